// The KV cache's memory and its blocks as plain bytes; attention.inl reads and writes what is in them.
#include "kv_cache.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace headrace {

namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kAlignment = 64;

int64_t bytes_of(KVDtype dtype) {
  switch (dtype) {
    case KVDtype::kF32:
      return 4;
    case KVDtype::kBF16:
    case KVDtype::kF16:
      return 2;
    case KVDtype::kE4M3:
    case KVDtype::kE5M2:
    case KVDtype::kInt8:
      return 1;
  }
  return 0;
}

bool overlap(const int32_t* pairs, int64_t count) {
  for (int64_t target = 0; target < count; target++)
    for (int64_t source = 0; source < count; source++)
      if (pairs[2 * target + 1] == pairs[2 * source]) return true;
  return false;
}

}  // namespace

KVCache* kv_cache_new(int64_t layers, int64_t blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim,
                      KVDtype dtype) {
  KVCache* cache = new (std::nothrow) KVCache{};
  if (cache == nullptr) return nullptr;
  cache->layers = layers;
  cache->blocks = blocks;
  cache->block_size = block_size;
  cache->kv_heads = kv_heads;
  cache->head_dim = head_dim;
  cache->dtype = dtype;
  cache->value_bytes = bytes_of(dtype);
  cache->tile = kTile;
  while (block_size % cache->tile != 0) cache->tile /= 2;
  const bool scaled = cache->value_bytes == 1;
  cache->heads_offset = scaled ? 2 * kv_heads * block_size * static_cast<int64_t>(sizeof(float)) : 0;
  cache->value_offset = block_size * head_dim * cache->value_bytes;
  cache->head_bytes = 2 * cache->value_offset;
  const int64_t used = cache->heads_offset + kv_heads * cache->head_bytes;
  cache->layer_bytes = (used + kAlignment - 1) / kAlignment * kAlignment;
  cache->block_bytes = layers * cache->layer_bytes;
  int64_t bytes = 0;
  void* data = MAP_FAILED;
  if (!__builtin_mul_overflow(blocks, cache->block_bytes, &bytes) && bytes > 0)
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    delete cache;
    return nullptr;
  }
#ifdef MADV_HUGEPAGE
  // Attention reads a few KB here and there. All layers of a block lie together, so little is touched beside them.
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  cache->data = static_cast<uint8_t*>(data);
  return cache;
}

void kv_cache_free(KVCache* cache) {
  if (cache == nullptr) return;
  munmap(cache->data, cache->blocks * cache->block_bytes);
  delete cache;
}

int64_t kv_cache_block_bytes(const KVCache* cache) { return cache->block_bytes; }

bool kv_cache_copy_blocks(KVCache* cache, const int32_t* pairs, int64_t count) {
  const size_t bytes = cache->block_bytes;
  if (!overlap(pairs, count)) {
    for (int64_t pair = 0; pair < count; pair++)
      std::memcpy(cache->data + pairs[2 * pair + 1] * bytes, cache->data + pairs[2 * pair] * bytes, bytes);
    return true;
  }
  auto* sources = static_cast<uint8_t*>(std::malloc(count * bytes));
  if (sources == nullptr) return false;
  for (int64_t pair = 0; pair < count; pair++) kv_cache_read_block(cache, pairs[2 * pair], sources + pair * bytes);
  for (int64_t pair = 0; pair < count; pair++) kv_cache_write_block(cache, pairs[2 * pair + 1], sources + pair * bytes);
  std::free(sources);
  return true;
}

void kv_cache_read_block(const KVCache* cache, int64_t block, void* out) {
  std::memcpy(out, cache->data + block * cache->block_bytes, cache->block_bytes);
}

void kv_cache_write_block(KVCache* cache, int64_t block, const void* from) {
  std::memcpy(cache->data + block * cache->block_bytes, from, cache->block_bytes);
}

}  // namespace headrace
