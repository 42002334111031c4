// Sixteen floats as two AVX2 registers, or as four 128-bit vectors on any other CPU, written with the vector extension
// of GCC and Clang. It has the same functions as simd_avx512.h. Only simd.h includes it.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
constexpr int kBytes = 32;
#else
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
constexpr int kBytes = 16;
#endif

typedef float Lanes __attribute__((vector_size(kBytes)));
typedef uint32_t Bits __attribute__((vector_size(kBytes)));
typedef int32_t Mask __attribute__((vector_size(kBytes)));
typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));
typedef uint8_t Quarters __attribute__((vector_size(kBytes / 4)));
typedef int8_t SignedQuarters __attribute__((vector_size(kBytes / 4)));

constexpr int kParts = 64 / kBytes;
constexpr int kLanes = kBytes / 4;

struct Vec {
  Lanes part[kParts];
};
struct Words {
  Bits part[kParts];
};

#define EACH UNROLLED (i, kParts)

template <class To, class From>
INLINE To read_as(const From* p) {
  To x;
  __builtin_memcpy(&x, p, sizeof(To));
  return x;
}
INLINE Lanes select(Mask m, Lanes a, Lanes b) { return (Lanes)(((Mask)a & m) | ((Mask)b & ~m)); }

INLINE Vec vset(float x) {
  Vec y;
#ifdef __AVX2__
  EACH y.part[i] = _mm256_set1_ps(x);
#else
  EACH for (int lane = 0; lane < kLanes; ++lane) y.part[i][lane] = x;  // not 0 + x, which would take an addition
#endif
  return y;
}
INLINE Vec vload(const float* p) {
  Vec y;
  EACH y.part[i] = read_as<Lanes>(p + i * kLanes);
  return y;
}
INLINE void vstore(float* p, Vec x) { EACH __builtin_memcpy(p + i * kLanes, &x.part[i], kBytes); }
INLINE Vec vadd(Vec a, Vec b) {
  EACH a.part[i] += b.part[i];
  return a;
}
INLINE Vec vsub(Vec a, Vec b) {
  EACH a.part[i] -= b.part[i];
  return a;
}
INLINE Vec vmul(Vec a, Vec b) {
  EACH a.part[i] *= b.part[i];
  return a;
}
INLINE Vec vdiv(Vec a, Vec b) {
  EACH a.part[i] /= b.part[i];
  return a;
}
INLINE Vec vfma(Vec a, Vec b, Vec c) {
#ifdef __FMA__
  EACH c.part[i] = _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]);
#elif defined(__aarch64__)
  EACH c.part[i] = (Lanes)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]);
#else
  EACH c.part[i] += a.part[i] * b.part[i];
#endif
  return c;
}
// Both return b if either is NaN.
INLINE Vec vmax(Vec a, Vec b) {
  EACH b.part[i] = select(a.part[i] > b.part[i], a.part[i], b.part[i]);
  return b;
}
INLINE Vec vmin(Vec a, Vec b) {
  EACH b.part[i] = select(a.part[i] < b.part[i], a.part[i], b.part[i]);
  return b;
}
INLINE float vsum(Vec x) {
  for (int width = kParts / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x.part[i] += x.part[i + width];
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x.part[0][i];
  return sum;
}
INLINE float vpeak(Vec x) {
  float lanes[16];
  vstore(lanes, x);
  float peak = lanes[0];
  for (int i = 1; i < 16; ++i) peak = lanes[i] > peak ? lanes[i] : peak;
  return peak;
}

// x in the lanes from `begin` up to `end`, `fill` in the others.
INLINE Vec vkeep(Vec x, int begin, int end, float fill) {
  float lanes[16];
  vstore(lanes, x);
  for (int i = 0; i < 16; ++i) lanes[i] = i >= begin && i < end ? lanes[i] : fill;
  return vload(lanes);
}

INLINE Words wload(const uint32_t* p) {
  Words y;
  EACH y.part[i] = read_as<Bits>(p + i * kLanes);
  return y;
}
INLINE void wstore(uint32_t* p, const Words& w) { __builtin_memcpy(p, &w, sizeof w); }
INLINE Words wset(uint32_t x) {
  Words y;
  Bits each = Bits{} + x;
#ifdef __AVX2__
  asm("" : "+x"(each));  // otherwise GCC shifts and masks x, and moves each result to a vector
#endif
  EACH y.part[i] = each;
  return y;
}
INLINE Vec as_floats(Words w) {
  Vec y;
  EACH y.part[i] = (Lanes)w.part[i];
  return y;
}
INLINE Vec low_halves(Words w) {
  EACH w.part[i] <<= 16;
  return as_floats(w);
}
INLINE Vec high_halves(Words w) {
  EACH w.part[i] &= ~0xffffu;
  return as_floats(w);
}

INLINE Vec vload(const bf16* p) {
  Vec y;
  EACH y.part[i] = (Lanes)(__builtin_convertvector(read_as<Halves>(p + i * kLanes), Bits) << 16);
  return y;
}
INLINE void vstore(bf16* p, Vec x) {
  EACH {
    const Bits bits = (Bits)x.part[i];
    const Bits nan = (Bits)(x.part[i] != x.part[i]);
    const Bits rounded = (bits + ((bits >> 16) & 1u) + 0x7fffu) >> 16;  // to nearest, ties to even
    const Halves out = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), Halves);
    __builtin_memcpy(p + i * kLanes, &out, sizeof(out));
  }
}

// Transposes these 16 x 16 words.
INLINE void transpose(Words (&rows)[16]) {
  uint32_t from[16][16], to[16][16];
  for (int i = 0; i < 16; ++i) wstore(from[i], rows[i]);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[j][i] = from[i][j];
  for (int i = 0; i < 16; ++i) rows[i] = wload(to[i]);
}
// Words of the low halves of a and b, and of their high halves, in turns: the first 16 of these words, and the others.
INLINE void zip_halves(Words a, Words b, Words& first, Words& second) {
  uint32_t from[2][16], to[32];
  wstore(from[0], a);
  wstore(from[1], b);
  for (int i = 0; i < 16; ++i) {
    to[2 * i] = (from[0][i] & 0xffffu) | from[1][i] << 16;
    to[2 * i + 1] = from[0][i] >> 16 | (from[1][i] & ~0xffffu);
  }
  first = wload(to);
  second = wload(to + 16);
}

// vround rounds to the nearest integer. vscale is p * 2^n for an integer n from -200 to 127 and p near 1; 0 instead of
// a subnormal result.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
INLINE Vec vround(Vec x) { return vsub(vadd(x, vset(kRounder)), vset(kRounder)); }
INLINE Vec vscale(Vec p, Vec n) {
  EACH {
    const Bits whole = (Bits)(n.part[i] + kRounder) << 23;
    const Mask normal = n.part[i] >= -125.0f;
    const Mask nan = n.part[i] != n.part[i];
    const Bits scaled = (Bits)p.part[i] + whole;
    p.part[i] = (Lanes)((scaled & (Bits)normal) | ((Bits)n.part[i] & (Bits)nan));
  }
  return p;
}

// No instruction multiplies pairs: see multiply().
constexpr bool kHalvesApart = true;
INLINE Vec dot_pairs(Vec acc, Words a, Words b) {
  return vfma(high_halves(a), high_halves(b), vfma(low_halves(a), low_halves(b), acc));
}

// Stores x and adds the rounded numbers to `sums`.
template <class T>
INLINE Vec store_and_add(T* p, Vec x, Vec sums) {
  vstore(p, x);
  return vadd(sums, vload(p));
}

#ifdef __AVX2__
// The low 16 bits of each integer.
INLINE __m256i low_shorts(Words w) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i first = _mm256_and_si256((__m256i)w.part[0], mask), second = _mm256_and_si256((__m256i)w.part[1], mask);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), _MM_SHUFFLE(3, 1, 2, 0));
}
#endif
// The low byte of each integer.
INLINE void store_bytes(int8_t* p, Words w) {
#ifdef __AVX2__
  const __m256i shorts = _mm256_and_si256(low_shorts(w), _mm256_set1_epi16(0xff));
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
#else
  uint32_t lanes[16];
  wstore(lanes, w);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(lanes[i]);
#endif
}

#include "simd_generic_integers.h"

INLINE Vec vload(const int8_t* p) {
  Vec y;
  EACH y.part[i] =
      __builtin_convertvector(__builtin_convertvector(read_as<SignedQuarters>(p + i * kLanes), Mask), Lanes);
  return y;
}
// The low or the high nibbles of 16 bytes.
INLINE Vec vload_nibbles(const uint8_t* p, bool high) {
  uint64_t bytes[2];
  __builtin_memcpy(bytes, p, sizeof bytes);
  for (uint64_t& each : bytes) each = (high ? each >> 4 : each) & 0x0f0f0f0f0f0f0f0fu;
  return vload(reinterpret_cast<const int8_t*>(bytes));
}
// Only for finite numbers. The exponents' biases differ by 120.
INLINE Vec vload(const float8* p) {
  Vec y;
  EACH {
    const Bits bits = __builtin_convertvector(read_as<Quarters>(p + i * kLanes), Bits);
    const Lanes size = (Lanes)((bits & 0x7fu) << 20) * 0x1p120f;
    y.part[i] = (Lanes)((Bits)size | (bits & 0x80u) << 24);
  }
  return y;
}
// Pairs of bfloat16 from numbers that bfloat16 represents exactly.
INLINE Words exact_pairs(Vec low, Vec high) {
  Words y;
  EACH y.part[i] = (Bits)low.part[i] >> 16 | ((Bits)high.part[i] & ~0xffffu);
  return y;
}

INLINE Vec vload(const half* p) {
  Vec y;
#ifdef __F16C__
  EACH y.part[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * kLanes)));
#elif defined(__aarch64__)
  EACH y.part[i] = (Lanes)vcvt_f32_f16((float16x4_t)read_as<Halves>(p + i * kLanes));
#else
  EACH {  // the exponent's offset differs by 112; infinity and NaN do not occur
    const Bits bits = __builtin_convertvector(read_as<Halves>(p + i * kLanes), Bits);
    const Lanes size = (Lanes)((bits & 0x7fffu) << 13) * 0x1p112f;
    y.part[i] = (Lanes)((Bits)size | (bits & 0x8000u) << 16);
  }
#endif
  return y;
}

#undef EACH

// One accumulator is one Vec. With AVX2 they take 10 of 16 registers (with 12 some would be in memory), with NEON 24 of
// 32.
#ifdef __aarch64__
constexpr int kRows = 6;
#else
constexpr int kRows = kParts == 2 ? 5 : 3;
#endif
constexpr int kAccumulators = kRows;
