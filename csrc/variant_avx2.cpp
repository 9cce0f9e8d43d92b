// The kernels for CPUs with AVX2, FMA and F16C. Built with its own flags: see build.py.
#define HR_ISA avx2
#define HR_VARIANT_NAME "avx2"
#define HR_VARIANT avx2_kernels
#include "simd_avx2.h"
#include "variant.inl"
