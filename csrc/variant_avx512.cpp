// The kernels for CPUs with AVX-512 F, BW, DQ and VL. Built with its own flags: see build.py.
#define HR_ISA avx512
#define HR_VARIANT_NAME "avx512"
#define HR_VARIANT avx512_kernels
#include "simd_avx512.h"
#include "variant.inl"
