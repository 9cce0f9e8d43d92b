// What every variant of the kernels offers: one table of functions, filled by each variant_*.cpp for its
// instruction set, and the argument structs they take.
//
// Activations are float32 [rows, width], row after row `stride` floats apart, so that a part of a wider buffer is
// a view. Every function spreads its work over the pool itself and returns when it is done.
//
// Promise: the bits of one row depend on nothing but the row (and, in attention, its own sequence): not on the
// other rows, their number, the number of threads, nor on how its prefix was split into steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pool.h"

namespace headrace {

struct View {
  float* data;
  int64_t stride;  // floats from one row to the next
};

enum class Storage : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kInt4 = 4, kInt8 = 8 };

// A checkpoint's matrix [out, in] as headrace/kernels/weight.py describes it; borrowed while it is packed.
struct SourceWeight {
  const void* values;
  const float* scales;   // [out, in / group_size] or null
  const float* offsets;  // as scales, or null
  int64_t out, in;
  int32_t storage;  // Storage
  int32_t group_size;
};

// How products with a packed matrix are taken.
enum class Scheme : int32_t {
  kFloat = 0,  // float32 activations, weights turned to float32 in registers, float32 sums: the exact path
  kBF16 = 1,   // bfloat16 weights; activations rounded to bfloat16 where the CPU has VDPBF16PS, else as kFloat
  kInt8 = 2,   // grouped int4/int8 weights as stored; activations of 8 to 13 bits, a scale a row and group
};

struct PackedMatrix;  // linear.h

struct LinearArgs {
  View x;  // [rows, in]
  int64_t rows;
  const PackedMatrix* matrix;
  const float* bias;  // [out] or null
  View y;             // [rows, out]
};

struct GatherArgs {  // rows of a packed matrix as float32: the embedding
  const PackedMatrix* matrix;
  const int32_t* token_ids;
  int64_t rows;
  View y;  // [rows, in]
};

struct NormArgs {  // every part of a row `width` wide on its own; with `residual`: sum = x + residual, y = norm(sum)
  View x;
  View residual;  // data null: none
  const float* weight;
  float eps;
  int64_t rows, parts, width;
  View y;
  View sum;
};

struct LayerNormArgs {  // y = (x - mean) / sqrt(variance + eps) * weight + bias, over the whole row
  View x;
  const float* weight;
  const float* bias;
  float eps;
  int64_t rows, width;
  View y;
};

struct RopeArgs {  // rotates the first 2 * half values of every head, copies the others
  View x;
  const float* cos;  // [positions, half]
  const float* sin;
  int64_t half, head_dim, heads, rows;
  const int32_t* positions;
  View y;
};

struct GatedArgs {  // y = act(x[:, :width]) * x[:, width:]
  View x;
  int64_t rows, width;
  View y;
};

struct ActivationArgs {  // y = act(x)
  View x;
  int64_t rows, width;
  View y;
};

struct ScaleArgs {
  View x;
  float factor;
  int64_t rows, width;
  View y;
};

struct AddArgs {
  View a, b;
  int64_t rows, width;
  View y;
};

struct PickArgs {  // y[i] = x[index[i]]
  View x;
  const int32_t* index;
  int64_t rows, width;
  View y;
};

struct ExpertsArgs {  // kernels/ops.py `experts`
  View x;             // [rows, width]
  View router;        // [rows, experts]
  const PackedMatrix* const* gate_up;
  const PackedMatrix* const* down;
  int64_t rows, width, experts, top_k;
  int32_t normalize;
  View y;
};

struct KVCache;  // kv_cache.h

// One step's batch, as kernels/ops.py `Batch`, for one group of layers.
struct BatchView {
  int64_t num_rows, num_sequences;
  const int32_t* token_ids;     // [rows]
  const int32_t* positions;     // [rows]
  const int32_t* slot_mapping;  // [rows]
  const int32_t* query_start;   // [sequences + 1]
  const int32_t* seq_lens;      // [sequences]
  const int32_t* block_tables;  // [sequences, table_width]
  int64_t table_width;
};

struct AttentionArgs {
  View q;     // [rows, heads * head_dim]
  View k, v;  // [rows, kv_heads * head_dim]
  KVCache* cache;
  int64_t layer, heads, kv_heads, head_dim;
  float scale;
  int64_t window;  // 0: none
  const BatchView* batch;
  View y;
};

// Every row of a sequence sees all of its sequence's rows of the step, which is the whole of it. No cache.
struct EncoderAttentionArgs {
  View q, k, v;  // [rows, heads * head_dim]
  int64_t heads, head_dim;
  float scale;
  const BatchView* batch;
  View y;
};

// Row r of a TokenLists of kernels/ops.py owns [starts[r], starts[r + 1]); starts null: no row has any.
struct TokenLists {
  const int32_t* starts;
  const int32_t* token_ids;
  const float* numbers;
};

struct SampleArgs {  // kernels/ops.py `SamplingRows`; optional arrays may be null
  View logits;       // [rows, vocab]
  int64_t rows, vocab;
  const float* temperature;
  const float* uniforms;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition_penalty;
  const float* frequency_penalty;
  const float* presence_penalty;
  TokenLists seen, generated, logit_bias, forbidden, allowed, scored;
  const int32_t* given;
  const uint32_t* mask;  // [rows, (vocab + 31) / 32], bit t of a row: token t is allowed; null: all are
  const uint8_t* masked;  // [rows]: 0 = the row's mask is not looked at; null: every row's is
  int64_t num_logprobs;  // -1: no log-probabilities
  int32_t* token_ids;    // [rows]
  float* logprobs;       // [rows], and so on as SampledRows; null without num_logprobs
  int32_t* ranks;
  int32_t* top_token_ids;  // [rows, num_logprobs]
  float* top_logprobs;
  float* scored_logprobs;  // [scored.starts[rows]]
  uint8_t* broken;         // [rows], 1: the row's best logit is not a finite number, 2: no memory to choose in
};

struct Kernels {
  const char* name;  // "portable", "avx2", "avx512", "avx512_bf16"
  // linear.inl
  PackedMatrix* (*pack)(Pool*, const SourceWeight&, Scheme);  // null when memory is short
  // A dense weight to int8 [out, in] and scales [out, in / group_size].
  void (*quantise)(Pool*, const SourceWeight&, int8_t*, float*);
  void (*linear)(Pool*, const LinearArgs&);
  void (*gather)(Pool*, const GatherArgs&);
  // rows.inl
  void (*norm)(Pool*, const NormArgs&);
  void (*rope)(Pool*, const RopeArgs&);
  void (*silu_mul)(Pool*, const GatedArgs&);
  void (*gelu_mul)(Pool*, const GatedArgs&);
  void (*scale)(Pool*, const ScaleArgs&);
  void (*add)(Pool*, const AddArgs&);
  void (*pick)(Pool*, const PickArgs&);
  void (*experts)(Pool*, const ExpertsArgs&);
  // attention.inl
  void (*attention)(Pool*, const AttentionArgs&);
  // encoder.inl
  void (*layer_norm)(Pool*, const LayerNormArgs&);
  void (*gelu)(Pool*, const ActivationArgs&);
  void (*tanh)(Pool*, const ActivationArgs&);
  void (*encoder_attention)(Pool*, const EncoderAttentionArgs&);
  // sample.inl
  void (*sample)(Pool*, const SampleArgs&);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();         // null where the compiler or the target does not know it
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();  // with VNNI

}  // namespace headrace
