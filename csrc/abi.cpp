// The library's face: plain C, no state of its own. Structs are those of decode.h, ops.h and program.h, mirrored in
// headrace/kernels/native/library.py; raise kAbiVersion when one of them changes.
#include <new>

#include "decode.h"
#include "kv_cache.h"
#include "linear.h"
#include "ops.h"
#include "pool.h"
#include "program.h"
#include "variants.h"

using namespace headrace;

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int32_t kAbiVersion = 5;

struct Device {
  const Kernels* kernels;
  Pool pool;
};

struct DecodeStep {
  Device* device;
  const Op* ops;
  int64_t count;
  const Step* step;
  const SampleArgs* sample;
  Decodes decodes;
};

}  // namespace

HR_EXPORT int32_t hr_abi_version() { return kAbiVersion; }

// The name of the index-th best variant for this CPU; null beyond the last.
HR_EXPORT const char* hr_variant_name(int32_t index) {
  const Kernels* kernels = variant(index);
  return kernels == nullptr ? nullptr : kernels->name;
}

// Null for an index that names no variant, or when no thread can be started.
HR_EXPORT Device* hr_device_new(int32_t variant_index, int32_t threads) {
  const Kernels* kernels = variant(variant_index);
  if (kernels == nullptr) return nullptr;
  try {
    return new Device{kernels, Pool(threads)};
  } catch (...) {
    return nullptr;
  }
}

HR_EXPORT void hr_device_free(Device* device) { delete device; }

HR_EXPORT PackedMatrix* hr_matrix_new(Device* device, const SourceWeight* weight, int32_t scheme) {
  return device->kernels->pack(&device->pool, *weight, static_cast<Scheme>(scheme));
}

// A dense weight to int8 `values` [out, in], in groups of `group_size` with a scale each.
HR_EXPORT void hr_quantise(Device* device, const SourceWeight* weight, int8_t* values, float* scales) {
  device->kernels->quantise(&device->pool, *weight, values, scales);
}

HR_EXPORT void hr_matrix_free(PackedMatrix* matrix) { free_packed(matrix); }

HR_EXPORT int64_t hr_matrix_bytes(const PackedMatrix* matrix) { return static_cast<int64_t>(packed_bytes(matrix)); }

// Rows of a matrix as float32 [count, in].
HR_EXPORT void hr_matrix_rows(Device* device, const PackedMatrix* matrix, const int32_t* rows, int64_t count,
                              float* out, int64_t in) {
  device->kernels->gather(&device->pool, {matrix, rows, count, {out, in}});
}

HR_EXPORT KVCache* hr_cache_new(int64_t layers, int64_t blocks, int64_t block_size, int64_t kv_heads,
                                int64_t head_dim, int32_t dtype) {
  return kv_cache_new(layers, blocks, block_size, kv_heads, head_dim, static_cast<KVDtype>(dtype));
}

HR_EXPORT void hr_cache_free(KVCache* cache) { kv_cache_free(cache); }

// Of all layers of one block.
HR_EXPORT int64_t hr_cache_block_bytes(const KVCache* cache) { return kv_cache_block_bytes(cache); }

// `pairs` are (source, target); every source is read before any target is written. 0, or -1 when memory is short.
HR_EXPORT int32_t hr_cache_copy_blocks(KVCache* cache, const int32_t* pairs, int64_t count) {
  return kv_cache_copy_blocks(cache, pairs, count) ? 0 : -1;
}

HR_EXPORT void hr_cache_read_block(const KVCache* cache, int64_t block, void* out) {
  kv_cache_read_block(cache, block, out);
}

HR_EXPORT void hr_cache_write_block(KVCache* cache, int64_t block, const void* from) {
  kv_cache_write_block(cache, block, from);
}

HR_EXPORT void hr_run(Device* device, const Op* ops, int64_t count, const Step* step) {
  run_program(*device->kernels, &device->pool, ops, count, *step);
}

// How many rows are broken.
HR_EXPORT int32_t hr_sample(Device* device, const SampleArgs* args) {
  device->kernels->sample(&device->pool, *args);
  int32_t broken = 0;
  for (int64_t row = 0; row < args->rows; row++) broken += args->broken[row] != 0;
  return broken;
}

// 1, or 0 where a sequence has no block for its token.
HR_EXPORT int32_t hr_advance(const Decodes* decodes) { return advance(*decodes) ? 1 : 0; }

// A step that sequences go on with: how many rows are broken, or -1 where a sequence has no block for its token. One
// argument, as each costs its caller more than the call.
HR_EXPORT int32_t hr_decode(const DecodeStep* step) {
  if (!advance(step->decodes)) return -1;
  hr_run(step->device, step->ops, step->count, step->step);
  return hr_sample(step->device, step->sample);
}
