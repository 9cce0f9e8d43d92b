// A model's forward as data: operations over numbered buffers, recorded once in Python and replayed with one call a
// step. The structs are mirrored in headrace/kernels/native/library.py.
#pragma once

#include <cstdint>

#include "ops.h"

namespace headrace {

enum class OpKind : int32_t {
  kEmbed,       // out0 = rows of matrix p0 for the batch's tokens, n0 1: for its positions
  kLinear,      // out0 = in0 x matrix p0 + bias p1
  kNorm,        // n: parts, width; f0 eps; p0 weight: out0 = norm(in0), or with in1 out1 = in0 + in1, out0 = norm(out1)
  kRope,        // n: half, head_dim, heads; p0 cos, p1 sin
  kAttention,   // n: layer, group, heads, kv_heads, head_dim, window; f0 scale; in: q k v
  kSiluMul,     // n: width
  kGeluMul,     // n: width
  kScale,       // n: width; f0 factor
  kAdd,         // n: width
  kPick,        // n: width: out0 = in0 at the rows that sample
  kExperts,     // n: width, experts, top_k, normalize; p0, p1 arrays of matrices; in: x router
  kLayerNorm,   // n: width; f0 eps; p0 weight, p1 bias
  kGelu,        // n: width
  kTanh,        // n: width
  kEncoderAttention,  // n: heads, head_dim; f0 scale; in: q k v
};

struct Slot {
  int32_t buffer;  // -1: none
  int32_t column;
};

struct Op {
  OpKind kind;
  int32_t sampling;  // 1: over the rows that sample, 0: over all
  Slot in[3];
  Slot out[2];
  int64_t n[6];
  float f[2];
  const void* p[2];
};

struct Buffer {
  float* data;
  int64_t width;
};

struct Step {
  KVCache* cache;
  const BatchView* groups;  // one for each group of layers; tokens and positions are the same in all
  const int32_t* sample_rows;
  int64_t num_sample_rows;
  const Buffer* buffers;
};

void run_program(const Kernels& kernels, Pool* pool, const Op* ops, int64_t count, const Step& step);

}  // namespace headrace
