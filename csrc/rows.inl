// What is done to rows on their own: norms, rope, gates, sums, picking rows, and the routing of rows through experts.
//
// Few values are not worth waking the pool for; more are handed out in chunks of whole rows. Either way a row is worked
// on by one thread from left to right, 16 lanes at a time, and what is left over as the first lanes of one more.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "ops.h"

namespace HR_ISA {

using namespace headrace;

constexpr int64_t kValuesWorthWaking = 16384;
constexpr int64_t kValuesPerItem = 8192;

// A whole Vec, or the first `lanes` of one.
struct Whole {
  static constexpr int lanes = kLanes;
};
struct Head {
  int lanes;
};

static inline Vec load(const float* p, Whole) { return load(p); }
static inline Vec load(const float* p, Head head) { return load_first(p, head.lanes); }
static inline void store(float* p, Vec x, Whole) { store(p, x); }
static inline void store(float* p, Vec x, Head head) { store_first(p, x, head.lanes); }

// body(first column, Whole or Head) from left to right.
template <typename Body>
static inline void each_vec(int64_t width, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, Whole{});
  if (i < width) body(i, Head{static_cast<int>(width - i)});
}

// work(args, row) for every row of `width` values.
template <typename Args, void (*work)(const Args&, int64_t)>
static void each_row(Pool* pool, const Args& args, int64_t width) {
  if (args.rows * width <= kValuesWorthWaking || pool->threads() == 1) {
    for (int64_t row = 0; row < args.rows; row++) work(args, row);
    return;
  }
  struct Chunks {
    const Args& args;
    int64_t rows;
  } chunks = {args, width < kValuesPerItem ? (kValuesPerItem + width - 1) / width : 1};
  auto chunk = [](void* context, int64_t item, int) {
    const Chunks& c = *static_cast<const Chunks*>(context);
    int64_t end = (item + 1) * c.rows < c.args.rows ? (item + 1) * c.rows : c.args.rows;
    for (int64_t row = item * c.rows; row < end; row++) work(c.args, row);
  };
  pool->run((args.rows + chunks.rows - 1) / chunks.rows, chunk, &chunks);
}

static inline float* row_of(const View& view, int64_t row) { return view.data + row * view.stride; }

static void norm_row(const NormArgs& args, int64_t row) {
  for (int64_t head = 0; head < args.parts; head++) {
    const int64_t at = head * args.width;
    const float* x = row_of(args.x, row) + at;
    Vec squares = broadcast(0.0f);
    if (args.residual.data != nullptr) {
      const float* residual = row_of(args.residual, row) + at;
      float* total = row_of(args.sum, row) + at;
      each_vec(args.width, [&](int64_t i, auto part) {
        Vec value = add(load(x + i, part), load(residual + i, part));
        store(total + i, value, part);
        squares = fma(value, value, squares);
      });
      x = total;
    } else {
      each_vec(args.width, [&](int64_t i, auto part) {
        Vec value = load(x + i, part);
        squares = fma(value, value, squares);
      });
    }
    Vec scale = broadcast(1.0f / sqrtf(sum(squares) / static_cast<float>(args.width) + args.eps));
    float* y = row_of(args.y, row) + at;
    each_vec(args.width, [&](int64_t i, auto part) {
      Vec value = mul(mul(load(x + i, part), scale), load(args.weight + i, part));
      store(y + i, value, part);
    });
  }
}

static void norm(Pool* pool, const NormArgs& args) {
  each_row<NormArgs, norm_row>(pool, args, args.parts * args.width);
}

static void rope_row(const RopeArgs& args, int64_t row) {
  const float* cos = args.cos + args.positions[row] * args.half;
  const float* sin = args.sin + args.positions[row] * args.half;
  for (int64_t head = 0; head < args.heads; head++) {
    const float* x = row_of(args.x, row) + head * args.head_dim;
    float* y = row_of(args.y, row) + head * args.head_dim;
    each_vec(args.half, [&](int64_t i, auto part) {
      Vec first = load(x + i, part), second = load(x + args.half + i, part);
      Vec c = load(cos + i, part), s = load(sin + i, part);
      store(y + i, sub(mul(first, c), mul(second, s)), part);
      store(y + args.half + i, add(mul(second, c), mul(first, s)), part);
    });
    const int64_t rotated = 2 * args.half, rest = args.head_dim - rotated;
    if (x != y && rest > 0) std::memcpy(y + rotated, x + rotated, sizeof(float) * rest);
  }
}

static void rope(Pool* pool, const RopeArgs& args) {
  each_row<RopeArgs, rope_row>(pool, args, args.heads * args.head_dim);
}

// x / (1 + e^-x)
static inline Vec silu(Vec x) { return div(x, add(broadcast(1.0f), exp(sub(broadcast(0.0f), x)))); }

// By the approximation with tanh: x / 2 (1 + tanh z) = x / (1 + e^-2z), z = sqrt(2 / pi) (x + 0.044715 x^3).
static inline Vec gelu(Vec x) {
  Vec cube = mul(mul(x, x), x);
  Vec minus_twice_z = mul(add(x, mul(cube, broadcast(0.044715f))), broadcast(-1.5957691216057308f));
  return div(x, add(broadcast(1.0f), exp(minus_twice_z)));
}

template <Vec (*act)(Vec)>
static void gated_row(const GatedArgs& args, int64_t row) {
  const float* x = row_of(args.x, row);
  float* y = row_of(args.y, row);
  each_vec(args.width, [&](int64_t i, auto part) {
    Vec value = mul(act(load(x + i, part)), load(x + args.width + i, part));
    store(y + i, value, part);
  });
}

static void silu_mul(Pool* pool, const GatedArgs& args) {
  each_row<GatedArgs, gated_row<silu>>(pool, args, 2 * args.width);
}

static void gelu_mul(Pool* pool, const GatedArgs& args) {
  each_row<GatedArgs, gated_row<gelu>>(pool, args, 2 * args.width);
}

static void scale_row(const ScaleArgs& args, int64_t row) {
  const float* x = row_of(args.x, row);
  float* y = row_of(args.y, row);
  Vec factor = broadcast(args.factor);
  each_vec(args.width, [&](int64_t i, auto part) { store(y + i, mul(load(x + i, part), factor), part); });
}

static void scale(Pool* pool, const ScaleArgs& args) { each_row<ScaleArgs, scale_row>(pool, args, args.width); }

static void add_row(const AddArgs& args, int64_t row) {
  const float* a = row_of(args.a, row);
  const float* b = row_of(args.b, row);
  float* y = row_of(args.y, row);
  each_vec(args.width, [&](int64_t i, auto part) { store(y + i, add(load(a + i, part), load(b + i, part)), part); });
}

static void add(Pool* pool, const AddArgs& args) { each_row<AddArgs, add_row>(pool, args, args.width); }

static void pick_row(const PickArgs& args, int64_t row) {
  std::memcpy(row_of(args.y, row), row_of(args.x, args.index[row]), sizeof(float) * args.width);
}

static void pick(Pool* pool, const PickArgs& args) { each_row<PickArgs, pick_row>(pool, args, args.width); }

// A row's experts, the heaviest first, in `chosen` and `weights` [top_k]; `softmax` is room for [experts].
static void route(const float* scores, const ExpertsArgs& args, float* softmax, int32_t* chosen, float* weights) {
  Vec peak = broadcast(-HUGE_VALF);
  each_vec(args.experts, [&](int64_t i, auto part) {
    peak = max(lanes_or(load(scores + i, part), 0, part.lanes, broadcast(-HUGE_VALF)), peak);
  });
  Vec best = broadcast(largest(peak)), total = broadcast(0.0f);
  each_vec(args.experts, [&](int64_t i, auto part) {
    Vec weight = exp(sub(load(scores + i, part), best));
    store(softmax + i, weight, part);
    total = add(total, lanes_or(weight, 0, part.lanes, broadcast(0.0f)));
  });
  Vec whole = broadcast(sum(total));
  each_vec(args.experts, [&](int64_t i, auto part) {
    store(softmax + i, div(load(softmax + i, part), whole), part);
  });
  float chosen_total = 0.0f;
  for (int64_t place = 0; place < args.top_k; place++) {
    int32_t heaviest = -1;
    // A weight below 0 is one that is taken. Not-a-number is above nothing but is taken when nothing else is left.
    for (int32_t expert = 0; expert < args.experts; expert++)
      if (!(softmax[expert] < 0.0f) && (heaviest < 0 || softmax[expert] > softmax[heaviest])) heaviest = expert;
    chosen[place] = heaviest;
    weights[place] = softmax[heaviest];
    chosen_total += weights[place];
    softmax[heaviest] = -1.0f;
  }
  if (args.normalize)
    for (int64_t place = 0; place < args.top_k; place++) weights[place] /= chosen_total;
}

// What an `experts` operation keeps: (row, place) number row * top_k + place, here called a visit.
struct Visits {
  const ExpertsArgs& args;
  Pool* pool;
  int64_t rows;
  int32_t* chosen;   // [rows * top_k] a visit's expert
  float* weights;    // [rows * top_k]
  int32_t* order;    // [rows * top_k] visits by expert
  int32_t* starts;   // [experts + 1] an expert's first in `order`
  float* softmax;    // [rows, experts]
  float* gathered;   // [rows, width] the rows that visit one expert
  float* inner;      // [rows, inner width]
  float* parts;      // [rows * top_k, width] what each visit gave
};

static void route_row(const Visits& v, int64_t row) {
  const int64_t first = row * v.args.top_k;
  route(row_of(v.args.router, row), v.args, v.softmax + row * v.args.experts, v.chosen + first, v.weights + first);
}

static void sort_by_expert(const Visits& v) {
  const int64_t visits = v.args.rows * v.args.top_k;
  std::memset(v.starts, 0, sizeof(int32_t) * (v.args.experts + 1));
  for (int64_t i = 0; i < visits; i++) v.starts[v.chosen[i] + 1]++;
  for (int64_t e = 0; e < v.args.experts; e++) v.starts[e + 1] += v.starts[e];
  for (int64_t i = 0; i < visits; i++) v.order[v.starts[v.chosen[i]]++] = static_cast<int32_t>(i);
  for (int64_t e = v.args.experts; e > 0; e--) v.starts[e] = v.starts[e - 1];
  v.starts[0] = 0;
}

static void visit_expert(const Visits& v, int64_t expert, int64_t inner_width) {
  const ExpertsArgs& args = v.args;
  const int64_t first = v.starts[expert], count = v.starts[expert + 1] - first;
  if (count == 0) return;
  const size_t row_bytes = sizeof(float) * args.width;
  for (int64_t i = 0; i < count; i++)
    std::memcpy(v.gathered + i * args.width, row_of(args.x, v.order[first + i] / args.top_k), row_bytes);
  const View x = {v.gathered, args.width}, inner = {v.inner, inner_width};
  linear(v.pool, {x, count, args.gate_up[expert], nullptr, inner});
  silu_mul(v.pool, {inner, count, inner_width / 2, inner});
  linear(v.pool, {inner, count, args.down[expert], nullptr, x});
  for (int64_t i = 0; i < count; i++)
    std::memcpy(v.parts + v.order[first + i] * args.width, v.gathered + i * args.width, row_bytes);
}

static void add_visits(const Visits& v, int64_t row) {
  const ExpertsArgs& args = v.args;
  const float* weights = v.weights + row * args.top_k;
  const float* parts = v.parts + row * args.top_k * args.width;
  float* y = row_of(args.y, row);
  each_vec(args.width, [&](int64_t i, auto part) {
    Vec total = mul(load(parts + i, part), broadcast(weights[0]));
    for (int64_t place = 1; place < args.top_k; place++)
      total = add(total, mul(load(parts + place * args.width + i, part), broadcast(weights[place])));
    store(y + i, total, part);
  });
}

// Where memory is short the rows are not numbers, which whoever samples them reports.
static void fill_with_nan(const ExpertsArgs& args) {
  for (int64_t row = 0; row < args.rows; row++)
    for (int64_t i = 0; i < args.width; i++) row_of(args.y, row)[i] = NAN;
}

// The rows of an expert are gathered, go through it together and are put back; a row's visits are added at the end.
static void experts(Pool* pool, const ExpertsArgs& args) {
  const int64_t visits = args.rows * args.top_k, inner_width = args.gate_up[0]->out;
  struct Room {
    size_t bytes = 0;
    size_t take(int64_t values) {
      size_t at = bytes;
      bytes += (static_cast<size_t>(values) * 4 + 63) / 64 * 64;
      return at;
    }
  } room;
  const size_t chosen = room.take(visits), weights = room.take(visits), order = room.take(visits);
  const size_t starts = room.take(args.experts + 1), softmax = room.take(args.rows * args.experts);
  const size_t gathered = room.take(args.rows * args.width), inner = room.take(args.rows * inner_width);
  const size_t parts = room.take(visits * args.width);
  char* base = static_cast<char*>(pool->shared(1, room.bytes));
  if (base == nullptr) return fill_with_nan(args);
  auto ints = [&](size_t at) { return reinterpret_cast<int32_t*>(base + at); };
  auto floats = [&](size_t at) { return reinterpret_cast<float*>(base + at); };
  Visits v = {args,        pool,         args.rows,       ints(chosen),     floats(weights), ints(order),
              ints(starts), floats(softmax), floats(gathered), floats(inner),   floats(parts)};
  each_row<Visits, route_row>(pool, v, args.experts * (args.top_k + 8));
  sort_by_expert(v);
  for (int64_t expert = 0; expert < args.experts; expert++) visit_expert(v, expert, inner_width);
  each_row<Visits, add_visits>(pool, v, args.top_k * args.width);
}

}  // namespace HR_ISA
