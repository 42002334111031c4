// RMSNorm, alone and fused with the residual addition, and the MLP's gates (SiLU and GELU). Computed in float32 and
// rounded once at the end.
#include "kernels.h"

#include "rms.h"

namespace {

template <class T>
void rms_norm(const T* x, const float* weight, T* out, long rows, int size, float eps, int threads) {
  parallel_rows(threads, rows, rows * size, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      const float factor = rms_factor(x + r * size, size, eps);
      for (int i = 0; i < size; i += 16) {
        const Vec scaled = vmul(vload_first(x + r * size + i, size - i), vset(factor));
        vstore_first(out + r * size + i, vmul(scaled, vload_first(weight + i, size - i)), size - i);
      }
    }
  });
}

// residual += x, rounded to T; then x = RMSNorm(residual), computed from the rounded sum as in the reference.
template <class T>
void add_rms_norm(T* x, T* residual, const float* weight, long rows, int size, float eps, int threads) {
  parallel_rows(threads, rows, rows * size, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      T *added = x + r * size, *sum = residual + r * size;
      for (int i = 0; i < size; i += 16)
        vstore_first(sum + i, vadd(vload_first(added + i, size - i), vload_first(sum + i, size - i)), size - i);
      const float factor = rms_factor(sum, size, eps);
      for (int i = 0; i < size; i += 16) {
        const Vec scaled = vmul(vload_first(sum + i, size - i), vset(factor));
        vstore_first(added + i, vmul(scaled, vload_first(weight + i, size - i)), size - i);
      }
    }
  });
}

template <bool gelu, class T>
void gate_mul(const T* gate_up, T* out, long rows, int size, int threads) {
  parallel_rows(threads, rows, rows * size * 6, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      const T *gate = gate_up + r * 2 * size, *up = gate + size;
      for (int i = 0; i < size; i += 16) {
        const Vec x = vload_first(gate + i, size - i);
        vstore_first(out + r * size + i, vmul(gelu ? vgelu(x) : vsilu(x), vload_first(up + i, size - i)), size - i);
      }
    }
  });
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void rms_norm_##suffix(const T* x, const float* weight, T* out, long rows, int size, float eps,             \
                                  int threads) {                                                                       \
    rms_norm(x, weight, out, rows, size, eps, threads);                                                                \
  }                                                                                                                    \
  EXPORTED void add_rms_norm_##suffix(T* x, T* residual, const float* weight, long rows, int size, float eps,          \
                                      int threads) {                                                                   \
    add_rms_norm(x, residual, weight, rows, size, eps, threads);                                                       \
  }                                                                                                                    \
  EXPORTED void silu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads) {                        \
    gate_mul<false>(gate_up, out, rows, size, threads);                                                                \
  }                                                                                                                    \
  EXPORTED void gelu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads) {                        \
    gate_mul<true>(gate_up, out, rows, size, threads);                                                                 \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
