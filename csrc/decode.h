// Sequences that go on, step after step, each by the token it got in the last one: what of their batch changes.
#pragma once

#include <cstdint>

namespace headrace {

// headrace/kernels/ops.py `DecodeState`, one row a sequence.
struct Decodes {
  int64_t sequences, groups, block_size, table_width;
  const int32_t* chosen;        // [sequences]
  int32_t* token_ids;           // [sequences], and so the next two
  int32_t* positions;
  int32_t* seq_lens;
  int32_t* slot_mapping;        // [groups, sequences]
  const int32_t* block_tables;  // [groups, sequences, table_width]
  const int32_t* num_blocks;    // [groups, sequences]: entries of the table
  const uint64_t* streams;      // [sequences], or null: nothing is drawn
  float* uniforms;              // [sequences]
};

// The batch of the next tokens, and the numbers they are drawn with. False if a sequence has no block for its token:
// the batch is then of no use.
bool advance(const Decodes& decodes);

}  // namespace headrace
