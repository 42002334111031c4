// Selective scans (kernels/recurrent/selective_scan.py).
#include <cmath>

#include "../kernels.h"
#include "../rms.h"
#include "recurrence.h"

namespace {

using namespace recurrence;

struct Weights {
  const float *rate, *shift, *skip, *write_norm, *read_norm;  // the last two may be null: no norms
  float eps;
};

// Parameters of one sequence's tokens.
template <class T>
struct Scan {
  const Sizes& sizes;
  const Weights& weights;
  const T* z;
  T* out;

  // Steps are stored where results are written later.
  void take(const T* given, const T* gates, int head, int place, const Tile& tile) const {
    const long first = static_cast<long>(head) * sizes.value, at = static_cast<long>(place) * sizes.value;
    const T* b = given + sizes.values();
    taken(b, weights.write_norm, tile.k + place * sizes.key);
    taken(b + sizes.key, weights.read_norm, tile.q + place * sizes.key);
    for (int i = 0; i < sizes.value; i += 16) {
      vstore(tile.v + at + i, vload(given + first + i));
      vstore(tile.out + at + i, vsoftplus(vadd(vload(gates + first + i), vload(weights.shift + first + i))));
    }
  }

  // Norms b or c.
  void taken(const T* from, const float* norm, float* to) const {
    const Vec factor = vset(norm ? rms_factor(from, sizes.key, weights.eps) : 1.0f);
    for (int i = 0; i < sizes.key; i += 16) {
      const int lanes = sizes.key - i;
      const Vec numbers = vmul(vload_first(from + i, lanes), factor);
      vstore_first(to + i, norm ? vmul(numbers, vload_first(norm + i, lanes)) : numbers, lanes);
    }
  }

  template <int W>
  __attribute__((always_inline)) void update(int head, int column, float* matrix, long stride, int rows, const float* q,
                                             const float* k, const float* v, float* out_of, const float*, float) const {
    const float* rate = weights.rate + head * sizes.matrix() + column;
    Vec step[W], delta[W], even[W], odd[W];
    for (int w = 0; w < W; ++w) {
      step[w] = vload(out_of + 16 * w);
      delta[w] = vmul(step[w], vload(v + 16 * w));
      step[w] = vmul(step[w], vset(kLog2E));
      even[w] = odd[w] = vset(0.0f);
    }
    for (int r = 0; r < rows; r += 2) {
      row<W>(matrix + r * stride, rate + r * stride, q[r], k[r], step, delta, even);
      row<W>(matrix + (r + 1) * stride, rate + (r + 1) * stride, q[r + 1], k[r + 1], step, delta, odd);
    }
    const float* skip = weights.skip + static_cast<long>(head) * sizes.value + column;
    for (int w = 0; w < W; ++w)
      vstore(out_of + 16 * w, vfma(vload(skip + 16 * w), vload(v + 16 * w), vadd(even[w], odd[w])));
  }

  // Updates a row of the matrix and adds its readout.
  template <int W>
  static __attribute__((always_inline)) void row(float* matrix, const float* rate, float q, float k,
                                                 const Vec (&step)[W], const Vec (&delta)[W], Vec (&read)[W]) {
    for (int w = 0; w < W; ++w) {
      const Vec decay = vexp2_below(vmul(vload(rate + 16 * w), step[w]));
      const Vec fresh = vfma(vset(k), delta[w], vmul(decay, vload(matrix + 16 * w)));
      vstore(matrix + 16 * w, fresh);
      read[w] = vfma(vset(q), fresh, read[w]);
    }
  }

  void give(long token, int head, const float* found) const {
    const long at = token * sizes.values() + static_cast<long>(head) * sizes.value;
    for (int j = 0; j < sizes.value; j += 16) vstore(out + at + j, vmul(vload(found + j), vsilu(vload(z + at + j))));
  }
};

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int selective_scan_##suffix(                                                                                \
      const T* xbc, const T* z, const T* dt, const float* rate, const float* shift, const float* skip,                 \
      const float* write_norm, const float* read_norm, T* out, float* matrices, T* guesses, const int32_t* starts,     \
      const int32_t* contexts, const int32_t* seen, const int32_t* known, const int64_t* slots, long slot_count,       \
      int sequences, int, int heads, int key, int value, int drafts, float eps, int threads) {                         \
    const Sizes sizes = {heads, key, value, drafts, heads * value + 2 * key, heads * value};                           \
    const Weights weights = {rate, shift, skip, write_norm, read_norm, eps};                                           \
    return run(Layer<T>{xbc, dt, matrices, guesses}, Rows{starts, contexts, seen, known, slots, sequences},            \
               slot_count, sizes, threads, [&](long row) {                                                             \
                 return Scan<T>{sizes, weights, z + row * sizes.values(), out + row * sizes.values()};                 \
               });                                                                                                     \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
