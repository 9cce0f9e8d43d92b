// The paged KV cache: keys and values of all layers, in blocks of `block_size` tokens, mapped and never touched as a
// whole: a page costs memory once a token is stored in it.
//
// All layers of a block lie together, so that a block in use touches few pages and can be copied in one piece:
//
//     cache  [block][layer]                  of `layer_bytes`
//     layer  scales of K [kv_head][token], scales of V [kv_head][token]     (float32; 8-bit types only)
//            [kv_head] K, V                  of `head_bytes`, V `value_offset` behind K
//     K      [token / tile][dim][tile]       tile: 16 tokens, or the largest power of two that divides block_size
//     V      [dim / 16][token][16]           the last panel is as narrow as what is left of head_dim
//
// So the scores of 16 tokens, or 16 values of an output, are the lanes of a vector. An 8-bit number is the value
// divided by the scale of its token and KV head: scale = largest magnitude / largest number of the type.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

enum class KVDtype : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kE4M3 = 3, kE5M2 = 4, kInt8 = 5 };

struct KVCache {
  int64_t layers, blocks, block_size, kv_heads, head_dim;
  KVDtype dtype;
  int64_t value_bytes;  // of one number
  int64_t tile;
  int64_t heads_offset, head_bytes, value_offset;
  int64_t layer_bytes, block_bytes;
  uint8_t* data;
};

// Null when memory is short or the cache would be larger than addresses are.
KVCache* kv_cache_new(int64_t layers, int64_t blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim,
                      KVDtype dtype);
void kv_cache_free(KVCache* cache);
// Of all layers of one block.
int64_t kv_cache_block_bytes(const KVCache* cache);
// `pairs` are (source, target); every source is read before any target is written. False when memory is short.
bool kv_cache_copy_blocks(KVCache* cache, const int32_t* pairs, int64_t count);
// Between all layers of a block and kv_cache_block_bytes of memory elsewhere.
void kv_cache_read_block(const KVCache* cache, int64_t block, void* out);
void kv_cache_write_block(KVCache* cache, int64_t block, const void* from);

}  // namespace headrace
