// Products in float32: tiles of a few rows by a few panels whose sums stay in registers.
//
// Every output is one chain of additions over the inputs, in their order, whatever the tile it lies in; where inputs
// are taken in blocks the chain waits in y.
#pragma once

namespace HR_ISA {

using namespace headrace;

// The forms of weights a tile reads. `load` gives part j of a step as 16 outputs; `mac` adds its products with what
// `input` gives of a row.
struct WeightsF32 {
  using Input = float;
  static constexpr int kParts = 1, kPartInputs = 1, kStepBytes = 64;
  static inline Vec load(const uint8_t* p, int) { return HR_ISA::load(reinterpret_cast<const float*>(p)); }
  static inline Vec input(const uint8_t* x) { return broadcast(*reinterpret_cast<const float*>(x)); }
  static inline Vec mac(Vec sum, Vec x, Vec w) { return HR_ISA::mac(sum, x, w); }
};

struct WeightsF16 : WeightsF32 {
  static constexpr int kStepBytes = 32;
  static inline Vec load(const uint8_t* p, int) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
};

// Pairs of inputs: the even one in the low half of 32 bits.
struct WeightsBF16 : WeightsF32 {
  static constexpr int kParts = 2;
  static inline Vec load(const uint8_t* p, int j) { return load_bf16_pairs(reinterpret_cast<const uint16_t*>(p), j); }
};

#if defined(HR_VNNI_BF16)
// Pairs multiplied by VDPBF16PS with rows that are bfloat16 too.
struct WeightsBF16Pairs {
  using Input = uint16_t;
  static constexpr int kParts = 1, kPartInputs = 2, kStepBytes = 64;
  static inline Vec load(const uint8_t* p, int) { return {_mm512_loadu_ps(p)}; }
  static inline Vec input(const uint8_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return {_mm512_castsi512_ps(_mm512_set1_epi32(pair))};
  }
  static inline Vec mac(Vec sum, Vec x, Vec w) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)w.v, (__m512bh)x.v)}; }
};
#endif

// How many panels a tile of so many rows takes, so that its sums fill the registers and hide the latency of additions.
#if defined(__AVX512F__)
constexpr int kFloatRows = 8;
constexpr int float_panels(int rows) { return rows == 1 ? 8 : rows <= 6 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int kFloatRows = 6;
constexpr int float_panels(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr int kFloatRows = 2;
constexpr int float_panels(int) { return 1; }
#endif

// A product of `rows` rows with some panels over `depth` inputs.
template <class Input>
struct FloatProduct {
  const Input* x;
  int64_t x_stride;
  int64_t rows, depth;
  const uint8_t* w;
  int64_t panel_bytes, panels;
  int64_t outputs;    // of the panels that are real
  bool first, last;   // block of inputs
  const float* bias;  // or null
  float* y;
  int64_t y_stride;
  float* partial;  // where sums wait between blocks: [panels][rows][16]
};

// Weights to fetch while a tile computes: `bytes` further at every step.
struct Ahead {
  const uint8_t* at;
  int64_t bytes;
};

static inline Vec load_outputs(const float* p, int64_t outputs) {
  return outputs >= kLanes ? load(p) : load_first(p, static_cast<int>(outputs));
}

static inline void store_outputs(float* p, Vec x, int64_t outputs) {
  if (outputs >= kLanes)
    store(p, x);
  else
    store_first(p, x, static_cast<int>(outputs));
}

template <class W, int kRows, int kPanels>
static inline void add_part(Vec (&sums)[kRows][kPanels], const RowPointers<kRows>& x, const uint8_t* w,
                            int64_t panel_bytes, int part) {
  const int64_t at = part * W::kPartInputs * sizeof(typename W::Input);
  if (kRows < 4) {  // the rows' inputs are held, weights pass by
    Vec inputs[kRows];
    HR_UNROLL(8)
    for (int r = 0; r < kRows; r++) inputs[r] = W::input(x.row(r) + at);
    HR_UNROLL(8)
    for (int p = 0; p < kPanels; p++) {
      const Vec weights = W::load(w + p * panel_bytes, part);
      HR_UNROLL(8)
      for (int r = 0; r < kRows; r++) sums[r][p] = W::mac(sums[r][p], inputs[r], weights);
    }
    return;
  }
  Vec weights[kPanels];
  HR_UNROLL(8)
  for (int p = 0; p < kPanels; p++) weights[p] = W::load(w + p * panel_bytes, part);
  HR_UNROLL(8)
  for (int r = 0; r < kRows; r++) {
    const Vec input = W::input(x.row(r) + at);
    HR_UNROLL(8)
    for (int p = 0; p < kPanels; p++) sums[r][p] = W::mac(sums[r][p], input, weights[p]);
  }
}

// Rows from `row` on, panels from `panel` on.
template <class W, int kRows, int kPanels>
__attribute__((noinline)) static void float_tile(const FloatProduct<typename W::Input>& t, int64_t row, int64_t panel,
                                                 Ahead ahead) {
  constexpr int kStep = W::kParts * W::kPartInputs;
  RowPointers<kRows> x(t.x + row * t.x_stride, t.x_stride * sizeof(typename W::Input));
  const uint8_t* w = t.w + panel * t.panel_bytes;
  const int64_t panel_bytes = t.panel_bytes;
  float* y = t.y + row * t.y_stride + panel * kPanel;
  float* partial = t.partial + (panel * t.rows + row) * kPanel;
  const int64_t partial_stride = t.rows * kPanel;
  const int64_t outputs = t.outputs - panel * kPanel;
  Vec sums[kRows][kPanels];
  HR_UNROLL(8)
  for (int r = 0; r < kRows; r++)
    HR_UNROLL(8)
    for (int p = 0; p < kPanels; p++)
      sums[r][p] = t.first ? broadcast(0.0f) : load(partial + p * partial_stride + r * kPanel);
  int64_t k = 0;
  for (; k + kStep <= t.depth; k += kStep) {
    HR_UNROLL(2)
    for (int part = 0; part < W::kParts; part++) {
      add_part<W>(sums, x, w, panel_bytes, part);
      // Weights of the next part are loaded again: there are no registers to keep them in.
      if (W::kParts > 1) asm volatile("" ::: "memory");
    }
    x.advance(kStep * sizeof(typename W::Input));
    w += W::kStepBytes;
    __builtin_prefetch(ahead.at);
    ahead.at += ahead.bytes;
  }
  if (W::kParts == 2 && k < t.depth) add_part<W>(sums, x, w, panel_bytes, 0);
  if (!t.last) {
    HR_UNROLL(8)
    for (int r = 0; r < kRows; r++)
      HR_UNROLL(8)
      for (int p = 0; p < kPanels; p++) store(partial + p * partial_stride + r * kPanel, sums[r][p]);
    return;
  }
  HR_UNROLL(8)
  for (int r = 0; r < kRows; r++)
    HR_UNROLL(8)
    for (int p = 0; p < kPanels; p++) {
      const int64_t left = outputs - p * kPanel;
      if (t.bias != nullptr)
        sums[r][p] = add(sums[r][p], load_outputs(t.bias + (panel + p) * kPanel, left));
      store_outputs(y + r * t.y_stride + p * kPanel, sums[r][p], left);
    }
}

template <class W, int kRows>
static void float_rows(const FloatProduct<typename W::Input>& t, int64_t row, int64_t panel, int64_t end,
                       Ahead ahead) {
  constexpr int kPanels = float_panels(kRows);
  for (; panel + kPanels <= end; panel += kPanels) float_tile<W, kRows, kPanels>(t, row, panel, ahead);
  for (; panel < end; panel++) float_tile<W, kRows, 1>(t, row, panel, ahead);
}

constexpr int64_t kFloatAhead = 4096;  // bytes

template <class W>
static void float_product(const FloatProduct<typename W::Input>& t) {
  const Heights heights = tile_heights(t.rows, kFloatRows);
  const int64_t block = float_panels(static_cast<int>(heights.least));
  constexpr int64_t kStep = W::kParts * W::kPartInputs;
  const int64_t slice = t.depth / kStep * W::kStepBytes / heights.tiles;
  for (int64_t panel = 0; panel < t.panels; panel += block) {
    const int64_t end = panel + block < t.panels ? panel + block : t.panels;
    for (int64_t i = 0, row = 0; i < heights.tiles; i++) {
      const int64_t height = heights.least + (i < heights.taller);
      // The only tile fetches what it reads next; of several, which read the same, each a part of the next panel.
      const Ahead ahead = heights.tiles == 1 ? Ahead{t.w + panel * t.panel_bytes + kFloatAhead, W::kStepBytes}
                                             : Ahead{t.w + end * t.panel_bytes + i * slice,
                                                     (W::kStepBytes + heights.tiles - 1) / heights.tiles};
      switch (height) {
        case 1: float_rows<W, 1>(t, row, panel, end, ahead); break;
        case 2: float_rows<W, 2>(t, row, panel, end, ahead); break;
#if defined(__AVX2__)
        case 3: float_rows<W, 3>(t, row, panel, end, ahead); break;
        case 4: float_rows<W, 4>(t, row, panel, end, ahead); break;
        case 5: float_rows<W, 5>(t, row, panel, end, ahead); break;
        case 6: float_rows<W, 6>(t, row, panel, end, ahead); break;
#endif
#if defined(__AVX512F__)
        case 7: float_rows<W, 7>(t, row, panel, end, ahead); break;
        case 8: float_rows<W, 8>(t, row, panel, end, ahead); break;
#endif
      }
      row += height;
    }
  }
}

// Inputs first .. first + depth - 1 of a panel of integers as float32 [depth][16], rounded as weight.py does.
static void unpack_panel(const PackedMatrix& m, int64_t panel, int64_t first, int64_t depth, float* w) {
  const uint8_t* packed = m.values + panel * m.panel_bytes;
  Vec scale = broadcast(0.0f), offset = scale;
  int64_t scaled = -1;
  const Vec zero = broadcast(m.form == Form::kInt8 ? 128.0f : 0.0f);
  for (int64_t k = first; k < first + depth; k++) {
    const int64_t group = k / m.group_size;
    if (group != scaled) {
      scaled = group;
      scale = load_numbers(m.scales, m.half_scales, panel * m.groups + group);
      if (m.offset_kind == Offsets::kMinusEight) offset = mul(scale, broadcast(-8.0f));
      if (m.offset_kind == Offsets::kHeld) offset = load_numbers(m.offsets, m.half_offsets, panel * m.groups + group);
    }
    Vec q = m.form == Form::kInt4
                ? load_bits(packed + k / 8 * 4 * kPanel, static_cast<int>(k % 4 * 8 + k % 8 / 4 * 4), 4)
                : sub(load_input8(packed + k / kStep8 * kStep8 * kPanel, static_cast<int>(k % kStep8)), zero);
    Vec value = mul(q, scale);
    if (m.offset_kind != Offsets::kNone) value = add(value, offset);
    store(w + (k - first) * kPanel, value);
  }
}

// Inputs of a block: so many that a panel of them stays in the first cache with the rows of a tile.
constexpr int64_t kFloatDepth = 256;
constexpr int64_t kUnpackedDepth = 64;
constexpr int64_t kUnpackedPanels = 4;

// Floats of scratch that the rows and panels of an item take when its inputs come in blocks: a block of the rows, and
// sums.
constexpr int64_t kCopiedStride = kFloatDepth + 16;
// Rows whose distance is a multiple of this are copied: a cache holds few lines that far apart.
constexpr int64_t kCrowdedBytes = 1024;
static inline int64_t float_scratch(int64_t rows, int64_t panels) {
  return rows <= kFloatRows ? kPanel : rows * (kCopiedStride + panels * kPanel);
}

template <class W>
static void float_range(const PackedMatrix& m, FloatProduct<typename W::Input> t, int64_t first_panel, float* scratch) {
  constexpr int64_t kStep = W::kParts * W::kPartInputs;
  using Input = typename W::Input;
  const int64_t in = W::kPartInputs > 1 ? m.depth : m.in;
  const Input* x = t.x;
  const int64_t x_stride = t.x_stride;
  const bool blocks = t.rows > kFloatRows;
  const bool copies = blocks && x_stride * static_cast<int64_t>(sizeof(Input)) % kCrowdedBytes == 0;
  const int64_t depth = blocks ? kFloatDepth : in;
  t.panel_bytes = static_cast<int64_t>(m.panel_bytes);
  t.partial = scratch + t.rows * kCopiedStride;
  for (int64_t k = 0; k < in; k += depth) {
    t.depth = in - k < depth ? in - k : depth;
    t.x = x + k;
    if (copies) {
      Input* copied = reinterpret_cast<Input*>(scratch);
      for (int64_t r = 0; r < t.rows; r++)
        std::memcpy(copied + r * kCopiedStride, x + r * x_stride + k, t.depth * sizeof(Input));
      t.x = copied;
      t.x_stride = kCopiedStride;
    }
    t.w = m.values + first_panel * m.panel_bytes + k / kStep * W::kStepBytes;
    t.first = k == 0;
    t.last = k + depth >= in;
    float_product<W>(t);
  }
}

// Integers: a few panels of a few inputs at a time are turned to float32.
static void integer_range(const PackedMatrix& m, FloatProduct<float> t, int64_t first_panel) {
  alignas(64) float unpacked[kUnpackedPanels * kUnpackedDepth * kPanel];
  alignas(64) float sums[kUnpackedPanels * kRowsPerItem * kPanel];
  const FloatProduct<float> whole = t;
  t.partial = sums;
  t.w = reinterpret_cast<const uint8_t*>(unpacked);
  t.panel_bytes = kUnpackedDepth * kPanel * sizeof(float);
  for (int64_t panel = 0; panel < whole.panels; panel += kUnpackedPanels) {
    t.panels = whole.panels - panel < kUnpackedPanels ? whole.panels - panel : kUnpackedPanels;
    t.outputs = whole.outputs - panel * kPanel;
    t.bias = whole.bias == nullptr ? nullptr : whole.bias + panel * kPanel;
    t.y = whole.y + panel * kPanel;
    for (int64_t k = 0; k < m.in; k += kUnpackedDepth) {
      t.x = whole.x + k;
      t.depth = m.in - k < kUnpackedDepth ? m.in - k : kUnpackedDepth;
      t.first = k == 0;
      t.last = k + kUnpackedDepth >= m.in;
      for (int64_t p = 0; p < t.panels; p++)
        unpack_panel(m, first_panel + panel + p, k, t.depth, unpacked + p * kUnpackedDepth * kPanel);
      float_product<WeightsF32>(t);
    }
  }
}

}  // namespace HR_ISA
