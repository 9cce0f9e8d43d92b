// Products of rows with a packed matrix: how the work is cut for the threads; the products are in products_*.inl.
//
// An item is some panels by some rows. Weights are read from memory once for all rows of an item, its rows stay in the
// second cache.
#pragma once

#include "linear.h"

// Sums stay in registers only where loops over them are unrolled; without vector registers that is code for nothing.
#if defined(__AVX2__)
#define HR_PRAGMA(text) _Pragma(#text)
#define HR_UNROLL(times) HR_PRAGMA(GCC unroll times)
#else
#define HR_UNROLL(times)
#endif

#include "dot.inl"

namespace HR_ISA {

using namespace headrace;

// Rows cut into tiles of at most `most` rows whose heights differ by one at most: the first `taller` have one more.
struct Heights {
  int64_t tiles, least, taller;
};

static inline Heights tile_heights(int64_t rows, int64_t most) {
  const int64_t tiles = (rows + most - 1) / most;
  return {tiles, rows / tiles, rows % tiles};
}

// Where a few rows are read at once: three rows a pointer, as addresses are made of a register and 0, 1 or 2 times
// another. The compiler would take a register for every row, and has none.
template <int kRows>
struct RowPointers {
  static constexpr int kPointers = (kRows + 2) / 3;
  const uint8_t* pointers[kPointers];
  int64_t stride;  // bytes

  inline RowPointers(const void* first, int64_t stride_bytes) : stride(stride_bytes) {
    for (int i = 0; i < kPointers; i++) pointers[i] = static_cast<const uint8_t*>(first) + 3 * i * stride;
  }
  inline const uint8_t* row(int r) const { return pointers[r / 3] + r % 3 * stride; }
  inline void advance(int64_t bytes) {
    HR_UNROLL(4)
    for (int i = 0; i < kPointers; i++) {
      pointers[i] += bytes;
      asm("" : "+r"(pointers[i]));
    }
  }
};

constexpr int64_t kRowsPerItem = 128;

// The scales or offsets of group number `index` of all panels.
static inline Vec load_numbers(const void* numbers, bool half, int64_t index) {
  return half ? load_f16(static_cast<const uint16_t*>(numbers) + index * kPanel)
              : load(static_cast<const float*>(numbers) + index * kPanel);
}

}  // namespace HR_ISA

#include "pack.inl"
#include "products_float.inl"
#include "products_int.inl"
#include "quantise.inl"

namespace HR_ISA {

struct LinearWork {
  LinearArgs args;
  Pool* pool;
  int64_t panels_per_item, rows_per_item, panel_items, row_items;
  int64_t scratch_bytes;  // of a thread
  QuantisedRows quantised;
  const uint16_t* rounded;  // rows as bfloat16 [rows, depth]
};

constexpr int64_t kItemBytes = 128 << 10;
constexpr int64_t kFloatPanelsPerItem = 16;
constexpr int64_t kItemInputBytes = 256 << 10;
constexpr int64_t kLeastIntRows = 24;

// Few items where the matrix is small, several a thread where it is large, so that a thread that lost its core for a
// while does not hold up the others.
static void cut(Pool* pool, LinearWork* work, int64_t most_rows, int64_t most_panels, int64_t panel_multiple) {
  const PackedMatrix& m = *work->args.matrix;
  const int64_t rows = work->args.rows, threads = pool->threads();
  const int64_t row_items = (rows + most_rows - 1) / most_rows;
  work->rows_per_item = (rows + row_items - 1) / row_items;
  work->row_items = (rows + work->rows_per_item - 1) / work->rows_per_item;
  const int64_t bytes = static_cast<int64_t>(m.panel_bytes) * m.panels * (rows < 8 ? 1 : rows / 4);
  int64_t items = bytes / threads / kItemBytes;
  items = threads * (items < 1 ? 1 : items > 8 ? 8 : items);
  int64_t panels = (m.panels + items - 1) / items;
  if (panels > most_panels) panels = most_panels;
  panels = (panels + panel_multiple - 1) / panel_multiple * panel_multiple;
  work->panels_per_item = panels;
  work->panel_items = (m.panels + panels - 1) / panels;
}

struct ItemRange {
  int64_t first_row, rows, first_panel, end_panel;
};

static inline ItemRange item_range(const LinearWork& work, int64_t item) {
  ItemRange range;
  range.first_row = item % work.row_items * work.rows_per_item;
  const int64_t rows = work.args.rows - range.first_row;
  range.rows = rows < work.rows_per_item ? rows : work.rows_per_item;
  range.first_panel = item / work.row_items * work.panels_per_item;
  range.end_panel = range.first_panel + work.panels_per_item;
  if (range.end_panel > work.args.matrix->panels) range.end_panel = work.args.matrix->panels;
  return range;
}

static void run_items(Pool* pool, LinearWork* work, Pool::Task task) {
  pool->run(work->row_items * work->panel_items, task, work);
}

// Memory for what an operation makes of its rows was short: no number is right, and sampling says so.
static void fail(const LinearArgs& args, const ItemRange& range) {
  const int64_t end = range.end_panel * kPanel < args.matrix->out ? range.end_panel * kPanel : args.matrix->out;
  for (int64_t row = range.first_row; row < range.first_row + range.rows; row++)
    for (int64_t i = range.first_panel * kPanel; i < end; i++)
      args.y.data[row * args.y.stride + i] = from_bits(0x7fc00000u);
}

template <class Input>
static FloatProduct<Input> float_part(const LinearWork& work, const ItemRange& range, const Input* x, int64_t stride) {
  const LinearArgs& args = work.args;
  FloatProduct<Input> t = {};
  t.x = x + range.first_row * stride;
  t.x_stride = stride;
  t.rows = range.rows;
  t.panels = range.end_panel - range.first_panel;
  t.outputs = args.matrix->out - range.first_panel * kPanel;
  t.bias = args.bias == nullptr ? nullptr : args.bias + range.first_panel * kPanel;
  t.y = args.y.data + range.first_row * args.y.stride + range.first_panel * kPanel;
  t.y_stride = args.y.stride;
  return t;
}

static void float_item(void* context, int64_t item, int thread) {
  const LinearWork& work = *static_cast<const LinearWork*>(context);
  const PackedMatrix& m = *work.args.matrix;
  const ItemRange range = item_range(work, item);
  const FloatProduct<float> t = float_part(work, range, work.args.x.data, work.args.x.stride);
  float* scratch = static_cast<float*>(work.pool->scratch(thread, work.scratch_bytes));
  if (scratch == nullptr) return fail(work.args, range);
  switch (m.form) {
    case Form::kF32: float_range<WeightsF32>(m, t, range.first_panel, scratch); break;
    case Form::kF16: float_range<WeightsF16>(m, t, range.first_panel, scratch); break;
    case Form::kBF16: float_range<WeightsBF16>(m, t, range.first_panel, scratch); break;
    default: integer_range(m, t, range.first_panel); break;
  }
}

#if defined(HR_VNNI_BF16)
static void bf16_item(void* context, int64_t item, int thread) {
  const LinearWork& work = *static_cast<const LinearWork*>(context);
  const PackedMatrix& m = *work.args.matrix;
  const ItemRange range = item_range(work, item);
  float* scratch = static_cast<float*>(work.pool->scratch(thread, work.scratch_bytes));
  if (scratch == nullptr) return fail(work.args, range);
  float_range<WeightsBF16Pairs>(m, float_part(work, range, work.rounded, m.depth), range.first_panel, scratch);
}

static void round_item(void* context, int64_t row, int) {
  const LinearWork& work = *static_cast<const LinearWork*>(context);
  const PackedMatrix& m = *work.args.matrix;
  const float* x = work.args.x.data + row * work.args.x.stride;
  uint16_t* to = const_cast<uint16_t*>(work.rounded) + row * m.depth;
  int64_t k = 0;
  for (; k + kLanes <= m.in; k += kLanes) store_bf16(to + k, load(x + k));
  for (; k < m.depth; k++) to[k] = k < m.in ? float_to_bf16(x[k]) : 0;
}
#endif

static void int_item(void* context, int64_t item, int) {
  const LinearWork& work = *static_cast<const LinearWork*>(context);
  const LinearArgs& args = work.args;
  const PackedMatrix& m = *args.matrix;
  const ItemRange r = item_range(work, item);
  const QuantisedRows& x = work.quantised;
  const int32_t* first_single = x.first_singles + r.first_row / work.rows_per_item;
  const IntProduct t = {&m, x, args.rows, args.bias, args.y.data, args.y.stride,
                        x.singles + first_single[0], x.singles + first_single[1]};
  if (m.form == Form::kInt8)
    int_product<Dot8>(t, r.first_row, r.rows, r.first_panel, r.end_panel);
  else if (m.group_size == 32)
    int_product<Dot4<32, true>>(t, r.first_row, r.rows, r.first_panel, r.end_panel);
  else if (m.group_size % 32 == 0)
    int_product<Dot4<32, false>>(t, r.first_row, r.rows, r.first_panel, r.end_panel);
  else
    int_product<Dot4<16, false>>(t, r.first_row, r.rows, r.first_panel, r.end_panel);
}

constexpr int64_t kInputsPerItem = 16 << 10;  // that are quantised or rounded by one thread at a time

// Rows of an item whose inputs stay in the second cache.
static int64_t int_rows_per_item(int64_t row_bytes) {
  const int64_t fitting = kItemInputBytes / row_bytes;
  return fitting < kLeastIntRows ? kLeastIntRows : fitting > kRowsPerItem ? kRowsPerItem : fitting;
}

static bool cut_quantised(Pool* pool, LinearWork* work) {
  const LinearArgs& args = work->args;
  const PackedMatrix& m = *args.matrix;
  const int64_t input_bytes = m.form == Form::kInt8 ? sizeof(Input8) : 1;
  const int64_t row_bytes = (m.depth * input_bytes + 63) / 64 * 64, groups = args.rows * m.groups;
  const int64_t bytes = args.rows * row_bytes + groups * static_cast<int64_t>(sizeof(GroupInputs) + sizeof(Single)) +
                        (args.rows + 1) * static_cast<int64_t>(sizeof(int32_t));
  uint8_t* memory = static_cast<uint8_t*>(pool->shared(0, bytes));
  if (memory == nullptr) return false;
  GroupInputs* of_groups = reinterpret_cast<GroupInputs*>(memory + args.rows * row_bytes);
  Single* singles = reinterpret_cast<Single*>(of_groups + groups);
  work->quantised = {memory, row_bytes, of_groups, singles, reinterpret_cast<int32_t*>(singles + groups)};
  Quantising q = {&args, work->quantised, kInputsPerItem / m.depth + 1};
  pool->run((args.rows + q.rows_per_item - 1) / q.rows_per_item, quantise_item, &q);
  cut(pool, work, int_rows_per_item(row_bytes), m.panels, int_panels(1));
  collect_singles(q, work->rows_per_item);
  return true;
}

static void cut_floats(Pool* pool, LinearWork* work) {
  const int64_t rows = work->args.rows;
  const int64_t multiple = float_panels(static_cast<int>(rows < kFloatRows ? rows : kFloatRows));
  cut(pool, work, kRowsPerItem, rows <= kFloatRows ? work->args.matrix->panels : kFloatPanelsPerItem, multiple);
  work->scratch_bytes = float_scratch(work->rows_per_item, work->panels_per_item) * sizeof(float);
}

static void linear(Pool* pool, const LinearArgs& args) {
  const PackedMatrix& m = *args.matrix;
  if (args.rows <= 0 || m.out <= 0) return;
  LinearWork work = {};
  work.args = args;
  work.pool = pool;
  const ItemRange whole = {0, args.rows, 0, m.panels};
  if (m.scheme == Scheme::kInt8) {
    if (!cut_quantised(pool, &work)) return fail(args, whole);
    return run_items(pool, &work, int_item);
  }
#if defined(HR_VNNI_BF16)
  if (m.scheme == Scheme::kBF16) {
    work.rounded = static_cast<uint16_t*>(pool->shared(0, args.rows * m.depth * 2));
    if (work.rounded == nullptr) return fail(args, whole);
    pool->run(args.rows, round_item, &work);
    cut_floats(pool, &work);
    return run_items(pool, &work, bf16_item);
  }
#endif
  cut_floats(pool, &work);
  run_items(pool, &work, float_item);
}

}  // namespace HR_ISA
