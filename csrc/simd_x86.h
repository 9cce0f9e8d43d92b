// What the variants for x86 share beside their vectors.
#pragma once

#include <immintrin.h>

#include "simd_scalar.h"

namespace HR_ISA {

static inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
static inline uint16_t float_to_half(float value) {
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace HR_ISA
