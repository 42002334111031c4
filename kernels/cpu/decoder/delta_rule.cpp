// The gated delta rule: kernels/recurrent/delta_rule.py says what it is, and
// what a slot keeps. Heads share nothing, and tokens follow one another, so
// that no bit depends on the batch or on where a sequence was cut.
#include <cmath>

#include "../kernels.h"
#include "../rms.h"

namespace {

constexpr int kTile = 32;                           // tokens whose results wait together for their norm
constexpr int kWide = kAccumulators >= 24 ? 4 : 2;  // vectors of values whose part of a matrix stays in the L1 cache
constexpr float kEpsilon = 1e-6f;                   // added to squared lengths
constexpr long kWorthwhile = 1 << 16;               // numbers of matrices for which it pays to wake other threads

struct Sizes {
  int key_heads, heads, key, value, drafts;
  float eps;

  long keys() const { return static_cast<long>(key_heads) * key; }
  long values() const { return static_cast<long>(heads) * value; }
  long inputs() const { return 2 * keys() + values(); }
  long kept() const { return inputs() + 2 * heads; }
  long matrix() const { return static_cast<long>(key) * value; }
};

struct Weights {
  const float *rate, *shift, *norm;
};

// One head of one sequence in a step: its tokens' numbers, from position
// `first` on, and the guesses before them.
template <class T>
struct Head {
  const T *qkv, *z, *ba;
  T* out;
  const T* guesses;
  long first;
  int index;
  Sizes sizes;
  Weights weights;

  const T* inputs(long at) const {
    return at < first ? guesses + at % sizes.drafts * sizes.kept() : qkv + (at - first) * sizes.inputs();
  }
  const T* gates(long at) const {
    return at < first ? inputs(at) + sizes.inputs() : ba + (at - first) * 2 * sizes.heads;
  }
};

// Numbers that a tile of tokens gives to the rule, and their results, as
// float32.
struct Tile {
  float *q, *k, *v, *out, *decay, *beta;
};

template <class T>
float number(const T* p) {
  float x;
  unpack(p, &x, 1);
  return x;
}

// A vector divided by its length, times `scale`.
template <class T>
void unit(const T* x, float* to, int size, float scale) {
  Vec sums = vset(0.0f);
  for (int i = 0; i < size; i += 16) {
    const Vec some = vload_first(x + i, size - i);
    sums = vfma(some, some, sums);
  }
  const Vec factor = vset(scale / __builtin_sqrtf(vsum(sums) + kEpsilon));
  for (int i = 0; i < size; i += 16) vstore_first(to + i, vmul(vload_first(x + i, size - i), factor), size - i);
}

template <class T>
void take(const Head<T>& head, long at, int place, const Tile& tile) {
  const Sizes& sizes = head.sizes;
  const T *given = head.inputs(at), *gates = head.gates(at);
  const long group = head.index / (sizes.heads / sizes.key_heads);
  const T* v = given + 2 * sizes.keys() + static_cast<long>(head.index) * sizes.value;
  unit(given + group * sizes.key, tile.q + place * sizes.key, sizes.key, 1.0f / __builtin_sqrtf(sizes.key));
  unit(given + sizes.keys() + group * sizes.key, tile.k + place * sizes.key, sizes.key, 1.0f);
  for (int i = 0; i < sizes.value; i += 16) vstore(tile.v + place * sizes.value + i, vload(v + i));
  const float a = number(gates + sizes.heads + head.index) + head.weights.shift[head.index];
  const float step = a > 20.0f ? a : std::log1p(std::exp(a));
  tile.decay[place] = std::exp(head.weights.rate[head.index] * step);
  tile.beta[place] = 1.0f / (1.0f + std::exp(-number(gates + head.index)));
}

// One token in W vectors of columns of a matrix, whose rows are `stride`
// numbers apart. Sums of even and of odd rows are made apart, to hide the
// latency of additions.
template <int W>
INLINE void update(float* matrix, long stride, int rows, const float* q, const float* k, const float* v, float* out,
                   float decay, float beta) {
  const Vec zero = vset(0.0f), kept = vset(decay);
  Vec even[W], odd[W], delta[W];
  for (int w = 0; w < W; ++w) even[w] = odd[w] = zero;
  for (int r = 0; r < rows; r += 2) {
    const float* row = matrix + r * stride;
    const Vec one = vset(k[r]), other = vset(k[r + 1]);
    for (int w = 0; w < W; ++w) even[w] = vfma(vload(row + 16 * w), one, even[w]);
    for (int w = 0; w < W; ++w) odd[w] = vfma(vload(row + stride + 16 * w), other, odd[w]);
  }
  for (int w = 0; w < W; ++w) {
    delta[w] = vmul(vset(beta), vsub(vload(v + 16 * w), vmul(kept, vadd(even[w], odd[w]))));
    even[w] = odd[w] = zero;
  }
  for (int r = 0; r < rows; r += 2) {
    float *row = matrix + r * stride, *next = row + stride;
    const Vec k0 = vset(k[r]), k1 = vset(k[r + 1]), q0 = vset(q[r]), q1 = vset(q[r + 1]);
    Vec first[W], second[W];
    for (int w = 0; w < W; ++w) first[w] = vfma(k0, delta[w], vmul(kept, vload(row + 16 * w)));
    for (int w = 0; w < W; ++w) second[w] = vfma(k1, delta[w], vmul(kept, vload(next + 16 * w)));
    for (int w = 0; w < W; ++w) {
      vstore(row + 16 * w, first[w]);
      vstore(next + 16 * w, second[w]);
      even[w] = vfma(q0, first[w], even[w]);
      odd[w] = vfma(q1, second[w], odd[w]);
    }
  }
  for (int w = 0; w < W; ++w) vstore(out + 16 * w, vadd(even[w], odd[w]));
}

template <int W>
void update_all(float* matrix, const Sizes& sizes, const Tile& tile, int column, int count) {
  for (int i = 0; i < count; ++i)
    update<W>(matrix + column, sizes.value, sizes.key, tile.q + i * sizes.key, tile.k + i * sizes.key,
              tile.v + i * sizes.value + column, tile.out + i * sizes.value + column, tile.decay[i], tile.beta[i]);
}

// Tokens [from, to) of a sequence; those before the step's own have no results.
template <class T>
void advance(const Head<T>& head, float* matrix, long from, long to, const Tile& tile) {
  const Sizes& sizes = head.sizes;
  for (long begin = from; begin < to; begin += kTile) {
    const int count = static_cast<int>(to - begin < kTile ? to - begin : kTile);
    for (int i = 0; i < count; ++i) take(head, begin + i, i, tile);
    int column = 0;
    for (; column + 16 * kWide <= sizes.value; column += 16 * kWide)
      update_all<kWide>(matrix, sizes, tile, column, count);
    for (; column < sizes.value; column += 16) update_all<1>(matrix, sizes, tile, column, count);
    for (int i = 0; i < count; ++i) {
      if (begin + i < head.first) continue;
      const long at = (begin + i - head.first) * sizes.values() + static_cast<long>(head.index) * sizes.value;
      const float* found = tile.out + i * sizes.value;
      const Vec factor = vset(rms_factor(found, sizes.value, sizes.eps));
      for (int j = 0; j < sizes.value; j += 16) {
        const Vec normed = vmul(vmul(vload(found + j), factor), vload(head.weights.norm + j));
        vstore(head.out + at + j, vmul(normed, vsilu(vload(head.z + at + j))));
      }
    }
  }
}

// All tokens of a head's sequence. Its matrix takes in those before `stop`; the
// guesses behind, a copy of it.
template <class T>
void compute(const Head<T>& head, float* matrix, long seen, long stop, long context) {
  const Sizes& sizes = head.sizes;
  const long keys = static_cast<long>(kTile) * sizes.key, values = static_cast<long>(kTile) * sizes.value;
  auto* memory = reinterpret_cast<float*>(scratch((2 * keys + 2 * values + 2 * kTile + sizes.matrix()) * 4));
  const Tile tile = {memory,
                     memory + keys,
                     memory + 2 * keys,
                     memory + 2 * keys + values,
                     memory + 2 * (keys + values),
                     memory + 2 * (keys + values) + kTile};
  if (head.first == 0) __builtin_memset(matrix, 0, sizes.matrix() * sizeof(float));
  advance(head, matrix, seen, stop, tile);
  if (stop == context) return;
  float* copy = memory + 2 * (keys + values) + 2 * kTile;
  __builtin_memcpy(copy, matrix, sizes.matrix() * sizeof(float));
  advance(head, copy, stop, context, tile);
}

// Where a sequence's step begins and ends, what its matrices have seen, and
// what they are to see.
struct Span {
  long first, context, seen, stop;

  bool fits(int drafts) const {
    return seen >= 0 && seen <= first && first - seen <= drafts && context - stop <= drafts;
  }
};

// A step's sequences.
struct Rows {
  const int32_t *starts, *contexts, *seen,
      *known;  // the last two may be null: see Guesses
  const int64_t* slots;
  int count;

  Span span(int s) const {
    const long context = contexts[s], first = context - (starts[s + 1] - starts[s]), from = seen ? seen[s] : first;
    const long certain = known ? known[s] : context, least = certain < from ? from : certain;
    return {first, context, from, least < context ? least : context};
  }
};

template <class T>
int delta_rule(const T* qkv, const T* z, const T* ba, const Weights& weights, T* out, float* matrices, T* guesses,
               const Rows& rows, long slot_count, const Sizes& sizes, int threads) {
  for (int s = 0; s < rows.count; ++s)
    if (rows.slots[s] < 0 || rows.slots[s] >= slot_count || !rows.span(s).fits(sizes.drafts)) return 1;
  const long items = static_cast<long>(rows.count) * sizes.heads;
  const long cost = rows.starts[rows.count] * sizes.heads * sizes.matrix();
  parallel_for(cost < kWorthwhile ? 1 : threads, items, [&](long item) {
    const int s = static_cast<int>(item / sizes.heads), index = static_cast<int>(item % sizes.heads);
    const long row = rows.starts[s], slot = rows.slots[s];
    const Span span = rows.span(s);
    const Head<T> head = {qkv + row * sizes.inputs(),
                          z + row * sizes.values(),
                          ba + row * 2 * sizes.heads,
                          out + row * sizes.values(),
                          guesses + slot * sizes.drafts * sizes.kept(),
                          span.first,
                          index,
                          sizes,
                          weights};
    compute(head, matrices + (slot * sizes.heads + index) * sizes.matrix(), span.seen, span.stop, span.context);
  });
  for (int s = 0; s < rows.count; ++s) {
    const Span span = rows.span(s);
    for (long at = span.stop > span.first ? span.stop : span.first; at < span.context; ++at) {
      const long row = rows.starts[s] + at - span.first;
      T* kept = guesses + (rows.slots[s] * sizes.drafts + at % sizes.drafts) * sizes.kept();
      __builtin_memcpy(kept, qkv + row * sizes.inputs(), sizes.inputs() * sizeof(T));
      __builtin_memcpy(kept + sizes.inputs(), ba + row * 2 * sizes.heads, 2 * sizes.heads * sizeof(T));
    }
  }
  return 0;
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int delta_rule_##suffix(const T* qkv, const T* z, const T* ba, const float* rate, const float* shift,       \
                                   const float* norm, T* out, float* matrices, T* guesses, const int32_t* starts,      \
                                   const int32_t* contexts, const int32_t* seen, const int32_t* known,                 \
                                   const int64_t* slots, long slot_count, int sequences, int key_heads, int heads,     \
                                   int key, int value, int drafts, float eps, int threads) {                           \
    return delta_rule(qkv, z, ba, Weights{rate, shift, norm}, out, matrices, guesses,                                  \
                      Rows{starts, contexts, seen, known, slots, sequences}, slot_count,                               \
                      Sizes{key_heads, heads, key, value, drafts, eps}, threads);                                      \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
