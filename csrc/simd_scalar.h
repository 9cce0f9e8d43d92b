// Single numbers as bits and as bfloat16, the same for every variant.
#pragma once

#include <cstdint>
#include <cstring>

namespace HR_ISA {

constexpr int kLanes = 16;

static inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float bf16_to_float(uint16_t value) { return from_bits(static_cast<uint32_t>(value) << 16); }
static inline uint16_t float_to_bf16(float value) {
  uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

}  // namespace HR_ISA
