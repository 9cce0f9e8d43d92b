// Dense weights as int8 in groups, as headrace/kernels/int8_weights.py defines it, bit for bit.
#pragma once

namespace HR_ISA {

using namespace headrace;

struct QuantisingWeight {
  const SourceWeight* source;
  int8_t* values;
  float* scales;
};

constexpr int64_t kRowsQuantised = 16;  // an item

// A group of a row, a multiple of 16 long. Numbers that are not finite make its scale NaN.
static inline float quantise_weights(const float* x, int64_t count, int8_t* values) {
  const float broken = not_finite(x, count);
  if (broken != 0.0f) {
    std::memset(values, 0, count);
    return broken;
  }
  const float scale = half_to_float(float_to_half(largest_magnitude(x, count) / 127.0f));
  const Vec inverse = broadcast(scale > 0.0f ? 1.0f / scale : 0.0f);
  const Vec limit = broadcast(127.0f), least = broadcast(-127.0f);
  for (int64_t k = 0; k < count; k += kLanes)
    store_i8(values + k, max(min(round(mul(load(x + k), inverse)), limit), least));
  return scale;
}

static void quantise_weight_rows(void* context, int64_t item, int) {
  const QuantisingWeight& q = *static_cast<const QuantisingWeight*>(context);
  const SourceWeight& source = *q.source;
  const int64_t size = source.group_size, groups = source.in / size;
  const int64_t end = (item + 1) * kRowsQuantised < source.out ? (item + 1) * kRowsQuantised : source.out;
  float values[kReadAhead];
  for (int64_t row = item * kRowsQuantised; row < end; row++)
    for (int64_t group = 0; group < groups; group++) {
      read_source(source, row, group * size, size, values);
      q.scales[row * groups + group] = quantise_weights(values, size, q.values + row * source.in + group * size);
    }
}

// Groups of 16 to kReadAhead inputs, a multiple of 16.
static void quantise(Pool* pool, const SourceWeight& source, int8_t* values, float* scales) {
  QuantisingWeight q = {&source, values, scales};
  pool->run((source.out + kRowsQuantised - 1) / kRowsQuantised, quantise_weight_rows, &q);
}

}  // namespace HR_ISA
