// Sixteen floats and what can be done with them, in plain C++: for CPUs without a faster variant, and the yardstick of
// the others. Every simd_*.h offers exactly these names, and every reduction adds in the same order.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd_scalar.h"

namespace HR_ISA {

struct Vec {
  float v[kLanes];
};

static inline float half_to_float(uint16_t half) {
  uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  float value = static_cast<float>(mantissa) * from_bits(0x33800000u);  // 2^-24
  return from_bits(sign | to_bits(value));
}

static inline uint16_t float_to_half(float value) {
  uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // adding 0.5 rounds to a multiple of 2^-24, to even
    float sum = from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (to_bits(sum) - 0x3f000000u));
  }
  uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

#define HR_EACH(expression)                 \
  Vec r;                                    \
  for (int i = 0; i < kLanes; i++) r.v[i] = expression; \
  return r

static inline Vec broadcast(float x) { HR_EACH(x); }
static inline Vec load(const float* p) { HR_EACH(p[i]); }
static inline Vec load_first(const float* p, int n) { HR_EACH(i < n ? p[i] : 0.0f); }
static inline Vec load_bf16(const uint16_t* p) { HR_EACH(bf16_to_float(p[i])); }
static inline Vec load_f16(const uint16_t* p) { HR_EACH(half_to_float(p[i])); }
static inline Vec load_i8(const int8_t* p) { HR_EACH(static_cast<float>(p[i])); }
static inline Vec load_e5m2(const uint8_t* p) { HR_EACH(half_to_float(static_cast<uint16_t>(p[i] << 8))); }
// x / 256 of each x: as it stands in a half float's bits. Not for NaN.
static inline Vec load_e4m3_256th(const uint8_t* p) {
  HR_EACH(half_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)));
}
static inline void store(float* p, Vec x) { for (int i = 0; i < kLanes; i++) p[i] = x.v[i]; }
static inline void store_first(float* p, Vec x, int n) { for (int i = 0; i < n; i++) p[i] = x.v[i]; }
static inline void store_bf16(uint16_t* p, Vec x) { for (int i = 0; i < kLanes; i++) p[i] = float_to_bf16(x.v[i]); }
static inline void store_f16(uint16_t* p, Vec x) { for (int i = 0; i < kLanes; i++) p[i] = float_to_half(x.v[i]); }
// Rounded to the nearest, to even; |x| <= 127.
static inline void store_i8(int8_t* p, Vec x) {
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<int8_t>(std::nearbyintf(x.v[i]));
}

static inline Vec add(Vec a, Vec b) { HR_EACH(a.v[i] + b.v[i]); }
static inline Vec sub(Vec a, Vec b) { HR_EACH(a.v[i] - b.v[i]); }
static inline Vec mul(Vec a, Vec b) { HR_EACH(a.v[i] * b.v[i]); }
static inline Vec div(Vec a, Vec b) { HR_EACH(a.v[i] / b.v[i]); }
// A NaN in `a` gives `b`, as the instructions of x86 do.
static inline Vec max(Vec a, Vec b) { HR_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline Vec min(Vec a, Vec b) { HR_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline Vec fma(Vec a, Vec b, Vec c) { HR_EACH(a.v[i] * b.v[i] + c.v[i]); }  // variants may round once
static inline Vec abs(Vec a) { HR_EACH(std::fabs(a.v[i])); }
static inline Vec round(Vec a) { HR_EACH(std::nearbyintf(a.v[i])); }
// a in the lanes first <= i < end, b in the others.
static inline Vec lanes_or(Vec a, int first, int end, Vec b) { HR_EACH(i >= first && i < end ? a.v[i] : b.v[i]); }
// a where x < limit, else b (for NaN too).
static inline Vec below_or(Vec x, Vec limit, Vec a, Vec b) { HR_EACH(x.v[i] < limit.v[i] ? a.v[i] : b.v[i]); }
// Bit i: lane i of x is not below that of limit (never so for NaN).
static inline uint32_t at_least(Vec x, Vec limit) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= static_cast<uint32_t>(x.v[i] >= limit.v[i]) << i;
  return bits;
}
// a in the lanes whose bit is set, b in the others.
static inline Vec bits_or(uint32_t bits, Vec a, Vec b) { HR_EACH(bits >> i & 1 ? a.v[i] : b.v[i]); }
// x * 2^n for whole n, -127 < n < 128.
static inline Vec scale_pow2(Vec x, Vec n) {
  HR_EACH(x.v[i] * from_bits(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23));
}

static inline float sum(Vec x) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) x.v[i] += x.v[i + width];
  return x.v[0];
}

static inline float largest(Vec x) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) x.v[i] = x.v[i] > x.v[i + width] ? x.v[i] : x.v[i + width];
  return x.v[0];
}

#undef HR_EACH

}  // namespace HR_ISA
