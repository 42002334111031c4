// RMSNorm and LayerNorm, alone and fused with the residual addition, the MLP's gates (SiLU and GELU), and GELU alone.
// Computed in float32 and rounded once at the end.
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

// Sum of the 16-lane partial sums of f(x[i .. i + 16]) over a row, in a fixed order.
template <class T, class Of>
INLINE float row_sum(const T* x, int size, const Of& of) {
  Vec sums = vset(0.0f);
  int i = 0;
  for (; i + 16 <= size; i += 16) sums = vadd(sums, of(vload(x + i)));
  if (i < size) sums = vadd(sums, vkeep(of(vload_first(x + i, size - i)), 0, size - i, 0.0f));
  return vsum(sums);
}

// out = LayerNorm(x), or with a residual: residual += x, rounded to T, and out = LayerNorm(residual).
template <class T>
void layer_norm(const T* x, T* residual, const float* weight, const float* bias, T* out, long rows, int size, float eps,
                int threads) {
  parallel_rows(threads, rows, rows * size * 2, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      const T* row = x + r * size;
      if (residual) {
        T* sum = residual + r * size;
        for (int i = 0; i < size; i += 16)
          vstore_first(sum + i, vadd(vload_first(row + i, size - i), vload_first(sum + i, size - i)), size - i);
        row = sum;
      }
      const Vec mean = vset(row_sum(row, size, [](Vec v) { return v; }) / size);
      const float squares = row_sum(row, size, [&](Vec v) {
        const Vec apart = vsub(v, mean);
        return vmul(apart, apart);
      });
      const Vec factor = vset(1.0f / __builtin_sqrtf(squares / size + eps));
      for (int i = 0; i < size; i += 16) {
        const Vec scaled = vmul(vsub(vload_first(row + i, size - i), mean), factor);
        const Vec moved = vfma(scaled, vload_first(weight + i, size - i), vload_first(bias + i, size - i));
        vstore_first(out + r * size + i, moved, size - i);
      }
    }
  });
}

// x = GELU(x).
template <class T>
void gelu(T* x, long size, int threads) {
  constexpr long kPiece = 4096;
  parallel_rows(threads, (size + kPiece - 1) / kPiece, size * 6, [&](long begin, long end) {
    const long last = end * kPiece < size ? end * kPiece : size;
    for (long i = begin * kPiece; i < last; i += 16) {
      const int count = last - i < 16 ? static_cast<int>(last - i) : 16;
      vstore_first(x + i, vgelu_exact(vload_first(x + i, count)), count);
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

// silu_mul with a steeper gate, and limits: gate * sigmoid(alpha * gate) * (up + 1).
template <class T>
void clamped_mul(const T* gate_up, T* out, long rows, int size, float alpha, float limit, int threads) {
  const Vec highest = vset(limit), lowest = vset(-limit), one = vset(1.0f), steep = vset(-alpha * kLog2E);
  parallel_rows(threads, rows, rows * size * 6, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      const T *gate = gate_up + r * 2 * size, *up = gate + size;
      for (int i = 0; i < size; i += 16) {
        const Vec x = vmin(highest, vload_first(gate + i, size - i));
        const Vec y = vadd(vmax(lowest, vmin(highest, vload_first(up + i, size - i))), one);
        vstore_first(out + r * size + i, vmul(vdiv(x, vadd(one, vexp2(vmul(x, steep)))), y), size - i);
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
  EXPORTED void layer_norm_##suffix(const T* x, T* residual, const float* weight, const float* bias, T* out,           \
                                    long rows, int size, float eps, int threads) {                                     \
    layer_norm(x, residual, weight, bias, out, rows, size, eps, threads);                                              \
  }                                                                                                                    \
  EXPORTED void gelu_##suffix(T* x, long size, int threads) { gelu(x, size, threads); }                                \
  EXPORTED void silu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads) {                        \
    gate_mul<false>(gate_up, out, rows, size, threads);                                                                \
  }                                                                                                                    \
  EXPORTED void gelu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads) {                        \
    gate_mul<true>(gate_up, out, rows, size, threads);                                                                 \
  }                                                                                                                    \
  EXPORTED void clamped_mul_##suffix(const T* gate_up, T* out, long rows, int size, float alpha, float limit,          \
                                     int threads) {                                                                    \
    clamped_mul(gate_up, out, rows, size, alpha, limit, threads);                                                      \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
