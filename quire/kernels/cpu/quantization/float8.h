// 8-bit floats (e4m3: a sign, four bits of exponent with bias 7, three of mantissa) as pairs of bfloat16, which
// represent all of their values exactly.
//
// A word has four codes: the upper bytes of its halves are one pair, the lower bytes the next. pairs_of makes one of
// the two pairs, numbers_of the floats of one of the four codes.
#pragma once

#include "../simd.h"

#ifdef __AVX512BW__

INLINE Words pairs_of(Words codes, int pair) {
  if (pair) codes = _mm512_slli_epi16(codes, 8);  // the lower bytes of the halves do not matter
  // Exponent and mantissa are shifted to their places in bfloat16, and 120 is added to the exponent. Codes without an
  // exponent are multiples of 2^-9 and come from a table, because the product instruction treats subnormal numbers as
  // 0.
  const Words moved = _mm512_and_si512(_mm512_srai_epi16(codes, 4), _mm512_set1_epi16(static_cast<short>(0x87f0)));
  const Words normal = _mm512_add_epi16(moved, _mm512_set1_epi16(0x3c00));
  const __mmask32 small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x7800));
  const Words table = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0x3c603c403c203c00, 0x3bc03b803b000000);
  const Words sign = _mm512_and_si512(codes, _mm512_set1_epi16(static_cast<short>(0x8000)));
  const Words multiple = _mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_andnot_si512(sign, codes), 8), table);
  return _mm512_mask_mov_epi16(normal, small, _mm512_or_si512(multiple, sign));
}
INLINE Vec numbers_of(Words codes, int i) { return halves(pairs_of(codes, i / 2), i % 2); }

#else

INLINE Vec numbers_of(Words codes, int i) {
  // Sign, exponent and mantissa at their places in bfloat16 are 2^-120 times the number.
  for (Bits& part : codes.part) {
    const Shorts upper = i < 2 ? (Shorts)part : (Shorts)part << 8;
    part = (Bits)(upper >> 4) & 0x87f087f0u;
  }
  return vmul(halves(codes, i % 2), vset(0x1p120f));
}
INLINE Words pairs_of(Words codes, int pair) {
  return exact_pairs(numbers_of(codes, 2 * pair), numbers_of(codes, 2 * pair + 1));
}

#endif
