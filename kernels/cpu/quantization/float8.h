// 8-bit floats (e4m3: a sign, four bits of exponent with bias 7, three of mantissa) as pairs of bfloat16, which hold
// all of their values exactly.
//
// A word has four codes: the upper bytes of its halves are one pair, the lower bytes the next.
#pragma once

#include "../simd.h"

#ifdef __AVX512BW__

// The codes are in the upper bytes of the halves; what is in the lower ones does not matter.
INLINE Words upper_pairs(Words codes) {
  // Exponent and mantissa are moved to where bfloat16 has them, and 120 is added to the exponent. Codes without an
  // exponent are multiples of 2^-9, which a table has: the instruction for products takes subnormal numbers for 0.
  const Words moved = _mm512_and_si512(_mm512_srai_epi16(codes, 4), _mm512_set1_epi16(static_cast<short>(0x87f0)));
  const Words normal = _mm512_add_epi16(moved, _mm512_set1_epi16(0x3c00));
  const __mmask32 small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x7800));
  const Words table = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0x3c603c403c203c00, 0x3bc03b803b000000);
  const Words sign = _mm512_and_si512(codes, _mm512_set1_epi16(static_cast<short>(0x8000)));
  const Words multiple = _mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_andnot_si512(sign, codes), 8), table);
  return _mm512_mask_mov_epi16(normal, small, _mm512_or_si512(multiple, sign));
}
INLINE Words lower_pairs(Words codes) { return upper_pairs(_mm512_slli_epi16(codes, 8)); }

#else

INLINE Words upper_pairs(Words codes) {
  Words pairs;
  for (int i = 0; i < kParts; ++i) {
    // As floats 2^-120 times their value: exponent and mantissa where a float has them.
    const Bits c = codes.part[i];
    const Lanes low = (Lanes)((c & 0x7f00u) << 12) * 0x1p120f, high = (Lanes)((c & 0x7f000000u) >> 4) * 0x1p120f;
    pairs.part[i] = (Bits)low >> 16 | (Bits)high | (c & 0x80008000u);
  }
  return pairs;
}
INLINE Words lower_pairs(Words codes) {
  for (int i = 0; i < kParts; ++i) codes.part[i] <<= 8;  // what goes over into the upper half's lower byte is ignored
  return upper_pairs(codes);
}

#endif
