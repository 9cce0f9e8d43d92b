// Products of integers: a row's inputs are quantised once an operation, per group of the weight, to int8.
//
//     x ~ q_x * scale_x     w = q * scale + offset     sum += (q . q_x) * scale * scale_x + offset * sum(q_x) * scale_x
//
// The integer sum of a group is exact; the float sums are one chain over the groups, in their order.
#pragma once

namespace HR_ISA {

using namespace headrace;

// Of one row and group: weights are held as q + zero, so that the integer sum starts at -zero * sum(q_x).
struct GroupInputs {
  float scale, scaled_sum;
  int32_t start;
};

struct QuantisedRows {
  uint8_t* inputs;  // rows of `depth` int8 or Input8
  int64_t row_bytes;
  GroupInputs* groups;  // [rows, groups]
};

struct Quantising {
  const LinearArgs* args;
  QuantisedRows to;
  int64_t rows_per_item;
};

// One group of one row: `count` inputs that are there, zeros up to a multiple of 16.
template <class Input>
static void quantise_group(const float* x, int64_t count, int32_t zero, Input* to, GroupInputs* group) {
  Vec most = broadcast(0.0f), broken = most;
  for (int64_t k = 0; k < count; k += kLanes) {
    Vec part = count - k >= kLanes ? load(x + k) : load_first(x + k, static_cast<int>(count - k));
    most = max(abs(part), most);
    broken = fma(part, broadcast(0.0f), broken);  // NaN where one is not finite
  }
  const float limit = largest(most), not_finite = sum(broken);
  const bool finite = not_finite == 0.0f;
  const Vec inverse = broadcast(finite && limit > 0.0f ? 127.0f / limit : 0.0f);
  Int total = broadcast_int(0);
  for (int64_t k = 0; k < count; k += kLanes) {
    Vec part = count - k >= kLanes ? load(x + k) : load_first(x + k, static_cast<int>(count - k));
    Int q = finite ? to_int(mul(part, inverse)) : broadcast_int(0);
    store_inputs(to + k, q);
    total = add_int(total, q);
  }
  const int32_t inputs = sum_int(total);
  group->scale = finite ? limit / 127.0f : not_finite;
  group->scaled_sum = static_cast<float>(inputs) * group->scale;
  group->start = static_cast<int32_t>(0u - static_cast<uint32_t>(zero) * static_cast<uint32_t>(inputs));
}

static void quantise_item(void* context, int64_t item, int) {
  const Quantising& q = *static_cast<const Quantising*>(context);
  const LinearArgs& args = *q.args;
  const PackedMatrix& m = *args.matrix;
  const int64_t end = (item + 1) * q.rows_per_item;
  for (int64_t row = item * q.rows_per_item; row < end && row < args.rows; row++) {
    const float* x = args.x.data + row * args.x.stride;
    for (int64_t g = 0; g < m.groups; g++) {
      const int64_t first = g * m.group_size;
      const int64_t count = m.in - first < m.group_size ? m.in - first : m.group_size;
      uint8_t* to = q.to.inputs + row * q.to.row_bytes;
      GroupInputs* group = q.to.groups + row * m.groups + g;
      if (m.form == Form::kInt8)
        quantise_group(x + first, count, m.zero, reinterpret_cast<Input8*>(to) + first, group);
      else
        quantise_group(x + first, count, m.zero, reinterpret_cast<int8_t*>(to) + first, group);
    }
  }
}

// How many rows and panels a tile takes.
#if defined(__AVX512F__)
constexpr int kRows4 = 8, kRows8 = 8;
constexpr int int_panels(int) { return 2; }
#elif defined(__AVX2__)
constexpr int kRows4 = 4, kRows8 = 6;
constexpr int int_panels(int) { return 1; }
#else
constexpr int kRows4 = 2, kRows8 = 2;
constexpr int int_panels(int) { return 1; }
#endif

static inline int32_t four_bytes(const uint8_t* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, 4);
  return bytes;
}

constexpr int64_t kAhead = 2048;  // bytes

// Asks for the weights after the next ones: the CPU itself looks ahead too little to keep the memory busy.
template <int kPanels>
static inline void fetch(const uint8_t* w, int64_t panel_bytes) {
  HR_UNROLL(2)
  for (int p = 0; p < kPanels; p++) __builtin_prefetch(w + p * panel_bytes + kAhead);
}

template <int kRows>
static inline const GroupInputs& group_of(const RowPointers<kRows>& groups, int row) {
  return *reinterpret_cast<const GroupInputs*>(groups.row(row));
}

// The sums of one group, from the rows' starts on. Of 4 bits kPart inputs are summed up before they are widened; kWhole:
// a group is no longer than that.
template <int kPart, bool kWhole>
struct Dot4 {
  static constexpr int kMaxRows = kRows4;
  static constexpr int64_t packed_bytes(int64_t inputs) { return inputs * kPanel / 2; }

  template <int kRows, int kPanels>
  static inline void part(Narrow (&narrow)[kRows][kPanels], RowPointers<kRows>& x, const uint8_t* w,
                          int64_t panel_bytes) {
    HR_UNROLL(4)
    for (int k = 0; k < kPart; k += 8) {
      Nibbles nibbles[kPanels];
      fetch<kPanels>(w + k * kPanel / 2, panel_bytes);
      HR_UNROLL(2)
      for (int p = 0; p < kPanels; p++) nibbles[p] = load_nibbles(w + p * panel_bytes + k * kPanel / 2);
      HR_UNROLL(2)
      for (int half = 0; half < 2; half++) {
        Weights8 weights[kPanels];
        HR_UNROLL(2)
        for (int p = 0; p < kPanels; p++) weights[p] = half ? high_nibbles(nibbles[p]) : low_nibbles(nibbles[p]);
        HR_UNROLL(8)
        for (int r = 0; r < kRows; r++) {
          const int32_t inputs = four_bytes(x.row(r) + k + 4 * half);
          HR_UNROLL(2)
          for (int p = 0; p < kPanels; p++)
            narrow[r][p] = k + half == 0 ? product4(weights[p], inputs) : dot4(narrow[r][p], weights[p], inputs);
        }
      }
    }
    x.advance(kPart);
  }

  template <int kRows, int kPanels>
  static inline void add(Int (&sums)[kRows][kPanels], RowPointers<kRows>& x, const RowPointers<kRows>& groups,
                         const uint8_t* w, int64_t panel_bytes, int64_t inputs) {
    Narrow narrow[kRows][kPanels] = {};
    part(narrow, x, w, panel_bytes);
    HR_UNROLL(8)
    for (int r = 0; r < kRows; r++)
      HR_UNROLL(2)
      for (int p = 0; p < kPanels; p++)
        sums[r][p] = add_int(widen(narrow[r][p]), broadcast_int(group_of(groups, r).start));
    if (kWhole) return;
    for (int64_t first = kPart; first < inputs; first += kPart) {
      w += kPart * kPanel / 2;
      part(narrow, x, w, panel_bytes);
      HR_UNROLL(8)
      for (int r = 0; r < kRows; r++)
        HR_UNROLL(2)
        for (int p = 0; p < kPanels; p++) sums[r][p] = add_int(sums[r][p], widen(narrow[r][p]));
    }
  }
};

struct Dot8 {
  static constexpr int kInputs = 16;  // what groups are made of
  static constexpr int kMaxRows = kRows8;
  static constexpr int64_t packed_bytes(int64_t inputs) { return inputs * kPanel; }

  template <int kRows, int kPanels>
  static inline void add(Int (&sums)[kRows][kPanels], RowPointers<kRows>& x, const RowPointers<kRows>& groups,
                         const uint8_t* w, int64_t panel_bytes, int64_t inputs) {
    HR_UNROLL(8)
    for (int r = 0; r < kRows; r++)
      HR_UNROLL(2)
      for (int p = 0; p < kPanels; p++) sums[r][p] = broadcast_int(group_of(groups, r).start);
    for (int64_t first = 0; first < inputs; first += kInputs) {
      HR_UNROLL(4)
      for (int line = 0; line < kInputs * kPanel; line += 64) fetch<kPanels>(w + line, panel_bytes);
      HR_UNROLL(8)
      for (int k = 0; k < kInputs; k += kStep8) {
        Weights8 weights[kPanels];
        HR_UNROLL(2)
        for (int p = 0; p < kPanels; p++) weights[p] = load_weights8(w + p * panel_bytes + k * kPanel);
        HR_UNROLL(8)
        for (int r = 0; r < kRows; r++) {
          const int32_t step = four_bytes(x.row(r) + k * sizeof(Input8));
          HR_UNROLL(2)
          for (int p = 0; p < kPanels; p++) sums[r][p] = dot8(sums[r][p], weights[p], step);
        }
      }
      x.advance(kInputs * sizeof(Input8));
      w += kInputs * kPanel;
    }
  }
};

struct IntProduct {
  const PackedMatrix* m;
  QuantisedRows x;
  int64_t rows;
  const float* bias;
  float* y;
  int64_t y_stride;
};

template <class Dot, int kRows, int kPanels>
__attribute__((noinline)) static void int_tile(const IntProduct& t, int64_t row, int64_t panel) {
  const PackedMatrix& m = *t.m;
  Vec totals[kRows][kPanels];
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++) totals[r][p] = broadcast(0.0f);
  const int64_t panel_bytes = static_cast<int64_t>(m.panel_bytes);
  const uint8_t* w = m.values + panel * panel_bytes;
  const int64_t count = m.groups, group_size = m.group_size, first_number = panel * count;
  const bool half_scales = m.half_scales, half_offsets = m.half_offsets, offsets = m.offset_kind == Offsets::kHeld;
  RowPointers<kRows> x(t.x.inputs + row * t.x.row_bytes, t.x.row_bytes);
  RowPointers<kRows> groups(t.x.groups + row * count, count * sizeof(GroupInputs));
  for (int64_t g = 0; g < count; g++) {
    Int sums[kRows][kPanels];
    Dot::add(sums, x, groups, w, panel_bytes, group_size);
    w += Dot::packed_bytes(group_size);
    HR_UNROLL(2)
    for (int p = 0; p < kPanels; p++) {
      const int64_t number = first_number + p * count + g;
      const Vec scale = load_numbers(m.scales, half_scales, number);
      HR_UNROLL(8)
      for (int r = 0; r < kRows; r++)
        totals[r][p] = fma(to_float(sums[r][p]), mul(scale, broadcast(group_of(groups, r).scale)), totals[r][p]);
      if (offsets) {
        const Vec offset = load_numbers(m.offsets, half_offsets, number);
        HR_UNROLL(8)
        for (int r = 0; r < kRows; r++)
          totals[r][p] = fma(offset, broadcast(group_of(groups, r).scaled_sum), totals[r][p]);
      }
    }
    groups.advance(sizeof(GroupInputs));
  }
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++) {
      const int64_t output = (panel + p) * kPanel, left = m.out - output;
      Vec total = totals[r][p];
      if (t.bias != nullptr) total = HR_ISA::add(total, load_outputs(t.bias + output, left));
      store_outputs(t.y + (row + r) * t.y_stride + output, total, left);
    }
}

template <class Dot, int kRows>
static void int_rows(const IntProduct& t, int64_t row, int64_t panel, int64_t end) {
  constexpr int kPanels = int_panels(kRows);
  if (panel + kPanels <= end)
    int_tile<Dot, kRows, kPanels>(t, row, panel);
  else
    int_tile<Dot, kRows, 1>(t, row, panel);
}

// Rows first_row .. with panels first .. end - 1.
template <class Dot>
static void int_product(const IntProduct& t, int64_t first_row, int64_t rows, int64_t first, int64_t end) {
  const Heights heights = tile_heights(rows, Dot::kMaxRows);
  const int64_t block = int_panels(1), bytes = block * static_cast<int64_t>(t.m->panel_bytes);
  for (int64_t panel = first; panel < end; panel += block)
    for (int64_t i = 0, row = first_row; i < heights.tiles; i++) {
      const int64_t height = heights.least + (i < heights.taller);
      // Every tile fetches its part of the next panel's weights.
      if (heights.tiles > 1) {
        const uint8_t* next = t.m->values + (panel + block) * static_cast<int64_t>(t.m->panel_bytes);
        for (int64_t at = bytes * i / heights.tiles; at < bytes * (i + 1) / heights.tiles; at += 64)
          __builtin_prefetch(next + at, 0, 2);
      }
      switch (height) {
        case 1: int_rows<Dot, 1>(t, row, panel, end); break;
        case 2: int_rows<Dot, 2>(t, row, panel, end); break;
#if defined(__AVX2__)
        case 3: int_rows<Dot, 3>(t, row, panel, end); break;
        case 4: int_rows<Dot, 4>(t, row, panel, end); break;
        case 5: int_rows<Dot, 5>(t, row, panel, end); break;
        case 6: int_rows<Dot, 6>(t, row, panel, end); break;
#endif
#if defined(__AVX512F__)
        case 7: int_rows<Dot, 7>(t, row, panel, end); break;
        case 8: int_rows<Dot, 8>(t, row, panel, end); break;
#endif
      }
      row += height;
    }
}

}  // namespace HR_ISA
