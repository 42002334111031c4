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
// Both return b if either is NaN.
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

constexpr bool kHalvesApart = false;
#ifdef __AVX512BF16__
INLINE Vec dot_pairs(Vec acc, Words a, Words b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#else
INLINE Vec dot_pairs(Vec acc, Words a, Words b) {
  return vfma(high_halves(a), high_halves(b), vfma(low_halves(a), low_halves(b), acc));
}
#endif

// Stores x and adds the rounded numbers to `sums`, in any lanes.
INLINE Vec store_and_add(float* p, Vec x, Vec sums) {
  vstore(p, x);
  return vadd(sums, x);
}
INLINE Vec store_and_add(bf16* p, Vec x, Vec sums) {
  const __m256i rounded = to_bf16(x);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded);
#ifdef __AVX512BF16__
  return dot_pairs(sums, _mm512_zextsi256_si512(rounded), _mm512_set1_epi32(0x3f803f80));  // one step instead of three
#else
  return vadd(sums, as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
#endif
}

// The low byte of each integer.
INLINE void store_bytes(int8_t* p, Words w) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(w));
}

// 16 integers of 32 bits, as Words. idot adds to each the products of its word's factors, four unsigned bytes, with
// four 8-bit integers of b, which are the same for all words. If the instruction multiplies 16 bits, idot takes first
// the even bytes and then the odd ones. Codes are stored in the order in which they are multiplied.
#ifdef __AVX512VNNI__
constexpr int kCodeBytes = 1;
INLINE Words factors_of(Words w, int) { return w; }
INLINE Words idot(Words acc, Words a, Words b) { return _mm512_dpbusd_epi32(acc, a, b); }
INLINE void store_codes(int8_t* p, Words w) { store_bytes(p, w); }
#else
constexpr int kCodeBytes = 2;
INLINE Words factors_of(Words w, int odd) {
  return odd ? _mm512_srli_epi16(w, 8) : _mm512_and_si512(w, wset(0x00ff00ffu));
}
INLINE Words idot(Words acc, Words a, Words b) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)); }
INLINE void store_codes(int8_t* p, Words w) {
  const __m256i low = _mm256_shufflelo_epi16(_mm512_cvtepi32_epi16(w), _MM_SHUFFLE(3, 1, 2, 0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shufflehi_epi16(low, _MM_SHUFFLE(3, 1, 2, 0)));
}
#endif
INLINE Vec to_floats(Words w) { return _mm512_cvtepi32_ps(w); }
INLINE Words to_integers(Vec x) { return _mm512_cvtps_epi32(x); }  // nearest; any if out of range, without a fault
INLINE Words wadd(Words a, Words b) { return _mm512_add_epi32(a, b); }
INLINE Words wmax(Words a, Words b) { return _mm512_max_epi32(a, b); }
INLINE Words wtimes256(Words w) { return _mm512_slli_epi32(w, 8); }
INLINE Words wby256(Words w) { return _mm512_srai_epi32(w, 8); }  // rounded down
INLINE int32_t wsum(Words w) { return _mm512_reduce_add_epi32(w); }
INLINE int32_t wpeak(Words w) { return _mm512_reduce_max_epi32(w); }
// The bits of |x|, which as integers have the order of the numbers. Those of NaN are the largest.
INLINE Words magnitude(Vec x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }

// Looks up each code in a table of 16 bytes. A code is the low or the high half of a byte.
INLINE Words wtable(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE Words look_up_low(Words table, Words codes) {
  return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(0x0f)));
}
INLINE Words look_up_high(Words table, Words codes) { return look_up_low(table, _mm512_srli_epi16(codes, 4)); }

// The highest bits of 3 vectors' nibbles, as nibbles.
INLINE Words join_high_bits(Words a, Words b, Words c) {
  constexpr int kOrMasked = 0xf8;  // a | (b & c)
  a = _mm512_and_si512(_mm512_srli_epi32(a, 3), _mm512_set1_epi8(0x11));
  a = _mm512_ternarylogic_epi32(a, _mm512_srli_epi32(b, 2), _mm512_set1_epi8(0x22), kOrMasked);
  return _mm512_ternarylogic_epi32(a, _mm512_srli_epi32(c, 1), _mm512_set1_epi8(0x44), kOrMasked);
}
INLINE Vec vload_nibbles(const uint8_t* p, bool high) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return to_floats(high ? _mm512_srli_epi32(bytes, 4) : _mm512_and_si512(bytes, _mm512_set1_epi32(15)));
}

INLINE Vec vload(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Only for finite numbers. A shift makes a half of it, which is 2^8 times smaller.
INLINE Vec vload(const float8* p) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
  const __m256i bits = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  return vmul(_mm512_cvtph_ps(bits), vset(256.0f));
}
// Pairs of bfloat16 from numbers that bfloat16 represents exactly.
INLINE Words exact_pairs(Vec low, Vec high) {
  const __m512i first = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
  return _mm512_or_si512(first, _mm512_and_si512(_mm512_castps_si512(high), _mm512_set1_epi32(~0xffff)));
}

// Transposes these 16 x 16 words.
INLINE void transpose(Words (&rows)[16]) {
  Words pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  Words fours[16];  // in 128-bit lane l, i + j has column 4 l + j of rows i to i + 3
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
      fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
    }
  for (int j = 0; j < 4; ++j) {
    const Words even = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88),
                odd = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd),
                more_even = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88),
                more_odd = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(even, more_even, 0x88);
    rows[4 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
    rows[12 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
  }
}
// Words of the low halves of a and b, and of their high halves, in turns: the first 16 of these words, and the others.
INLINE void zip_halves(Words a, Words b, Words& first, Words& second) {
  const Words low = _mm512_or_si512(_mm512_and_si512(a, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(b, 16));
  const Words high = _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_and_si512(b, _mm512_set1_epi32(~0xffff)));
  const Words from = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  first = _mm512_permutex2var_epi32(low, from, high);
  second = _mm512_permutex2var_epi32(low, _mm512_add_epi32(from, _mm512_set1_epi32(8)), high);
}

INLINE Vec vload(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

constexpr int kRows = 6;           // rows that are multiplied together
constexpr int kAccumulators = 24;  // of the 32 registers
