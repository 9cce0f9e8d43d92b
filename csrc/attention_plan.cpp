// Cuts a step into units: tiles first, then the runs of segments of those that would outlast the others.
#include "attention_plan.h"

#include <algorithm>

namespace headrace {

namespace {

// Rows x heads of a tile: enough to make turning a key into float32 cheap, few enough for the tile to stay in the L2.
constexpr int64_t kLargestTile = 96;
constexpr int64_t kSmallestTile = 12;
// Units for each thread that are enough to keep all busy to the end.
constexpr int64_t kUnitsPerThread = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Chunk {  // one sequence's rows of the step
  int64_t row, rows, position;
};

Chunk chunk_of(const BatchView& batch, int64_t sequence) {
  const int64_t row = batch.query_start[sequence], rows = batch.query_start[sequence + 1] - row;
  return {row, rows, batch.seq_lens[sequence] - rows};
}

int64_t first_key(int64_t position, int64_t window) {
  return window > 0 && position >= window ? position + 1 - window : 0;
}

int64_t tile_rows(const BatchView& batch, int64_t shared_heads, int64_t kv_heads, int threads) {
  int64_t size = kLargestTile;
  for (; size / 2 >= kSmallestTile; size /= 2) {
    int64_t tiles = 0;
    for (int64_t s = 0; s < batch.num_sequences; s++)
      tiles += ceil_div(chunk_of(batch, s).rows * shared_heads, size);
    if (tiles * kv_heads >= kUnitsPerThread * threads) break;
  }
  return std::max<int64_t>(1, size / shared_heads);
}

}  // namespace

AttentionPlan plan_attention(const BatchView& batch, int64_t shared_heads, int64_t kv_heads, int64_t window,
                             int threads, AttentionUnit* units, SplitTile* splits) {
  const int64_t most_rows = tile_rows(batch, shared_heads, kv_heads, threads);

  auto each_tile = [&](auto&& visit) {
    for (int64_t s = 0; s < batch.num_sequences; s++) {
      const Chunk chunk = chunk_of(batch, s);
      for (int64_t done = 0; done < chunk.rows; done += most_rows) {
        AttentionUnit unit{};
        unit.sequence = static_cast<int32_t>(s);
        unit.row = static_cast<int32_t>(chunk.row + done);
        unit.rows = static_cast<int32_t>(std::min(most_rows, chunk.rows - done));
        unit.position = static_cast<int32_t>(chunk.position + done);
        unit.whole = -1;
        const int64_t first = first_key(unit.position, window), end = unit.position + unit.rows;
        unit.segment = static_cast<int32_t>(first / kSegmentTokens);
        unit.segments = static_cast<int32_t>(ceil_div(end, kSegmentTokens) - unit.segment);
        unit.cost = (end - first) * unit.rows;
        visit(unit);
      }
    }
  };

  int64_t total = 0;
  each_tile([&](const AttentionUnit& unit) { total += unit.cost; });
  const int64_t most_cost = std::max<int64_t>(1, total * kv_heads / (kUnitsPerThread * threads));

  AttentionPlan plan{};
  plan.most_rows = most_rows;
  each_tile([&](const AttentionUnit& tile) {
    const int64_t parts = threads == 1 ? 1 : std::min<int64_t>(tile.segments, ceil_div(tile.cost, most_cost));
    if (parts == 1) {
      if (units != nullptr) units[plan.units] = tile;
      plan.units++;
      return;
    }
    for (int64_t part = 0; part < parts; part++, plan.units++) {
      if (units == nullptr) continue;
      AttentionUnit unit = tile;
      const int64_t begin = tile.segments * part / parts, end = tile.segments * (part + 1) / parts;
      unit.segment = static_cast<int32_t>(tile.segment + begin);
      unit.segments = static_cast<int32_t>(end - begin);
      unit.whole = static_cast<int32_t>(plan.splits);
      unit.cost = tile.cost / parts;
      units[plan.units] = unit;
    }
    if (splits != nullptr)
      splits[plan.splits] = {tile.sequence, tile.row,      tile.rows,    tile.position,
                             tile.segment,  tile.segments, plan.partials};
    plan.splits++;
    plan.partials += tile.rows * shared_heads * tile.segments;
  });
  if (units != nullptr)
    std::sort(units, units + plan.units, [](const AttentionUnit& a, const AttentionUnit& b) { return a.cost > b.cost; });
  return plan;
}

}  // namespace headrace
