// simd_portable.h for AVX2, FMA and F16C: a Vec is two registers of eight.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_x86.h"

namespace HR_ISA {

struct Vec {
  __m256 lo, hi;
};

// Lanes 0 .. n - 1 of eight.
static inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline Vec load_first(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
static inline __m256 bf16_part(const uint16_t* p) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
static inline Vec load_bf16(const uint16_t* p) { return {bf16_part(p), bf16_part(p + 8)}; }
static inline __m256 f16_part(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline Vec load_f16(const uint16_t* p) { return {f16_part(p), f16_part(p + 8)}; }
static inline __m256 i8_part(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline Vec load_i8(const int8_t* p) { return {i8_part(p), i8_part(p + 8)}; }
static inline Vec half_words(__m256i words) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
}
static inline Vec load_e5m2(const uint8_t* p) {
  __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return half_words(_mm256_slli_epi16(words, 8));
}
// x / 256 of each x: as it stands in a half float's bits. Not for NaN.
static inline Vec load_e4m3_256th(const uint8_t* p) {
  __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return half_words(_mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}
static inline void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
static inline void store_first(float* p, Vec x, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), x.lo);
  _mm256_maskstore_ps(p + 8, first_lanes(n - 8), x.hi);
}
// To the nearest, to even; NaN stays NaN.
static inline __m256i bf16_bits(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}
static inline void store_bf16(uint16_t* p, Vec x) {
  __m256i packed = _mm256_packus_epi32(bf16_bits(x.lo), bf16_bits(x.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline void store_f16(uint16_t* p, Vec x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.lo, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.hi, kNearest));
}
static inline void store_i8(int8_t* p, Vec x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
  words = _mm256_permute4x64_epi64(words, 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

static inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline Vec abs(Vec a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
static inline Vec round(Vec a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}
static inline Vec lanes_or(Vec a, int first, int end, Vec b) {
  __m256 lo = _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(first), first_lanes(end)));
  __m256 hi = _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(first - 8), first_lanes(end - 8)));
  return {_mm256_blendv_ps(b.lo, a.lo, lo), _mm256_blendv_ps(b.hi, a.hi, hi)};
}
static inline Vec below_or(Vec x, Vec limit, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_LT_OQ))};
}
static inline uint32_t at_least(Vec x, Vec limit) {
  uint32_t lo = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_GE_OQ)));
  uint32_t hi = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_GE_OQ)));
  return lo | hi << 8;
}
static inline Vec bits_or(uint32_t bits, Vec a, Vec b) {
  __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  __m256i lo = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), hi = _mm256_slli_epi32(lo, 8);
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, lo), lo))),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, hi), hi)))};
}
static inline __m256 pow2_part(__m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
static inline Vec scale_pow2(Vec x, Vec n) { return mul(x, {pow2_part(n.lo), pow2_part(n.hi)}); }

static inline float sum(Vec x) {
  __m256 eight = _mm256_add_ps(x.lo, x.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline float largest(Vec x) {
  __m256 eight = _mm256_max_ps(x.lo, x.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace HR_ISA
