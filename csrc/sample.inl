// Chooses a token for every row of logits, a row at a time, as kernels/ops.py SamplingRows says.
//
// A row that takes its largest logit costs one pass. A filtered draw sorts no vocabulary: a bound on what can be kept
// picks candidates, these fall into buckets by their value, and only the buckets that a limit or the draw falls into
// are put in order:
//
//     candidates by bucket   [.31 .33] [.09 .07 .08] [.05 .03] ...    sums before each: 0 .64 .88 .96
//     top-p 0.9 ends in the third, which is sorted: .05 is the last token kept; u = 0.7 -> 0.7 * .93 = .651 falls into
//     the second: .09
//
// Where a running sum meets its target to the last bits of its float64, or of the float32 exponentials it is made of,
// another implementation may take the neighbour. What is kept and in which order is never a matter of rounding else.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "ops.h"

namespace HR_ISA {

using namespace headrace;

constexpr int64_t kChunk = 64 * kLanes;  // values of which the largest in each lane is kept
constexpr int64_t kBlock = 16 * kLanes;  // weights that are added up before the running sum
constexpr int64_t kBuckets = 1024;
constexpr int64_t kOneBucket = 512;      // so few candidates are sorted at once
constexpr int64_t kFewItems = 32;        // so few are sorted by insertion
constexpr float kWeightless = -87.3f;    // e^x is 0 below

// A float and a token in one number: ascending numbers are descending floats, lower tokens first among equals.
using Item = uint64_t;

static inline Item item_of(float value, int64_t token) {
  uint32_t bits = to_bits(value + 0.0f);  // -0 equals 0
  uint32_t key = bits >> 31 ? bits : bits ^ 0x7fffffffu;
  return static_cast<Item>(key) << 32 | static_cast<uint32_t>(token);
}

static inline float value_of(Item item) {
  uint32_t key = static_cast<uint32_t>(item >> 32);
  return from_bits(key >> 31 ? key : key ^ 0x7fffffffu);
}

static inline int32_t token_of(Item item) { return static_cast<int32_t>(static_cast<uint32_t>(item)); }

typedef float EightFloats __attribute__((vector_size(32)));
typedef double EightDoubles __attribute__((vector_size(64)));

// A sum in float64 of the lanes of Vecs.
struct DoubleSum {
  EightDoubles lanes = {};

  void add(Vec x) {
    EightFloats halves[2];
    static_assert(sizeof(halves) == sizeof(x), "a Vec is sixteen floats");
    std::memcpy(halves, &x, sizeof(x));
    lanes += __builtin_convertvector(halves[0], EightDoubles);
    lanes += __builtin_convertvector(halves[1], EightDoubles);
  }

  double total() const {
    double even = (lanes[0] + lanes[4]) + (lanes[2] + lanes[6]), odd = (lanes[1] + lanes[5]) + (lanes[3] + lanes[7]);
    return even + odd;
  }
};

static inline int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Sixteen values from `at` on, as many as there are, `missing` in the other lanes.
static inline Vec load_or(const float* values, int64_t at, int64_t end, Vec missing) {
  if (at + kLanes <= end) return load(values + at);
  int count = static_cast<int>(end - at);
  return lanes_or(load_first(values + at, count), 0, count, missing);
}

// A thread's memory for a row.
struct Room {
  float* values;    // [vocab] the logits after what changes them, then these less the best over the temperature
  float* peaks;     // [chunks, 16]
  double* sums;     // [blocks]
  Item* items;      // [vocab], or what the peaks are if they are more
  Item* spare;      // as items
  float* weights;   // [vocab]
  int32_t* starts;  // [kBuckets + 1]
  double* before;   // [kBuckets + 1]
  uint8_t* sorted;  // [kBuckets]

  // The arrays one behind the other from `base` on; returns their bytes.
  size_t lay_out(uintptr_t base, int64_t vocab) {
    uintptr_t at = base;
    auto take = [&](int64_t bytes) {
      uintptr_t here = at;
      at += static_cast<uintptr_t>(bytes + 63) / 64 * 64;
      return here;
    };
    values = reinterpret_cast<float*>(take(vocab * 4));
    peaks = reinterpret_cast<float*>(take(pieces(vocab, kChunk) * kLanes * 4));
    sums = reinterpret_cast<double*>(take(pieces(vocab, kBlock) * 8));
    starts = reinterpret_cast<int32_t*>(take((kBuckets + 1) * 4));
    before = reinterpret_cast<double*>(take((kBuckets + 1) * 8));
    sorted = reinterpret_cast<uint8_t*>(take(kBuckets));
    items = reinterpret_cast<Item*>(take((vocab + kLanes) * 8));
    spare = reinterpret_cast<Item*>(take((vocab + kLanes) * 8));
    weights = reinterpret_cast<float*>(take(vocab * 4));
    return at - base;
  }
};

struct Peak {
  float value;    // the largest
  int32_t token;  // the first that has it
  bool finite;    // it is a number, and so are all others or they are -inf
};

// One pass; `peaks` gets the largest value of each lane of each chunk unless it is null.
static Peak find_peak(const float* values, int64_t vocab, float* peaks) {
  const Vec nothing = broadcast(-HUGE_VALF), infinity = broadcast(HUGE_VALF), one = broadcast(1.0f);
  Vec spoilt = broadcast(0.0f);
  float best = -HUGE_VALF;
  int64_t best_chunk = 0;
  for (int64_t start = 0; start < vocab; start += kChunk) {
    Vec a = nothing, b = nothing, c = nothing, d = nothing;
    int64_t i = start;
    if (start + kChunk <= vocab) {
      for (; i < start + kChunk; i += 4 * kLanes) {
        Vec w = load(values + i), x = load(values + i + kLanes);
        Vec y = load(values + i + 2 * kLanes), z = load(values + i + 3 * kLanes);
        a = max(w, a);
        b = max(x, b);
        c = max(y, c);
        d = max(z, d);
        spoilt = below_or(w, infinity, spoilt, one);
        spoilt = below_or(x, infinity, spoilt, one);
        spoilt = below_or(y, infinity, spoilt, one);
        spoilt = below_or(z, infinity, spoilt, one);
      }
    }
    for (; i < start + kChunk && i < vocab; i += kLanes) {
      Vec x = load_or(values, i, vocab, nothing);
      a = max(x, a);
      spoilt = below_or(x, infinity, spoilt, one);
    }
    a = max(max(a, b), max(c, d));
    if (peaks != nullptr) store(peaks + start / kChunk * kLanes, a);
    float peak = largest(a);
    if (peak > best) {
      best = peak;
      best_chunk = start;
    }
  }
  Peak found = {best, 0, best > -HUGE_VALF && largest(spoilt) == 0.0f};
  const Vec limit = broadcast(best);
  for (int64_t i = best_chunk; i < vocab; i += kLanes) {
    uint32_t bits = at_least(load_or(values, i, vocab, nothing), limit);
    if (bits != 0) {
      // Of a row without any number the first that is at least -inf may be a lane behind its end.
      const int64_t token = i + __builtin_ctz(bits);
      if (token < vocab) found.token = static_cast<int32_t>(token);
      break;
    }
  }
  return found;
}

// How a value is turned into the logarithm of its weight.
struct Shift {
  float best, temperature;

  float of(float value) const { return (value - best) / temperature; }
  Vec of(Vec value) const { return div(sub(value, broadcast(best)), broadcast(temperature)); }
};

// Of every value its shifted one (kKeep) in `shifted`, which may be `values`, and each block's sum of weights (kWeigh).
template <bool kKeep, bool kWeigh>
static void weigh(const float* values, int64_t vocab, Shift shift, float* shifted, double* sums) {
  for (int64_t start = 0; start < vocab; start += kBlock) {
    DoubleSum sum;
    const int64_t end = start + kBlock < vocab ? start + kBlock : vocab;
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      Vec x = shift.of(load(values + i));
      if (kKeep) store(shifted + i, x);
      if (kWeigh) sum.add(exp(x));
    }
    if (i < end) {
      int count = static_cast<int>(end - i);
      Vec x = shift.of(load_first(values + i, count));
      if (kKeep) store_first(shifted + i, x, count);
      if (kWeigh) sum.add(lanes_or(exp(x), 0, count, broadcast(0.0f)));
    }
    if (kWeigh) sums[start / kBlock] = sum.total();
  }
}

static double running_total(const double* sums, int64_t count) {
  double total = 0.0;
  for (int64_t i = 0; i < count; i++) total += sums[i];
  return total;
}

// The first token whose running sum of weights, in order of the tokens, exceeds u of their total.
static int32_t draw_from_all(const float* values, int64_t vocab, Shift shift, float u, const Peak& peak, double* sums) {
  weigh<false, true>(values, vocab, shift, nullptr, sums);
  const int64_t blocks = pieces(vocab, kBlock);
  const double target = static_cast<double>(u) * running_total(sums, blocks);
  double before = 0.0;
  int64_t block = 0;
  while (block < blocks && !(before + sums[block] > target)) before += sums[block++];
  if (block == blocks) return peak.token;
  int32_t last = peak.token;
  const int64_t start = block * kBlock;
  for (int64_t i = start; i < start + kBlock && i < vocab; i += kLanes) {
    float weights[kLanes];
    store(weights, exp(shift.of(load_or(values, i, vocab, broadcast(-HUGE_VALF)))));
    for (int lane = 0; lane < kLanes; lane++) {
      before += weights[lane];
      if (weights[lane] > 0.0f) last = static_cast<int32_t>(i + lane);
      if (before > target) return last;
    }
  }
  return last;  // the block's own sum was rounded up
}

static void sort_items(Item* items, Item* spare, int64_t count) {
  if (count <= kFewItems) {
    for (int64_t i = 1; i < count; i++) {
      Item item = items[i];
      int64_t at = i;
      for (; at > 0 && items[at - 1] > item; at--) items[at] = items[at - 1];
      items[at] = item;
    }
    return;
  }
  // Byte after byte of the float's part; equal floats keep the order they came in, which is that of their tokens.
  int32_t places[4][256] = {};
  for (int64_t i = 0; i < count; i++)
    for (int byte = 0; byte < 4; byte++) places[byte][items[i] >> (32 + 8 * byte) & 255]++;
  Item *from = items, *to = spare;
  for (int byte = 0; byte < 4; byte++) {
    int32_t* place = places[byte];
    if (place[from[0] >> (32 + 8 * byte) & 255] == count) continue;
    int32_t next = 0;
    for (int digit = 0; digit < 256; digit++) {
      int32_t here = place[digit];
      place[digit] = next;
      next += here;
    }
    for (int64_t i = 0; i < count; i++) to[place[from[i] >> (32 + 8 * byte) & 255]++] = from[i];
    Item* sorted = to;
    to = from;
    from = sorted;
  }
  if (from != items) std::memcpy(items, from, sizeof(Item) * count);
}

// The items of all values not below `threshold`, in order of the tokens; returns how many.
static int64_t gather_items(const float* values, int64_t vocab, float threshold, Item* items) {
  const Vec limit = broadcast(threshold);
  int64_t count = 0;
  auto take = [&](int64_t at, uint32_t bits) {
    for (; bits != 0; bits &= bits - 1) {
      int64_t token = at + __builtin_ctz(bits);
      items[count++] = item_of(values[token], token);
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) take(i, at_least(load(values + i), limit));
  if (i < vocab) {
    int left = static_cast<int>(vocab - i);
    take(i, at_least(load_first(values + i, left), limit) & ((1u << left) - 1));
  }
  return count;
}

// A value that at least `wanted` of the row's are not below, and not many more; -inf if the peaks cannot tell.
static float bound_of_best(const Room& room, int64_t vocab, int64_t wanted) {
  const int64_t count = pieces(vocab, kChunk) * kLanes;
  if (wanted > count) return -HUGE_VALF;
  for (int64_t i = 0; i < count; i++) room.items[i] = item_of(room.peaks[i], i);
  sort_items(room.items, room.spare, count);
  return value_of(room.items[wanted - 1]);
}

static void weigh_items(const Item* items, int64_t count, float* weights) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t here = count - i < kLanes ? count - i : kLanes;
    float values[kLanes] = {};
    for (int64_t lane = 0; lane < here; lane++) values[lane] = value_of(items[i + lane]);
    Vec weight = exp(load(values));
    if (here == kLanes)
      store(weights + i, weight);
    else
      store_first(weights + i, weight, static_cast<int>(here));
  }
}

static double sum_of(const float* weights, int64_t count) {
  DoubleSum sum;
  for (int64_t i = 0; i < count; i += kLanes) sum.add(load_or(weights, i, count, broadcast(0.0f)));
  return sum.total();
}

// Candidates in falling buckets, those of a bucket put in order when it matters. Ranks count from 0, the most likely.
struct Candidates {
  Item* items;
  Item* spare;
  float* weights;
  int32_t* starts;  // of each bucket, and the end
  double* before;   // the sum of all weights before each bucket, and of all
  uint8_t* sorted;
  int64_t count, buckets;

  Candidates(const Room& room, int64_t candidates)
      : items(room.items), spare(room.spare), weights(room.weights), starts(room.starts), before(room.before),
        sorted(room.sorted), count(candidates), buckets(1) {
    starts[0] = 0;
    starts[1] = static_cast<int32_t>(count);
    if (count > kOneBucket) spread();
    weigh_items(items, count, weights);
    before[0] = 0.0;
    for (int64_t b = 0; b < buckets; b++) {
      before[b + 1] = before[b] + sum_of(weights + starts[b], starts[b + 1] - starts[b]);
      sorted[b] = 0;
    }
  }

  // By the distance from the best, which is at 0, in equal steps.
  void spread() {
    float lowest = 0.0f;
    for (int64_t i = 0; i < count; i++) lowest = value_of(items[i]) < lowest ? value_of(items[i]) : lowest;
    if (!(lowest < -1e-30f)) return;
    const float step = -static_cast<float>(kBuckets) / lowest;
    auto bucket_of = [&](Item item) {
      int32_t bucket = static_cast<int32_t>(-value_of(item) * step);
      return bucket < kBuckets ? bucket : static_cast<int32_t>(kBuckets - 1);
    };
    buckets = kBuckets;
    std::memset(starts, 0, sizeof(int32_t) * (buckets + 1));
    for (int64_t i = 0; i < count; i++) starts[bucket_of(items[i]) + 1]++;
    for (int64_t b = 0; b < buckets; b++) starts[b + 1] += starts[b];
    for (int64_t i = 0; i < count; i++) spare[starts[bucket_of(items[i])]++] = items[i];
    for (int64_t b = buckets; b > 0; b--) starts[b] = starts[b - 1];
    starts[0] = 0;
    Item* filled = spare;
    spare = items;
    items = filled;
  }

  void sort(int64_t b) {
    if (sorted[b]) return;
    const int64_t first = starts[b], size = starts[b + 1] - first;
    sort_items(items + first, spare + first, size);
    weigh_items(items + first, size, weights + first);
    sorted[b] = 1;
  }

  int32_t token_at(int64_t rank) {
    int64_t b = 0;
    while (starts[b + 1] <= rank) b++;
    sort(b);
    return token_of(items[rank]);
  }

  // The sum of the `ranks` largest weights.
  double sum_of_best(int64_t ranks) {
    int64_t b = 0;
    while (b < buckets - 1 && starts[b + 1] < ranks) b++;
    if (ranks == starts[b + 1]) return before[b + 1];
    sort(b);
    double sum = before[b];
    for (int64_t i = starts[b]; i < ranks; i++) sum += weights[i];
    return sum;
  }

  // The first rank up to and with which the weights' sum exceeds `target`, or with `or_equal` reaches it.
  int64_t rank_at(double target, bool or_equal) {
    auto reaches = [&](double sum) { return or_equal ? sum >= target : sum > target; };
    int64_t b = 0;
    while (b < buckets - 1 && !reaches(before[b + 1])) b++;
    sort(b);
    double sum = before[b];
    for (int64_t i = starts[b]; i < starts[b + 1]; i++) {
      sum += weights[i];
      if (reaches(sum)) return i;
    }
    return starts[b + 1] > 0 ? starts[b + 1] - 1 : 0;  // the bucket's own sum was rounded up
  }

  int64_t count_at_least(double weight) const {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) found += weights[i] >= weight;
    return found;
  }
};

// What a row keeps before it draws; top_k == vocab, top_p >= 1 and min_p <= 0 keep all.
struct Filters {
  int64_t top_k;
  double top_p, min_p;
};

// The first of the kept tokens, most likely first, whose running sum of weights exceeds u of their total.
static int32_t draw_from_best(const float* values, int64_t vocab, Shift shift, float u, const Filters& filters,
                              const Peak& peak, const Room& room) {
  const bool limited = filters.top_k < vocab, nucleus = filters.top_p < 1.0;
  float threshold = kWeightless;
  auto raise = [&](double bound) { threshold = bound > threshold ? static_cast<float>(bound) : threshold; };
  double total = 0.0;
  if (limited) {
    weigh<true, false>(values, vocab, shift, room.values, nullptr);
    raise(shift.of(bound_of_best(room, vocab, filters.top_k)));
  } else if (nucleus) {
    weigh<true, true>(values, vocab, shift, room.values, room.sums);
    total = running_total(room.sums, pieces(vocab, kBlock));
    // Tokens below this share make up less than the part that is left out, all of them together.
    raise(log((1.0 - filters.top_p) * total / static_cast<double>(vocab)) - 1e-3);
  } else {
    weigh<true, false>(values, vocab, shift, room.values, nullptr);
  }
  if (filters.min_p > 0.0 && !(limited && nucleus)) raise(log(filters.min_p) - 1e-3);
  if (threshold > 0.0f) threshold = 0.0f;
  const int64_t count = gather_items(room.values, vocab, threshold, room.items);
  if (count == 0) return peak.token;

  Candidates candidates(room, count);
  int64_t kept = filters.top_k < count ? filters.top_k : count;
  auto limit = [&](int64_t ranks) { kept = ranks < kept ? ranks : kept; };
  if (nucleus) {
    if (limited) total = candidates.sum_of_best(kept);
    limit(candidates.rank_at(filters.top_p * total, true) + 1);
  }
  if (filters.min_p > 0.0) limit(candidates.count_at_least(filters.min_p));
  if (kept < 1) kept = 1;
  const int64_t rank = candidates.rank_at(static_cast<double>(u) * candidates.sum_of_best(kept), false);
  return candidates.token_at(rank < kept ? rank : kept - 1);
}

static inline bool has_any(const TokenLists& lists, int64_t row) {
  return lists.starts != nullptr && lists.starts[row + 1] > lists.starts[row];
}

// The row's logits after everything but the temperature: the logits themselves, or a copy in `scores`.
static const float* adjust(const SampleArgs& args, int64_t row, const float* logits, float* scores) {
  const bool masked = args.mask != nullptr && (args.masked == nullptr || args.masked[row] != 0);
  const bool penalized = (has_any(args.seen, row) && args.repetition_penalty != nullptr) ||
                         (has_any(args.generated, row) &&
                          (args.frequency_penalty != nullptr || args.presence_penalty != nullptr));
  if (!masked && !penalized && !has_any(args.allowed, row) && !has_any(args.forbidden, row) &&
      !has_any(args.logit_bias, row))
    return logits;
  auto each = [&](const TokenLists& lists, auto change) {
    if (lists.starts == nullptr) return;
    for (int32_t i = lists.starts[row]; i < lists.starts[row + 1]; i++)
      change(lists.token_ids[i], lists.numbers == nullptr ? 0.0f : lists.numbers[i]);
  };
  if (has_any(args.allowed, row)) {
    for (int64_t i = 0; i < args.vocab; i++) scores[i] = -HUGE_VALF;
    each(args.allowed, [&](int32_t token, float) { scores[token] = logits[token]; });
  } else {
    std::memcpy(scores, logits, sizeof(float) * args.vocab);
  }
  if (masked) {
    const uint32_t* words = args.mask + row * pieces(args.vocab, 32);
    const Vec nothing = broadcast(-HUGE_VALF);
    int64_t i = 0;
    for (; i + kLanes <= args.vocab; i += kLanes)
      store(scores + i, bits_or(words[i / 32] >> (i % 32) & 0xffffu, load(scores + i), nothing));
    for (; i < args.vocab; i++)
      if (!(words[i / 32] >> (i % 32) & 1)) scores[i] = -HUGE_VALF;
  }
  each(args.forbidden, [&](int32_t token, float) { scores[token] = -HUGE_VALF; });
  if (args.repetition_penalty != nullptr) {
    const float penalty = args.repetition_penalty[row];
    each(args.seen, [&](int32_t token, float) {
      scores[token] = scores[token] > 0.0f ? scores[token] / penalty : scores[token] * penalty;
    });
  }
  each(args.generated, [&](int32_t token, float count) {
    if (args.frequency_penalty != nullptr) scores[token] -= args.frequency_penalty[row] * count;
    if (args.presence_penalty != nullptr) scores[token] -= args.presence_penalty[row];
  });
  each(args.logit_bias, [&](int32_t token, float bias) { scores[token] += bias; });
  return scores;
}

static Filters filters_of(const SampleArgs& args, int64_t row) {
  Filters filters = {args.vocab, 1.0, 0.0};
  if (args.top_k != nullptr && args.top_k[row] > 0 && args.top_k[row] < args.vocab) filters.top_k = args.top_k[row];
  if (args.top_p != nullptr) filters.top_p = args.top_p[row];
  if (args.min_p != nullptr) filters.min_p = args.min_p[row];
  return filters;
}

static int32_t choose(const SampleArgs& args, int64_t row, const float* logits, const Room& room) {
  const float* scores = adjust(args, row, logits, room.values);
  const Filters filters = filters_of(args, row);
  const int32_t given = args.given == nullptr ? -1 : args.given[row];
  const bool draws = given < 0 && args.temperature[row] > 0.0f;
  const bool limited = filters.top_k < args.vocab;
  const Peak peak = find_peak(scores, args.vocab, draws && limited ? room.peaks : nullptr);
  args.broken[row] = !peak.finite;
  if (given >= 0) return given;
  if (!draws || !peak.finite) return peak.token;
  const Shift shift = {peak.value, args.temperature[row]};
  const float u = args.uniforms[row];
  if (limited || filters.top_p < 1.0 || filters.min_p > 0.0)
    return draw_from_best(scores, args.vocab, shift, u, filters, peak, room);
  return draw_from_all(scores, args.vocab, shift, u, peak, room.sums);
}

static int32_t rank_of(const float* logits, int64_t vocab, float chosen) {
  const Vec limit = broadcast(chosen), nothing = broadcast(-HUGE_VALF), one = broadcast(1.0f), zero = broadcast(0.0f);
  Vec above = zero;
  for (int64_t i = 0; i < vocab; i += kLanes)
    above = add(above, below_or(limit, load_or(logits, i, vocab, nothing), one, zero));
  return 1 + static_cast<int32_t>(sum(above));
}

// Log-probabilities of the raw logits: of the row's token, the most likely ones and those to be scored.
static void write_logprobs(const SampleArgs& args, int64_t row, const float* logits, int32_t token, const Room& room) {
  const int64_t wanted = args.num_logprobs;
  const Peak peak = find_peak(logits, args.vocab, wanted > 0 ? room.peaks : nullptr);
  weigh<false, true>(logits, args.vocab, {peak.value, 1.0f}, nullptr, room.sums);
  const double normaliser = peak.value + log(running_total(room.sums, pieces(args.vocab, kBlock)));
  auto logprob = [&](float logit) { return static_cast<float>(logit - normaliser); };
  args.logprobs[row] = logprob(logits[token]);
  args.ranks[row] = rank_of(logits, args.vocab, logits[token]);
  if (wanted > 0) {
    const int64_t count = gather_items(logits, args.vocab, bound_of_best(room, args.vocab, wanted), room.items);
    sort_items(room.items, room.spare, count);
    for (int64_t i = 0; i < wanted; i++) {
      // Only a row with logits that are no numbers has fewer.
      args.top_token_ids[row * wanted + i] = i < count ? token_of(room.items[i]) : 0;
      args.top_logprobs[row * wanted + i] = i < count ? logprob(value_of(room.items[i])) : NAN;
    }
  }
  if (has_any(args.scored, row))
    for (int32_t i = args.scored.starts[row]; i < args.scored.starts[row + 1]; i++)
      args.scored_logprobs[i] = logprob(logits[args.scored.token_ids[i]]);
}

static void sample(Pool* pool, const SampleArgs& args) {
  struct Job {
    Pool* pool;
    const SampleArgs& args;
    size_t room_bytes;
  } job = {pool, args, Room().lay_out(0, args.vocab)};
  auto row = [](void* context, int64_t row, int thread) {
    const Job& job = *static_cast<const Job*>(context);
    const SampleArgs& args = job.args;
    args.token_ids[row] = 0;
    args.broken[row] = 2;
    void* memory = job.pool->scratch(thread, job.room_bytes);
    if (memory == nullptr) return;
    Room room;
    room.lay_out(reinterpret_cast<uintptr_t>(memory), args.vocab);
    const float* logits = args.logits.data + row * args.logits.stride;
    args.token_ids[row] = choose(args, row, logits, room);
    if (args.num_logprobs >= 0) write_logprobs(args, row, logits, args.token_ids[row], room);
  };
  pool->run(args.rows, row, &job);
}

}  // namespace HR_ISA
