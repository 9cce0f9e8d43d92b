// From a source weight to a packed matrix, panel by panel, and back: rows of it as float32.
#pragma once

namespace HR_ISA {

using namespace headrace;

constexpr int64_t kReadAhead = 64;  // inputs of a row that are turned to float32 at once

// Inputs first .. first + count - 1 of row `row` as float32; count <= kReadAhead.
static void read_source(const SourceWeight& source, int64_t row, int64_t first, int64_t count, float* values) {
  const int64_t at = row * source.in + first;
  switch (static_cast<Storage>(source.storage)) {
    case Storage::kF32:
      std::memcpy(values, static_cast<const float*>(source.values) + at, count * sizeof(float));
      return;
    case Storage::kBF16: {
      const uint16_t* bits = static_cast<const uint16_t*>(source.values) + at;
      int64_t k = 0;
      for (; k + kLanes <= count; k += kLanes) store(values + k, load_bf16(bits + k));
      for (; k < count; k++) values[k] = bf16_to_float(bits[k]);
      return;
    }
    case Storage::kF16: {
      const uint16_t* bits = static_cast<const uint16_t*>(source.values) + at;
      int64_t k = 0;
      for (; k + kLanes <= count; k += kLanes) store(values + k, load_f16(bits + k));
      for (; k < count; k++) values[k] = half_to_float(bits[k]);
      return;
    }
    default:
      break;
  }
  const int64_t groups = source.in / source.group_size;
  for (int64_t k = 0; k < count; k++) {
    const int64_t index = at + k, group = row * groups + (first + k) / source.group_size;
    float q;
    if (static_cast<Storage>(source.storage) == Storage::kInt4)
      q = static_cast<float>(static_cast<const uint8_t*>(source.values)[index / 2] >> (index % 2 * 4) & 15);
    else
      q = static_cast<float>(static_cast<const int8_t*>(source.values)[index]);
    float value = q * source.scales[group];
    if (source.offsets != nullptr) value = value + source.offsets[group];
    values[k] = value;
  }
}

static inline bool is_half(float x) { return to_bits(half_to_float(float_to_half(x))) == to_bits(x); }

// The nibbles of 32 bits 0 1 2 3 4 5 6 7 as 0 4 1 5 2 6 3 7.
static inline uint32_t interleave_nibbles(uint32_t x) {
  uint32_t t = (x ^ (x >> 8)) & 0x0000ff00u;
  x ^= t ^ (t << 8);
  t = (x ^ (x >> 4)) & 0x00f000f0u;
  return x ^ t ^ (t << 4);
}

struct Packing {
  const SourceWeight* source;
  PackedMatrix* matrix;
  int64_t per_item;  // panels, or rows of scales
  int not_half_scales, not_half_offsets, not_minus_eight;
};

// What the scales and offsets have in common: run over rows of them before memory is taken.
static void inspect_scales(void* context, int64_t item, int) {
  Packing& p = *static_cast<Packing*>(context);
  const SourceWeight& source = *p.source;
  const int64_t groups = source.in / source.group_size;
  const int64_t first = item * p.per_item * groups;
  const int64_t end = (item + 1) * p.per_item < source.out ? first + p.per_item * groups : source.out * groups;
  bool half_scales = true, half_offsets = true, minus_eight = true;
  for (int64_t i = first; i < end; i++) half_scales &= is_half(source.scales[i]);
  if (source.offsets != nullptr)
    for (int64_t i = first; i < end; i++) {
      half_offsets &= is_half(source.offsets[i]);
      minus_eight &= to_bits(source.offsets[i]) == to_bits(source.scales[i] * -8.0f);
    }
  if (!half_scales) __atomic_store_n(&p.not_half_scales, 1, __ATOMIC_RELAXED);
  if (!half_offsets) __atomic_store_n(&p.not_half_offsets, 1, __ATOMIC_RELAXED);
  if (!minus_eight) __atomic_store_n(&p.not_minus_eight, 1, __ATOMIC_RELAXED);
}

// [lanes rows of `words` Words] -> [words][16].
template <class Word>
static void interleave(const Word* source, int64_t stride, int64_t words, int64_t lanes, Word* packed) {
  if (lanes == kPanel) {
    for (int64_t k = 0; k < words; k++)
      for (int64_t lane = 0; lane < kPanel; lane++) packed[k * kPanel + lane] = source[lane * stride + k];
    return;
  }
  for (int64_t k = 0; k < words; k++)
    for (int64_t lane = 0; lane < lanes; lane++) packed[k * kPanel + lane] = source[lane * stride + k];
}

static void pack_bf16(const SourceWeight& source, int64_t first, int64_t lanes, uint16_t* packed) {
  float values[kReadAhead];
  for (int64_t lane = 0; lane < lanes; lane++)
    for (int64_t k = 0; k < source.in; k += kReadAhead) {
      const int64_t count = source.in - k < kReadAhead ? source.in - k : kReadAhead;
      read_source(source, first + lane, k, count, values);
      for (int64_t i = 0; i < count; i++)
        packed[(k + i) / 2 * 2 * kPanel + lane * 2 + (k + i) % 2] = float_to_bf16(values[i]);
    }
}

// As many int8 as a step takes, from q on: one word of a panel.
static inline void put_step(uint8_t* packed, int64_t lane, int64_t k, const int8_t* q) {
  uint8_t held[kStep8];
  for (int i = 0; i < kStep8; i++) held[i] = static_cast<uint8_t>(q[i] + 128);
  std::memcpy(packed + k * kPanel + lane * kStep8, held, kStep8);
}

static void pack_numbers(const float* source, int64_t groups, int64_t lanes, bool half, int64_t panel, void* packed) {
  const int64_t at = panel * groups * kPanel;
  for (int64_t g = 0; g < groups; g++)
    for (int64_t lane = 0; lane < lanes; lane++) {
      const int64_t i = at + g * kPanel + lane;
      const float number = source[lane * groups + g];
      if (half)
        static_cast<uint16_t*>(packed)[i] = float_to_half(number);
      else
        static_cast<float*>(packed)[i] = number;
    }
}

static void pack_panel(const SourceWeight& source, PackedMatrix& matrix, int64_t panel) {
  const int64_t first = panel * kPanel, in = source.in;
  const int64_t lanes = source.out - first < kPanel ? source.out - first : kPanel;
  uint8_t* packed = matrix.values + panel * matrix.panel_bytes;
  switch (matrix.form) {
    case Form::kF32:
      interleave(static_cast<const float*>(source.values) + first * in, in, in, lanes,
                 reinterpret_cast<float*>(packed));
      return;
    case Form::kF16:
      interleave(static_cast<const uint16_t*>(source.values) + first * in, in, in, lanes,
                 reinterpret_cast<uint16_t*>(packed));
      return;
    case Form::kBF16:
      if (static_cast<Storage>(source.storage) == Storage::kBF16 && in % 2 == 0)
        interleave(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(source.values) + first * in),
                   in / 2, in / 2, lanes, reinterpret_cast<uint32_t*>(packed));
      else
        pack_bf16(source, first, lanes, reinterpret_cast<uint16_t*>(packed));
      return;
    case Form::kInt4: {
      const uint8_t* rows = static_cast<const uint8_t*>(source.values) + first * in / 2;
      for (int64_t k = 0; k < in / 8; k++)
        for (int64_t lane = 0; lane < lanes; lane++) {
          uint32_t eight;
          std::memcpy(&eight, rows + lane * in / 2 + k * 4, 4);
          eight = interleave_nibbles(eight);
          std::memcpy(packed + (k * kPanel + lane) * 4, &eight, 4);
        }
      break;
    }
    case Form::kInt8:
      for (int64_t k = 0; k < in; k += kStep8)
        for (int64_t lane = 0; lane < lanes; lane++)
          put_step(packed, lane, k, static_cast<const int8_t*>(source.values) + (first + lane) * in + k);
      break;
  }
  const int64_t groups = matrix.groups;
  pack_numbers(source.scales + first * groups, groups, lanes, matrix.half_scales, panel, matrix.scales);
  if (matrix.offset_kind == Offsets::kHeld)
    pack_numbers(source.offsets + first * groups, groups, lanes, matrix.half_offsets, panel, matrix.offsets);
}

static void pack_item(void* context, int64_t item, int) {
  Packing& p = *static_cast<Packing*>(context);
  for (int64_t panel = item * p.per_item; panel < (item + 1) * p.per_item && panel < p.matrix->panels; panel++)
    pack_panel(*p.source, *p.matrix, panel);
}

static Form packed_form(const SourceWeight& source, Scheme scheme) {
  if (scheme == Scheme::kBF16) return Form::kBF16;
  switch (static_cast<Storage>(source.storage)) {
    case Storage::kF32: return Form::kF32;
    case Storage::kF16: return Form::kF16;
    case Storage::kBF16: return Form::kBF16;
    case Storage::kInt4: return Form::kInt4;
    default: return Form::kInt8;
  }
}

// A group's size must be a multiple of 16 and divide `in`.
static PackedMatrix* pack(Pool* pool, const SourceWeight& source, Scheme scheme) {
  PackedMatrix* matrix = new PackedMatrix();
  matrix->out = source.out;
  matrix->in = source.in;
  matrix->panels = (source.out + kPanel - 1) / kPanel;
  matrix->form = packed_form(source, scheme);
  matrix->scheme = scheme;
  matrix->depth = source.in;
  int64_t bits = 32;
  Packing p{&source, matrix, 64, 0, 0, 0};
  switch (matrix->form) {
    case Form::kF32: break;
    case Form::kF16: bits = 16; break;
    case Form::kBF16:
      bits = 16;
      matrix->depth = (source.in + 1) / 2 * 2;
      break;
    case Form::kInt4: bits = 4; break;
    case Form::kInt8:
      bits = 8;
      matrix->zero = 128;
      break;
  }
  if (matrix->form == Form::kInt4 || matrix->form == Form::kInt8) {
    matrix->group_size = source.group_size;
    matrix->groups = source.in / source.group_size;
    pool->run((source.out + p.per_item - 1) / p.per_item, inspect_scales, &p);
    matrix->half_scales = !p.not_half_scales;
    matrix->half_offsets = !p.not_half_offsets;
    if (source.offsets != nullptr) matrix->offset_kind = Offsets::kHeld;
    if (source.offsets != nullptr && matrix->form == Form::kInt4 && !p.not_minus_eight) {
      matrix->offset_kind = Offsets::kMinusEight;
      matrix->zero = 8;
    }
  }
  matrix->panel_bytes = static_cast<size_t>(matrix->depth * kPanel * bits / 8);
  if (!allocate_packed(matrix)) {
    free_packed(matrix);
    return nullptr;
  }
  p.per_item = 4;
  pool->run((matrix->panels + p.per_item - 1) / p.per_item, pack_item, &p);
  return matrix;
}

static inline float number_at(const void* numbers, bool half, int64_t i) {
  return half ? half_to_float(static_cast<const uint16_t*>(numbers)[i]) : static_cast<const float*>(numbers)[i];
}

// Row `row` of a matrix of integers as float32, rounded as weight.py does: after the product, after the sum.
static void gather_integers(const PackedMatrix& m, const uint8_t* packed, int64_t panel, int64_t lane, float* y) {
  for (int64_t g = 0; g < m.groups; g++) {
    const int64_t i = (panel * m.groups + g) * kPanel + lane;
    const float scale = number_at(m.scales, m.half_scales, i);
    float offset = 0.0f;
    if (m.offset_kind == Offsets::kMinusEight) offset = scale * -8.0f;
    if (m.offset_kind == Offsets::kHeld) offset = number_at(m.offsets, m.half_offsets, i);
    const int64_t end = (g + 1) * m.group_size < m.in ? (g + 1) * m.group_size : m.in;
    for (int64_t k = g * m.group_size; k < end; k++) {
      int q;
      if (m.form == Form::kInt4)
        q = packed[(k / 8 * kPanel + lane) * 4 + k % 4] >> (k % 8 / 4 * 4) & 15;
      else
        q = packed[(k / kStep8 * kPanel + lane) * kStep8 + k % kStep8] - 128;
      const float product = static_cast<float>(q) * scale;
      y[k] = m.offset_kind == Offsets::kNone ? product : product + offset;
    }
  }
}

static void gather_row(const PackedMatrix& m, int64_t row, float* y) {
  const int64_t panel = row / kPanel, lane = row % kPanel;
  const uint8_t* packed = m.values + panel * m.panel_bytes;
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(packed);
  switch (m.form) {
    case Form::kF32:
      for (int64_t k = 0; k < m.in; k++) y[k] = reinterpret_cast<const float*>(packed)[k * kPanel + lane];
      return;
    case Form::kF16:
      for (int64_t k = 0; k < m.in; k++) y[k] = half_to_float(halves[k * kPanel + lane]);
      return;
    case Form::kBF16:
      for (int64_t k = 0; k < m.in; k++) y[k] = bf16_to_float(halves[(k / 2 * kPanel + lane) * 2 + k % 2]);
      return;
    default:
      gather_integers(m, packed, panel, lane, y);
  }
}

constexpr int64_t kGatherRows = 8;  // an item

static void gather_item(void* context, int64_t item, int) {
  const GatherArgs& a = *static_cast<const GatherArgs*>(context);
  for (int64_t r = item * kGatherRows; r < (item + 1) * kGatherRows && r < a.rows; r++)
    gather_row(*a.matrix, a.token_ids[r], a.y.data + r * a.y.stride);
}

static void gather(Pool* pool, const GatherArgs& args) {
  GatherArgs copy = args;
  pool->run((args.rows + kGatherRows - 1) / kGatherRows, gather_item, &copy);
}

}  // namespace HR_ISA
