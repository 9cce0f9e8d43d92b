// Products of integers: a row's inputs are quantised once an operation, per group of the weight.
//
//     x ~ q_x * scale_x     w = q * scale + offset     sum += (q . q_x) * scale * scale_x + offset * sum(q_x) * scale_x
//
// The integer sum of a group is exact; the float sums are one chain over the groups, in their order, and one over what
// follows.
//
// Inputs of 8 bits are few for a group in which one stands out, and in language models some do: two thirds of a norm's
// error lie in one group of 18. So that one has no part in the group's scale; it is multiplied as the float it is.
//
//     x  0.3 -40 1.1 0.7   ->   q_x  35 0 127 81   single -40.0     (without that 1.1 would be 3)
#pragma once

#include <cmath>

namespace HR_ISA {

using namespace headrace;

// Of one row and group: weights are held as q + zero, so that the integer sum starts at -zero * sum(q_x).
struct GroupInputs {
  float scale, scaled_sum;
  int32_t start;
  int32_t single;  // where the input is that stands out, -1 if none does
};

// An input that is multiplied on its own.
struct Single {
  float input;
  int32_t row, group, index;
};

// An input stands out when all others of its group are less than this part of it.
constexpr float kOthers = 0.4f;

// Of 16 bits fewer are used: so the sum of a group of 32 is a whole number of float32 too, as the reference has it.
template <class Input>
constexpr float largest_input(int64_t group_size) {
  return sizeof(Input) > 1 && group_size <= 4096 ? 4095.0f : 127.0f;
}

struct QuantisedRows {
  uint8_t* inputs;  // rows of `depth` int8 or Input8
  int64_t row_bytes;
  GroupInputs* groups;     // [rows, groups]
  Single* singles;         // by item of rows, whose first row is number 0, then group, then row
  int32_t* first_singles;  // [items of rows + 1]
};

struct Quantising {
  const LinearArgs* args;
  QuantisedRows to;
  int64_t rows_per_item;
};

// The place of the input that stands out among `count` whose largest magnitude is `limit`, or -1.
static inline int64_t place_of_single(const float* x, int64_t count, float limit) {
  const Vec least = broadcast(kOthers * limit);
  int64_t place = -1;
  int found = 0;
  for (int64_t k = 0; k < count; k += kLanes) {
    const uint32_t lanes = at_least(abs(load(x + k)), least);
    if (lanes != 0) place = k + __builtin_ctz(lanes);
    found += __builtin_popcount(lanes);
  }
  return found == 1 ? place : -1;
}

static inline float largest_but(const float* x, int64_t count, int64_t place) {
  Vec most = broadcast(0.0f);
  for (int64_t k = 0; k < count; k += kLanes) {
    const int lane = place / kLanes * kLanes == k ? static_cast<int>(place % kLanes) : kLanes;
    most = max(lanes_or(broadcast(0.0f), lane, lane + 1, abs(load(x + k))), most);
  }
  return largest(most);
}

static inline float largest_magnitude(const float* x, int64_t count) {
  Vec most = broadcast(0.0f);
  for (int64_t k = 0; k < count; k += kLanes) most = max(abs(load(x + k)), most);
  return largest(most);
}

// One group of one row: `count` finite inputs, a multiple of 16, as numbers up to `codes`.
template <class Input>
static void quantise_group(const float* x, int64_t count, int32_t zero, float codes, Input* to, GroupInputs* group) {
  float limit = largest_magnitude(x, count);
  const int64_t place = sizeof(Input) == 1 ? place_of_single(x, count, limit) : -1;
  if (place >= 0) limit = largest_but(x, count, place);
  const Vec inverse = broadcast(limit > 0.0f ? codes / limit : 0.0f);
  Int total = broadcast_int(0);
  for (int64_t k = 0; k < count; k += kLanes) {
    Vec part = load(x + k);
    if (place >= 0 && place / kLanes * kLanes == k) {
      const int lane = static_cast<int>(place % kLanes);
      part = lanes_or(broadcast(0.0f), lane, lane + 1, part);
    }
    const Int q = to_int(mul(part, inverse));
    store_inputs(to + k, q);
    total = add_int(total, q);
  }
  const int32_t inputs = sum_int(total);
  group->scale = limit / codes;
  group->scaled_sum = static_cast<float>(inputs) * group->scale;
  if (place >= 0) group->scaled_sum += x[place];
  group->start = static_cast<int32_t>(0u - static_cast<uint32_t>(zero) * static_cast<uint32_t>(inputs));
  group->single = static_cast<int32_t>(place);
}

// NaN if one is not finite, else 0.
static inline float not_finite(const float* x, int64_t count) {
  Vec broken = broadcast(0.0f);
  for (int64_t k = 0; k < count; k += kLanes) broken = fma(load(x + k), broadcast(0.0f), broken);
  return sum(broken);
}

template <class Input>
static void quantise_row(const Quantising& q, int64_t row, float codes) {
  const PackedMatrix& m = *q.args->matrix;
  const float* x = q.args->x.data + row * q.args->x.stride;
  Input* to = reinterpret_cast<Input*>(q.to.inputs + row * q.to.row_bytes);
  GroupInputs* groups = q.to.groups + row * m.groups;
  const float broken = not_finite(x, m.in);
  if (broken != 0.0f) {
    std::memset(to, 0, m.in * sizeof(Input));
    for (int64_t g = 0; g < m.groups; g++) groups[g] = {broken, broken, 0, -1};
    return;
  }
  for (int64_t g = 0; g < m.groups; g++) {
    const int64_t first = g * m.group_size;
    quantise_group(x + first, m.group_size, m.zero, codes, to + first, groups + g);
  }
}

static void quantise_item(void* context, int64_t item, int) {
  const Quantising& q = *static_cast<const Quantising*>(context);
  const PackedMatrix& m = *q.args->matrix;
  const int64_t end = (item + 1) * q.rows_per_item;
  for (int64_t row = item * q.rows_per_item; row < end && row < q.args->rows; row++)
    if (m.form == Form::kInt8)
      quantise_row<Input8>(q, row, largest_input<Input8>(m.group_size));
    else
      quantise_row<int8_t>(q, row, 127.0f);
}

// Group after group, as it is often the same input that stands out in many rows.
static void collect_singles(const Quantising& q, int64_t rows_per_item) {
  const PackedMatrix& m = *q.args->matrix;
  const View& x = q.args->x;
  const int64_t rows = q.args->rows;
  Single* next = q.to.singles;
  int32_t* first_single = q.to.first_singles;
  for (int64_t row = 0; row < rows; row += rows_per_item) {
    *first_single++ = static_cast<int32_t>(next - q.to.singles);
    const int64_t end = row + rows_per_item < rows ? row + rows_per_item : rows;
    for (int64_t g = 0; g < m.groups; g++)
      for (int64_t r = row; r < end; r++) {
        const int32_t place = q.to.groups[r * m.groups + g].single;
        if (place < 0) continue;
        const int64_t index = g * m.group_size + place;
        *next++ = {x.data[r * x.stride + index], static_cast<int32_t>(r - row), static_cast<int32_t>(g),
                   static_cast<int32_t>(index)};
      }
  }
  *first_single = static_cast<int32_t>(next - q.to.singles);
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
  // Of input k, for 16 outputs.
  static inline Vec weight(const uint8_t* w, int32_t k) {
    return load_bits(w + k / 8 * 4 * kPanel, k % 4 * 8 + k % 8 / 4 * 4, 4);
  }

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
        Bytes weights[kPanels];
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
  static inline Vec weight(const uint8_t* w, int32_t k) {
    return load_input8(w + k / kStep8 * kStep8 * kPanel, k % kStep8);
  }

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
  const Single *singles, *singles_end;
};

// sums [rows][16] of the inputs that are multiplied on their own with a panel.
template <class Dot>
__attribute__((noinline)) static void add_singles(const IntProduct& t, int64_t rows, int64_t panel, float* sums) {
  const PackedMatrix& m = *t.m;
  const uint8_t* w = m.values + panel * static_cast<int64_t>(m.panel_bytes);
  const Vec zero = broadcast(static_cast<float>(m.zero));
  const bool half_scales = m.half_scales;
  for (int64_t r = 0; r < rows; r++) store(sums + r * kPanel, broadcast(0.0f));
  Vec weight = zero;
  int32_t index = -1;
  for (const Single* single = t.singles; single != t.singles_end; single++) {
    if (single->index != index) {
      index = single->index;
      const Vec scale = load_numbers(m.scales, half_scales, panel * m.groups + single->group);
      weight = mul(sub(Dot::weight(w, index), zero), scale);
    }
    float* sum = sums + single->row * kPanel;
    store(sum, fma(broadcast(single->input), weight, load(sum)));
  }
}

// What the tiles of a panel add to their totals: the sums of the singles.
struct SingleSums {
  float* sums;  // [panels][kRowsPerItem][16], from the tile's first row on; null: there are none
  bool late;    // the tile makes them, when the weights it reads have come; else they are there
};

template <class Dot, int kRows, int kPanels>
__attribute__((noinline)) static void int_tile(const IntProduct& t, int64_t row, int64_t panel, SingleSums singles) {
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
  for (int p = 0; singles.late && p < kPanels; p++)
    add_singles<Dot>(t, kRows, panel + p, singles.sums + p * kRowsPerItem * kPanel);
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++) {
      const int64_t output = (panel + p) * kPanel, left = m.out - output;
      // Of a row without singles 0 is added whether others have some or not: even that can change a bit, the sign of 0.
      Vec total = totals[r][p];
      total = HR_ISA::add(total, singles.sums == nullptr ? broadcast(0.0f)
                                                         : load(singles.sums + (p * kRowsPerItem + r) * kPanel));
      if (t.bias != nullptr) total = HR_ISA::add(total, load_outputs(t.bias + output, left));
      store_outputs(t.y + (row + r) * t.y_stride + output, total, left);
    }
}

template <class Dot, int kRows>
static void int_rows(const IntProduct& t, int64_t row, int64_t panel, int64_t end, SingleSums singles) {
  constexpr int kPanels = int_panels(kRows);
  if (panel + kPanels <= end)
    int_tile<Dot, kRows, kPanels>(t, row, panel, singles);
  else
    int_tile<Dot, kRows, 1>(t, row, panel, singles);
}

// Rows first_row .. with panels first .. end - 1; the singles are those of the rows.
template <class Dot>
static void int_product(const IntProduct& t, int64_t first_row, int64_t rows, int64_t first, int64_t end) {
  const Heights heights = tile_heights(rows, Dot::kMaxRows);
  const int64_t block = int_panels(1), bytes = block * static_cast<int64_t>(t.m->panel_bytes);
  alignas(64) float sums[int_panels(1) * kRowsPerItem * kPanel];
  const bool any = t.singles != t.singles_end, late = any && heights.tiles == 1;
  for (int64_t panel = first; panel < end; panel += block) {
    for (int64_t p = 0; any && !late && p < block && panel + p < end; p++)
      add_singles<Dot>(t, rows, panel + p, sums + p * kRowsPerItem * kPanel);
    for (int64_t i = 0, row = first_row; i < heights.tiles; i++) {
      const int64_t height = heights.least + (i < heights.taller);
      const SingleSums singles = {any ? sums + (row - first_row) * kPanel : nullptr, late};
      // Every tile fetches its part of the next panel's weights.
      if (heights.tiles > 1) {
        const uint8_t* next = t.m->values + (panel + block) * static_cast<int64_t>(t.m->panel_bytes);
        for (int64_t at = bytes * i / heights.tiles; at < bytes * (i + 1) / heights.tiles; at += 64)
          __builtin_prefetch(next + at, 0, 2);
      }
      switch (height) {
        case 1: int_rows<Dot, 1>(t, row, panel, end, singles); break;
        case 2: int_rows<Dot, 2>(t, row, panel, end, singles); break;
#if defined(__AVX2__)
        case 3: int_rows<Dot, 3>(t, row, panel, end, singles); break;
        case 4: int_rows<Dot, 4>(t, row, panel, end, singles); break;
        case 5: int_rows<Dot, 5>(t, row, panel, end, singles); break;
        case 6: int_rows<Dot, 6>(t, row, panel, end, singles); break;
#endif
#if defined(__AVX512F__)
        case 7: int_rows<Dot, 7>(t, row, panel, end, singles); break;
        case 8: int_rows<Dot, 8>(t, row, panel, end, singles); break;
#endif
      }
      row += height;
    }
  }
}

}  // namespace HR_ISA
