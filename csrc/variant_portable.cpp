// The kernels for any CPU. Built with its own flags: see build.py.
#define HR_ISA portable
#define HR_VARIANT_NAME "portable"
#define HR_VARIANT portable_kernels
#include "simd_portable.h"
#include "variant.inl"
