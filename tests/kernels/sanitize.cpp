// Runs every exported kernel over random shapes, each array in an allocation of exactly its size: compiled with
// AddressSanitizer and UndefinedBehaviorSanitizer by test_cpu_build.py, which expects it to end with "done".
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>

struct bf16 {
  uint16_t bits;
};

#include "../../kernels/cpu/exports.h"

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
template <class T>
void expect_finite(const Array<T>& array, long n, const char* where) {
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
  const long tokens = starts[sequences], stride = 16L * kv_heads * dim, width = heads + 2 * kv_heads;
  auto keys = numbers<T>(pages * stride, true), values = numbers<T>(pages * stride, true);
  Array<int64_t> slots(new int64_t[tokens]), positions(new int64_t[tokens]);
  for (int s = 0; s < sequences; ++s) {
    const long old = contexts[s] - (starts[s + 1] - starts[s]);
    const auto slot = [&](long at) { return table[s * most + at / 16] * 16L + at % 16; };
    Array<int64_t> before(new int64_t[old]);
    for (long i = 0; i < old; ++i) before[i] = slot(i);
    auto k = numbers<T>(old * kv_heads * dim), v = numbers<T>(old * kv_heads * dim);
    Kernels<T>::store_kv(k.get(), v.get(), keys.get(), values.get(), before.get(), stride, stride, old, pages, kv_heads,
                         dim);
    for (long i = starts[s]; i < starts[s + 1]; ++i) slots[i] = slot(positions[i] = old + i - starts[s]);
  }
  auto qkv = numbers<T>(tokens * width * dim), query = numbers<T>(tokens * heads * dim);
  auto out = numbers<T>(tokens * heads * dim, true);
  auto cos_sin = numbers<float>(most * 16 * dim), norm = numbers<float>(dim);
  const bool normed = draw(0, 1);
  int failed = Kernels<T>::rope_store(qkv.get(), normed ? norm.get() : nullptr, normed ? norm.get() : nullptr,
                                      draw(0, 1) ? cos_sin.get() : nullptr, positions.get(), slots.get(), query.get(),
                                      keys.get(), values.get(), stride, stride, tokens, pages, heads, kv_heads, dim,
                                      1e-5f, draw(1, 3));
  failed |= Kernels<T>::paged_attention(out.get(), query.get(), keys.get(), values.get(), starts.get(), contexts.get(),
                                        table.get(), most, stride, stride, pages, sequences, heads, kv_heads, dim, 0.2f,
                                        draw(0, 1) ? draw(1, 300) : 0, draw(0, 1) ? 8.0f : 0.0f, draw(1, 3));
  if (failed) std::exit(1);
  expect_finite(out, tokens * heads * dim, "attention");
}

template <class T>
void rowwise() {
  const int size = draw(1, 200), threads = draw(1, 3);
  const long rows = draw(1, 400);
  auto x = numbers<T>(rows * size), y = numbers<T>(rows * size);
  auto weight = numbers<float>(size);
  auto out = numbers<T>(rows * size, true), gate_up = numbers<T>(2 * rows * size);
  Kernels<T>::rms_norm(x.get(), weight.get(), out.get(), rows, size, 1e-5f, threads);
  expect_finite(out, rows * size, "rms_norm");
  Kernels<T>::add_rms_norm(x.get(), y.get(), weight.get(), rows, size, 1e-5f, threads);
  expect_finite(x, rows * size, "add_rms_norm");
  Kernels<T>::silu_mul(gate_up.get(), out.get(), rows, size, threads);
  expect_finite(out, rows * size, "silu_mul");
  Kernels<T>::gelu_mul(gate_up.get(), out.get(), rows, size, threads);
  expect_finite(out, rows * size, "gelu_mul");
}

template <class T>
void multiply() {
  const int in = 2 * draw(1, 100), outs = draw(1, 200), threads = draw(1, 3);
  const long rows = draw(1, draw(0, 3) ? 20 : 400), packed_size = (outs + 63) / 64 * 64L * in;
  auto weight = numbers<T>(static_cast<long>(outs) * in), packed = numbers<T>(packed_size, true);
  auto x = numbers<T>(rows * in), bias = numbers<T>(outs), out = numbers<T>(rows * outs, true);
  Kernels<T>::pack_linear(weight.get(), packed.get(), in, outs, threads);
  PackedLinear linear = {packed.get(), draw(0, 1) ? bias.get() : nullptr, in, outs, 0, 0};
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

int main() {
  for (int i = 0; i < 20; ++i) {
    draws();
    fetches();
    attend<float>();
    attend<bf16>();
    rowwise<float>();
    rowwise<bf16>();
    multiply<float>();
    multiply<bf16>();
  }
  std::puts("done");
}
