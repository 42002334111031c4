// RMSNorm and LayerNorm, alone and fused with the residual addition, the MLP's gates (SiLU and GELU), and activations
// of MLPs without a gate. Computed in float32 and rounded once at the end.
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
      float average;
      const Vec factor = vset(centred_factor(row, size, eps, &average)), mean = vset(average);
      for (int i = 0; i < size; i += 16) {
        const Vec scaled = vmul(vsub(vload_first(row + i, size - i), mean), factor);
        const Vec moved = vfma(scaled, vload_first(weight + i, size - i), vload_first(bias + i, size - i));
        vstore_first(out + r * size + i, moved, size - i);
      }
    }
  });
}

constexpr long kPiece = 4096;  // numbers that one thread computes at once

// x = of(x), for each number.
template <class T, class Of>
void each_number(T* x, long size, int threads, const Of& of) {
  parallel_rows(threads, (size + kPiece - 1) / kPiece, size * 6, [&](long begin, long end) {
    const long last = end * kPiece < size ? end * kPiece : size;
    for (long i = begin * kPiece; i < last; i += 16) {
      const int count = last - i < 16 ? static_cast<int>(last - i) : 16;
      vstore_first(x + i, of(vload_first(x + i, count)), count);
    }
  });
}

// kernels/parameters/activation.py has the same numbers for the kinds, and defines xIELU.
enum { kGelu = 0, kGeluTanh = 1, kRelu = 2, kSquaredRelu = 3, kXielu = 4, kTimes = 5 };

template <class T>
void activate(T* x, long size, int kind, float positive, float negative, float slope, int threads) {
  const Vec zero = vset(0.0f), one = vset(1.0f);
  switch (kind) {
    case kGelu:
      return each_number(x, size, threads, [](Vec v) { return vgelu_exact(v); });
    case kGeluTanh:
      return each_number(x, size, threads, [](Vec v) { return vgelu(v); });
    case kRelu:
      return each_number(x, size, threads, [&](Vec v) { return vmax(v, zero); });
    case kSquaredRelu:
      return each_number(x, size, threads, [&](Vec v) { return vmul(vmax(v, zero), vmax(v, zero)); });
    case kTimes:
      return each_number(x, size, threads, [&](Vec v) { return vmul(v, vset(slope)); });
    default:
      const Vec a = vset(positive), c = vset(negative), b = vset(slope);
      return each_number(x, size, threads, [&](Vec v) {
        const Vec above = vmax(v, zero), below = vmin(v, zero);
        const Vec bent = vsub(vsub(vexp2(vmul(below, vset(kLog2E))), one), below);
        return vfma(b, v, vfma(vmul(a, above), above, vmul(c, bent)));
      });
  }
}

// residual += x.
template <class T>
void add(const T* x, T* residual, long size, int threads) {
  parallel_rows(threads, (size + kPiece - 1) / kPiece, size, [&](long begin, long end) {
    const long last = end * kPiece < size ? end * kPiece : size;
    for (long i = begin * kPiece; i < last; i += 16) {
      const int count = last - i < 16 ? static_cast<int>(last - i) : 16;
      vstore_first(residual + i, vadd(vload_first(x + i, count), vload_first(residual + i, count)), count);
    }
  });
}

// x *= sigmoid(gate); each gate covers this many adjacent numbers.
template <class T>
void sigmoid_mul_wide(T* x, const T* gate, long gates, int each, int threads) {
  parallel_rows(threads, gates, gates * each, [&](long begin, long end) {
    for (long g = begin; g < end; ++g) {
      float score;
      vstore_first(&score, vload_first(gate + g, 1), 1);
      const Vec share = vset(1.0f / (1.0f + __builtin_expf(-score)));
      for (long i = g * each; i < (g + 1) * each; i += 16) {
        const int count = (g + 1) * each - i < 16 ? static_cast<int>((g + 1) * each - i) : 16;
        vstore_first(x + i, vmul(vload_first(x + i, count), share), count);
      }
    }
  });
}

// x *= sigmoid(gate), with a gate for each number.
template <class T>
void sigmoid_mul(T* x, const T* gate, long size, int threads) {
  parallel_rows(threads, (size + kPiece - 1) / kPiece, size * 6, [&](long begin, long end) {
    const long last = end * kPiece < size ? end * kPiece : size;
    for (long i = begin * kPiece; i < last; i += 16) {
      const int count = last - i < 16 ? static_cast<int>(last - i) : 16;
      const Vec fall = vexp2(vmul(vload_first(gate + i, count), vset(-kLog2E)));
      vstore_first(x + i, vdiv(vload_first(x + i, count), vadd(vset(1.0f), fall)), count);
    }
  });
}

// out = the rows of x and of y side by side.
template <class T>
void join(const T* x, const T* y, T* out, long rows, int first, int second, int threads) {
  parallel_rows(threads, rows, rows * (first + second), [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      T* row = out + r * (first + second);
      __builtin_memcpy(row, x + r * first, first * sizeof(T));
      __builtin_memcpy(row + first, y + r * second, second * sizeof(T));
    }
  });
}

// Converts numbers to the other type.
template <class T, class Other>
void cast(const T* x, Other* out, long size, int threads) {
  constexpr long kPiece = 256;
  parallel_rows(threads, (size + kPiece - 1) / kPiece, size, [&](long begin, long end) {
    const long last = end * kPiece < size ? end * kPiece : size;
    for (long i = begin * kPiece; i < last; i += 16) {
      const int count = last - i < 16 ? static_cast<int>(last - i) : 16;
      vstore_first(out + i, vload_first(x + i, count), count);
    }
  });
}

// residual += sigmoid(gate) * x, with one gate for each row.
template <class T>
void add_gated(const T* x, const T* gate, T* residual, long rows, int size, int threads) {
  parallel_rows(threads, rows, rows * size, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      float score;
      vstore_first(&score, vload_first(gate + r, 1), 1);
      const Vec share = vset(1.0f / (1.0f + __builtin_expf(-score)));
      for (long i = r * size; i < (r + 1) * size; i += 16) {
        const int count = (r + 1) * size - i < 16 ? static_cast<int>((r + 1) * size - i) : 16;
        vstore_first(residual + i, vfma(vload_first(x + i, count), share, vload_first(residual + i, count)), count);
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

// x [rows, size] *= columns of `beside` [rows, width] from `first` on.
template <class T>
void mul_columns(T* x, const T* beside, long rows, int size, int width, int first, int threads) {
  parallel_rows(threads, rows, rows * size, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      T* own = x + r * size;
      const T* columns = beside + r * width + first;
      for (int i = 0; i < size; i += 16)
        vstore_first(own + i, vmul(vload_first(own + i, size - i), vload_first(columns + i, size - i)), size - i);
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
  EXPORTED void add_##suffix(const T* x, T* residual, long size, int threads) { add(x, residual, size, threads); }     \
  EXPORTED void add_gated_##suffix(const T* x, const T* gate, T* residual, long rows, int size, int threads) {         \
    add_gated(x, gate, residual, rows, size, threads);                                                                 \
  }                                                                                                                    \
  EXPORTED void activate_##suffix(T* x, long size, int kind, float positive, float negative, float slope,              \
                                  int threads) {                                                                       \
    activate(x, size, kind, positive, negative, slope, threads);                                                       \
  }                                                                                                                    \
  EXPORTED void join_##suffix(const T* x, const T* y, T* out, long rows, int first, int second, int threads) {         \
    join(x, y, out, rows, first, second, threads);                                                                     \
  }                                                                                                                    \
  EXPORTED void cast_##suffix(const T* x, void* out, long size, int threads) {                                         \
    using Other = std::conditional_t<std::is_same_v<T, float>, bf16, float>;                                           \
    cast(x, static_cast<Other*>(out), size, threads);                                                                  \
  }                                                                                                                    \
  EXPORTED void sigmoid_mul_##suffix(T* x, const T* gate, long gates, int each, int threads) {                         \
    each > 1 ? sigmoid_mul_wide(x, gate, gates, each, threads) : sigmoid_mul(x, gate, gates, threads);                 \
  }                                                                                                                    \
  EXPORTED void silu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads) {                        \
    gate_mul<false>(gate_up, out, rows, size, threads);                                                                \
  }                                                                                                                    \
  EXPORTED void gelu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads) {                        \
    gate_mul<true>(gate_up, out, rows, size, threads);                                                                 \
  }                                                                                                                    \
  EXPORTED void mul_columns_##suffix(T* x, const T* beside, long rows, int size, int width, int first, int threads) {  \
    mul_columns(x, beside, rows, size, width, first, threads);                                                         \
  }                                                                                                                    \
  EXPORTED void clamped_mul_##suffix(const T* gate_up, T* out, long rows, int size, float alpha, float limit,          \
                                     int threads) {                                                                    \
    clamped_mul(gate_up, out, rows, size, alpha, limit, threads);                                                      \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
