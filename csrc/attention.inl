// Paged causal attention of a mixed batch: decode rows and chunks of prompts alike are tiles of rows, and a row is summed
// the same way in any of them. Its keys are taken in segments aligned to the sequence's start; in a segment all
// scores come first, then their softmax, then the values in the order of the tokens; segments are merged in order.
//
// The rows of a tile are (position, query head), for the query heads that share one KV head: its keys and values are
// read once for all of them. A row takes the tokens it sees and no others: what it must not see may hold anything.
#pragma once

#include "attention_math.inl"
#include "attention_plan.h"

namespace HR_ISA {

// From so many rows on a key or value of fewer than 32 bits is turned to float32 once, not for every six of them.
constexpr int64_t kManyRows = 13;

// So many keys are stored by the caller alone; of more, each item stores some rows.
constexpr int64_t kFewNumbers = 1 << 14;
constexpr int64_t kRowsStored = 8;

// One KV head of one tile of rows. Row r is query head r % shared of position + r / shared.
struct Tile {
  const KVCache* cache;
  const int32_t* blocks;  // of the sequence
  int64_t layer, head, shared, rows, dim, width, position, window;

  // Tokens of the segment that a row sees: first .. end - 1, counted from the segment's start.
  int64_t first(int64_t row, int64_t segment) const {
    const int64_t lowest = window > 0 ? position + row / shared + 1 - window : 0, start = segment * kSegmentTokens;
    return lowest > start ? lowest - start : 0;
  }
  int64_t end(int64_t row, int64_t segment) const {
    const int64_t left = position + row / shared + 1 - segment * kSegmentTokens;
    return left < 0 ? 0 : left < kSegmentTokens ? left : kSegmentTokens;
  }
  bool sees(int64_t row, int64_t segment) const { return first(row, segment) < end(row, segment); }
  CachedHead cached(int64_t token) const {
    return cached_head(*cache, blocks[token / cache->block_size], layer, head);
  }
};

// A thread's memory for one tile.
struct Work {
  float* q;             // [rows][dim], times the scale
  float* scores;        // [rows][kSegmentTokens], then weights
  Partial* partial;     // [rows]
  float* sums;          // [rows][width]
  Partial* next;        // of one segment
  float* next_sums;
  float* keys;          // [kColumnsAtOnce][dim][16]
  float* key_scales;    // [kColumnsAtOnce][16]
  float* values;        // [width / 16][kSegmentTokens][16]
  float* value_scales;  // [kSegmentTokens]
};

// Takes its parts from `memory`; returns how many floats that are.
static inline int64_t lay_out(Work* work, float* memory, int64_t rows, int64_t dim, int64_t width) {
  int64_t used = 0;
  auto take = [&](int64_t floats) {
    float* part = memory + used;
    used += (floats + kLanes - 1) / kLanes * kLanes;
    return part;
  };
  work->q = take(rows * dim);
  work->scores = take(rows * kSegmentTokens);
  work->partial = reinterpret_cast<Partial*>(take(2 * rows));
  work->sums = take(rows * width);
  work->next = reinterpret_cast<Partial*>(take(2 * rows));
  work->next_sums = take(rows * width);
  work->keys = take(kColumnsAtOnce * dim * kTokens);
  work->key_scales = take(kColumnsAtOnce * kTokens);
  work->values = take(width * kSegmentTokens);
  work->value_scales = take(kSegmentTokens);
  return used;
}

// Scores of the segment's tiles that hold tokens first .. end - 1, still to be multiplied with the keys' scales.
template <KVDtype dtype>
static KeyTile gathered_keys(const Tile& tile, int64_t segment, int64_t at, int64_t first, int64_t end, float* keys,
                             float* scales) {
  for (int64_t lane = 0; lane < kTokens; lane++) {
    const int64_t token = segment * kSegmentTokens + at + lane;
    if (at + lane < first || at + lane >= end) {
      for (int64_t d = 0; d < tile.dim; d++) keys[d * kTokens + lane] = 0.0f;
      scales[lane] = 0.0f;
      continue;
    }
    const CachedHead cached = tile.cached(token);
    const int64_t place = token % tile.cache->block_size, key = key_index(*tile.cache, place);
    for (int64_t d = 0; d < tile.dim; d++) {
      float lanes[kLanes];
      store(lanes, load_few_values<dtype>(cached.keys, key + d * tile.cache->tile, 1));
      keys[d * kTokens + lane] = lanes[0];
    }
    if (is_scaled(dtype)) scales[lane] = cached.key_scales[place];
  }
  return {keys, scales, keys};
}

template <KVDtype dtype>
static void score_segment(const Tile& tile, int64_t segment, const Work& work) {
  const int64_t first = tile.first(0, segment), end = tile.end(tile.rows - 1, segment);
  const bool whole_tiles = tile.cache->tile == kTokens;
  const bool as_float = !whole_tiles || (dtype != KVDtype::kF32 && tile.rows >= kManyRows);
  KeyTile keys[kColumnsAtOnce];
  for (int64_t t = first / kTokens * kTokens; t < end; t += kColumnsAtOnce * kTokens) {
    int64_t tiles = 0;
    for (; tiles < kColumnsAtOnce && t + tiles * kTokens < end; tiles++) {
      const int64_t at = t + tiles * kTokens, token = segment * kSegmentTokens + at;
      float* converted = work.keys + tiles * tile.dim * kTokens;
      if (!whole_tiles) {
        keys[tiles] = gathered_keys<dtype>(tile, segment, at, first, end, converted, work.key_scales + tiles * kTokens);
        continue;
      }
      const CachedHead cached = tile.cached(token);
      const int64_t place = token % tile.cache->block_size;
      const int64_t offset = place * tile.dim * bytes_of(dtype);
      keys[tiles] = {cached.keys + offset, cached.key_scales + place, cached.values + offset};
      if (!as_float) continue;
      keys[tiles].ahead = converted;
      for (int64_t d = 0; d < tile.dim; d++)
        store(converted + d * kTokens, load_values<dtype>(keys[tiles].keys, d * kTokens));
      keys[tiles].keys = converted;
    }
    for (int64_t row = 0, count; row < tile.rows; row += count) {
      count = rows_at_once(tile.rows - row);
      if (tile.first(row, segment) >= t + tiles * kTokens || tile.end(row + count - 1, segment) <= t) continue;
      const float* q = work.q + row * tile.dim;
      float* scores = work.scores + row * kSegmentTokens + t;
      if (as_float) {
        score_rows<KVDtype::kF32>(count, q, tile.dim, keys, tiles, scores);
      } else {
        score_rows<dtype>(count, q, tile.dim, keys, tiles, scores);
      }
      if constexpr (is_scaled(dtype)) {
        for (int64_t i = 0; i < tiles; i++) {
          const Vec scales = mul(load(keys[i].scales), broadcast(value_unit(dtype)));
          for (int64_t r = 0; r < count; r++) {
            float* x = scores + r * kSegmentTokens + i * kTokens;
            store(x, mul(load(x), scales));
          }
        }
      }
    }
  }
}

// Runs of tokens first .. end - 1 of the segment whose values lie one after the other: visit(at, tokens, head, place).
template <typename Visit>
static inline void each_run(const Tile& tile, int64_t segment, int64_t first, int64_t end, Visit&& visit) {
  for (int64_t at = first, tokens; at < end; at += tokens) {
    const int64_t token = segment * kSegmentTokens + at, place = token % tile.cache->block_size;
    tokens = tile.cache->block_size - place < end - at ? tile.cache->block_size - place : end - at;
    visit(at, tokens, tile.cached(token), place);
  }
}

// The segment's values as float32, columns kSegmentTokens apart, and beyond head_dim zeros.
template <KVDtype dtype>
static void convert_values(const Tile& tile, int64_t segment, int64_t first, int64_t end, const Work& work) {
  each_run(tile, segment, first, end, [&](int64_t at, int64_t tokens, const CachedHead& cached, int64_t place) {
    for (int64_t d = 0; d < tile.dim; d += kLanes) {
      const int64_t count = tile.dim - d < kLanes ? tile.dim - d : kLanes;
      float* out = work.values + d * kSegmentTokens + at * kLanes;
      for (int64_t i = 0; i < tokens; i++) {
        const int64_t index = d * tile.cache->block_size + (place + i) * count;
        store(out + i * kLanes, count == kLanes ? load_values<dtype>(cached.values, index)
                                                : load_few_values<dtype>(cached.values, index, count));
      }
    }
  });
}

// Adds the values of tokens first .. end - 1, weighted, to the sums of `count` rows. The keys of the next segment are
// fetched meanwhile, as the values were while the keys were multiplied.
template <KVDtype dtype>
static void add_tokens(const Tile& tile, int64_t segment, int64_t first, int64_t end, bool as_float, int64_t row,
                       int64_t count, const Work& work, float* sums) {
  const float* weights = work.scores + row * kSegmentTokens;
  float* into = sums + row * tile.width;
  if (as_float) {
    const float* values = work.values + first * kLanes;
    add_rows<KVDtype::kF32>(count, weights + first, values, values, end - first, kSegmentTokens * kLanes, into,
                            tile.width);
    return;
  }
  each_run(tile, segment, first, end, [&](int64_t at, int64_t tokens, const CachedHead& cached, int64_t place) {
    const int64_t offset = place * kLanes * bytes_of(dtype), next = (segment + 1) * kSegmentTokens + at;
    const uint8_t* ahead = next <= tile.position ? tile.cached(next).keys : cached.values;
    add_rows<dtype>(count, weights + at, cached.values + offset, ahead + offset, tokens,
                    tile.cache->block_size * kLanes, into, tile.width);
  });
}

template <KVDtype dtype>
static void add_segment_values(const Tile& tile, int64_t segment, const Work& work, float* sums) {
  const bool as_float = tile.dim % kLanes != 0 || (dtype != KVDtype::kF32 && tile.rows >= kManyRows);
  if (as_float)
    convert_values<dtype>(tile, segment, tile.first(0, segment), tile.end(tile.rows - 1, segment), work);
  for (int64_t row = 0, count; row < tile.rows; row += count) {
    count = rows_at_once(tile.rows - row);
    // Tokens that all of the rows see, and what each sees before and behind them.
    const int64_t first = tile.first(row + count - 1, segment), end = tile.end(row, segment);
    if (first >= end) {
      for (int64_t r = row; r < row + count; r++)
        if (tile.sees(r, segment))
          add_tokens<dtype>(tile, segment, tile.first(r, segment), tile.end(r, segment), as_float, r, 1, work, sums);
      continue;
    }
    for (int64_t r = row; r < row + count; r++)
      if (tile.first(r, segment) < first)
        add_tokens<dtype>(tile, segment, tile.first(r, segment), first, as_float, r, 1, work, sums);
    add_tokens<dtype>(tile, segment, first, end, as_float, row, count, work, sums);
    for (int64_t r = row; r < row + count; r++)
      if (tile.end(r, segment) > end)
        add_tokens<dtype>(tile, segment, end, tile.end(r, segment), as_float, r, 1, work, sums);
  }
}

// One segment of all rows of the tile, those that see none of it left out.
template <KVDtype dtype>
static void attend_segment(const Tile& tile, int64_t segment, const Work& work, Partial* partial, float* sums) {
  score_segment<dtype>(tile, segment, work);
  const float* value_scales = nullptr;
  if constexpr (is_scaled(dtype)) {
    each_run(tile, segment, tile.first(0, segment), tile.end(tile.rows - 1, segment),
             [&](int64_t at, int64_t tokens, const CachedHead& cached, int64_t place) {
               for (int64_t i = 0; i < tokens; i++)
                 work.value_scales[at + i] = cached.value_scales[place + i] * value_unit(dtype);
             });
    value_scales = work.value_scales;
  }
  for (int64_t row = 0; row < tile.rows; row++)
    if (tile.sees(row, segment))
      partial[row] = soften(work.scores + row * kSegmentTokens, tile.first(row, segment), tile.end(row, segment),
                            value_scales);
  std::memset(sums, 0, tile.rows * tile.width * sizeof(float));
  add_segment_values<dtype>(tile, segment, work, sums);
}

// The segments in order: each call adds one, where the row sees it.
static inline void merge_rows(const Tile& tile, int64_t segment, Partial* partial, float* sums, const Partial* next,
                              const float* next_sums) {
  for (int64_t row = 0; row < tile.rows; row++) {
    if (!tile.sees(row, segment)) continue;
    float* into = sums + row * tile.width;
    const float* from = next_sums + row * tile.width;
    if (segment == 0 || !tile.sees(row, segment - 1)) {
      partial[row] = next[row];
      std::memcpy(into, from, tile.width * sizeof(float));
    } else {
      merge(partial + row, into, next[row], from, tile.width);
    }
  }
}

struct AttentionStep {
  Pool* pool;
  const AttentionArgs* args;
  const AttentionUnit* units;
  const SplitTile* splits;
  Partial* partials;  // [plan.partials * kv_heads]
  float* sums;        // [plan.partials * kv_heads][width]
  AttentionPlan plan;
  int64_t width, most_rows;
  size_t scratch_bytes;

  float* scratch(int thread) const { return static_cast<float*>(pool->scratch(thread, scratch_bytes)); }
};

static Tile tile_of(const AttentionStep& step, int64_t head, int64_t sequence, int64_t rows, int64_t position) {
  const AttentionArgs& args = *step.args;
  const int64_t shared = args.heads / args.kv_heads;
  return {args.cache, args.batch->block_tables + sequence * args.batch->table_width, args.layer, head, shared,
          rows * shared, args.head_dim, step.width, position, args.window};
}

static void write_rows(const AttentionArgs& args, const Tile& tile, int64_t batch_row, const Partial* partial,
                       const float* sums) {
  for (int64_t row = 0; row < tile.rows; row++) {
    float* y = args.y.data + (batch_row + row / tile.shared) * args.y.stride +
               (tile.head * tile.shared + row % tile.shared) * tile.dim;
    const Vec total = broadcast(partial[row].total);
    for (int64_t d = 0; d < tile.dim; d += kLanes) {
      const Vec x = div(load(sums + row * tile.width + d), total);
      if (tile.dim - d < kLanes) {
        store_first(y + d, x, static_cast<int>(tile.dim - d));
      } else {
        store(y + d, x);
      }
    }
  }
}

// Where the results of segment `segment` of a split tile are, the first of its rows.
static int64_t partial_index(const AttentionStep& step, const SplitTile& split, int64_t head, int64_t rows,
                             int64_t segment) {
  return split.partials * step.args->kv_heads + (head * split.segments + segment - split.segment) * rows;
}

template <KVDtype dtype>
static void attend_unit(const AttentionStep& step, const AttentionUnit& unit, int64_t head, int thread) {
  const AttentionArgs& args = *step.args;
  const Tile tile = tile_of(step, head, unit.sequence, unit.rows, unit.position);
  Work work;
  lay_out(&work, step.scratch(thread), step.most_rows, tile.dim, tile.width);
  const Vec scale = broadcast(args.scale);
  for (int64_t row = 0; row < tile.rows; row++) {
    const float* q = args.q.data + (unit.row + row / tile.shared) * args.q.stride +
                     (head * tile.shared + row % tile.shared) * tile.dim;
    for (int64_t d = 0; d < tile.dim; d += kLanes) {
      const int count = static_cast<int>(tile.dim - d < kLanes ? tile.dim - d : kLanes);
      store_first(work.q + row * tile.dim + d, mul(load_first(q + d, count), scale), count);
    }
  }
  for (int64_t segment = unit.segment; segment < unit.segment + unit.segments; segment++) {
    if (unit.whole >= 0) {
      const int64_t at = partial_index(step, step.splits[unit.whole], head, tile.rows, segment);
      attend_segment<dtype>(tile, segment, work, step.partials + at, step.sums + at * tile.width);
    } else {
      attend_segment<dtype>(tile, segment, work, work.next, work.next_sums);
      merge_rows(tile, segment, work.partial, work.sums, work.next, work.next_sums);
    }
  }
  if (unit.whole < 0) write_rows(args, tile, unit.row, work.partial, work.sums);
}

static void merge_split(const AttentionStep& step, const SplitTile& split, int64_t head, int thread) {
  const Tile tile = tile_of(step, head, split.sequence, split.rows, split.position);
  Work work;
  lay_out(&work, step.scratch(thread), step.most_rows, tile.dim, tile.width);
  for (int64_t segment = split.segment; segment < split.segment + split.segments; segment++) {
    const int64_t at = partial_index(step, split, head, tile.rows, segment);
    merge_rows(tile, segment, work.partial, work.sums, step.partials + at, step.sums + at * tile.width);
  }
  write_rows(*step.args, tile, split.row, work.partial, work.sums);
}

template <KVDtype dtype>
static void store_rows(const AttentionArgs& args, int64_t first, int64_t end) {
  const KVCache& cache = *args.cache;
  for (int64_t row = first; row < end; row++) {
    const int64_t slot = args.batch->slot_mapping[row];
    for (int64_t head = 0; head < args.kv_heads; head++)
      store_token<dtype>(cache, cached_head(cache, slot / cache.block_size, args.layer, head), slot % cache.block_size,
                         args.k.data + row * args.k.stride + head * args.head_dim,
                         args.v.data + row * args.v.stride + head * args.head_dim);
  }
}

template <KVDtype dtype>
static void store_batch(Pool* pool, const AttentionArgs& args) {
  const int64_t rows = args.batch->num_rows;
  if (rows * args.kv_heads * args.head_dim <= kFewNumbers) return store_rows<dtype>(args, 0, rows);
  pool->run(
      (rows + kRowsStored - 1) / kRowsStored,
      [](void* context, int64_t item, int) {
        const auto& of = *static_cast<const AttentionArgs*>(context);
        const int64_t first = item * kRowsStored, left = of.batch->num_rows - first;
        store_rows<dtype>(of, first, first + (left < kRowsStored ? left : kRowsStored));
      },
      const_cast<AttentionArgs*>(&args));
}

template <KVDtype dtype>
static void attend(AttentionStep* step) {
  store_batch<dtype>(step->pool, *step->args);
  step->pool->run(
      step->plan.units * step->args->kv_heads,
      [](void* context, int64_t item, int thread) {
        const auto& of = *static_cast<const AttentionStep*>(context);
        attend_unit<dtype>(of, of.units[item / of.args->kv_heads], item % of.args->kv_heads, thread);
      },
      step);
  step->pool->run(
      step->plan.splits * step->args->kv_heads,
      [](void* context, int64_t item, int thread) {
        const auto& of = *static_cast<const AttentionStep*>(context);
        merge_split(of, of.splits[item / of.args->kv_heads], item % of.args->kv_heads, thread);
      },
      step);
}

// The memory of a step: plan and partial results shared, a tile's work for each thread. False when there is too little.
static bool prepare(AttentionStep* step) {
  const AttentionArgs& args = *step->args;
  const int64_t shared = args.heads / args.kv_heads, kv_heads = args.kv_heads;
  const int threads = step->pool->threads();
  step->plan = plan_attention(*args.batch, shared, kv_heads, args.window, threads, nullptr, nullptr);
  const AttentionPlan& plan = step->plan;
  auto rounded = [](int64_t bytes) { return static_cast<size_t>((bytes + 63) / 64 * 64); };
  const size_t units = rounded(plan.units * sizeof(AttentionUnit)), splits = rounded(plan.splits * sizeof(SplitTile));
  const size_t partials = rounded(plan.partials * kv_heads * sizeof(Partial));
  const size_t sums = rounded(plan.partials * kv_heads * step->width * sizeof(float));
  auto* memory = static_cast<uint8_t*>(step->pool->shared(0, units + splits + partials + sums));
  if (memory == nullptr) return false;
  auto* unit_memory = reinterpret_cast<AttentionUnit*>(memory);
  auto* split_memory = reinterpret_cast<SplitTile*>(memory + units);
  plan_attention(*args.batch, shared, kv_heads, args.window, threads, unit_memory, split_memory);
  step->units = unit_memory;
  step->splits = split_memory;
  step->partials = reinterpret_cast<Partial*>(memory + units + splits);
  step->sums = reinterpret_cast<float*>(memory + units + splits + partials);
  step->most_rows = plan.most_rows * shared;
  Work work;
  step->scratch_bytes = lay_out(&work, nullptr, step->most_rows, args.head_dim, step->width) * sizeof(float);
  for (int thread = 0; thread < threads; thread++)
    if (step->pool->scratch(thread, step->scratch_bytes) == nullptr) return false;
  return true;
}

static void attention(Pool* pool, const AttentionArgs& args) {
  AttentionStep step{};
  step.pool = pool;
  step.args = &args;
  step.width = (args.head_dim + kLanes - 1) / kLanes * kLanes;
  if (!prepare(&step)) {
    // Seen where a token is chosen: its logits are not numbers.
    for (int64_t row = 0; row < args.batch->num_rows; row++)
      for (int64_t i = 0; i < args.heads * args.head_dim; i++)
        args.y.data[row * args.y.stride + i] = __builtin_nanf("");
    return;
  }
  switch (args.cache->dtype) {
    case KVDtype::kF32: return attend<KVDtype::kF32>(&step);
    case KVDtype::kBF16: return attend<KVDtype::kBF16>(&step);
    case KVDtype::kF16: return attend<KVDtype::kF16>(&step);
    case KVDtype::kE4M3: return attend<KVDtype::kE4M3>(&step);
    case KVDtype::kE5M2: return attend<KVDtype::kE5M2>(&step);
    case KVDtype::kInt8: return attend<KVDtype::kInt8>(&step);
  }
}

}  // namespace HR_ISA
