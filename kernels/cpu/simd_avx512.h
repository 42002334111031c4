// Sixteen floats as one AVX-512 register. It has the same functions as simd_generic.h; only simd.h includes it.
#pragma once

#include <immintrin.h>

using Vec = __m512;     // 16 floats
using Words = __m512i;  // 16 words of 32 bits, each a float or a pair of bfloat16

INLINE Vec vset(float x) { return _mm512_set1_ps(x); }
INLINE Vec vload(const float* p) { return _mm512_loadu_ps(p); }
INLINE void vstore(float* p, Vec x) { _mm512_storeu_ps(p, x); }
INLINE Vec vadd(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec vsub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
INLINE Vec vmul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec vdiv(Vec a, Vec b) { return _mm512_div_ps(a, b); }
INLINE Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// Both return b where either is NaN.
INLINE Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE float vsum(Vec x) { return _mm512_reduce_add_ps(x); }
INLINE float vpeak(Vec x) { return _mm512_reduce_max_ps(x); }

// x in the lanes from `begin` up to `end`, `fill` in the others.
INLINE Vec vkeep(Vec x, int begin, int end, float fill) {
  const unsigned below_end = end >= 16 ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1;
  const unsigned below_begin = begin >= 16 ? 0xffffu : begin <= 0 ? 0u : (1u << begin) - 1;
  return _mm512_mask_mov_ps(_mm512_set1_ps(fill), static_cast<__mmask16>(below_end & ~below_begin), x);
}

INLINE Words wload(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE void wstore(uint32_t* p, Words w) { _mm512_storeu_si512(p, w); }
INLINE Words wset(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
INLINE Vec as_floats(Words w) { return _mm512_castsi512_ps(w); }
INLINE Vec low_halves(Words w) { return as_floats(_mm512_slli_epi32(w, 16)); }
INLINE Vec high_halves(Words w) { return as_floats(_mm512_and_si512(w, _mm512_set1_epi32(~0xffff))); }

INLINE Vec vload(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

#ifdef __AVX512BF16__
INLINE __m256i to_bf16(Vec x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
#else
INLINE __m256i to_bf16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(even, 16), nan, _mm512_set1_epi32(0x7fc0)));
}
#endif

INLINE void vstore(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }

// vround rounds to the nearest integer. vscale is p * 2^n for an integer n; 0 far below the smallest float.
INLINE Vec vround(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec vscale(Vec p, Vec n) { return _mm512_scalef_ps(p, n); }

#ifdef __AVX512BF16__
INLINE Vec dot_pairs(Vec acc, Words a, Words b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#else
INLINE Vec dot_pairs(Vec acc, Words a, Words b) {
  return vfma(high_halves(a), high_halves(b), vfma(low_halves(a), low_halves(b), acc));
}
#endif

constexpr int kRows = 6;           // that are multiplied together
constexpr int kAccumulators = 24;  // of the 32 registers
