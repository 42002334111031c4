// Integers, codes and their products, as in simd_avx512.h. Only simd_generic.h includes this.
#pragma once

// 16 integers of 32 bits, as Words; see simd_avx512.h.
typedef int16_t Shorts __attribute__((vector_size(kBytes)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(kBytes)));
INLINE Bits add_pairs(Shorts a, Shorts b) {  // the sums of neighbours' products
#if defined(__AVX2__)
  return (Bits)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Bits)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const Mask low = ((Mask)((Bits)a << 16) >> 16) * ((Mask)((Bits)b << 16) >> 16);
  return (Bits)(low + ((Mask)a >> 16) * ((Mask)b >> 16));
#endif
}
#if defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int kCodeBytes = 1;
INLINE void store_codes(int8_t* p, Words w) { store_bytes(p, w); }
INLINE Words factors_of(Words w, int) { return w; }
INLINE Words idot(Words acc, Words a, Words b) {
#ifdef __AVXVNNI__
  EACH acc.part[i] = (Bits)_mm256_dpbusd_avx_epi32((__m256i)acc.part[i], (__m256i)a.part[i], (__m256i)b.part[i]);
#else
  EACH {  // its factors are signed, so kCentre is subtracted from the unsigned ones
    const auto centred = (int8x16_t)(a.part[i] ^ 0x80808080u);
    acc.part[i] = (Bits)vdotq_s32((int32x4_t)acc.part[i], centred, (int8x16_t)b.part[i]);
  }
#endif
  return acc;
}
#else
constexpr int kCodeBytes = 2;
INLINE void store_codes(int8_t* p, Words w) {
#ifdef __AVX2__
  const __m256i low = _mm256_shufflelo_epi16(low_shorts(w), _MM_SHUFFLE(3, 1, 2, 0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shufflehi_epi16(low, _MM_SHUFFLE(3, 1, 2, 0)));
#else
  uint32_t lanes[16];
  wstore(lanes, w);
  for (int i = 0; i < 16; ++i) {
    const auto code = static_cast<int16_t>(lanes[i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i]);
    __builtin_memcpy(p + 2 * i, &code, 2);
  }
#endif
}
INLINE Words factors_of(Words w, int odd) {
  EACH w.part[i] = odd ? (Bits)((UnsignedShorts)w.part[i] >> 8) : w.part[i] & 0x00ff00ffu;
  return w;
}
INLINE Words idot(Words acc, Words a, Words b) {
  EACH {
    acc.part[i] += add_pairs((Shorts)a.part[i], (Shorts)b.part[i]);
#ifdef __AVX2__
    asm("" : "+x"(acc.part[i]));  // else GCC adds products to each other first, for which registers are too few
#endif
  }
  return acc;
}
#endif
INLINE Vec to_floats(Words w) {
  Vec y;
  EACH y.part[i] = __builtin_convertvector((Mask)w.part[i], Lanes);
  return y;
}
INLINE Words to_integers(Vec x) {  // nearest, for numbers of at most 22 bits; otherwise any integer, without a fault
  EACH x.part[i] += kRounder;
  Words y;
  EACH y.part[i] = (Bits)x.part[i] - 0x4b400000u;
  return y;
}
INLINE Words wadd(Words a, Words b) {
  EACH a.part[i] += b.part[i];
  return a;
}
INLINE Words wtimes256(Words w) {
  EACH w.part[i] <<= 8;
  return w;
}
INLINE Words wby256(Words w) {  // rounded down
  EACH w.part[i] = (Bits)((Mask)w.part[i] >> 8);
  return w;
}
INLINE Words wmax(Words a, Words b) {
  EACH b.part[i] = (Bits)select((Mask)a.part[i] > (Mask)b.part[i], (Lanes)a.part[i], (Lanes)b.part[i]);
  return b;
}
INLINE int32_t wsum(Words w) {
  uint32_t lanes[16], sum = 0;
  wstore(lanes, w);
  for (int i = 0; i < 16; ++i) sum += lanes[i];
  return static_cast<int32_t>(sum);
}
INLINE int32_t wpeak(Words w) {
  int32_t lanes[16];
  wstore(reinterpret_cast<uint32_t*>(lanes), w);
  int32_t peak = lanes[0];
  for (int i = 1; i < 16; ++i) peak = lanes[i] > peak ? lanes[i] : peak;
  return peak;
}
// The bits of |x|, which as integers have the order of the numbers. Those of NaN are the largest.
INLINE Words magnitude(Vec x) {
  Words y;
  EACH y.part[i] = (Bits)x.part[i] & 0x7fffffffu;
  return y;
}

// Looks up each code in a table of 16 bytes. A code is the low or the high half of a byte.
INLINE Words wtable(const uint8_t* p) {
  Words y;
  for (int i = 0; i < 4; ++i) __builtin_memcpy(reinterpret_cast<char*>(&y) + 16 * i, p, 16);
  return y;
}
INLINE Words look_up_low(Words table, Words codes) {
#if defined(__AVX2__)
  EACH codes.part[i] = (Bits)_mm256_shuffle_epi8((__m256i)table.part[i], (__m256i)(codes.part[i] & 0x0f0f0f0fu));
  return codes;
#elif defined(__aarch64__)
  EACH codes.part[i] = (Bits)vqtbl1q_u8((uint8x16_t)table.part[i], (uint8x16_t)(codes.part[i] & 0x0f0f0f0fu));
  return codes;
#else
  uint8_t from[64], entries[16];
  __builtin_memcpy(from, &codes, sizeof from);
  __builtin_memcpy(entries, &table, sizeof entries);
  for (int b = 0; b < 64; ++b) from[b] = entries[from[b] & 15];
  __builtin_memcpy(&codes, from, sizeof from);
  return codes;
#endif
}
INLINE Words look_up_high(Words table, Words codes) {
  EACH codes.part[i] >>= 4;
  return look_up_low(table, codes);
}
// The highest bits of 3 vectors' nibbles, as nibbles.
INLINE Words join_high_bits(Words a, Words b, Words c) {
  EACH a.part[i] = (a.part[i] >> 3 & 0x11111111u) | (b.part[i] >> 2 & 0x22222222u) | (c.part[i] >> 1 & 0x44444444u);
  return a;
}
