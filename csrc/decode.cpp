// The random numbers are those of headrace/kernels/draws.py.
#include "decode.h"

namespace headrace {

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

inline uint64_t mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

inline float uniform(uint64_t stream, uint64_t position) {
  return static_cast<float>(mix(stream + kGolden * (position + 1)) >> 40) * 0x1p-24f;
}

}  // namespace

bool advance(const Decodes& d) {
  for (int64_t s = 0; s < d.sequences; s++) {
    const int32_t position = d.positions[s] + 1;
    d.token_ids[s] = d.chosen[s];
    d.positions[s] = position;
    d.seq_lens[s] = position + 1;
    const int64_t column = position / d.block_size, offset = position % d.block_size;
    for (int64_t row = s; row < d.groups * d.sequences; row += d.sequences) {
      if (column >= d.num_blocks[row]) return false;
      d.slot_mapping[row] = static_cast<int32_t>(d.block_tables[row * d.table_width + column] * d.block_size + offset);
    }
    if (d.streams != nullptr) d.uniforms[s] = uniform(d.streams[s], static_cast<uint64_t>(position) + 1);
  }
  return true;
}

}  // namespace headrace
