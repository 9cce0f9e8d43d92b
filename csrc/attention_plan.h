// How one step's attention is cut into units that threads take: a tile of consecutive rows of one sequence, with all the
// segments of keys it sees or, where one unit would outlast the others, with a run of them. How it is cut changes no
// bit of a result: a row is summed segment by segment, aligned to the sequence's start, and merged in their order.
#pragma once

#include <cstdint>

#include "ops.h"

namespace headrace {

constexpr int64_t kSegmentTokens = 256;

struct AttentionUnit {
  int32_t sequence;
  int32_t row, rows;       // of the batch
  int32_t position;        // of its first row
  int32_t segment, segments;
  int32_t whole;           // which of the plan's split tiles it is a part of, -1: it is a whole tile
  int64_t cost;            // keys x rows
};

// A tile that several units share: their results, one a segment, are merged when all are done.
struct SplitTile {
  int32_t sequence;
  int32_t row, rows;
  int32_t position;
  int32_t segment, segments;
  int64_t partials;  // the first of its rows x heads x segments partial results
};

struct AttentionPlan {
  int64_t units, splits, partials;  // how many
  int64_t most_rows;                // of a unit
};

// Counts; writes too unless `units` is null. `shared_heads`: query heads that share a KV head. Units are heaviest first.
AttentionPlan plan_attention(const BatchView& batch, int64_t shared_heads, int64_t kv_heads, int64_t window,
                             int threads, AttentionUnit* units, SplitTile* splits);

}  // namespace headrace
