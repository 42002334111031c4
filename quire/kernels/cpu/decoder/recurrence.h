// Matrix states, and rules by which tokens change them. kernels/recurrent/recurrence.py says what a slot stores. Heads
// share nothing, and tokens follow one another, so no bit depends on the batch or on how a sequence is divided into
// steps.
#pragma once
#include "../kernels.h"

namespace recurrence {

constexpr int kTile = 32;                           // tokens whose results are processed together
constexpr int kWide = kAccumulators >= 24 ? 4 : 2;  // vectors of values whose part of a matrix stays in the L1 cache
constexpr long kWorthwhile = 1 << 16;               // numbers of matrices from which on waking other threads pays

// A token of a layer has `inputs` numbers, and separately `gates` numbers for its heads. A head has one decay, or one
// per row of its matrix.
struct Sizes {
  int heads, key, value, drafts, inputs, gates, decays = 1;

  long values() const { return static_cast<long>(heads) * value; }
  long matrix() const { return static_cast<long>(key) * value; }
  long kept() const { return inputs + gates; }
};

// One sequence in a step: its tokens' numbers, from position `first` on, and the draft tokens before them.
template <class T>
struct Tokens {
  const T *given, *beside, *guesses;
  long first;
  Sizes sizes;

  const T* inputs(long at) const {
    return at < first ? guesses + at % sizes.drafts * sizes.kept() : given + (at - first) * sizes.inputs;
  }
  const T* gates(long at) const { return at < first ? inputs(at) + sizes.inputs : beside + (at - first) * sizes.gates; }
};

// A tile of tokens as inputs of the rule, and their results, as float32.
struct Tile {
  float *q, *k, *v, *out, *decay, *beta;
};

template <class T>
float number(const T* p) {
  float x;
  unpack(p, &x, 1);
  return x;
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// log(1 + u) for u from 0 to 1 is 2 atanh(u / (2 + u)). Its series in powers of at most 1/3 ends here. The terms left
// out are 2e-9 of the sum.
INLINE Vec log_1_plus(Vec u) {
  const Vec s = vdiv(u, vadd(vset(2.0f), u)), square = vmul(s, s);
  Vec p = vset(1.0f / 15);
  for (int odd = 13; odd > 0; odd -= 2) p = vfma(p, square, vset(1.0f / static_cast<float>(odd)));
  return vmul(vmul(vset(2.0f), s), p);
}

// log(1 + e^x) is max(x, 0) + log(1 + e^-|x|).
INLINE Vec vsoftplus(Vec x) {
  const Vec size = vmax(x, vsub(vset(0.0f), x));
  return vadd(vmax(x, vset(0.0f)), log_1_plus(vexp2_below(vmul(size, vset(-kLog2E)))));
}

// The factor by which a token decays each row of a matrix.
struct SameDecay {
  Vec kept;

  explicit SameDecay(const float* decay) : kept(vset(*decay)) {}
  Vec of(int) const { return kept; }
};

struct DecayPerRow {
  const float* decay;

  explicit DecayPerRow(const float* decays) : decay(decays) {}
  Vec of(int row) const { return vset(decay[row]); }
};

// W vectors of columns of a matrix, whose rows are `stride` numbers apart: matrix = decay * matrix + k delta, and then
// the readout of q. Even and odd rows are summed separately, to hide the latency of additions.
template <int W, class Decay>
INLINE void write_and_read(float* matrix, long stride, int rows, const float* q, const float* k, const Vec* delta,
                           Decay decay, Vec* read) {
  Vec even[W], odd[W];
  for (int w = 0; w < W; ++w) even[w] = odd[w] = vset(0.0f);
  for (int r = 0; r < rows; r += 2) {
    float *row = matrix + r * stride, *next = row + stride;
    const Vec k0 = vset(k[r]), k1 = vset(k[r + 1]), q0 = vset(q[r]), q1 = vset(q[r + 1]);
    const Vec kept = decay.of(r), kept_next = decay.of(r + 1);
    Vec first[W], second[W];
    for (int w = 0; w < W; ++w) first[w] = vfma(k0, delta[w], vmul(kept, vload(row + 16 * w)));
    for (int w = 0; w < W; ++w) second[w] = vfma(k1, delta[w], vmul(kept_next, vload(next + 16 * w)));
    for (int w = 0; w < W; ++w) {
      vstore(row + 16 * w, first[w]);
      vstore(next + 16 * w, second[w]);
      even[w] = vfma(q0, first[w], even[w]);
      odd[w] = vfma(q1, second[w], odd[w]);
    }
  }
  for (int w = 0; w < W; ++w) read[w] = vadd(even[w], odd[w]);
}

template <int W, class Rule>
void update_all(const Rule& rule, int head, float* matrix, const Sizes& sizes, const Tile& tile, int column,
                int count) {
  for (int i = 0; i < count; ++i)
    rule.template update<W>(head, column, matrix + column, sizes.value, sizes.key, tile.q + i * sizes.key,
                            tile.k + i * sizes.key, tile.v + i * sizes.value + column,
                            tile.out + i * sizes.value + column, tile.decay + i * sizes.decays, tile.beta[i]);
}

// Computes tokens [from, to) of one head of a sequence. Tokens before the step's first have no results.
template <class T, class Rule>
void advance(const Rule& rule, const Tokens<T>& tokens, int head, float* matrix, long from, long to, const Tile& tile) {
  const Sizes& sizes = tokens.sizes;
  for (long begin = from; begin < to; begin += kTile) {
    const int count = static_cast<int>(to - begin < kTile ? to - begin : kTile);
    for (int i = 0; i < count; ++i) rule.take(tokens.inputs(begin + i), tokens.gates(begin + i), head, i, tile);
    int column = 0;
    for (; column + 16 * kWide <= sizes.value; column += 16 * kWide)
      update_all<kWide>(rule, head, matrix, sizes, tile, column, count);
    for (; column < sizes.value; column += 16) update_all<1>(rule, head, matrix, sizes, tile, column, count);
    for (int i = 0; i < count; ++i)
      if (begin + i >= tokens.first) rule.give(begin + i - tokens.first, head, tile.out + i * sizes.value);
  }
}

// Computes all tokens of one head of a sequence. Tokens before `stop` change its matrix. Draft tokens from `stop` on
// change a copy.
template <class T, class Rule>
void compute(const Rule& rule, const Tokens<T>& tokens, int head, float* matrix, long seen, long stop, long context) {
  const Sizes& sizes = tokens.sizes;
  const long keys = static_cast<long>(kTile) * sizes.key, values = static_cast<long>(kTile) * sizes.value;
  const long decays = static_cast<long>(kTile) * sizes.decays, tiled = 2 * (keys + values) + decays + kTile;
  auto* memory = reinterpret_cast<float*>(scratch((tiled + sizes.matrix()) * 4));
  const Tile tile = {memory,
                     memory + keys,
                     memory + 2 * keys,
                     memory + 2 * keys + values,
                     memory + 2 * (keys + values),
                     memory + 2 * (keys + values) + decays};
  if (tokens.first == 0) __builtin_memset(matrix, 0, sizes.matrix() * sizeof(float));
  advance(rule, tokens, head, matrix, seen, stop, tile);
  if (stop == context) return;
  float* copy = memory + tiled;
  __builtin_memcpy(copy, matrix, sizes.matrix() * sizeof(float));
  advance(rule, tokens, head, copy, stop, context, tile);
}

// Positions where a sequence's step begins and ends, and the number of tokens that its matrices include before and
// after the step.
struct Span {
  long first, context, seen, stop;

  bool fits(int drafts) const {
    return seen >= 0 && seen <= first && first - seen <= drafts && context - stop <= drafts;
  }
};

// The sequences of a step.
struct Rows {
  const int32_t *starts, *contexts, *seen, *known;  // the last two may be null without draft tokens
  const int64_t* slots;
  int count;

  Span span(int s) const {
    const long context = contexts[s], first = context - (starts[s + 1] - starts[s]), from = seen ? seen[s] : first;
    const long certain = known ? known[s] : context, least = certain < from ? from : certain;
    return {first, context, from, least < context ? least : context};
  }
};

// Inputs and results of all tokens of a step, and what slots store.
template <class T>
struct Layer {
  const T *given, *beside;
  float* matrices;
  T* guesses;
};

// Computes all sequences. `rule_of(row)` returns the rule of a sequence whose first token has this index in the step.
// Returns 1 if a slot does not exist or has no room for so many draft tokens.
template <class T, class RuleOf>
int run(const Layer<T>& layer, const Rows& rows, long slot_count, const Sizes& sizes, int threads,
        const RuleOf& rule_of) {
  for (int s = 0; s < rows.count; ++s)
    if (rows.slots[s] < 0 || rows.slots[s] >= slot_count || !rows.span(s).fits(sizes.drafts)) return 1;
  const long items = static_cast<long>(rows.count) * sizes.heads;
  const long cost = rows.starts[rows.count] * sizes.heads * sizes.matrix();
  parallel_for(cost < kWorthwhile ? 1 : threads, items, [&](long item) {
    const int s = static_cast<int>(item / sizes.heads), head = static_cast<int>(item % sizes.heads);
    const long row = rows.starts[s], slot = rows.slots[s];
    const Span span = rows.span(s);
    const Tokens<T> tokens = {layer.given + row * sizes.inputs, layer.beside + row * sizes.gates,
                              layer.guesses + slot * sizes.drafts * sizes.kept(), span.first, sizes};
    compute(rule_of(row), tokens, head, layer.matrices + (slot * sizes.heads + head) * sizes.matrix(), span.seen,
            span.stop, span.context);
  });
  for (int s = 0; s < rows.count; ++s) {
    const Span span = rows.span(s);
    for (long at = span.stop > span.first ? span.stop : span.first; at < span.context; ++at) {
      const long row = rows.starts[s] + at - span.first;
      T* kept = layer.guesses + (rows.slots[s] * sizes.drafts + at % sizes.drafts) * sizes.kept();
      __builtin_memcpy(kept, layer.given + row * sizes.inputs, sizes.inputs * sizeof(T));
      __builtin_memcpy(kept + sizes.inputs, layer.beside + row * sizes.gates, sizes.gates * sizeof(T));
    }
  }
  return 0;
}

}  // namespace recurrence
