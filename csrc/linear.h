// A matrix packed for products with rows: panels of 16 outputs, each a stream that is read from front to back.
//
//     float32, float16   [out / 16][in][16]            bfloat16   [out / 16][in / 2][16][2]
//     4 bits             [out / 16][in / 8][16][4], a byte's low nibble from the first four inputs, its high from the next
//     8 bits             [out / 16][in / s][16][s], s = 2 or 4 as the variant multiplies them
//     scales, offsets    [out / 16][in / group_size][16]
//
// Outputs and inputs beyond the matrix are zeros. A packed matrix is for the variant that packed it only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops.h"

namespace headrace {

constexpr int64_t kPanel = 16;

enum class Form : int32_t { kF32, kF16, kBF16, kInt4, kInt8 };

// Of integers: w = q * scale + offset. kMinusEight: every offset is -8 * scale and none is held.
enum class Offsets : int32_t { kNone, kMinusEight, kHeld };

struct PackedMatrix {
  int64_t out, in;
  int64_t panels;
  int64_t depth;  // `in` with its padding
  int64_t group_size, groups;
  size_t panel_bytes;  // of values
  Form form;
  Scheme scheme;
  Offsets offset_kind;
  bool half_scales, half_offsets;  // held as float16: every one is exactly that
  int32_t zero;                    // of integers: held is q + zero, which has no sign
  uint8_t* values;
  void* scales;
  void* offsets;
  size_t mapped_bytes;
};

// Takes memory for the parts of `matrix`, whose other fields are set. False when memory is short.
bool allocate_packed(PackedMatrix* matrix);
// Bytes a packed matrix holds.
size_t packed_bytes(const PackedMatrix* matrix);
void free_packed(PackedMatrix* matrix);

}  // namespace headrace
