// The kernels for CPUs with AVX-512 and its BF16 and VNNI. Built with its own flags: see build.py.
#define HR_ISA avx512_bf16
#define HR_VARIANT_NAME "avx512_bf16"
#define HR_VARIANT avx512_bf16_kernels
#define HR_VNNI_BF16
#if defined(__AVX512BF16__)
#include "simd_avx512.h"
#include "variant.inl"
#else
#include "ops.h"

const headrace::Kernels* headrace::HR_VARIANT() { return nullptr; }
#endif
