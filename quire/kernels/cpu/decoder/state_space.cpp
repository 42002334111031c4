// Selective state spaces (kernels/recurrent/state_space.py).
#include <cmath>

#include "../kernels.h"
#include "../rms.h"
#include "recurrence.h"

namespace {

using namespace recurrence;

struct Weights {
  const float *rate, *shift, *skip, *norm;  // the last one may be null: no norm
  float eps, least, most;
  int groups, norm_first;

  bool gates_first() const { return !norm || !norm_first; }
};

// Parameters of one sequence's tokens.
template <class T>
struct Space {
  const Sizes& sizes;
  const Weights& weights;
  const T* z;
  T* out;

  void take(const T* given, const T* gates, int head, int place, const Tile& tile) const {
    const long keys = static_cast<long>(weights.groups) * sizes.key, group = head / (sizes.heads / weights.groups);
    const T *x = given + static_cast<long>(head) * sizes.value, *b = given + sizes.values() + group * sizes.key;
    for (int i = 0; i < sizes.key; i += 16) {
      const int lanes = sizes.key - i;
      vstore_first(tile.k + place * sizes.key + i, vload_first(b + i, lanes), lanes);
      vstore_first(tile.q + place * sizes.key + i, vload_first(b + keys + i, lanes), lanes);
    }
    for (int i = 0; i < sizes.value; i += 16) vstore(tile.v + place * sizes.value + i, vload(x + i));
    const float step = softplus(number(gates + head) + weights.shift[head]);
    tile.beta[place] = step < weights.least ? weights.least : step > weights.most ? weights.most : step;
    tile.decay[place] = std::exp(weights.rate[head] * tile.beta[place]);
  }

  template <int W>
  __attribute__((always_inline)) void update(int head, int, float* matrix, long stride, int rows, const float* q,
                                             const float* k, const float* v, float* out_of, const float* decay,
                                             float step) const {
    Vec delta[W], read[W];
    for (int w = 0; w < W; ++w) delta[w] = vmul(vset(step), vload(v + 16 * w));
    write_and_read<W>(matrix, stride, rows, q, k, delta, SameDecay(decay), read);
    const Vec skip = vset(weights.skip[head]);
    for (int w = 0; w < W; ++w) vstore(out_of + 16 * w, vfma(skip, vload(v + 16 * w), read[w]));
  }

  void give(long token, int head, const float* found) const {
    const long at = token * sizes.values() + static_cast<long>(head) * sizes.value;
    for (int j = 0; j < sizes.value; j += 16) {
      const Vec y = vload(found + j);
      vstore(out + at + j, weights.gates_first() ? vmul(y, vsilu(vload(z + at + j))) : y);
    }
  }
};

// Norms results, each group of a token by itself.
template <class T>
void norm(const Sizes& sizes, const Weights& weights, const T* z, T* out, long tokens, int threads) {
  const int size = static_cast<int>(sizes.values() / weights.groups);
  parallel_rows(threads, tokens * weights.groups, tokens * sizes.values(), [&](long begin, long end) {
    for (long row = begin; row < end; ++row) {
      T* y = out + row * size;
      const T* gate = z + row * size;
      const float* weight = weights.norm + row % weights.groups * size;
      const Vec factor = vset(rms_factor(y, size, weights.eps));
      for (int i = 0; i < size; i += 16) {
        const Vec normed = vmul(vmul(vload(y + i), factor), vload(weight + i));
        vstore(y + i, weights.norm_first ? vmul(normed, vsilu(vload(gate + i))) : normed);
      }
    }
  });
}

template <class T>
int state_space(const T* z, T* out, const Layer<T>& layer, const Rows& rows, long slot_count, const Sizes& sizes,
                const Weights& weights, int threads) {
  const int failed = run(layer, rows, slot_count, sizes, threads, [&](long row) {
    return Space<T>{sizes, weights, z + row * sizes.values(), out + row * sizes.values()};
  });
  if (!failed && weights.norm) norm(sizes, weights, z, out, rows.starts[rows.count], threads);
  return failed;
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int state_space_##suffix(                                                                                   \
      const T* xbc, const T* z, const T* dt, const float* rate, const float* shift, const float* skip,                 \
      const float* norm, T* out, float* matrices, T* guesses, const int32_t* starts, const int32_t* contexts,          \
      const int32_t* seen, const int32_t* known, const int64_t* slots, long slot_count, int sequences, int groups,     \
      int heads, int key, int value, int drafts, float eps, float least, float most, int norm_first, int threads) {    \
    const Sizes sizes = {heads, key, value, drafts, heads * value + 2 * groups * key, heads};                          \
    return state_space(z, out, Layer<T>{xbc, dt, matrices, guesses},                                                   \
                       Rows{starts, contexts, seen, known, slots, sequences}, slot_count, sizes,                       \
                       Weights{rate, shift, skip, norm, eps, least, most, groups, norm_first}, threads);               \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
