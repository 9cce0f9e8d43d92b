// What models that read a whole text at once need besides: attention in both directions, layer norms, and their
// activations.
//
// An item of the attention is one head of one sequence. Its keys are turned into tiles and its values into columns once,
// then all rows are summed as in attention.inl: segments of keys in order, a softmax in each, merged.
#pragma once

#include "attention_math.inl"
#include "rows.inl"

namespace HR_ISA {

static void layer_norm_row(const LayerNormArgs& args, int64_t row) {
  const float* x = row_of(args.x, row);
  float* y = row_of(args.y, row);
  const Vec none = broadcast(0.0f);
  Vec total = none, squares = none;
  each_vec(args.width, [&](int64_t i, auto part) { total = add(total, load(x + i, part)); });
  const Vec mean = broadcast(sum(total) / static_cast<float>(args.width));
  each_vec(args.width, [&](int64_t i, auto part) {
    const Vec distance = lanes_or(sub(load(x + i, part), mean), 0, part.lanes, none);
    squares = fma(distance, distance, squares);
  });
  const Vec scale = broadcast(1.0f / sqrtf(sum(squares) / static_cast<float>(args.width) + args.eps));
  each_vec(args.width, [&](int64_t i, auto part) {
    const Vec normed = mul(sub(load(x + i, part), mean), scale);
    store(y + i, fma(normed, load(args.weight + i, part), load(args.bias + i, part)), part);
  });
}

static void layer_norm(Pool* pool, const LayerNormArgs& args) {
  each_row<LayerNormArgs, layer_norm_row>(pool, args, args.width);
}

// x (1 + erf(x / sqrt 2)) / 2 = max(x, 0) - |x| erfc(|x| / sqrt 2) / 2, erfc within 1.5e-7: Abramowitz and Stegun 7.1.26.
static inline Vec exact_gelu(Vec x) {
  const Vec size = abs(x), z = mul(size, broadcast(0.70710678118654752f)), one = broadcast(1.0f);
  const Vec t = div(one, fma(z, broadcast(0.3275911f), one));
  Vec p = fma(t, broadcast(1.061405429f), broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = mul(fma(p, t, broadcast(0.254829592f)), t);
  const Vec erfc = mul(p, exp(sub(broadcast(0.0f), mul(z, z))));
  return sub(max(x, broadcast(0.0f)), mul(mul(size, broadcast(0.5f)), erfc));
}

// 1 - 2 / (e^2x + 1)
static inline Vec tanh(Vec x) {
  const Vec one = broadcast(1.0f);
  return sub(one, div(broadcast(2.0f), add(exp(add(x, x)), one)));
}

template <Vec (*act)(Vec)>
static void act_row(const ActivationArgs& args, int64_t row) {
  const float* x = row_of(args.x, row);
  float* y = row_of(args.y, row);
  each_vec(args.width, [&](int64_t i, auto part) { store(y + i, act(load(x + i, part)), part); });
}

static void gelu(Pool* pool, const ActivationArgs& args) {
  each_row<ActivationArgs, act_row<exact_gelu>>(pool, args, args.width);
}

static void tanh(Pool* pool, const ActivationArgs& args) {
  each_row<ActivationArgs, act_row<tanh>>(pool, args, args.width);
}

constexpr int64_t kRowsOfATile = 48;

// A thread's memory for one head of one sequence.
struct HeadWork {
  float *keys, *values;   // [tiles][dim][16], [width / 16][tokens][16]
  float *q, *scores;      // [kRowsOfATile][dim], [kRowsOfATile][kSegmentTokens]
  float *sums, *next;     // [kRowsOfATile][width]
  Partial *partial, *next_partial;

  // Takes its parts from `memory`; returns how many floats that are. `tokens` is a multiple of 16.
  int64_t lay_out(float* memory, int64_t tokens, int64_t dim, int64_t width) {
    int64_t used = 0;
    auto take = [&](int64_t floats) {
      float* part = memory + used;
      used += (floats + kLanes - 1) / kLanes * kLanes;
      return part;
    };
    keys = take(tokens * dim);
    values = take(tokens * width);
    q = take(kRowsOfATile * dim);
    scores = take(kRowsOfATile * kSegmentTokens);
    sums = take(kRowsOfATile * width);
    next = take(kRowsOfATile * width);
    partial = reinterpret_cast<Partial*>(take(2 * kRowsOfATile));
    next_partial = reinterpret_cast<Partial*>(take(2 * kRowsOfATile));
    return used;
  }
};

struct EncoderStep {
  Pool* pool;
  const EncoderAttentionArgs* args;
  int64_t width;  // head_dim in whole Vecs
  size_t scratch_bytes;
};

static inline int64_t whole_tiles(int64_t tokens) { return (tokens + kTokens - 1) / kTokens * kTokens; }

// What follows the last token is 0.
static void gather_head(const EncoderAttentionArgs& args, int64_t first, int64_t tokens, int64_t head, int64_t width,
                        const HeadWork& work) {
  const int64_t dim = args.head_dim, padded = whole_tiles(tokens);
  for (int64_t t = 0; t < padded; t += kTokens)
    for (int64_t lane = 0; lane < kTokens; lane++) {
      const float* key = t + lane < tokens ? row_of(args.k, first + t + lane) + head * dim : nullptr;
      for (int64_t d = 0; d < dim; d++) work.keys[(t * dim) + d * kTokens + lane] = key == nullptr ? 0.0f : key[d];
    }
  for (int64_t d = 0; d < width; d += kLanes) {
    const int count = static_cast<int>(dim - d < kLanes ? dim - d : kLanes);
    float* column = work.values + d * padded;
    for (int64_t t = 0; t < padded; t++) {
      const Vec value = t < tokens ? load_first(row_of(args.v, first + t) + head * dim + d, count) : broadcast(0.0f);
      store(column + t * kLanes, value);
    }
  }
}

// `rows` rows, whose queries are in `work`, over the segment's keys; its softmax and sums go to `partial` and `sums`.
static void attend_to_segment(int64_t rows, int64_t start, int64_t count, int64_t padded, int64_t dim, int64_t width,
                              const HeadWork& work, Partial* partial, float* sums) {
  KeyTile keys[kSegmentTokens / kTokens];
  int64_t tiles = 0;
  for (; tiles * kTokens < count; tiles++) {
    const float* at = work.keys + (start + tiles * kTokens) * dim;
    keys[tiles] = {at, nullptr, at};
  }
  std::memset(sums, 0, rows * width * sizeof(float));
  for (int64_t row = 0, some; row < rows; row += some) {
    some = rows_at_once(rows - row);
    float* scores = work.scores + row * kSegmentTokens;
    score_rows<KVDtype::kF32>(some, work.q + row * dim, dim, keys, tiles, scores);
    for (int64_t r = 0; r < some; r++) partial[row + r] = soften(scores + r * kSegmentTokens, 0, count, nullptr);
    const float* values = work.values + start * kLanes;
    add_rows<KVDtype::kF32>(some, scores, values, values, count, padded * kLanes, sums + row * width, width);
  }
}

static void attend_rows(const EncoderStep& step, int64_t first, int64_t tokens, int64_t head, int64_t begin,
                        int64_t rows, const HeadWork& work) {
  const EncoderAttentionArgs& args = *step.args;
  const int64_t dim = args.head_dim, width = step.width, padded = whole_tiles(tokens);
  const Vec scale = broadcast(args.scale);
  for (int64_t row = 0; row < rows; row++) {
    const float* q = row_of(args.q, first + begin + row) + head * dim;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int count = static_cast<int>(dim - d < kLanes ? dim - d : kLanes);
      store_first(work.q + row * dim + d, mul(load_first(q + d, count), scale), count);
    }
  }
  for (int64_t start = 0; start < tokens; start += kSegmentTokens) {
    const int64_t count = tokens - start < kSegmentTokens ? tokens - start : kSegmentTokens;
    if (start == 0) {
      attend_to_segment(rows, start, count, padded, dim, width, work, work.partial, work.sums);
      continue;
    }
    attend_to_segment(rows, start, count, padded, dim, width, work, work.next_partial, work.next);
    for (int64_t row = 0; row < rows; row++)
      merge(work.partial + row, work.sums + row * width, work.next_partial[row], work.next + row * width, width);
  }
  for (int64_t row = 0; row < rows; row++) {
    float* y = row_of(args.y, first + begin + row) + head * dim;
    const Vec total = broadcast(work.partial[row].total);
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int count = static_cast<int>(dim - d < kLanes ? dim - d : kLanes);
      store_first(y + d, div(load(work.sums + row * width + d), total), count);
    }
  }
}

static void attend_head(const EncoderStep& step, int64_t item, int thread) {
  const EncoderAttentionArgs& args = *step.args;
  const int64_t sequence = item / args.heads, head = item % args.heads;
  const int64_t first = args.batch->query_start[sequence], tokens = args.batch->query_start[sequence + 1] - first;
  HeadWork work;
  work.lay_out(static_cast<float*>(step.pool->scratch(thread, step.scratch_bytes)), whole_tiles(tokens), args.head_dim,
               step.width);
  gather_head(args, first, tokens, head, step.width, work);
  for (int64_t row = 0; row < tokens; row += kRowsOfATile)
    attend_rows(step, first, tokens, head, row, tokens - row < kRowsOfATile ? tokens - row : kRowsOfATile, work);
}

static void encoder_attention(Pool* pool, const EncoderAttentionArgs& args) {
  const BatchView& batch = *args.batch;
  EncoderStep step = {pool, &args, (args.head_dim + kLanes - 1) / kLanes * kLanes, 0};
  int64_t longest = 0;
  for (int64_t s = 0; s < batch.num_sequences; s++) {
    const int64_t tokens = batch.query_start[s + 1] - batch.query_start[s];
    longest = tokens > longest ? tokens : longest;
  }
  HeadWork work;
  step.scratch_bytes = work.lay_out(nullptr, whole_tiles(longest), args.head_dim, step.width) * sizeof(float);
  for (int thread = 0; thread < pool->threads(); thread++) {
    if (pool->scratch(thread, step.scratch_bytes) != nullptr) continue;
    // Memory is short: whoever pools these rows sees that they are not numbers.
    for (int64_t row = 0; row < batch.num_rows; row++)
      for (int64_t i = 0; i < args.heads * args.head_dim; i++) row_of(args.y, row)[i] = __builtin_nanf("");
    return;
  }
  pool->run(
      batch.num_sequences * args.heads,
      [](void* context, int64_t item, int thread) { attend_head(*static_cast<EncoderStep*>(context), item, thread); },
      &step);
}

}  // namespace HR_ISA
