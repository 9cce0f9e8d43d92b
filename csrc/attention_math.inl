// The arithmetic of attention: scores of rows against tiles of keys, their softmax, sums of values, and merging.
//
// Each function takes several rows at once to load a key or a value once for all, and gives every row the same bits
// whatever the others are: a score is one chain of sums over the head's dimensions, a sum of values one over the tokens.
#pragma once

#include "attention_plan.h"
#include "kv_values.inl"

namespace HR_ISA {

// Vecs of sums that stay in registers beside what is multiplied; a number that is converted takes a register more.
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 6;
constexpr int sums_for(KVDtype) { return 24; }
#elif defined(__AVX2__)
constexpr int kRowsAtOnce = 6;
constexpr int sums_for(KVDtype form) { return form == KVDtype::kF32 ? 6 : 5; }
#else
constexpr int kRowsAtOnce = 2;
constexpr int sums_for(KVDtype) { return 2; }
#endif
constexpr int kColumnsAtOnce = 4;

// Tiles of keys or columns of values that `rows` rows take at once: 1, 2 or 4.
constexpr int columns_for(KVDtype form, int rows) {
  return sums_for(form) / rows >= 4 ? 4 : sums_for(form) / rows >= 2 ? 2 : 1;
}

// How many of `left` rows to take at once: as many as there are sums for, and of what is left at the
// end halves.
static inline int64_t rows_at_once(int64_t left) {
  if (left <= kRowsAtOnce) return left;
  return left < 2 * kRowsAtOnce ? (left + 1) / 2 : kRowsAtOnce;
}

struct KeyTile {
  const void* keys;     // [dim][16]
  const float* scales;  // [16]
  const void* ahead;    // [dim][16] of what is wanted after the keys: it is fetched while they are multiplied
};

// Into the L2.
template <KVDtype form>
static inline void fetch(const void* values, int64_t index) {
  __builtin_prefetch(static_cast<const uint8_t*>(values) + index * bytes_of(form), 0, 2);
}

// scores[r][16 t ..] = row r of q times the keys of tile t. Scores are kSegmentTokens apart from row to row.
template <KVDtype form, int rows, int tiles>
static inline void score(const float* q, int64_t dim, const KeyTile* tile, float* scores) {
  Vec sums[rows][tiles];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int t = 0; t < tiles; t++) sums[r][t] = broadcast(0.0f);
  for (int64_t d = 0; d < dim; d++) {
#pragma GCC unroll 4
    for (int t = 0; t < tiles; t++) {
      const Vec keys = load_values<form>(tile[t].keys, d * kTokens);
      fetch<form>(tile[t].ahead, d * kTokens);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) sums[r][t] = fma(broadcast(q[r * dim + d]), keys, sums[r][t]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int t = 0; t < tiles; t++) store(scores + r * kSegmentTokens + t * kTokens, sums[r][t]);
}

// sums[r][16 c ..] += the weights of row r times column c of the values [tokens][16], token after token. `ahead` is laid
// out as the values and wanted after them.
template <KVDtype form, int rows, int columns>
static inline void add_values(const float* weights, const void* values, const void* ahead, int64_t tokens,
                              int64_t column_size, float* sums, int64_t width) {
  Vec sum[rows][columns];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) sum[r][c] = load(sums + r * width + c * kLanes);
  for (int64_t token = 0; token < tokens; token++) {
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) {
      const Vec value = load_values<form>(values, c * column_size + token * kLanes);
      fetch<form>(ahead, c * column_size + token * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++)
        sum[r][c] = fma(broadcast(weights[r * kSegmentTokens + token]), value, sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) store(sums + r * width + c * kLanes, sum[r][c]);
}

template <KVDtype form, int rows>
static void score_tiles(const float* q, int64_t dim, const KeyTile* tile, int64_t tiles, float* scores) {
  constexpr int kAtOnce = columns_for(form, rows);
  int64_t t = 0;
  for (; t + kAtOnce <= tiles; t += kAtOnce) score<form, rows, kAtOnce>(q, dim, tile + t, scores + t * kTokens);
  for (; t < tiles; t++) score<form, rows, 1>(q, dim, tile + t, scores + t * kTokens);
}

// `column_size`: numbers from one column of values to the next. sums: [rows][width], width a multiple of 16.
template <KVDtype form, int rows>
static void add_columns(const float* weights, const void* values, const void* ahead, int64_t tokens,
                        int64_t column_size, float* sums, int64_t width) {
  constexpr int kAtOnce = columns_for(form, rows);
  const int64_t columns = width / kLanes;
  auto column = [&](const void* first, int64_t c) {
    return static_cast<const uint8_t*>(first) + c * column_size * bytes_of(form);
  };
  int64_t c = 0;
  for (; c + kAtOnce <= columns; c += kAtOnce)
    add_values<form, rows, kAtOnce>(weights, column(values, c), column(ahead, c), tokens, column_size,
                                    sums + c * kLanes, width);
  for (; c < columns; c++)
    add_values<form, rows, 1>(weights, column(values, c), column(ahead, c), tokens, column_size, sums + c * kLanes,
                              width);
}

template <KVDtype form, int most = kRowsAtOnce>
static inline void score_rows(int64_t rows, const float* q, int64_t dim, const KeyTile* tile, int64_t tiles,
                              float* scores) {
  if constexpr (most > 1)
    if (rows < most) return score_rows<form, most - 1>(rows, q, dim, tile, tiles, scores);
  score_tiles<form, most>(q, dim, tile, tiles, scores);
}

template <KVDtype form, int most = kRowsAtOnce>
static inline void add_rows(int64_t rows, const float* weights, const void* values, const void* ahead, int64_t tokens,
                            int64_t column_size, float* sums, int64_t width) {
  if constexpr (most > 1)
    if (rows < most)
      return add_rows<form, most - 1>(rows, weights, values, ahead, tokens, column_size, sums, width);
  add_columns<form, most>(weights, values, ahead, tokens, column_size, sums, width);
}

// Softmaxes of some of a row's segments, not yet divided: weights are e^(score - maximum), `total` their sum.
struct Partial {
  float maximum, total;
};

// Turns one row's scores of the tokens first <= t < end of a segment to weights, times `value_scales` unless null.
// The other lanes of their tiles are overwritten.
static inline Partial soften(float* scores, int64_t first, int64_t end, const float* value_scales) {
  const Vec none = broadcast(-__builtin_inff());
  const int64_t begin = first / kTokens * kTokens;
  Vec highest = none;
  for (int64_t t = begin; t < end; t += kTokens) {
    Vec x = load(scores + t);
    if (t < first || t + kTokens > end) {
      x = lanes_or(x, static_cast<int>(first - t), static_cast<int>(end - t), none);
      store(scores + t, x);
    }
    highest = max(x, highest);
  }
  const float maximum = largest(highest);
  const Vec top = broadcast(maximum);
  Vec total = broadcast(0.0f);
  for (int64_t t = begin; t < end; t += kTokens) {
    Vec weight = exp(sub(load(scores + t), top));
    total = add(total, weight);
    if (value_scales != nullptr) weight = mul(weight, load(value_scales + t));
    store(scores + t, weight);
  }
  return {maximum, sum(total)};
}

static inline float exp_of(float x) {
  float lanes[kLanes];
  store(lanes, exp(broadcast(x)));
  return lanes[0];
}

// `into` and `sums` hold the row's earlier segments, `next` the one that follows.
static inline void merge(Partial* into, float* sums, const Partial& next, const float* next_sums, int64_t width) {
  const float maximum = into->maximum > next.maximum ? into->maximum : next.maximum;
  const float before = exp_of(into->maximum - maximum), after = exp_of(next.maximum - maximum);
  *into = {maximum, into->total * before + next.total * after};
  const Vec a = broadcast(before), b = broadcast(after);
  for (int64_t d = 0; d < width; d += kLanes)
    store(sums + d, fma(load(sums + d), a, mul(load(next_sums + d), b)));
}

}  // namespace HR_ISA
