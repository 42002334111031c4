// The gated delta rule (kernels/recurrent/delta_rule.py).
#include <cmath>
#include <type_traits>

#include "../kernels.h"
#include "../rms.h"
#include "recurrence.h"

namespace {

using namespace recurrence;

constexpr float kEpsilon = 1e-6f;  // added to squared lengths

struct Weights {
  const float *rate, *shift, *norm;
  float eps;
  int sigmoid_gate;  // instead of SiLU
};

// Writes x, divided by its length and times `scale`, to `to`.
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

// Parameters of one sequence's tokens.
template <class T, class Decay>
struct Delta {
  const Sizes& sizes;
  const Weights& weights;
  int key_heads;
  const T* z;
  T* out;

  void take(const T* given, const T* gates, int head, int place, const Tile& tile) const {
    const long keys = static_cast<long>(key_heads) * sizes.key, group = head / (sizes.heads / key_heads);
    const T* v = given + 2 * keys + static_cast<long>(head) * sizes.value;
    unit(given + group * sizes.key, tile.q + place * sizes.key, sizes.key, 1.0f / __builtin_sqrtf(sizes.key));
    unit(given + keys + group * sizes.key, tile.k + place * sizes.key, sizes.key, 1.0f);
    for (int i = 0; i < sizes.value; i += 16) vstore(tile.v + place * sizes.value + i, vload(v + i));
    decay(gates + sizes.heads, head, tile.decay + place * sizes.decays);
    tile.beta[place] = 1.0f / (1.0f + std::exp(-number(gates + head)));
  }

  void decay(const T* gates, int head, float* to) const {
    if constexpr (std::is_same_v<Decay, SameDecay>) {
      *to = std::exp(weights.rate[head] * softplus(number(gates + head) + weights.shift[head]));
    } else {
      const long first = static_cast<long>(head) * sizes.decays;
      const Vec rate = vset(weights.rate[head] * kLog2E);
      for (int i = 0; i < sizes.decays; i += 16) {
        const int lanes = sizes.decays - i;
        const Vec raw = vadd(vload_first(gates + first + i, lanes), vload_first(weights.shift + first + i, lanes));
        vstore_first(to + i, vexp2_below(vmul(rate, vsoftplus(raw))), lanes);
      }
    }
  }

  // Subtracts from `v` what k reads of the decayed matrix. A single decay can be multiplied after the sum over rows.
  template <int W>
  __attribute__((always_inline)) void update(int, int, float* matrix, long stride, int rows, const float* q,
                                             const float* k, const float* v, float* out_of, const float* decay,
                                             float beta) const {
    constexpr bool kSame = std::is_same_v<Decay, SameDecay>;
    const Vec kept = vset(kSame ? *decay : 1.0f);
    Vec even[W], odd[W], delta[W];
    for (int w = 0; w < W; ++w) even[w] = odd[w] = vset(0.0f);
    for (int r = 0; r < rows; r += 2) {
      const float* row = matrix + r * stride;
      const Vec one = vset(kSame ? k[r] : k[r] * decay[r]), other = vset(kSame ? k[r + 1] : k[r + 1] * decay[r + 1]);
      for (int w = 0; w < W; ++w) even[w] = vfma(vload(row + 16 * w), one, even[w]);
      for (int w = 0; w < W; ++w) odd[w] = vfma(vload(row + stride + 16 * w), other, odd[w]);
    }
    for (int w = 0; w < W; ++w) delta[w] = vmul(vset(beta), vsub(vload(v + 16 * w), vmul(kept, vadd(even[w], odd[w]))));
    write_and_read<W>(matrix, stride, rows, q, k, delta, Decay(decay), even);
    for (int w = 0; w < W; ++w) vstore(out_of + 16 * w, even[w]);
  }

  void give(long token, int head, const float* found) const {
    const long at = token * sizes.values() + static_cast<long>(head) * sizes.value;
    const Vec factor = vset(rms_factor(found, sizes.value, weights.eps));
    for (int j = 0; j < sizes.value; j += 16) {
      const Vec normed = vmul(vmul(vload(found + j), factor), vload(weights.norm + j));
      const Vec gate = vload(z + at + j);
      vstore(out + at + j, vmul(normed, weights.sigmoid_gate ? vsigmoid(gate) : vsilu(gate)));
    }
  }
};

template <class Decay, class T>
int delta_rule(const T* z, T* out, const Layer<T>& layer, const Rows& rows, long slot_count, const Sizes& sizes,
               const Weights& weights, int key_heads, int threads) {
  return run(layer, rows, slot_count, sizes, threads, [&](long row) {
    return Delta<T, Decay>{sizes, weights, key_heads, z + row * sizes.values(), out + row * sizes.values()};
  });
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int delta_rule_##suffix(                                                                                    \
      const T* qkv, const T* z, const T* ba, const float* rate, const float* shift, const float* norm, T* out,         \
      float* matrices, T* guesses, const int32_t* starts, const int32_t* contexts, const int32_t* seen,                \
      const int32_t* known, const int64_t* slots, long slot_count, int sequences, int key_heads, int heads, int key,   \
      int value, int drafts, float eps, int decay_per_row, int sigmoid_gate, int threads) {                            \
    const int decays = decay_per_row ? key : 1;                                                                        \
    const Sizes sizes = {                                                                                              \
        heads, key, value, drafts, 2 * key_heads * key + heads * value, heads * (1 + decays), decays};                 \
    const Weights weights = {rate, shift, norm, eps, sigmoid_gate};                                                    \
    const Layer<T> layer = {qkv, ba, matrices, guesses};                                                               \
    const Rows rows = {starts, contexts, seen, known, slots, sequences};                                               \
    return (decay_per_row ? delta_rule<DecayPerRow, T> : delta_rule<SameDecay, T>)(z, out, layer, rows, slot_count,    \
                                                                                   sizes, weights, key_heads,          \
                                                                                   threads);                           \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
