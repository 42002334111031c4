// bfloat16 weights in 12 bits, exactly: a weight's sign and mantissa as they are (8 bits) and, for its exponent, a code
// of 4 bits: 0 for an exponent of 0, then 15 exponents in a row, those that cover most of the matrix. Of weights spread
// like a normal distribution, trained or random, all but 2 in 10,000 have one (the entropy of exponents is 2.6 bits:
// Zhang et al., 2025, arXiv 2504.11651). Where memory is the limit, a quarter fewer bytes is a third more speed, and no
// bit of a result changes.
//
// A step is 128 weights: two inputs of the 64 outputs of a panel (linear.cpp). It takes 192 bytes: 128 of signs and
// mantissas, and 64 of codes, the low half of byte b for sign-and-mantissa b, the high half for 64 + b. A step in which
// another exponent occurs is kept whole besides, as 64 words.
#pragma once

constexpr int kPanel = 64;
constexpr int kCompressedStep = 192;  // bytes

struct CompressedHeader {
  long whole;                 // steps kept whole
  uint8_t high[16], low[16];  // per code: the exponent without its last bit, and that bit as the top bit of a byte
};

// Where the parts of a compressed matrix lie: header, [panels] longs, [whole + 1] ints, [steps][192] bytes, [whole][64].
struct Compressed {
  CompressedHeader* header;
  long* first;      // of each panel's whole steps, the first
  int* where;       // the whole steps' numbers in order, then one past all
  uint8_t* steps;
  uint32_t* whole;
  size_t bytes;     // of all

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
constexpr bool kCompresses = true;

struct Codebook {
  Words high, low;

  explicit Codebook(const CompressedHeader& header)
      : high(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(header.high)))),
        low(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(header.low)))) {}
};

// One step's four columns of 16 words.
INLINE void expand(const Codebook& book, const uint8_t* step, Words (&column)[4]) {
  const Words codes = _mm512_loadu_si512(step + 128), mask = _mm512_set1_epi8(0x0f), sign = wset(0x80808080u);
  const Words code[2] = {_mm512_and_si512(codes, mask), _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask)};
  for (int half = 0; half < 2; ++half) {
    const Words from = _mm512_loadu_si512(step + 64 * half);
    // Bytes: sign and exponent's upper 7 bits; its last bit and the mantissa.
    const Words high = _mm512_ternarylogic_epi32(from, sign, _mm512_shuffle_epi8(book.high, code[half]), 0xea);
    const Words low = _mm512_ternarylogic_epi32(from, sign, _mm512_shuffle_epi8(book.low, code[half]), 0xba);
    column[2 * half] = _mm512_unpacklo_epi8(low, high);
    column[2 * half + 1] = _mm512_unpackhi_epi8(low, high);
  }
}
#else
constexpr bool kCompresses = false;
struct Codebook {
  explicit Codebook(const CompressedHeader&) {}
};
INLINE void expand(const Codebook&, const uint8_t*, Words (&)[4]) {}
#endif

// Of a step's 128 weights, which lies at sign-and-mantissa byte b: what `expand` undoes.
INLINE int weight_at(int b) {
  const int column = b / 64 * 2 + b % 16 / 8, in_column = b % 64 / 16 * 8 + b % 8;
  return column * 32 + in_column;
}

INLINE int exponent(uint16_t weight) { return weight >> 7 & 0xff; }

// The code of an exponent, right if `has_code`; `base` is one below the 15.
INLINE uint8_t code(int exponent, int base) { return static_cast<uint8_t>(exponent > base ? exponent - base : 0); }
INLINE bool has_code(int exponent, int base) {
  return (exponent == 0) | (static_cast<unsigned>(exponent - base - 1) < 15u);
}

// Chosen by a sample of `steps` steps of 128 weights.
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

INLINE void compress_step(const uint16_t* weights, int base, uint8_t* step) {
  uint8_t codes[2 * kPanel];
  for (int b = 0; b < 2 * kPanel; ++b) {
    const uint16_t weight = weights[weight_at(b)];
    step[b] = static_cast<uint8_t>((weight >> 8 & 0x80) | (weight & 0x7f));
    codes[b] = code(exponent(weight), base);
  }
  for (int b = 0; b < kPanel; ++b) step[128 + b] = static_cast<uint8_t>(codes[b] | codes[kPanel + b] << 4);
}
