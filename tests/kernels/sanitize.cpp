// Runs every exported kernel over random shapes, each array in an allocation of exactly its size: compiled with
// AddressSanitizer and UndefinedBehaviorSanitizer by test_cpu_build.py, which expects it to end with "done". Its
// argument, if there is one, is a file for all results; so what is drawn does not depend on the order in which a
// compiler evaluates a call's arguments.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

struct bf16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

#include "../../quire/kernels/cpu/exports.h"

static std::mt19937 generator(7);
static int draw(int low, int high) {
  return low + static_cast<int>(generator() % static_cast<unsigned>(high - low + 1));
}

template <class T>
using Array = std::unique_ptr<T[]>;

static void put(float& x, float value) { x = value; }
static void put(bf16& x, float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  x.bits = static_cast<uint16_t>(bits >> 16);
}
static bool finite(float x) { return std::isfinite(x); }
static bool finite(bf16 x) { return (x.bits & 0x7f80) != 0x7f80; }

template <class T>
Array<T> numbers(long n, bool nan = false) {
  Array<T> array(new T[n]);
  for (long i = 0; i < n; ++i) put(array[i], nan ? NAN : static_cast<float>(draw(-1000, 1000)) / 500.0f);
  return array;
}
static float number(float x) { return x; }
static float number(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

static std::FILE* results = nullptr;  // of every array: its size and its numbers, as floats
static void write(float x) { std::fwrite(&x, sizeof x, 1, results); }

template <class T>
void expect_finite(const Array<T>& array, long n, const char* where) {
  if (results) {
    write(static_cast<float>(n));
    for (long i = 0; i < n; ++i) write(number(array[i]));
  }
  for (long i = 0; i < n; ++i)
    if (!finite(array[i])) {
      std::printf("%s: element %ld of %ld is not finite\n", where, i, n);
      std::exit(1);
    }
}

// Random sequences, their older tokens put in place by store_kv, the step's own by rope_store; then attention.
template <class T>
void attend() {
  const int sequences = draw(1, 4), kv_heads = draw(1, 3), heads = kv_heads * draw(1, 5), dim = 2 * draw(1, 50);
  const long most = 40, pages = sequences * most;
  Array<int32_t> starts(new int32_t[sequences + 1]()), contexts(new int32_t[sequences]);
  Array<int32_t> table(new int32_t[sequences * most]);
  for (long i = 0; i < pages; ++i) table[i] = static_cast<int32_t>(pages - 1 - i);
  for (int s = 0; s < sequences; ++s) {
    contexts[s] = draw(1, draw(0, 1) ? 40 : static_cast<int>(most) * 16);
    starts[s + 1] = starts[s] + draw(1, contexts[s] < 90 ? contexts[s] : 90);
  }
  const KVFormat format = {draw(kPlain, kFloat8), draw(1, 20) / 10.0f, draw(1, 20) / 10.0f};
  const long bytes = format.held == kPlain ? sizeof(T) : 1, scales = format.held == kInt8 ? 2 : 0;
  const long tokens = starts[sequences], stride = 16L * kv_heads * (dim + scales), width = heads + 2 * kv_heads;
  Array<char> keys(new char[pages * stride * bytes]), values(new char[pages * stride * bytes]);
  std::memset(keys.get(), 255, pages * stride * bytes);  // NaN, of whatever type
  std::memset(values.get(), 255, pages * stride * bytes);
  Array<int64_t> slots(new int64_t[tokens]), positions(new int64_t[tokens]);
  for (int s = 0; s < sequences; ++s) {
    const long old = contexts[s] - (starts[s + 1] - starts[s]);
    const auto slot = [&](long at) { return table[s * most + at / 16] * 16L + at % 16; };
    Array<int64_t> before(new int64_t[old]);
    for (long i = 0; i < old; ++i) before[i] = slot(i);
    auto k = numbers<T>(old * kv_heads * dim), v = numbers<T>(old * kv_heads * dim);
    Kernels<T>::store_kv(k.get(), v.get(), keys.get(), values.get(), &format, before.get(), stride, stride, old, pages,
                         kv_heads, dim);
    for (long i = starts[s]; i < starts[s + 1]; ++i) slots[i] = slot(positions[i] = old + i - starts[s]);
  }
  auto qkv = numbers<T>(tokens * width * dim), query = numbers<T>(tokens * heads * dim);
  auto out = numbers<T>(tokens * heads * dim, true);
  const bool scaled = draw(0, 1);
  const int norm = draw(0, 3);                        // rope.cpp has their names
  const long norms = norm == 1 || norm == 2 ? 1 : 0;  // a weight for each head
  auto cos_sin = numbers<float>(most * 16 * dim), q_scale = numbers<float>(most * 16);
  auto q_norm = numbers<float>((norms ? heads : 1) * dim), k_norm = numbers<float>((norms ? kv_heads : 1) * dim);
  auto bias = numbers<float>(heads * (2 * most * 16 + 15)), sinks = numbers<float>(heads);
  const bool sunk = draw(0, 1), normed = draw(0, 1), biased = draw(0, 1), turned = draw(0, 1), windowed = draw(0, 1),
             capped = draw(0, 1);
  const int window = windowed ? draw(1, 300) * (draw(0, 1) ? 1 : -1) : 0, ahead = draw(0, 1) ? draw(0, 300) : 0,
            threads = draw(1, 3);
  const auto v_norm = numbers<float>(dim);
  const int given = draw(1, 2);  // whether values are projected
  int failed = Kernels<T>::rope_store(qkv.get(), normed ? q_norm.get() : nullptr, normed ? k_norm.get() : nullptr,
                                      draw(0, 1) ? v_norm.get() : nullptr, turned ? cos_sin.get() : nullptr,
                                      scaled ? q_scale.get() : nullptr, norm, given, positions.get(), slots.get(),
                                      query.get(), keys.get(), values.get(), &format, stride, stride, tokens, pages,
                                      heads, kv_heads, dim, 1e-5f, threads);
  failed |= Kernels<T>::paged_attention(
      out.get(), query.get(), keys.get(), values.get(), &format, starts.get(), contexts.get(), table.get(), most,
      stride, stride, pages, sequences, heads, kv_heads, dim, 0.2f, window, capped ? 8.0f : 0.0f, ahead,
      biased ? bias.get() : nullptr, 2 * most * 16 + 15, most * 16 - 1, sunk ? sinks.get() : nullptr, 0, threads);
  if (failed) std::exit(1);
  expect_finite(out, tokens * heads * dim, "attention");
}

// Tokens whose latents and keys are stored; then attention over them, in one head's pages.
template <class T>
void attends_latents() {
  const int heads = draw(1, 40), latent = 2 * draw(1, 40), rotated = 2 * draw(1, 20), dim = latent + rotated;
  const int tokens = draw(1, 90), plain = draw(1, 30), threads = draw(1, 3);
  const long pages = 6;
  Array<int32_t> starts(new int32_t[2]()), contexts(new int32_t[1]), table(new int32_t[pages]);
  starts[1] = contexts[0] = tokens;
  Array<int64_t> slots(new int64_t[tokens]), positions(new int64_t[tokens]);
  for (long i = 0; i < pages; ++i) table[i] = static_cast<int32_t>(pages - 1 - i);
  for (long i = 0; i < tokens; ++i) slots[i] = table[i / 16] * 16L + (positions[i] = i) % 16;
  const KVFormat format = {draw(kPlain, kFloat8), draw(1, 20) / 10.0f, 1.0f};
  const long bytes = format.held == kPlain ? sizeof(T) : 1, stride = 16L * (dim + (format.held == kInt8 ? 2 : 0));
  Array<char> cache(new char[pages * stride * bytes]);
  std::memset(cache.get(), 255, pages * stride * bytes);
  const int in = 2 * plain;
  std::vector<PackedLinear> linears;
  std::vector<Array<T>> weights;
  for (int h = 0; h < heads; ++h) {
    auto weight = numbers<T>(static_cast<long>(latent) * in);
    weights.emplace_back(new T[(latent + 63) / 64 * 64L * in]);
    Kernels<T>::pack_linear(weight.get(), weights.back().get(), in, latent, threads);
    linears.push_back({weights.back().get(), nullptr, in, latent, 0, 0, nullptr, nullptr});
  }
  const LinearBlocks blocks = {linears.data(), heads, rotated};
  auto x = numbers<T>(tokens * heads * (in + rotated)), q = numbers<T>(tokens * heads * dim, true);
  auto kv = numbers<T>(tokens * dim), out = numbers<T>(tokens * heads * latent, true);
  auto norm = numbers<float>(latent), cos_sin = numbers<float>(tokens * rotated);
  Kernels<T>::linear_blocks(&blocks, x.get(), q.get(), tokens, threads);
  int failed = Kernels<T>::latent_store(q.get(), kv.get(), norm.get(), draw(0, 1) ? cos_sin.get() : nullptr, draw(0, 1),
                                        positions.get(), slots.get(), cache.get(), &format, stride, tokens, pages,
                                        heads, latent, rotated, 1e-5f, threads);
  failed |= Kernels<T>::paged_attention(out.get(), q.get(), cache.get(), cache.get(), &format, starts.get(),
                                        contexts.get(), table.get(), pages, stride, stride, pages, 1, heads, 1, dim,
                                        0.2f, 0, 0.0f, 0, nullptr, 0, 0, nullptr, latent, threads);
  if (failed) std::exit(1);
  expect_finite(out, tokens * heads * latent, "attention over latents");
  if (format.held != kPlain) return;
  const int index_heads = draw(1, 20), turned = 2 * draw(1, 10), index_dim = turned + 2 * draw(0, 10),
            top = draw(1, 90);
  auto index_q = numbers<T>(tokens * index_heads * index_dim), index_k = numbers<T>(tokens * index_dim);
  auto index_weights = numbers<T>(tokens * index_heads);
  auto index_norm = numbers<float>(index_dim), index_bias = numbers<float>(index_dim);
  auto index_cos_sin = numbers<float>(tokens * turned);
  auto index_cache = numbers<T>(pages * 16 * index_dim, true);
  Array<int32_t> selected(new int32_t[tokens * top]);
  failed = Kernels<T>::select_keys(
      index_q.get(), index_k.get(), index_weights.get(), index_norm.get(), index_bias.get(), index_cos_sin.get(),
      draw(0, 1), positions.get(), slots.get(), index_cache.get(), 16L * index_dim, starts.get(), contexts.get(),
      table.get(), pages, selected.get(), tokens, pages, 1, index_heads, index_dim, turned, top, 1e-5f, threads);
  // Scores that differ by a rounding may change the list, so that attention gets another one: results are compared.
  for (long t = 0; t < tokens; ++t) {
    const long seen = t < top ? t + 1 : top;
    for (long i = 0; i < seen; ++i) selected[t * top + i] = static_cast<int32_t>(i * (t + 1) / seen);
  }
  failed |= Kernels<T>::sparse_attention(out.get(), q.get(), cache.get(), selected.get(), starts.get(), contexts.get(),
                                         table.get(), pages, stride, pages, 1, heads, dim, 0.2f, latent, top, threads);
  if (failed) std::exit(1);
  expect_finite(out, tokens * heads * latent, "attention over selected latents");
}

// Sequences of which some tokens were computed before, whose columns may be anything.
template <class T>
void convolves() {
  const int sequences = draw(1, 4), channels = draw(1, 200), width = draw(2, 6), kept = width - 1 + draw(0, 9);
  const bool gated = draw(0, 1), paged = draw(0, 1);
  const long most = 5, pages = sequences * most;
  Array<int32_t> starts(new int32_t[sequences + 1]()), contexts(new int32_t[sequences]), table(new int32_t[pages]);
  Array<int64_t> slots(new int64_t[sequences]);
  for (long i = 0; i < pages; ++i) table[i] = static_cast<int32_t>(pages - 1 - i);
  for (int s = 0; s < sequences; ++s) {
    contexts[s] = draw(1, static_cast<int>(most) * 16);
    starts[s + 1] = starts[s] + draw(1, contexts[s]);
    slots[s] = sequences - 1 - s;
  }
  const long tokens = starts[sequences];
  auto bcx = numbers<T>(tokens * 3 * channels), out = numbers<T>(tokens * channels, true);
  auto weight = numbers<float>(width * channels), bias = numbers<float>(channels);
  auto ends = numbers<T>(pages * (width - 1) * channels), recent = numbers<T>(sequences * kept * channels);
  const bool biased = draw(0, 1);
  const int threads = draw(1, 3);
  if (Kernels<T>::short_conv(bcx.get(), weight.get(), biased ? bias.get() : nullptr, out.get(),
                             paged ? ends.get() : nullptr, recent.get(), starts.get(), contexts.get(), table.get(),
                             most, slots.get(), pages, sequences, sequences, channels, width, kept, gated, threads))
    std::exit(1);
  expect_finite(out, tokens * channels, "short convolution");
  expect_finite(ends, pages * (width - 1) * channels, "columns in pages");
  expect_finite(recent, sequences * kept * channels, "columns in slots");
}

// Sequences with guesses before their step's own tokens, and behind them, by one of the rules.
template <class T>
void recurs() {
  const int sequences = draw(1, 3), groups = draw(1, 3), heads = groups * draw(1, 3), key = 2 * draw(1, 40),
            value = 16 * draw(1, 9), drafts = draw(0, 5);
  Array<int32_t> starts(new int32_t[sequences + 1]()), contexts(new int32_t[sequences]);
  Array<int32_t> seen(new int32_t[sequences]), known(new int32_t[sequences]);
  Array<int64_t> slots(new int64_t[sequences]);
  for (int s = 0; s < sequences; ++s) {
    const int first = draw(0, 20), before = draw(0, drafts < first ? drafts : first), behind = draw(0, drafts);
    contexts[s] = first + draw(1, 70) + behind;
    starts[s + 1] = starts[s] + contexts[s] - first;
    seen[s] = first - before;
    known[s] = contexts[s] - behind;
    slots[s] = sequences - 1 - s;
  }
  const bool is_delta = draw(0, 1), guessed = draw(0, 1), normed = draw(0, 1), decay_per_row = draw(0, 1);
  const long tokens = starts[sequences], values = static_cast<long>(heads) * value;
  const long decays = is_delta && decay_per_row ? static_cast<long>(heads) * key : heads;
  const long inputs = 2L * groups * key + values, beside = is_delta ? heads + decays : heads, kept = inputs + beside;
  const long matrix = static_cast<long>(key) * value;
  auto given = numbers<T>(tokens * inputs), z = numbers<T>(tokens * values), gates = numbers<T>(tokens * beside);
  auto rate = numbers<float>(heads), shift = numbers<float>(decays), skip = numbers<float>(heads);
  auto norm = numbers<float>(is_delta ? value : values);
  for (int h = 0; h < heads; ++h) rate[h] = -__builtin_fabsf(rate[h]);
  auto out = numbers<T>(tokens * values, true), guesses = numbers<T>(sequences * drafts * kept);
  auto matrices = numbers<float>(sequences * heads * matrix);
  const int32_t *from = guessed ? seen.get() : nullptr, *certain = guessed ? known.get() : nullptr;
  const int failed =
      is_delta
          ? Kernels<T>::delta_rule(given.get(), z.get(), gates.get(), rate.get(), shift.get(), norm.get(), out.get(),
                                   matrices.get(), guesses.get(), starts.get(), contexts.get(), from, certain,
                                   slots.get(), sequences, sequences, groups, heads, key, value, drafts, 1e-5f,
                                   decay_per_row, draw(0, 1), draw(1, 3))
          : Kernels<T>::state_space(given.get(), z.get(), gates.get(), rate.get(), shift.get(), skip.get(),
                                    normed ? norm.get() : nullptr, out.get(), matrices.get(), guesses.get(),
                                    starts.get(), contexts.get(), from, certain, slots.get(), sequences, sequences,
                                    groups, heads, key, value, drafts, 1e-5f, 0.001f, 5.0f, draw(0, 1), draw(1, 3));
  if (failed) std::exit(1);
  expect_finite(out, tokens * values, "recurrence");
  expect_finite(matrices, sequences * heads * matrix, "its matrices");
  expect_finite(guesses, sequences * drafts * kept, "its guesses");
}

// The same of selective scans, whose every channel has a step.
template <class T>
void scans() {
  const int heads = draw(1, 4), key = 2 * draw(1, 20), value = 16 * draw(1, 5), drafts = draw(0, 3);
  const int first = draw(0, 9), before = draw(0, drafts < first ? drafts : first), behind = draw(0, drafts);
  Array<int32_t> starts(new int32_t[2]()), contexts(new int32_t[1]), seen(new int32_t[1]), known(new int32_t[1]);
  Array<int64_t> slots(new int64_t[1]());
  contexts[0] = first + draw(1, 50) + behind;
  starts[1] = contexts[0] - first;
  seen[0] = first - before;
  known[0] = contexts[0] - behind;
  const long tokens = starts[1], values = static_cast<long>(heads) * value, inputs = values + 2L * key;
  auto x = numbers<T>(tokens * values), bc = numbers<T>(tokens * 2 * key), given = numbers<T>(tokens * inputs, true);
  Kernels<T>::join(x.get(), bc.get(), given.get(), tokens, static_cast<int>(values), 2 * key, draw(1, 3));
  expect_finite(given, tokens * inputs, "join");
  auto z = numbers<T>(tokens * values), steps = numbers<T>(tokens * values);
  auto rate = numbers<float>(values * key), shift = numbers<float>(values), skip = numbers<float>(values);
  auto norm = numbers<float>(key), other = numbers<float>(key);
  for (long i = 0; i < values * key; ++i) rate[i] = -__builtin_fabsf(rate[i]);
  auto out = numbers<T>(tokens * values, true), guesses = numbers<T>(drafts * (inputs + values));
  auto matrices = numbers<float>(values * key);
  const bool normed = draw(0, 1);
  if (Kernels<T>::selective_scan(given.get(), z.get(), steps.get(), rate.get(), shift.get(), skip.get(),
                                 normed ? norm.get() : nullptr, normed ? other.get() : nullptr, out.get(),
                                 matrices.get(), guesses.get(), starts.get(), contexts.get(), seen.get(), known.get(),
                                 slots.get(), 1, 1, 1, heads, key, value, drafts, 1e-5f, draw(1, 3)))
    std::exit(1);
  expect_finite(out, tokens * values, "selective scan");
  expect_finite(matrices, values * key, "its matrices");
}

template <class T>
void rowwise() {
  const int size = draw(1, 200), threads = draw(1, 3), kind = draw(0, 5);
  const long rows = draw(1, 400);
  auto x = numbers<T>(rows * size), y = numbers<T>(rows * size);
  auto weight = numbers<float>(size);
  auto out = numbers<T>(rows * size, true), gate_up = numbers<T>(2 * rows * size);
  Kernels<T>::rms_norm(x.get(), weight.get(), out.get(), rows, size, 1e-5f, threads);
  Kernels<T>::layer_norm(x.get(), draw(0, 1) ? y.get() : nullptr, weight.get(), weight.get(), out.get(), rows, size,
                         1e-5f, threads);
  expect_finite(out, rows * size, "rms_norm");
  Kernels<T>::add(x.get(), y.get(), rows * size, threads);
  expect_finite(y, rows * size, "add");
  Kernels<T>::activate(x.get(), rows * size, kind, 0.8f, 0.3f, 0.5f, threads);
  expect_finite(x, rows * size, "activate");
  Kernels<T>::add_rms_norm(x.get(), y.get(), weight.get(), rows, size, 1e-5f, threads);
  expect_finite(x, rows * size, "add_rms_norm");
  Kernels<T>::sigmoid_mul(x.get(), y.get(), rows * size, 1, threads);
  Kernels<T>::sigmoid_mul(x.get(), y.get(), rows, size, threads);
  expect_finite(x, rows * size, "sigmoid_mul");
  std::vector<float> other(rows * size);  // has room for either type
  Kernels<T>::cast(x.get(), other.data(), rows * size, threads);
  Kernels<T>::silu_mul(gate_up.get(), out.get(), rows, size, threads);
  expect_finite(out, rows * size, "silu_mul");
  Kernels<T>::gelu_mul(gate_up.get(), out.get(), rows, size, threads);
  expect_finite(out, rows * size, "gelu_mul");
  Kernels<T>::clamped_mul(gate_up.get(), out.get(), rows, size, 1.702f, 1.5f, threads);
  expect_finite(out, rows * size, "clamped_mul");
  Kernels<T>::mul_columns(out.get(), gate_up.get(), rows, size, 2 * size, draw(0, size), threads);
  expect_finite(out, rows * size, "mul_columns");
}

template <class T>
void adapt() {
  const int in = 2 * draw(1, 100), first = draw(0, 40), outs = draw(1, 100), more = draw(0, 30), slots = draw(1, 5);
  const int rank = draw(1, 40), own = draw(1, rank), panels = (rank + 15) / 16, total = first + outs + more;
  const long rows = draw(1, draw(0, 3) ? 20 : 300);
  auto down = numbers<T>(panels * 16L * in), up = numbers<T>((outs + 15) / 16 * 16L * own);
  const LoraPart part = {up.get(), first, outs, rank - own, own};
  Array<LoraAdapter> adapters(new LoraAdapter[slots]);
  for (int s = 0; s < slots; ++s) adapters[s] = {down.get(), &part, draw(0, 1), panels};
  Array<int64_t> of(new int64_t[rows]);
  for (long r = 0; r < rows; ++r) of[r] = draw(0, slots);
  auto x = numbers<T>(rows * in), out = numbers<T>(rows * total);
  LoraLinear linear = {adapters.get(), slots, in, total, 0};
  Kernels<T>::add_adapters(&linear, of.get(), x.get(), out.get(), rows, draw(1, 3));
  expect_finite(out, rows * total, "adapters");
  auto wide = numbers<float>(rows * total);
  linear.wide = 1;
  Kernels<T>::add_adapters(&linear, of.get(), x.get(), wide.get(), rows, draw(1, 3));
  expect_finite(wide, rows * total, "wide adapters");
}

template <class T>
void multiply() {
  const int in = 2 * draw(1, 100), outs = draw(1, 200), threads = draw(1, 3);
  const long rows = draw(1, draw(0, 3) ? 20 : 400), packed_size = (outs + 63) / 64 * 64L * in;
  auto weight = numbers<T>(static_cast<long>(outs) * in), packed = numbers<T>(packed_size, true);
  auto x = numbers<T>(rows * in), bias = numbers<T>(outs), out = numbers<T>(rows * outs, true);
  Kernels<T>::pack_linear(weight.get(), packed.get(), in, outs, threads);
  PackedLinear linear = {packed.get(), draw(0, 1) ? bias.get() : nullptr, in, outs, 0, 0, nullptr};
  Fetch meanwhile;
  meanwhile.start(in * sizeof(T));
  for (long r = draw(0, 1) * rows; r < rows; ++r) meanwhile.add(x.get() + r * in);
  Kernels<T>::linear(&linear, x.get(), out.get(), rows, threads, &meanwhile);
  expect_finite(out, rows * outs, "linear");
  if constexpr (sizeof(T) == 2) {
    const auto* bits = reinterpret_cast<const uint16_t*>(packed.get());
    if (const long size = compressed_size(bits, in, outs, threads)) {
      std::unique_ptr<void, void (*)(void*)> compressed(std::aligned_alloc(64, (size + 63) / 64 * 64), std::free);
      compress(bits, static_cast<uint8_t*>(compressed.get()), in, outs, threads);
      linear.weight = compressed.get();
      linear.compressed = 1;
      auto again = numbers<T>(rows * outs, true);
      Kernels<T>::linear(&linear, x.get(), again.get(), rows, threads, nullptr);
      if (std::memcmp(out.get(), again.get(), rows * outs * sizeof(T))) {
        std::puts("a compressed linear differs");
        std::exit(1);
      }
    }
  }
}

void fetches() {
  const long bytes = draw(1, 1000), steps = draw(1, 100), pieces = draw(0, 50);
  const char memory[1000] = {};
  Fetch fetch;
  fetch.start(bytes);
  for (long p = 0; p < pieces; ++p) fetch.add(memory);
  long lines = 0;
  for (long t = 0; t <= pieces; ++t) {
    Fetch::Lines some = fetch.take(steps);
    for (; some.region != some.last; some.step()) ++lines;
  }
  if (lines != (bytes <= 64 * steps ? pieces * ((bytes + 63) / 64) : 0)) {
    std::puts("not all pieces are fetched once");
    std::exit(1);
  }
}

void draws() {
  const long rows = draw(1, 5), size = draw(1, draw(0, 1) ? 40 : 3000);
  auto logits = numbers<float>(rows * size);
  Array<double> filters(new double[4 * rows]), u(new double[rows]);
  Array<int64_t> out(new int64_t[rows]);
  for (long r = 0; r < rows; ++r) {
    filters[4 * r] = draw(1, 20) / 10.0;
    filters[4 * r + 1] = draw(0, 1) ? draw(1, static_cast<int>(size)) : size;
    filters[4 * r + 2] = draw(0, 1) ? draw(1, 99) / 100.0 : 1.0;
    filters[4 * r + 3] = draw(0, 2) ? 0.0 : draw(0, 10) / 10.0;
    u[r] = draw(0, 999) / 1000.0;
  }
  draw_f32(logits.get(), filters.get(), u.get(), out.get(), rows, size, draw(1, 3));
  for (long r = 0; r < rows; ++r)
    if (out[r] < 0 || out[r] >= size) {
      std::puts("a token outside the vocabulary was drawn");
      std::exit(1);
    }
}

// A mixture of experts, in place.
template <class T>
void mixes() {
  const int hidden = 2 * draw(1, 50), inner = 2 * draw(1, 50), count = draw(1, 9), threads = draw(1, 3);
  const int kind = draw(0, 1) ? 3 : -1;  // of MLPs without gates
  const long rows = draw(1, draw(0, 3) ? 20 : 300);
  Array<Array<T>> packed(new Array<T>[2 * count]);
  Array<PackedLinear> linears(new PackedLinear[2 * count]);
  const auto linear = [&](Array<T>& to, int in, int outs, int wide) {
    auto weight = numbers<T>(1L * outs * in);
    to = numbers<T>((outs + 63) / 64 * 64L * in, true);
    Kernels<T>::pack_linear(weight.get(), to.get(), in, outs, threads);
    return PackedLinear{to.get(), nullptr, in, outs, 0, wide, nullptr, nullptr};
  };
  for (int e = 0; e < count; ++e) {
    linears[e] = linear(packed[e], hidden, kind < 0 ? 2 * inner : inner, 0);
    linears[count + e] = linear(packed[count + e], inner, hidden, 0);
  }
  Array<T> memory;
  const PackedLinear router = linear(memory, hidden, count, 1);
  const auto correction = numbers<float>(count), factors = numbers<float>(count);
  const int groups = count % 2 || draw(0, 1) ? 1 : count / 2, kept = draw(1, groups), best = groups > 1 ? 2 : 1;
  const Routing routing = {draw(0, 1) ? correction.get() : nullptr,
                           draw(0, 1) ? factors.get() : nullptr,
                           draw(1, kept * (count / groups)),
                           draw(0, 2),
                           draw(0, 1),
                           groups,
                           kept,
                           best,
                           draw(0, 1),
                           1e-6f,
                           2.5f,
                           draw(0, 1) * 9.0f,
                           0.1f};
  const Experts experts = {&router, linears.get(), linears.get() + count, routing, count,     0, count,
                           0,       1.702f,        draw(0, 1) * 7.0f,     kind,    draw(0, 1)};
  auto x = numbers<T>(rows * hidden), routed = numbers<T>(rows * hidden);
  Kernels<T>::mix_experts(&experts, x.get(), draw(0, 1) ? routed.get() : x.get(), x.get(), rows, threads);
  expect_finite(x, rows * hidden, "experts");
}

// A linear of 8-bit floats.
template <class T>
void float8s() {
  const int in = 4 * draw(1, 50), outs = draw(1, 150), threads = draw(1, 3), block = draw(0, 1) ? in : 4 * draw(1, 9);
  const long rows = draw(0, 1) ? draw(1, 12) : draw(1, 300), panels = (outs + 63) / 64,
             blocks = (in + block - 1) / block;
  Array<uint8_t> codes(new uint8_t[1L * outs * in]), packed(new uint8_t[panels * 64 * in]);
  for (long i = 0; i < 1L * outs * in; ++i) codes[i] = static_cast<uint8_t>(128 * (i % 2) + draw(0, 126));
  pack_float8(codes.get(), packed.get(), in, outs, threads);
  auto scales = numbers<float>(panels * blocks * 64), bias = numbers<float>(outs);
  const Float8Linear float8 = {packed.get(), scales.get(), block};
  const PackedLinear linear = {nullptr, draw(0, 1) ? bias.get() : nullptr, in, outs, 0, draw(0, 1), nullptr, &float8};
  auto x = numbers<T>(rows * in);
  Array<float> wide(new float[rows * outs]);
  Array<T> narrow(new T[rows * outs]);
  void* out = linear.wide ? static_cast<void*>(wide.get()) : narrow.get();
  Kernels<T>::linear(&linear, x.get(), out, rows, threads, nullptr);
  if (linear.wide)
    expect_finite(wide, rows * outs, "8-bit floats");
  else
    expect_finite(narrow, rows * outs, "8-bit floats");
}

// The search for 4 bits.
template <class T>
void fits() {
  const long groups = draw(0, 1) ? draw(1, 40) : draw(1, 1500);
  auto weights = numbers<T>(groups * 32);
  Array<uint8_t> codes(new uint8_t[groups * 16]);
  Array<float> scales(new float[groups]), offsets(new float[groups]);
  const int zero_points = draw(0, 1), threads = draw(1, 3);
  Kernels<T>::fit_int4(weights.get(), codes.get(), scales.get(), offsets.get(), groups, zero_points, threads);
  std::FILE* const kept = results;
  results = nullptr;  // of two choices that are equally good the last bit of a sum decides
  expect_finite(scales, groups, "scales");
  expect_finite(offsets, groups, "offsets");
  results = kept;
}

// A linear of two parts in 2, 3, 4 or 8 bits, with or without scales, nested or not, and offsets, and its rows as a
// table's.
template <class T>
void quantize() {
  const int block = 16 * draw(1, 4), in = draw(1, 3) == 1 ? draw(1, 200) & ~1 : block * draw(1, 6);
  const int inner = (in + block - 1) / block * block, threads = draw(1, 3);
  if (in == 0) return;
  const long rows = draw(0, 1) ? draw(1, 12) : draw(1, 300);
  QuantizedPart parts[2];
  Array<float> factors[2];
  Array<uint8_t> packed[2];
  int outs = 0;
  for (int p = 0; p < 2; ++p) {
    QuantizedPart& part = parts[p];
    part = {nullptr, nullptr, draw(1, 150), draw(0, 1) ? draw(2, 4) : 8, inner, 0, 0, 0, {}};
    if (in == inner && draw(0, 1)) part.group = block;
    part.scales = part.group < inner || draw(0, 1);
    part.offsets = part.scales && draw(0, 1);
    if (part.scales && draw(0, 1)) part.nested = part.group << draw(0, 2);
    if (part.nested && inner % part.nested) part.nested = part.group;
    for (int i = 0; i < 32; ++i) part.table[i / 16][i % 16] = static_cast<uint8_t>(draw(1, 255));
    const long groups = inner / part.group, given = 1L * part.outs * in / (part.bits < 8 ? 2 : 1);
    Array<uint8_t> codes(new uint8_t[given]), multiples(new uint8_t[part.outs * groups]);
    for (long i = 0; i < part.outs * groups; ++i) multiples[i] = static_cast<uint8_t>(draw(0, 255));
    for (long i = 0; i < given; ++i) codes[i] = static_cast<uint8_t>(draw(0, 255));
    Array<half> halves(new half[part.outs * groups]);
    for (long i = 0; i < part.outs * groups; ++i) halves[i].bits = static_cast<uint16_t>(draw(0, 0x7bff));
    factors[p] = numbers<float>(part.outs);
    packed[p].reset(new uint8_t[quantized_size(&part, inner)]);
    part.factors = factors[p].get();
    part.packed = packed[p].get();
    pack_quantized(&part, codes.get(), part.scales ? halves.get() : nullptr, part.offsets ? halves.get() : nullptr,
                   multiples.get(), in, inner, threads);
    outs += part.outs;
  }
  Array<int32_t> order(new int32_t[in]);
  for (int i = 0; i < in; ++i) order[i] = in - 1 - i;
  QuantizedLinear quantized = {parts, draw(0, 1) ? order.get() : nullptr, 2, block};
  auto bias = numbers<float>(outs);
  PackedLinear linear = {nullptr, draw(0, 1) ? bias.get() : nullptr, in, outs, 0, draw(0, 1), &quantized};
  auto x = numbers<T>(rows * in);
  Array<float> wide(new float[rows * outs]);
  Array<T> narrow(new T[rows * outs]);
  void* out = linear.wide ? static_cast<void*>(wide.get()) : narrow.get();
  Kernels<T>::linear(&linear, x.get(), out, rows, threads, nullptr);
  if (linear.wide)
    expect_finite(wide, rows * outs, "quantized linear");
  else
    expect_finite(narrow, rows * outs, "quantized linear");
  quantized.count = 1;
  Array<int64_t> ids(new int64_t[3]);
  for (int i = 0; i < 3; ++i) ids[i] = draw(0, parts[0].outs - 1);
  Array<T> found(new T[3L * in]);
  Kernels<T>::look_up(&linear, ids.get(), found.get(), 3);
  expect_finite(found, 3L * in, "table");
}

// Two ranks, the other one a thread.
template <class T>
void collect() {
  const int size = draw(1, 3000), rows = draw(1, 5), capacity = 4096;
  std::vector<char> memory(64 + 8192 + 4L * capacity);
  char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  const int spins[2] = {draw(0, 100), draw(0, 100)};
  Collective groups[2] = {{aligned, capacity, 0, 2, 0, spins[0], 0}, {aligned, capacity, 1, 2, 0, spins[1], 0}};
  Array<T> parts[2] = {numbers<T>(size), numbers<T>(size)}, shared[2] = {numbers<T>(size), numbers<T>(size)};
  const int64_t middle = draw(1, 500), starts[3] = {0, middle, draw(500, 1000)};
  Array<float> own[2] = {numbers<float>(rows * starts[1]), numbers<float>(rows * (starts[2] - starts[1]))};
  Array<float> out(new float[rows * starts[2]]);
  const auto work = [&](int rank) {
    Kernels<T>::sum_ranks(&groups[rank], parts[rank].get(), size, 1);
    share_rank(&groups[rank], reinterpret_cast<char*>(shared[rank].get()), size * sizeof(T));
    gather_ranks(&groups[rank], own[rank].get(), rank ? nullptr : out.get(), rows, starts);
  };
  std::thread other([&] { work(1); });
  work(0);
  other.join();
  expect_finite(parts[0], size, "sum of ranks");
  expect_finite(out, rows * starts[2], "gathered ranks");
  expect_finite(shared[1], size, "the first rank's");
}

extern "C" int usable_isas();  // isa.cpp

int main(int count, char** arguments) {
  usable_isas();  // which asks the system for tiles, where the processor has them
  if (count > 1) results = std::fopen(arguments[1], "wb");
  for (int i = 0; i < 20; ++i) {
    draws();
    fetches();
    attend<float>();
    attend<bf16>();
    attends_latents<float>();
    attends_latents<bf16>();
    convolves<float>();
    convolves<bf16>();
    recurs<float>();
    recurs<bf16>();
    scans<float>();
    scans<bf16>();
    rowwise<float>();
    rowwise<bf16>();
    multiply<float>();
    adapt<float>();
    adapt<bf16>();
    multiply<bf16>();
    mixes<float>();
    mixes<bf16>();
    float8s<float>();
    float8s<bf16>();
    fits<float>();
    fits<bf16>();
    quantize<float>();
    quantize<bf16>();
    collect<float>();
    collect<bf16>();
  }
  if (results) std::fclose(results);
  std::puts("done");
}
