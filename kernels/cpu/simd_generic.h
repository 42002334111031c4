// Sixteen floats as two AVX2 registers, or as four 128-bit vectors on any other CPU, written with the vector extension
// of GCC and Clang. It has the same functions as simd_avx512.h; only simd.h includes it.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

typedef float Lanes __attribute__((vector_size(kBytes)));
typedef uint32_t Bits __attribute__((vector_size(kBytes)));
typedef int32_t Mask __attribute__((vector_size(kBytes)));
typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));

constexpr int kParts = 64 / kBytes;
constexpr int kLanes = kBytes / 4;

struct Vec {
  Lanes part[kParts];
};
struct Words {
  Bits part[kParts];
};

#define EACH for (int i = 0; i < kParts; ++i)

template <class To, class From>
INLINE To read_as(const From* p) {
  To x;
  __builtin_memcpy(&x, p, sizeof(To));
  return x;
}
INLINE Lanes select(Mask m, Lanes a, Lanes b) { return (Lanes)(((Mask)a & m) | ((Mask)b & ~m)); }

INLINE Vec vset(float x) {
  Vec y;
  EACH y.part[i] = Lanes{} + x;
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
#else
  EACH c.part[i] += a.part[i] * b.part[i];
#endif
  return c;
}
// Both return b where either is NaN.
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
  EACH y.part[i] = Bits{} + x;
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

INLINE Vec dot_pairs(Vec acc, Words a, Words b) {
  return vfma(high_halves(a), high_halves(b), vfma(low_halves(a), low_halves(b), acc));
}

#undef EACH

constexpr int kRows = kParts == 2 ? 6 : 3;  // one Vec accumulator each; with AVX2 they take 12 of 16 registers
constexpr int kAccumulators = kRows;
