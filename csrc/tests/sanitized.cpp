// Drives every operation of every variant this CPU runs over random odd shapes, built with AddressSanitizer and
// UndefinedBehaviorSanitizer: `make test-native-sanitized`. Values are tested elsewhere; here it is memory.
//
// Every buffer ends where its last value does and the gaps between rows are not-a-number, so that what is read or
// written beyond a view is seen: by the sanitizer, in a gap, or in a result. Mappings are taken from malloc (see
// build.py), which is guarded. Each operation runs with one thread and with three, and must give the same bits.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "../decode.h"
#include "../kv_cache.h"
#include "../linear.h"
#include "../ops.h"
#include "../pool.h"
#include "../variants.h"

extern "C" void* guarded_mmap(void*, size_t bytes, int, int, int, long) {
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (memory == nullptr) return reinterpret_cast<void*>(-1);
  return std::memset(memory, 0, bytes);
}

extern "C" int guarded_munmap(void* memory, size_t) {
  std::free(memory);
  return 0;
}

namespace headrace {
namespace {

uint64_t state = 0x9e3779b97f4a7c15u;

uint64_t next() {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

int64_t between(int64_t least, int64_t most) { return least + static_cast<int64_t>(next() % (most - least + 1)); }
bool chance(int percent) { return between(1, 100) <= percent; }
float uniform() { return static_cast<float>(next() >> 40) / 16777216.0f; }
float number() { return (uniform() + uniform() + uniform() - 1.5f) * 2.0f; }

template <class T>
T one_of(std::initializer_list<T> values) {
  return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
}

[[noreturn]] void fail(const char* variant, const char* operation, const char* what) {
  std::fprintf(stderr, "%s %s: %s\n", variant, operation, what);
  std::exit(1);
}

// A heap block of exactly `count` values.
template <class T>
struct Exact {
  T* data;
  int64_t count;

  explicit Exact(int64_t values) : data(static_cast<T*>(std::malloc(values * sizeof(T)))), count(values) {}
  Exact(const Exact&) = delete;
  ~Exact() { std::free(data); }
  template <class Make>
  Exact& fill(Make make) {
    for (int64_t i = 0; i < count; i++) data[i] = make(i);
    return *this;
  }
};

// Rows with gaps; the last one has none.
struct Rows {
  int64_t rows, width, stride;
  Exact<float> memory;

  Rows(int64_t row_count, int64_t row_width)
      : rows(row_count), width(row_width), stride(row_width + between(0, 3)), memory((rows - 1) * stride + width) {
    memory.fill([&](int64_t i) { return i % stride < width ? number() : NAN; });
  }

  View view() { return {memory.data, stride}; }

  void check(const char* variant, const char* operation) const {
    for (int64_t i = 0; i < memory.count; i++) {
      const bool gap = i % stride >= width;
      if (gap != std::isnan(memory.data[i]))
        fail(variant, operation, gap ? "wrote between rows" : "a result is no number");
    }
  }
};

struct Pools {
  Pool one{1}, three{3};
};

// run(pool) twice; what `result` holds after it must be the same.
template <class Run>
void same_with_any_threads(Pools& pools, const Kernels& k, const char* operation, Rows& result, Run run) {
  run(&pools.one);
  result.check(k.name, operation);
  std::vector<float> first(result.memory.data, result.memory.data + result.memory.count);
  for (int64_t i = 0; i < result.memory.count; i++)
    if (i % result.stride < result.width) result.memory.data[i] = number();
  run(&pools.three);
  if (std::memcmp(first.data(), result.memory.data, first.size() * sizeof(float)) != 0)
    fail(k.name, operation, "three threads give other bits than one");
}

int64_t some_width() { return one_of<int64_t>({1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 130, 577}); }
int64_t some_rows() { return one_of<int64_t>({1, 2, 3, 5, 8, 13, 33, 70}); }

void drive_rows(Pools& pools, const Kernels& k) {
  const int64_t rows = some_rows(), width = some_width(), parts = one_of<int64_t>({1, 1, 3});
  {
    Rows x(rows, parts * width), residual(rows, parts * width), y(rows, parts * width), sum(rows, parts * width);
    Exact<float> weight(width);
    weight.fill([](int64_t) { return number(); });
    for (bool added : {false, true})
      same_with_any_threads(pools, k, "norm", y, [&](Pool* pool) {
        k.norm(pool, {x.view(), added ? residual.view() : View{nullptr, 0}, weight.data, 1e-5f, rows, parts, width,
                      y.view(), added ? sum.view() : View{nullptr, 0}});
      });
    sum.check(k.name, "norm");
    same_with_any_threads(pools, k, "add", y, [&](Pool* pool) {
      k.add(pool, {x.view(), residual.view(), rows, parts * width, y.view()});
    });
    same_with_any_threads(pools, k, "scale", y,
                          [&](Pool* pool) { k.scale(pool, {x.view(), 0.3f, rows, parts * width, y.view()}); });
    Exact<int32_t> index(rows);
    index.fill([&](int64_t) { return static_cast<int32_t>(between(0, rows - 1)); });
    same_with_any_threads(pools, k, "pick", y, [&](Pool* pool) {
      k.pick(pool, {x.view(), index.data, rows, parts * width, y.view()});
    });
  }
  {
    Rows x(rows, 2 * width), y(rows, width);
    same_with_any_threads(pools, k, "silu_mul", y, [&](Pool* p) { k.silu_mul(p, {x.view(), rows, width, y.view()}); });
    same_with_any_threads(pools, k, "gelu_mul", y, [&](Pool* p) { k.gelu_mul(p, {x.view(), rows, width, y.view()}); });
  }
  const int64_t half = one_of<int64_t>({1, 8, 20, 32}), head_dim = 2 * half + one_of<int64_t>({0, 6});
  const int64_t heads = between(1, 9), positions = 40;
  Rows x(rows, heads * head_dim), y(rows, heads * head_dim);
  Exact<float> cos(positions * half), sin(positions * half);
  cos.fill([](int64_t) { return number(); });
  sin.fill([](int64_t) { return number(); });
  Exact<int32_t> at(rows);
  at.fill([&](int64_t) { return static_cast<int32_t>(between(0, positions - 1)); });
  same_with_any_threads(pools, k, "rope", y, [&](Pool* pool) {
    k.rope(pool, {x.view(), cos.data, sin.data, half, head_dim, heads, rows, at.data, y.view()});
  });
}

// Whole texts of several lengths, every row of which sees all of its text.
void drive_encoder(Pools& pools, const Kernels& k) {
  const int64_t heads = between(1, 4), head_dim = one_of<int64_t>({1, 8, 16, 20, 32, 64}), width = heads * head_dim;
  const int64_t sequences = between(1, 4);
  Exact<int32_t> starts(sequences + 1);
  starts.fill([&](int64_t i) {
    const int64_t tokens = one_of<int64_t>({1, 2, 15, 16, 17, 48, 49, 100, 256, 300});
    return i == 0 ? 0 : static_cast<int32_t>(starts.data[i - 1] + tokens);
  });
  const int64_t rows = starts.data[sequences];
  const BatchView batch = {rows, sequences, nullptr, nullptr, nullptr, starts.data, nullptr, nullptr, 0};
  Rows q(rows, width), keys(rows, width), values(rows, width), y(rows, width);
  Exact<float> weight(width), bias(width);
  weight.fill([](int64_t) { return number(); });
  bias.fill([](int64_t) { return number(); });
  same_with_any_threads(pools, k, "encoder_attention", y, [&](Pool* pool) {
    k.encoder_attention(pool, {q.view(), keys.view(), values.view(), heads, head_dim, 0.2f, &batch, y.view()});
  });
  same_with_any_threads(pools, k, "layer_norm", y, [&](Pool* pool) {
    k.layer_norm(pool, {q.view(), weight.data, bias.data, 1e-5f, rows, width, y.view()});
  });
  same_with_any_threads(pools, k, "gelu", y, [&](Pool* p) { k.gelu(p, {q.view(), rows, width, y.view()}); });
  same_with_any_threads(pools, k, "tanh", y, [&](Pool* p) { k.tanh(p, {q.view(), rows, width, y.view()}); });
}

struct Packed {
  PackedMatrix* matrix;

  // A random source weight of any form, packed by a scheme that takes it.
  Packed(Pool* pool, const Kernels& k, int64_t out, int64_t in) {
    const Storage storage = one_of({Storage::kF32, Storage::kBF16, Storage::kF16, Storage::kInt4, Storage::kInt8});
    const bool grouped = storage == Storage::kInt4 || storage == Storage::kInt8;
    const int64_t group_size = in % 64 == 0 && chance(50) ? 64 : in % 32 == 0 ? 32 : 16;
    const int64_t groups = grouped ? in / group_size : 0;
    const int64_t dense_bits = storage == Storage::kF32 ? 32 : 16;
    const int64_t bits = storage == Storage::kInt4 ? 4 : storage == Storage::kInt8 ? 8 : dense_bits;
    Exact<uint8_t> values(out * in * bits / 8);
    values.fill([](int64_t) { return static_cast<uint8_t>(next()); });
    for (int64_t i = 0; i < out * in && !grouped; i++) {
      const float value = number();
      uint32_t word;
      std::memcpy(&word, &value, 4);
      if (storage == Storage::kF32) std::memcpy(values.data + 4 * i, &value, 4);
      const uint16_t part = storage == Storage::kBF16 ? word >> 16 : static_cast<uint16_t>(next() & 0xbbff);
      if (storage != Storage::kF32) std::memcpy(values.data + 2 * i, &part, 2);
    }
    Exact<float> scales(out * groups), offsets(out * groups);
    scales.fill([](int64_t) { return number() / 8; });
    const int offset_form = static_cast<int>(between(0, 2));
    offsets.fill([&](int64_t i) { return offset_form == 1 ? scales.data[i] * -8.0f : number(); });
    const Scheme scheme = grouped ? one_of({Scheme::kFloat, Scheme::kInt8})
                                  : storage == Storage::kBF16 && chance(50)
                                        ? Scheme::kBF16
                                        : Scheme::kFloat;
    matrix = k.pack(pool,
                    {values.data, grouped ? scales.data : nullptr, grouped && offset_form > 0 ? offsets.data : nullptr,
                     out, in, static_cast<int32_t>(storage), static_cast<int32_t>(grouped ? group_size : 0)},
                    scheme);
    if (matrix == nullptr) fail(k.name, "pack", "gives nothing");
    if (grouped) return;
    Exact<int8_t> quantised(out * in);
    Exact<float> of_groups(out * (in / group_size));
    k.quantise(pool,
               {values.data, nullptr, nullptr, out, in, static_cast<int32_t>(storage), static_cast<int32_t>(group_size)},
               quantised.data, of_groups.data);
  }
  Packed(const Packed&) = delete;
  ~Packed() { free_packed(matrix); }
};

void drive_linear(Pools& pools, const Kernels& k) {
  const int64_t rows = one_of<int64_t>({1, 2, 3, 5, 8, 13, 33, 70, 130});
  const int64_t out = one_of<int64_t>({1, 7, 16, 17, 48, 100, 260}), in = one_of<int64_t>({16, 32, 48, 64, 160, 320});
  Packed packed(&pools.one, k, out, in);
  Rows x(rows, in), y(rows, out), table_rows(rows, in);
  Exact<float> bias(out);
  bias.fill([](int64_t) { return number(); });
  const float* added = chance(50) ? bias.data : nullptr;
  same_with_any_threads(pools, k, "linear", y, [&](Pool* pool) {
    k.linear(pool, {x.view(), rows, packed.matrix, added, y.view()});
  });
  Exact<int32_t> tokens(rows);
  tokens.fill([&](int64_t) { return static_cast<int32_t>(between(0, out - 1)); });
  same_with_any_threads(pools, k, "gather", table_rows, [&](Pool* pool) {
    k.gather(pool, {packed.matrix, tokens.data, rows, table_rows.view()});
  });
}

void drive_odd_linear(Pools& pools, const Kernels& k) {
  const int64_t rows = some_rows(), out = some_width(), in = some_width();
  Exact<float> values(out * in);
  values.fill([](int64_t) { return number(); });
  const SourceWeight source = {values.data, nullptr, nullptr, out, in, static_cast<int32_t>(Storage::kF32), 0};
  PackedMatrix* matrix = k.pack(&pools.three, source, Scheme::kFloat);
  Rows x(rows, in), y(rows, out);
  same_with_any_threads(pools, k, "linear", y,
                        [&](Pool* pool) { k.linear(pool, {x.view(), rows, matrix, nullptr, y.view()}); });
  free_packed(matrix);
}

void drive_experts(Pools& pools, const Kernels& k) {
  const int64_t rows = some_rows(), width = one_of<int64_t>({16, 32, 96}), inner = one_of<int64_t>({16, 32});
  const int64_t experts = one_of<int64_t>({1, 2, 5, 16, 17, 40}), top_k = between(1, experts < 8 ? experts : 8);
  std::vector<Packed*> held;
  std::vector<const PackedMatrix*> gate_up, down;
  for (int64_t e = 0; e < experts; e++) {
    held.push_back(new Packed(&pools.one, k, 2 * inner, width));
    gate_up.push_back(held.back()->matrix);
    held.push_back(new Packed(&pools.one, k, width, inner));
    down.push_back(held.back()->matrix);
  }
  Rows x(rows, width), router(rows, experts), y(rows, width);
  const bool normalize = chance(50);
  same_with_any_threads(pools, k, "experts", y, [&](Pool* pool) {
    k.experts(pool, {x.view(), router.view(), gate_up.data(), down.data(), rows, width, experts, top_k, normalize,
                     y.view()});
  });
  for (Packed* packed : held) delete packed;
}

// Sequences with a past, of which each brings some rows: first their past in one step, then their rows.
void drive_attention(Pools& pools, const Kernels& k) {
  const int64_t layers = 2, block_size = one_of<int64_t>({1, 2, 3, 4, 16, 32, 48}), kv_heads = between(1, 3);
  const int64_t heads = kv_heads * between(1, 4), head_dim = one_of<int64_t>({8, 16, 20, 64, 80});
  const KVDtype dtype = static_cast<KVDtype>(between(0, 5));
  const int64_t sequences = between(1, 4), window = chance(30) ? between(1, 40) : 0;
  std::vector<int64_t> past, fresh;
  int64_t most_blocks = 0, blocks = 1;
  for (int64_t s = 0; s < sequences; s++) {
    past.push_back(one_of<int64_t>({0, 1, 15, 40, 300, 600}));
    fresh.push_back(chance(60) ? 1 : between(1, 40));
    const int64_t needed = (past[s] + fresh[s] + block_size - 1) / block_size;
    most_blocks = needed > most_blocks ? needed : most_blocks;
    blocks += needed;
  }
  KVCache* cache = kv_cache_new(layers, blocks, block_size, kv_heads, head_dim, dtype);
  if (cache == nullptr) fail(k.name, "attention", "no cache");
  Exact<int32_t> tables(sequences * most_blocks);
  int32_t taken = 1;
  for (int64_t s = 0; s < sequences; s++)
    for (int64_t b = 0; b < most_blocks; b++)
      tables.data[s * most_blocks + b] = b * block_size < past[s] + fresh[s] ? taken++ : 0;
  for (bool now : {false, true}) {
    std::vector<int32_t> positions, slots, starts = {0}, lens, table;
    for (int64_t s = 0; s < sequences; s++) {
      const int64_t first = now ? past[s] : 0, end = now ? past[s] + fresh[s] : past[s];
      if (first == end) continue;
      for (int64_t p = first; p < end; p++) {
        positions.push_back(static_cast<int32_t>(p));
        const int64_t block = tables.data[s * most_blocks + p / block_size];
        slots.push_back(static_cast<int32_t>(block * block_size + p % block_size));
      }
      starts.push_back(static_cast<int32_t>(positions.size()));
      lens.push_back(static_cast<int32_t>(end));
      table.insert(table.end(), tables.data + s * most_blocks, tables.data + (s + 1) * most_blocks);
    }
    const int64_t rows = static_cast<int64_t>(positions.size());
    if (rows == 0) continue;
    auto exact = [](Exact<int32_t>& to, const std::vector<int32_t>& from) {
      return to.fill([&](int64_t i) { return from[i]; }).data;
    };
    Exact<int32_t> a(rows), b(rows), c(starts.size()), d(lens.size()), e(table.size());
    const BatchView batch = {rows,           static_cast<int64_t>(lens.size()), nullptr,        exact(a, positions),
                             exact(b, slots), exact(c, starts),                  exact(d, lens), exact(e, table),
                             most_blocks};
    Rows q(rows, heads * head_dim), keys(rows, kv_heads * head_dim), values(rows, kv_heads * head_dim);
    Rows y(rows, heads * head_dim);
    same_with_any_threads(pools, k, "attention", y, [&](Pool* pool) {
      k.attention(pool, {q.view(), keys.view(), values.view(), cache, 1, heads, kv_heads, head_dim, 0.2f, window,
                         &batch, y.view()});
    });
  }
  Exact<uint8_t> block(kv_cache_block_bytes(cache));
  kv_cache_read_block(cache, blocks - 1, block.data);
  kv_cache_write_block(cache, 0, block.data);
  const int32_t pairs[] = {0, static_cast<int32_t>(blocks - 1)};
  if (!kv_cache_copy_blocks(cache, pairs, 1)) fail(k.name, "copy_blocks", "no memory");
  kv_cache_free(cache);
}

// Lists of up to `most` different tokens a row; their memory.
struct Lists {
  std::vector<int32_t> row_starts = {0}, tokens;
  Exact<int32_t>*starts = nullptr, *token_ids = nullptr;
  Exact<float>* numbers = nullptr;

  Lists(int64_t rows, int64_t vocab, int64_t most, bool any) {
    if (!any) return;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t count = between(0, most < vocab ? most : vocab), step = vocab / (count + 1) + 1;
      for (int64_t i = 0; i < count && i * step < vocab; i++) tokens.push_back(static_cast<int32_t>(i * step));
      row_starts.push_back(static_cast<int32_t>(tokens.size()));
    }
    starts = new Exact<int32_t>(rows + 1);
    starts->fill([&](int64_t i) { return row_starts[i]; });
    token_ids = new Exact<int32_t>(tokens.size());
    token_ids->fill([&](int64_t i) { return tokens[i]; });
    numbers = new Exact<float>(tokens.size());
    numbers->fill([](int64_t) { return number(); });
  }
  Lists(const Lists&) = delete;
  ~Lists() {
    delete starts;
    delete token_ids;
    delete numbers;
  }
  TokenLists lists() const {
    if (starts == nullptr) return {nullptr, nullptr, nullptr};
    return {starts->data, token_ids->data, numbers->data};
  }
};

void drive_sample(Pools& pools, const Kernels& k) {
  const int64_t rows = between(1, 6), vocab = one_of<int64_t>({1, 2, 5, 15, 16, 17, 33, 777, 1024, 1030, 2100, 9000});
  Rows logits(rows, vocab);
  const int form = static_cast<int>(between(0, 3));
  for (int64_t i = 0; i < logits.memory.count; i++)
    if (i % logits.stride < vocab)
      logits.memory.data[i] = form == 0 ? 0.5f : form == 1 ? std::round(number()) : number() * 4;
  if (chance(10)) logits.memory.data[0] = one_of({NAN, INFINITY, -INFINITY});
  auto floats = [&](Exact<float>& to, std::initializer_list<float> values, bool any) {
    to.fill([&](int64_t) { return one_of(values); });
    return any ? to.data : nullptr;
  };
  Exact<float> t(rows), u(rows), p(rows), m(rows), r(rows), f(rows), s(rows);
  Exact<int32_t> top_k(rows), given(rows);
  top_k.fill([&](int64_t) {
    return static_cast<int32_t>(one_of<int64_t>({0, 1, 2, 10, 400, vocab - 1, vocab, vocab + 3, vocab / 2}));
  });
  given.fill([&](int64_t) { return chance(70) ? -1 : static_cast<int32_t>(vocab - 1); });
  const int64_t words = (vocab + 31) / 32, alternatives = one_of<int64_t>({-1, -1, 0, 1, vocab < 20 ? vocab : 20});
  Exact<uint32_t> mask(rows * words);
  mask.fill([](int64_t) { return static_cast<uint32_t>(next()) | 1u; });
  Exact<uint8_t> masked(rows), broken(rows);
  masked.fill([](int64_t) { return static_cast<uint8_t>(chance(50)); });
  const Lists seen(rows, vocab, 9, chance(30)), generated(rows, vocab, 9, chance(30)), bias(rows, vocab, 9, chance(30));
  const Lists forbidden(rows, vocab, 3, chance(30)), allowed(rows, vocab, 30, chance(20));
  const Lists scored(rows, vocab, 5, alternatives >= 0 && chance(50));
  Exact<int32_t> token_ids(rows), ranks(rows), top(rows * (alternatives > 0 ? alternatives : 0));
  Exact<float> logprobs(rows), top_logprobs(top.count), scored_logprobs(scored.tokens.size());
  u.fill([](int64_t) { return uniform(); });
  SampleArgs args = {};
  args.logits = logits.view();
  args.rows = rows;
  args.vocab = vocab;
  args.temperature = floats(t, {0.0f, 1e-6f, 0.3f, 1.0f, 1.0f, 50.0f}, true);
  args.uniforms = u.data;
  args.top_k = chance(40) ? top_k.data : nullptr;
  args.top_p = floats(p, {1.0f, 0.95f, 0.01f, 0.9999f, 0.0f}, chance(40));
  args.min_p = floats(m, {0.0f, 0.05f, 1.0f}, chance(30));
  args.repetition_penalty = floats(r, {1.0f, 1.3f}, chance(50));
  args.frequency_penalty = floats(f, {0.0f, -1.0f}, chance(50));
  args.presence_penalty = floats(s, {0.0f, 0.7f}, chance(50));
  args.seen = seen.lists();
  args.generated = generated.lists();
  args.logit_bias = bias.lists();
  args.forbidden = forbidden.lists();
  args.allowed = allowed.lists();
  args.scored = scored.lists();
  args.given = chance(20) ? given.data : nullptr;
  args.mask = chance(30) ? mask.data : nullptr;
  args.masked = chance(50) ? masked.data : nullptr;
  args.num_logprobs = alternatives;
  args.token_ids = token_ids.data;
  args.logprobs = logprobs.data;
  args.ranks = ranks.data;
  args.top_token_ids = top.data;
  args.top_logprobs = top_logprobs.data;
  args.scored_logprobs = scored_logprobs.data;
  args.broken = broken.data;
  std::vector<int32_t> first;
  for (Pool* pool : {&pools.one, &pools.three}) {
    k.sample(pool, args);
    std::vector<int32_t> chosen(token_ids.data, token_ids.data + rows);
    for (int32_t token : chosen)
      if (token < 0 || token >= vocab) fail(k.name, "sample", "chose a token that is none");
    if (pool == &pools.three && chosen != first) fail(k.name, "sample", "three threads choose other tokens than one");
    first = chosen;
  }
}

// Sequences go on until the first has no block for its token.
void drive_decode() {
  const int64_t count = between(1, 40), groups = between(1, 3), size = between(1, 20), width = between(1, 9);
  Exact<int32_t> chosen(count), tokens(count), positions(count), lens(count), slots(groups * count);
  Exact<int32_t> tables(groups * count * width), held(groups * count);
  Exact<uint64_t> streams(count);
  Exact<float> uniforms(count);
  chosen.fill([](int64_t i) { return static_cast<int32_t>(i); });
  positions.fill([&](int64_t) { return static_cast<int32_t>(between(0, width * size - 1)); });
  tables.fill([](int64_t) { return static_cast<int32_t>(between(0, 1000)); });
  held.fill([&](int64_t row) {
    const int64_t least = positions.data[row % count] / size + 1;
    return static_cast<int32_t>(between(least, width));
  });
  streams.fill([](int64_t) { return next(); });
  const Decodes decodes = {count,      groups,        size,       width,     chosen.data,
                           tokens.data, positions.data, lens.data, slots.data, tables.data,
                           held.data,   chance(50) ? streams.data : nullptr,  uniforms.data};
  int64_t steps = 0;
  while (advance(decodes)) {
    if (++steps >= width * size) fail("decode", "advance", "went on without a block");
    for (int64_t i = 0; decodes.streams != nullptr && i < count; i++)
      if (!(uniforms.data[i] >= 0.0f && uniforms.data[i] < 1.0f)) fail("decode", "advance", "a draw beyond [0, 1)");
  }
}

}  // namespace
}  // namespace headrace

int main(int count, char** arguments) {
  using namespace headrace;
  const double seconds = count > 1 ? std::atof(arguments[1]) : 8.0;  // of the processor's time, for each variant
  Pools pools;
  for (int index = 0; variant(index) != nullptr; index++) {
    const Kernels& k = *variant(index);
    const std::clock_t start = std::clock();
    int rounds = 0;
    for (; std::clock() - start < seconds * CLOCKS_PER_SEC; rounds++) {
      drive_rows(pools, k);
      drive_encoder(pools, k);
      drive_linear(pools, k);
      drive_odd_linear(pools, k);
      drive_experts(pools, k);
      drive_attention(pools, k);
      drive_sample(pools, k);
      drive_sample(pools, k);
      drive_decode();
    }
    std::printf("%s: %d rounds of every operation\n", k.name, rounds);
    std::fflush(stdout);
  }
}
