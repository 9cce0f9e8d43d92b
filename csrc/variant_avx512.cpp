// The kernels for CPUs with AVX-512 F, BW, DQ and VL. Built with its own flags: see build.py.
#define HR_ISA avx512
#define HR_VARIANT_NAME "avx512"
#define HR_VARIANT avx512_kernels
#if defined(__AVX512F__)
#include "simd_avx512.h"
#include "variant.inl"
#else
#include "ops.h"

const headrace::Kernels* headrace::HR_VARIANT() { return nullptr; }
#endif
