// simd_portable.h for AVX-512 (F, BW, DQ, VL): a Vec is one register.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_x86.h"

namespace HR_ISA {

struct Vec {
  __m512 v;
};

// Lanes 0 .. n - 1; n may be below 0 or above 16.
static inline __mmask16 first_lanes(int n) {
  return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
}

static inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
static inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
static inline Vec load_bf16(const uint16_t* p) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
static inline Vec load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline Vec load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
static inline Vec load_e5m2(const uint8_t* p) {
  __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_cvtph_ps(_mm256_slli_epi16(words, 8))};
}
// x / 256 of each x: as it stands in a half float's bits. Not for NaN.
static inline Vec load_e4m3_256th(const uint8_t* p) {
  __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return {_mm512_cvtph_ps(words)};
}
static inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
static inline void store_first(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
// To the nearest, to even; NaN stays NaN.
static inline void store_bf16(uint16_t* p, Vec x) {
  __m512i bits = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  __m512i chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(chosen));
}
static inline void store_f16(uint16_t* p, Vec x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, kNearest));
}
static inline void store_i8(int8_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

static inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vec abs(Vec a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
static inline Vec round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline Vec lanes_or(Vec a, int first, int end, Vec b) {
  __mmask16 chosen = static_cast<__mmask16>(first_lanes(end) & ~first_lanes(first));
  return {_mm512_mask_blend_ps(chosen, b.v, a.v)};
}
static inline Vec below_or(Vec x, Vec limit, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), b.v, a.v)};
}
static inline uint32_t at_least(Vec x, Vec limit) { return _mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ); }
static inline Vec bits_or(uint32_t bits, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), b.v, a.v)};
}
static inline Vec scale_pow2(Vec x, Vec n) {
  __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return mul(x, {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))});
}

static inline __m256 halves(__m512 x, int half) {
  return half ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x);
}

static inline float sum(Vec x) {
  __m256 eight = _mm256_add_ps(halves(x.v, 0), halves(x.v, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline float largest(Vec x) {
  __m256 eight = _mm256_max_ps(halves(x.v, 0), halves(x.v, 1));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace HR_ISA
