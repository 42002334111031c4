// Vectors of sixteen floats for every instruction set. Each kernel is written once, with these functions. The kernels
// are compiled with -ffp-contract=off, so that a product and a sum are fused only by vfma. A row's arithmetic is then
// the same in every instance of a template, as the contract of kernels/backend.py (the same bits in every batch)
// requires.
#pragma once

#include <cstdint>
#include <type_traits>

#include "inline.h"

struct bf16 {
  uint16_t bits;
};
struct half {  // IEEE's 16-bit float
  uint16_t bits;
};
struct float8 {  // four bits of exponent, three of fraction, no infinity: e4m3fn
  uint8_t bits;
};

INLINE uint32_t word_at(const void* p) {
  uint32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return word;
}

#ifdef __AVX512F__
#include "simd_avx512.h"
#else
#include "simd_generic.h"
#endif

// What idot itself subtracts from each unsigned byte: 128 if an instruction's factors are signed. Sums then start at 0.
#ifdef __ARM_FEATURE_DOTPROD
constexpr uint32_t kCentre = 128;
#else
constexpr uint32_t kCentre = 0;
#endif

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896340736f;

INLINE float as_float(int32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE void unpack(const float* from, float* to, int n) { __builtin_memcpy(to, from, n * sizeof(float)); }
INLINE void unpack(const bf16* from, float* to, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i].bits) << 16;
    __builtin_memcpy(to + i, &bits, sizeof(float));
  }
}

// Loads the first n of 16 lanes. The others become 0. vstore_first stores only the first n.
template <class T>
INLINE Vec vload_first(const T* p, int n) {
  if (n >= 16) return vload(p);
  float lanes[16] = {};
  unpack(p, lanes, n);
  return vload(lanes);
}
template <class T>
INLINE void vstore_first(T* p, Vec x, int n) {
  if (n >= 16) return vstore(p, x);
  T lanes[16];
  vstore(lanes, x);
  __builtin_memcpy(p, lanes, n * sizeof(T));
}

// 2^f for f from -1/2 to 1/2, exactly 1 at 0. Minimax polynomials found with Lawson's iteration. Their error is 9e-8,
// or 3e-6 for results that are rounded to bfloat16 anyway.
template <class Result>
INLINE Vec exp2_polynomial(Vec f) {
  Vec p;
  if constexpr (sizeof(Result) == 4) {
    p = vfma(vset(1.326472689905358e-3f), f, vset(9.671512660562133e-3f));
    p = vfma(p, f, vset(5.55073374424457e-2f));
    p = vfma(p, f, vset(2.4022242084919254e-1f));
    p = vfma(p, f, vset(6.931469775984717e-1f));
  } else {
    p = vfma(vset(9.582852867473804e-3f), f, vset(5.5906424924599164e-2f));
    p = vfma(p, f, vset(2.402409861671141e-1f));
    p = vfma(p, f, vset(6.931241933586662e-1f));
  }
  return vfma(p, f, vset(1.0f));
}

// 2^x, exactly 1 at 0 and exactly 0 at -infinity. NaN gives NaN. vexp2_below requires x to be at most 127.
template <class Result = float>
INLINE Vec vexp2_below(Vec x) {
  x = vmax(vset(-200.0f), x);
  const Vec whole = vround(x);
  return vscale(exp2_polynomial<Result>(vsub(x, whole)), whole);
}
INLINE Vec vexp2(Vec x) { return vexp2_below(vmin(vset(127.0f), x)); }
INLINE Vec vtanh(Vec x) {  // 1 - 2 / (e^2x + 1)
  const Vec e = vexp2(vmul(x, vset(2 * kLog2E)));
  return vsub(vset(1.0f), vdiv(vset(2.0f), vadd(e, vset(1.0f))));
}
INLINE Vec vsigmoid(Vec x) { return vdiv(vset(1.0f), vadd(vset(1.0f), vexp2(vmul(x, vset(-kLog2E))))); }
INLINE Vec vsilu(Vec x) { return vdiv(x, vadd(vset(1.0f), vexp2(vmul(x, vset(-kLog2E))))); }
INLINE Vec vgelu(Vec x) {  // x (1 + tanh u) / 2 is x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  const Vec bent = vfma(vmul(vmul(x, x), x), vset(0.044715f), x);
  return vdiv(x, vadd(vset(1.0f), vexp2(vmul(bent, vset(-1.5957691216057308f * kLog2E)))));
}

// x (1 + erf(x / sqrt(2))) / 2. For the error function, formula 7.1.26 of Abramowitz and Stegun (1964), whose absolute
// error is 1.5e-7.
INLINE Vec vgelu_exact(Vec x) {
  const Vec z = vmul(vmax(x, vsub(vset(0.0f), x)), vset(0.70710678118654752f));
  const Vec t = vdiv(vset(1.0f), vfma(z, vset(0.3275911f), vset(1.0f)));
  Vec p = vfma(vset(1.061405429f), t, vset(-1.453152027f));
  p = vfma(p, t, vset(1.421413741f));
  p = vfma(p, t, vset(-0.284496736f));
  p = vfma(p, t, vset(0.254829592f));
  const Vec rest = vmul(vmul(p, t), vexp2_below(vmul(vmul(z, z), vset(-kLog2E))));  // 1 - erf(z)
  const Vec half = vmul(vmul(x, rest), vset(0.5f));  // the result is x - half above 0, and half below it
  return vsub(vmax(x, vset(0.0f)), vmax(half, vsub(vset(0.0f), half)));
}

// acc + a * b for each word. A word is a float, or a pair of bfloat16, whose two products are both added.
template <class T>
INLINE Vec dot(Vec acc, Words a, Words b);
template <>
inline __attribute__((always_inline)) Vec dot<float>(Vec acc, Words a, Words b) {
  return vfma(as_floats(a), as_floats(b), acc);
}
template <>
inline __attribute__((always_inline)) Vec dot<bf16>(Vec acc, Words a, Words b) {
  return dot_pairs(acc, a, b);
}

INLINE Words as_words(Vec x) {
  Words words;
  __builtin_memcpy(&words, &x, sizeof words);
  return words;
}
INLINE Vec halves(Words pairs, bool high) { return high ? high_halves(pairs) : low_halves(pairs); }

// How many columns of 16 outputs are computed together with R rows.
template <int R>
constexpr int kColumns = R * 4 <= kAccumulators   ? 4
                         : R * 2 <= kAccumulators ? 2
                                                  : 1;

// acc[r][c] += sum over s of a[r][s] * b[c][s * stride .. + 16]: the inner loop of every matrix multiplication. Each
// accumulator adds its products in the order of s, so a row's result is the same for every R and C. `fetch(s)` may
// prefetch what will be read next: pages are scattered in memory, so the CPU cannot predict the next one. If no
// instruction multiplies pairs, their low halves are multiplied first and then the high ones, which are loaded again,
// because both at once would need more registers than AVX2 has. Rows may be bfloat16 in pairs, or floats.
template <class T, int R, int C, class X, class Fetch>
INLINE void multiply(Vec (&acc)[R][C], const X* const (&a)[R], const uint32_t* const (&b)[C], long stride, int steps,
                     const Fetch& fetch) {
  constexpr bool kFloats = sizeof(T) == 2 && std::is_same_v<X, float>;
  for (long s = 0; s < steps; ++s) {
    fetch(s);
    if constexpr (sizeof(T) == 4 || !(kHalvesApart || kFloats)) {
      Words column[C];
      UNROLLED (c, C) column[c] = wload(b[c] + s * stride);
      UNROLLED (r, R) {
        const Words row = wset(word_at(reinterpret_cast<const char*>(a[r]) + 4 * s));
        UNROLLED (c, C) acc[r][c] = dot<T>(acc[r][c], column[c], row);
      }
    } else {
      long at = s;
      UNROLLED (half, 2) {
        Vec column[C];
        UNROLLED (c, C) column[c] = halves(wload(b[c] + at * stride), half);
        UNROLLED (r, R) {
          Vec row;
          if constexpr (kFloats)
            row = vset(a[r][2 * at + half]);
          else
            row = halves(wset(a[r][at]), half);
          UNROLLED (c, C) acc[r][c] = vfma(column[c], row, acc[r][c]);
        }
        asm("" : "+r"(at));  // otherwise GCC moves the sums into memory to keep what it has loaded
      }
    }
  }
}
