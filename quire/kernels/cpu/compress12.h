// Lossless compression of bfloat16 weights to 12 bits. A weight's sign and mantissa are stored unchanged (8 bits), its
// exponent as a code of 4 bits. Code 0 means exponent 0, and the other codes mean the 15 consecutive exponents that
// cover most of the matrix. Of normally distributed weights, trained or random, all but 2 in 10,000 have a code (the
// entropy of exponents is 2.6 bits: Zhang et al., 2025, arXiv 2504.11651). If memory bandwidth is the limit, a quarter
// fewer bytes give a third more speed. No bit of a result changes.
//
// A step is 128 weights: two inputs for the 64 outputs of a panel (linear.cpp). It takes 192 bytes: 128 with signs and
// mantissas, and 64 with codes. The low half of byte b belongs to sign and mantissa b, the high half to 64 + b. A step
// with a weight whose exponent has no code is also stored uncompressed, as 64 words ("whole").
#pragma once

#include "panels.h"

constexpr int kCompressedStep = 192;  // bytes

struct CompressedHeader {
  long whole;                 // number of steps that are stored uncompressed
  uint8_t high[16], low[16];  // by code: the exponent without its lowest bit, and that bit as the top bit of a byte
};

// Pointers to the parts of a compressed matrix: the header, [panels] longs, [whole + 1] ints, [steps][192] bytes,
// [whole][64] words.
struct Compressed {
  CompressedHeader* header;
  long* first;  // by panel: the index of its first whole step among the whole steps
  int* where;   // the step numbers of the whole steps, in order, then the number of steps
  uint8_t* steps;
  uint32_t* whole;
  size_t bytes;  // of all parts together

  Compressed(uint8_t* at, long panels, long panel_steps, long kept) {
    const auto aligned = [](size_t n) { return (n + 63) / 64 * 64; };
    header = reinterpret_cast<CompressedHeader*>(at);
    size_t used = 64;
    first = reinterpret_cast<long*>(at + used);
    used += aligned(panels * sizeof(long));
    where = reinterpret_cast<int*>(at + used);
    used += aligned((kept + 1) * sizeof(int));
    steps = at + used;
    used += panels * panel_steps * kCompressedStep;
    whole = reinterpret_cast<uint32_t*>(at + used);
    bytes = used + kept * kPanel * sizeof(uint32_t);
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool kCanCompress = true;

struct Codebook {
  Words high, low;

  explicit Codebook(const CompressedHeader& header)
      : high(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(header.high)))),
        low(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(header.low)))) {}
};

// Decompresses a step to its 64 words, as four vectors.
INLINE void expand(const Codebook& book, const uint8_t* step, Words (&column)[4]) {
  const Words codes = _mm512_loadu_si512(step + 128), mask = _mm512_set1_epi8(0x0f), sign = wset(0x80808080u);
  const Words code[2] = {_mm512_and_si512(codes, mask), _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask)};
  for (int half = 0; half < 2; ++half) {
    const Words from = _mm512_loadu_si512(step + 64 * half);
    // The bytes of the weights. The high ones have the sign and the exponent's upper 7 bits, the low ones the
    // exponent's lowest bit and the mantissa.
    const Words high = _mm512_ternarylogic_epi32(from, sign, _mm512_shuffle_epi8(book.high, code[half]), 0xea);
    const Words low = _mm512_ternarylogic_epi32(from, sign, _mm512_shuffle_epi8(book.low, code[half]), 0xba);
    column[2 * half] = _mm512_unpacklo_epi8(low, high);
    column[2 * half + 1] = _mm512_unpackhi_epi8(low, high);
  }
}

// Compresses a step for which `can_compress` is true, so that `expand` restores it. Otherwise the bytes mean nothing.
INLINE void compress_step(const uint16_t* weights, int base, uint8_t* step) {
  const Words byte = _mm512_set1_epi16(0xff), sign = wset(0x80808080u), below = _mm512_set1_epi8(base);
  Words codes[2];
  for (int half = 0; half < 2; ++half) {
    const Words first = _mm512_loadu_si512(weights + 64 * half), second = _mm512_loadu_si512(weights + 64 * half + 32);
    const Words high = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    const Words low = _mm512_packus_epi16(_mm512_and_si512(first, byte), _mm512_and_si512(second, byte));
    const Words exponents = _mm512_packus_epi16(_mm512_and_si512(_mm512_srli_epi16(first, 7), byte),
                                                _mm512_and_si512(_mm512_srli_epi16(second, 7), byte));
    _mm512_storeu_si512(step + 64 * half, _mm512_ternarylogic_epi32(sign, high, low, 0xca));
    codes[half] = _mm512_subs_epu8(exponents, below);
  }
  const Words upper = _mm512_slli_epi16(_mm512_and_si512(codes[1], _mm512_set1_epi8(0x0f)), 4);
  _mm512_storeu_si512(step + 128, _mm512_or_si512(codes[0], upper));
}
#else
constexpr bool kCanCompress = false;
struct Codebook {
  explicit Codebook(const CompressedHeader&) {}
};
INLINE void expand(const Codebook&, const uint8_t*, Words (&)[4]) {}
INLINE void compress_step(const uint16_t*, int, uint8_t*) {}
#endif

INLINE int exponent(uint16_t weight) { return weight >> 7 & 0xff; }

// `base` is the exponent below the 15 that have codes.
INLINE bool has_code(int exponent, int base) {
  return (exponent == 0) | (static_cast<unsigned>(exponent - base - 1) < 15u);
}

// Chooses the base that covers most weights, from a sample of the `steps` steps.
inline int choose_base(const uint16_t* weights, long steps) {
  constexpr long kSample = 512;
  long seen[256 + 15] = {}, best = -1;
  for (long s = 0; s < steps; s += steps < kSample ? 1 : steps / kSample)
    for (int i = 0; i < 2 * kPanel; ++i) ++seen[exponent(weights[s * 2 * kPanel + i])];
  int base = 0;
  for (int b = 0; b < 255; ++b) {
    long covered = 0;
    for (int e = b + 1; e <= b + 15; ++e) covered += seen[e];
    if (covered > best) {
      best = covered;
      base = b;
    }
  }
  return base;
}

INLINE void fill_codebook(CompressedHeader& header, int base) {
  for (int c = 0; c < 16; ++c) {
    const int e = c == 0 ? 0 : base + c;
    header.high[c] = static_cast<uint8_t>(e >> 1 & 0x7f);
    header.low[c] = static_cast<uint8_t>((e & 1) << 7);
  }
}

INLINE bool can_compress(const uint16_t* step, int base) {
  unsigned missing = 0;
  for (int i = 0; i < 2 * kPanel; ++i) missing |= !has_code(exponent(step[i]), base);
  return !missing;
}
