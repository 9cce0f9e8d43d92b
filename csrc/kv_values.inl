// Numbers of the KV cache: how each type is turned to float32 and back, and where a token's are in its block.
#pragma once

#include "kv_cache.h"

namespace HR_ISA {

using namespace headrace;

constexpr int64_t kTokens = 16;  // of a tile of keys: the lanes of a Vec

constexpr bool is_scaled(KVDtype dtype) {
  return dtype == KVDtype::kE4M3 || dtype == KVDtype::kE5M2 || dtype == KVDtype::kInt8;
}

constexpr int64_t bytes_of(KVDtype dtype) {
  return dtype == KVDtype::kF32 ? 4 : dtype == KVDtype::kBF16 || dtype == KVDtype::kF16 ? 2 : 1;
}

// The largest number of an 8-bit type, which the largest value of a token's head becomes.
constexpr float largest_code(KVDtype dtype) {
  return dtype == KVDtype::kE4M3 ? 448.0f : dtype == KVDtype::kE5M2 ? 57344.0f : 127.0f;
}

// What load_values has to be multiplied with, besides the scale.
constexpr float value_unit(KVDtype dtype) { return dtype == KVDtype::kE4M3 ? 256.0f : 1.0f; }

template <KVDtype dtype>
static inline Vec load_values(const void* values, int64_t index) {
  if constexpr (dtype == KVDtype::kF32) return load(static_cast<const float*>(values) + index);
  if constexpr (dtype == KVDtype::kBF16) return load_bf16(static_cast<const uint16_t*>(values) + index);
  if constexpr (dtype == KVDtype::kF16) return load_f16(static_cast<const uint16_t*>(values) + index);
  if constexpr (dtype == KVDtype::kE4M3) return load_e4m3_256th(static_cast<const uint8_t*>(values) + index);
  if constexpr (dtype == KVDtype::kE5M2) return load_e5m2(static_cast<const uint8_t*>(values) + index);
  if constexpr (dtype == KVDtype::kInt8) return load_i8(static_cast<const int8_t*>(values) + index);
}

// `count` of them, not reading beyond; the other lanes are 0.
template <KVDtype dtype>
static inline Vec load_few_values(const void* values, int64_t index, int64_t count) {
  uint8_t few[kLanes * bytes_of(dtype)] = {};
  std::memcpy(few, static_cast<const uint8_t*>(values) + index * bytes_of(dtype), count * bytes_of(dtype));
  return load_values<dtype>(few, 0);
}

// Branch-free, so that a loop over it becomes vector code. |x| is at most the type's largest number.
template <int mantissa_bits, int bias>
static inline uint8_t to_8_bits(float x) {
  constexpr int kDropped = 23 - mantissa_bits;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - bias) << 23;
  // Adding this rounds to a multiple of the smallest number, to even.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 24 - bias - mantissa_bits) << 23;
  const uint32_t bits = to_bits(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = magnitude + ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1);
  const uint32_t normal = (rounded >> kDropped) - (static_cast<uint32_t>(127 - bias) << mantissa_bits);
  const uint32_t small = to_bits(from_bits(magnitude) + from_bits(kMagic)) - kMagic;
  return static_cast<uint8_t>(sign | (magnitude < kSmallestNormal ? small : normal));
}

// 16 numbers of the type; an 8-bit one is given divided by its scale.
template <KVDtype dtype>
static inline void store_values(uint8_t* out, Vec x) {
  if constexpr (dtype == KVDtype::kF32) {
    store(reinterpret_cast<float*>(out), x);
  } else if constexpr (dtype == KVDtype::kBF16) {
    store_bf16(reinterpret_cast<uint16_t*>(out), x);
  } else if constexpr (dtype == KVDtype::kF16) {
    store_f16(reinterpret_cast<uint16_t*>(out), x);
  } else if constexpr (dtype == KVDtype::kInt8) {
    store_i8(reinterpret_cast<int8_t*>(out), x);
  } else {
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; i++)
      out[i] = dtype == KVDtype::kE4M3 ? to_8_bits<3, 7>(lanes[i]) : to_8_bits<2, 15>(lanes[i]);
  }
}

// Of one block, layer and KV head.
struct CachedHead {
  uint8_t* keys;
  uint8_t* values;
  float* key_scales;  // [token]
  float* value_scales;
};

static inline CachedHead cached_head(const KVCache& cache, int64_t block, int64_t layer, int64_t head) {
  uint8_t* at = cache.data + block * cache.block_bytes + layer * cache.layer_bytes;
  float* scales = reinterpret_cast<float*>(at);
  uint8_t* keys = at + cache.heads_offset + head * cache.head_bytes;
  return {keys, keys + cache.value_offset, scales + head * cache.block_size,
          scales + (cache.kv_heads + head) * cache.block_size};
}

// Where the first of a token's keys is; the next is `tile` further.
static inline int64_t key_index(const KVCache& cache, int64_t token) {
  return token / cache.tile * cache.tile * cache.head_dim + token % cache.tile;
}

// The scale of `dim` numbers. One that is not finite makes it NaN, and with it all that is read back.
template <KVDtype dtype>
static inline float scale_of(const float* x, int64_t dim) {
  Vec highest = broadcast(0.0f), broken = broadcast(0.0f);
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec part = dim - d < kLanes ? load_first(x + d, static_cast<int>(dim - d)) : load(x + d);
    highest = max(abs(part), highest);
    broken = add(broken, sub(part, part));
  }
  const float magnitude = largest(highest) + sum(broken);
  return (magnitude < 1e-30f ? 1e-30f : magnitude) / largest_code(dtype);
}

// Stores one token's key and value of one head. x: [dim].
template <KVDtype dtype>
static void store_token(const KVCache& cache, const CachedHead& cached, int64_t token, const float* k, const float* v) {
  constexpr int64_t kBytes = bytes_of(dtype);
  const int64_t dim = cache.head_dim, first_key = key_index(cache, token);
  float key_scale = 1.0f, value_scale = 1.0f;
  if constexpr (is_scaled(dtype)) {
    cached.key_scales[token] = key_scale = scale_of<dtype>(k, dim);
    cached.value_scales[token] = value_scale = scale_of<dtype>(v, dim);
  }
  auto numbers = [&](const float* x, int64_t count, float scale, uint8_t* out) {
    Vec part = count < kLanes ? load_first(x, static_cast<int>(count)) : load(x);
    if constexpr (is_scaled(dtype)) part = div(part, broadcast(scale));
    store_values<dtype>(out, part);
  };
  for (int64_t d = 0; d < dim; d += kLanes) {
    const int64_t count = dim - d < kLanes ? dim - d : kLanes;
    uint8_t out[kLanes * kBytes];
    numbers(k + d, count, key_scale, out);
    for (int64_t i = 0; i < count; i++)
      std::memcpy(cached.keys + (first_key + (d + i) * cache.tile) * kBytes, out + i * kBytes, kBytes);
    numbers(v + d, count, value_scale, out);
    std::memcpy(cached.values + (d * cache.block_size + token * count) * kBytes, out, count * kBytes);
  }
}

}  // namespace HR_ISA
