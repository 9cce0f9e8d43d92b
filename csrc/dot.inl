// Products of integers, of one panel (16 outputs) with one row: what the products need of each instruction set.
//
// 8 bits: `Weights8` are kStep8 inputs of 16 outputs, multiplied with as many of a row, held as `Input8` and handed over
// as the 32 bits they fill: int16 but where the CPU multiplies bytes only. 4 bits: `Nibbles` are 8 inputs; a low or high
// half of them, `Bytes`, is multiplied with 4 int8 into `Narrow`, which holds the sums of 32 inputs before it must be
// widened. Weights have no sign, a row's inputs do. Sums are exact. `to_int` rounds to the nearest, to even;
// `store_inputs` takes numbers that fit.
#pragma once

namespace HR_ISA {

#if defined(__AVX512BW__)

using Int = __m512i;
using Nibbles = __m512i;
using Bytes = __m512i;
using Weights8 = __m512i;
using Narrow = __m512i;

// sum + x * w
static inline Vec mac(Vec sum, Vec x, Vec w) { return fma(x, w, sum); }
static inline Int broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
static inline Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
static inline Vec to_float(Int a) { return {_mm512_cvtepi32_ps(a)}; }
static inline Int to_int(Vec a) { return _mm512_cvtps_epi32(a.v); }
static inline int32_t sum_int(Int a) { return _mm512_reduce_add_epi32(a); }
static inline void store_inputs(int8_t* p, Int a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}
static inline void store_inputs(int16_t* p, Int a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
}

static inline Nibbles load_nibbles(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline Bytes low_nibbles(Nibbles w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
static inline Bytes high_nibbles(Nibbles w) {
  return _mm512_and_si512(_mm512_srli_epi32(w, 4), _mm512_set1_epi8(15));
}

// Of pairs of bfloat16 the first or second, as floats.
static inline Vec load_bf16_pairs(const uint16_t* p, int j) {
  __m512i pairs = _mm512_loadu_si512(p);
  if (j == 0) return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  return {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

// The number of `bits` bits from bit `shift` on, in each 32 bits at p, as floats.
static inline Vec load_bits(const uint8_t* p, int shift, int bits) {
  Int shifted = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift));
  return to_float(_mm512_and_si512(shifted, _mm512_set1_epi32((1 << bits) - 1)));
}

#if defined(HR_VNNI_BF16)

using Input8 = int8_t;
constexpr int kStep8 = 4;

static inline Weights8 load_weights8(const uint8_t* p) { return _mm512_loadu_si512(p); }
// Of kStep8 inputs at p the j-th, as floats.
static inline Vec load_input8(const uint8_t* p, int j) { return load_bits(p, 8 * j, 8); }
static inline Int dot8(Int sum, Weights8 w, int32_t inputs) {
  return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(inputs));
}
static inline Narrow dot4(Narrow sum, Bytes w, int32_t inputs) { return dot8(sum, w, inputs); }
static inline Narrow product4(Bytes w, int32_t inputs) { return dot8(_mm512_setzero_si512(), w, inputs); }
static inline Int widen(Narrow sum) { return sum; }

#else

using Input8 = int16_t;
constexpr int kStep8 = 2;

static inline Weights8 load_weights8(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Of kStep8 inputs at p the j-th, as floats.
static inline Vec load_input8(const uint8_t* p, int j) {
  Int pairs = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return to_float(j == 0 ? _mm512_and_si512(pairs, _mm512_set1_epi32(255)) : _mm512_srli_epi32(pairs, 8));
}
// The compiler would add up many products before it adds them to the sum, and has no registers for them.
static inline Int in_registers(Int sum) {
  asm("" : "+v"(sum));
  return sum;
}
static inline Int dot8(Int sum, Weights8 w, int32_t inputs) {
  return in_registers(_mm512_add_epi32(sum, _mm512_madd_epi16(w, _mm512_set1_epi32(inputs))));
}
static inline Narrow dot4(Narrow sum, Bytes w, int32_t inputs) {
  return in_registers(_mm512_add_epi16(sum, _mm512_maddubs_epi16(w, _mm512_set1_epi32(inputs))));
}
static inline Narrow product4(Bytes w, int32_t inputs) {
  return _mm512_maddubs_epi16(w, _mm512_set1_epi32(inputs));
}
static inline Int widen(Narrow sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }

#endif

#elif defined(__AVX2__)

struct Int {
  __m256i lo, hi;
};
using Nibbles = Int;
using Bytes = Int;
using Weights8 = Int;
using Narrow = Int;
using Input8 = int16_t;
constexpr int kStep8 = 2;

static inline __m256i load_half(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

static inline Int broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Int add_int(Int a, Int b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
static inline Vec to_float(Int a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline Int to_int(Vec a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
static inline int32_t sum_int(Int a) {
  __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
static inline __m256i words(Int a) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8); }
static inline void store_inputs(int8_t* p, Int a) {
  __m256i both = words(a);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
static inline void store_inputs(int16_t* p, Int a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words(a)); }

static inline Nibbles load_nibbles(const uint8_t* p) { return {load_half(p), load_half(p + 32)}; }
static inline Bytes low_nibbles(Nibbles w) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}
static inline Bytes high_nibbles(Nibbles w) {
  return low_nibbles({_mm256_srli_epi32(w.lo, 4), _mm256_srli_epi32(w.hi, 4)});
}

// Of pairs of bfloat16 the first or second, as floats.
static inline __m256 bf16_of_pairs(const uint8_t* p, int j) {
  __m256i pairs = load_half(p);
  if (j == 1) pairs = _mm256_srli_epi32(pairs, 16);  // a mask would take a register
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
static inline Vec load_bf16_pairs(const uint16_t* p, int j) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(p);
  return {bf16_of_pairs(bytes, j), bf16_of_pairs(bytes + 32, j)};
}

// The number of `bits` bits from bit `shift` on, in each 32 bits at p, as floats.
static inline Vec load_bits(const uint8_t* p, int shift, int bits) {
  __m128i count = _mm_cvtsi32_si128(shift);
  __m256i mask = _mm256_set1_epi32((1 << bits) - 1);
  __m256i lo = _mm256_srl_epi32(load_half(p), count), hi = _mm256_srl_epi32(load_half(p + 32), count);
  return to_float(Int{_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask)});
}

static inline Weights8 load_weights8(const uint8_t* p) {
  const __m128i* half = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128(half)), _mm256_cvtepu8_epi16(_mm_loadu_si128(half + 1))};
}
// Of kStep8 inputs at p the j-th, as floats.
static inline Vec load_input8(const uint8_t* p, int j) {
  const __m128i* half = reinterpret_cast<const __m128i*>(p);
  __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128(half)), hi = _mm256_cvtepu16_epi32(_mm_loadu_si128(half + 1));
  if (j == 1) return to_float(Int{_mm256_srli_epi32(lo, 8), _mm256_srli_epi32(hi, 8)});
  __m256i mask = _mm256_set1_epi32(255);
  return to_float(Int{_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask)});
}
// sum + x * w where the sum is. Left to itself the compiler moves sums about until it has no registers for them, and adds
// up many products of integers before it adds them to the sum.
static inline Vec mac(Vec sum, Vec x, Vec w) {
  asm("vfmadd231ps %1, %2, %0" : "+x"(sum.lo) : "x"(x.lo), "x"(w.lo));
  asm("vfmadd231ps %1, %2, %0" : "+x"(sum.hi) : "x"(x.hi), "x"(w.hi));
  return sum;
}
static inline void add_words(__m256i& sum, __m256i x) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x)); }
static inline void add_doubles(__m256i& sum, __m256i x) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }
static inline Int dot8(Int sum, Weights8 w, int32_t inputs) {
  __m256i x = _mm256_set1_epi32(inputs);
  add_doubles(sum.lo, _mm256_madd_epi16(w.lo, x));
  add_doubles(sum.hi, _mm256_madd_epi16(w.hi, x));
  return sum;
}
static inline Narrow dot4(Narrow sum, Bytes w, int32_t inputs) {
  __m256i x = _mm256_set1_epi32(inputs);
  add_words(sum.lo, _mm256_maddubs_epi16(w.lo, x));
  add_words(sum.hi, _mm256_maddubs_epi16(w.hi, x));
  return sum;
}
static inline Narrow product4(Bytes w, int32_t inputs) {
  __m256i x = _mm256_set1_epi32(inputs);
  return {_mm256_maddubs_epi16(w.lo, x), _mm256_maddubs_epi16(w.hi, x)};
}
static inline Int widen(Narrow sum) {
  __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sum.lo, ones), _mm256_madd_epi16(sum.hi, ones)};
}

#else

struct Int {
  int32_t v[kLanes];
};
struct Bytes {
  uint8_t v[4 * kLanes];
};
struct Pairs {
  uint8_t v[2 * kLanes];
};
using Nibbles = Bytes;
using Weights8 = Pairs;
using Narrow = Int;
using Input8 = int16_t;
constexpr int kStep8 = 2;

// sum + x * w
static inline Vec mac(Vec sum, Vec x, Vec w) { return fma(x, w, sum); }
static inline Int broadcast_int(int32_t x) {
  Int r;
  for (int i = 0; i < kLanes; i++) r.v[i] = x;
  return r;
}
static inline Int add_int(Int a, Int b) {
  for (int i = 0; i < kLanes; i++) a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + b.v[i]);
  return a;
}
static inline Vec to_float(Int a) {
  Vec r;
  for (int i = 0; i < kLanes; i++) r.v[i] = static_cast<float>(a.v[i]);
  return r;
}
static inline Int to_int(Vec a) {
  Int r;
  for (int i = 0; i < kLanes; i++) r.v[i] = static_cast<int32_t>(std::nearbyintf(a.v[i]));
  return r;
}
static inline int32_t sum_int(Int a) {
  int32_t total = 0;
  for (int i = 0; i < kLanes; i++) total += a.v[i];
  return total;
}
template <class Input>
static inline void store_inputs(Input* p, Int a) {
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<Input>(a.v[i]);
}

static inline Nibbles load_nibbles(const uint8_t* p) {
  Nibbles r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
static inline Bytes low_nibbles(Nibbles w) {
  Bytes r;
  for (int i = 0; i < 4 * kLanes; i++) r.v[i] = static_cast<uint8_t>(w.v[i] & 15);
  return r;
}
static inline Bytes high_nibbles(Nibbles w) {
  Bytes r;
  for (int i = 0; i < 4 * kLanes; i++) r.v[i] = static_cast<uint8_t>(w.v[i] >> 4);
  return r;
}

// Of pairs of bfloat16 the first or second, as floats.
static inline Vec load_bf16_pairs(const uint16_t* p, int j) {
  Vec r;
  for (int i = 0; i < kLanes; i++) r.v[i] = bf16_to_float(p[2 * i + j]);
  return r;
}

// The number of `bits` bits from bit `shift` on, in each 32 bits at p, as floats.
static inline Vec load_bits(const uint8_t* p, int shift, int bits) {
  Vec r;
  for (int i = 0; i < kLanes; i++) {
    uint32_t word = p[4 * i] | p[4 * i + 1] << 8 | p[4 * i + 2] << 16 | static_cast<uint32_t>(p[4 * i + 3]) << 24;
    r.v[i] = static_cast<float>(word >> shift & ((1u << bits) - 1));
  }
  return r;
}
static inline int32_t add_product(int32_t sum, int32_t w, int32_t x) {
  return static_cast<int32_t>(static_cast<uint32_t>(sum) + static_cast<uint32_t>(w * x));
}

static inline Weights8 load_weights8(const uint8_t* p) {
  Weights8 r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
// Of kStep8 inputs at p the j-th, as floats.
static inline Vec load_input8(const uint8_t* p, int j) {
  Vec r;
  for (int i = 0; i < kLanes; i++) r.v[i] = p[2 * i + j];
  return r;
}
static inline Int dot8(Int sum, Weights8 w, int32_t inputs) {
  int16_t x[2];
  std::memcpy(x, &inputs, 4);
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < 2; j++) sum.v[i] = add_product(sum.v[i], w.v[2 * i + j], x[j]);
  return sum;
}
static inline Narrow dot4(Narrow sum, Bytes w, int32_t inputs) {
  int8_t x[4];
  std::memcpy(x, &inputs, 4);
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < 4; j++) sum.v[i] = add_product(sum.v[i], w.v[4 * i + j], x[j]);
  return sum;
}
static inline Narrow product4(Bytes w, int32_t inputs) { return dot4(broadcast_int(0), w, inputs); }
static inline Int widen(Narrow sum) { return sum; }

#endif

}  // namespace HR_ISA
