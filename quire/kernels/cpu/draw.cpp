// Samples a token for each row: temperature, top-k, top-p and min-p, then the inverse of the cumulative distribution,
// with tokens in the vocabulary's order.
//
// A token's weight is e^(its scaled logit minus the largest one). Its mass is the weight in fixed point, because sums
// of integers are exact in any order. Each filter is a threshold, the smallest weight that it keeps, stored as the bits
// of a float, which have the same order as floats. A threshold is found without sorting, with histograms: the first one
// counts weights by their top bits, the next one counts those in the threshold's bucket by the bits below, and so on.
#include "kernels.h"

namespace {

constexpr double kOne = 1LL << 44;  // the mass of weight 1; the sum of 2^19 such masses fits in 64 bits
constexpr int kBuckets = 1024;
constexpr long kStretch = 512;

INLINE int64_t mass(float weight) { return static_cast<int64_t>(weight * static_cast<float>(kOne)); }
INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

// Number and mass of the weights in each bucket, by kBuckets values of the bits from `shift` up.
struct Histogram {
  int count[kBuckets];
  int64_t sum[kBuckets];

  void fill(const float* weights, long size, int shift) {
    __builtin_memset(this, 0, sizeof *this);
    for (long i = 0; i < size; ++i) {
      const int bucket = bits_of(weights[i]) >> shift & (kBuckets - 1);
      ++count[bucket];
      sum[bucket] += mass(weights[i]);
    }
  }
};

// A threshold, and the number and mass of the weights above it.
struct Cut {
  uint32_t bits = 0;
  long above = 0;
  int64_t mass_above = 0;
};

// Finds the largest threshold that keeps `tokens` tokens or a mass of `least`. `top` is the histogram of the weights'
// bits from 20 up. It has a bucket for every weight, because weights are at most 1, whose bits from 20 up are 1016.
Cut find_cut(const float* weights, long size, const Histogram& top, float* some, long tokens, double least) {
  Cut cut;
  Histogram below;
  const Histogram* histogram = &top;
  for (int shift = 20;; shift -= 10) {
    int bucket = kBuckets - 1;
    for (; bucket > 0; --bucket) {
      const long count = cut.above + histogram->count[bucket];
      const int64_t sum = cut.mass_above + histogram->sum[bucket];
      if (histogram->count[bucket] && (count >= tokens || static_cast<double>(sum) >= least)) break;
      cut.above = count;
      cut.mass_above = sum;
    }
    cut.bits |= static_cast<uint32_t>(bucket) << shift;
    if (shift == 0) return cut;
    long kept = 0;
    for (long i = 0; i < size; ++i)
      if (bits_of(weights[i]) >> shift == cut.bits >> shift) some[kept++] = weights[i];
    weights = some;
    size = kept;
    below.fill(weights, size, shift - 10);
    histogram = &below;
  }
}

struct Draw {
  float temperature, min_p;
  double top_p, u;
  long top_k;
};

// Computes the weights of a row's logits. Returns false if no logit is above -infinity.
bool weigh(const float* logits, float* weights, long size, float temperature) {
  Vec most = vset(logits[0]);
  for (long i = 0; i + 16 <= size; i += 16) most = vmax(most, vload(logits + i));
  float peak = vpeak(most);
  for (long i = size / 16 * 16; i < size; ++i) peak = logits[i] > peak ? logits[i] : peak;
  if (!(peak > -__builtin_inff())) return false;
  for (long i = 0; i < size; i += 16) {
    const Vec scaled = vdiv(vload_first(logits + i, size - i), vset(temperature));
    vstore_first(weights + i, vexp2_below(vmul(vsub(scaled, vset(peak / temperature)), vset(kLog2E))), size - i);
  }
  return true;
}

// The smallest weight that all filters keep, as bits.
uint32_t least_kept(const float* weights, float* some, long size, const Draw& draw) {
  const uint32_t least = bits_of(draw.min_p);
  if (draw.top_k >= size && draw.top_p >= 1.0) return least;
  Histogram top;
  top.fill(weights, size, 20);
  int64_t whole = 0;
  for (const int64_t sum : top.sum) whole += sum;
  uint32_t found = 0;
  if (draw.top_k < size) {
    const Cut cut = find_cut(weights, size, top, some, draw.top_k, __builtin_inf());
    float weight;
    __builtin_memcpy(&weight, &cut.bits, 4);
    // If several tokens have exactly the threshold's weight, top_p counts only as many as top_k allows.
    whole = cut.mass_above + (draw.top_k - cut.above) * mass(weight);
    found = cut.bits;
  }
  if (draw.top_p < 1.0) {
    const Cut cut = find_cut(weights, size, top, some, size + 1, draw.top_p * static_cast<double>(whole));
    found = cut.bits > found ? cut.bits : found;
  }
  return found > least ? found : least;
}

int64_t draw_token(const float* logits, float* weights, float* some, long size, const Draw& draw) {
  if (!weigh(logits, weights, size, draw.temperature)) return 0;
  const uint32_t least = least_kept(weights, some, size, draw);
  const auto kept = [&](long i) { return bits_of(weights[i]) >= least ? mass(weights[i]) : 0; };
  const auto stretch = [&](long begin) {
    int64_t sum = 0;
    for (long i = begin; i < size && i < begin + kStretch; ++i) sum += kept(i);
    return sum;
  };
  int64_t whole = 0, before = 0;
  for (long i = 0; i < size; i += kStretch) whole += stretch(i);
  int64_t wanted = static_cast<int64_t>(draw.u * static_cast<double>(whole));
  if (wanted >= whole) wanted = whole - 1;  // the product may have been rounded up to `whole`, which no token reaches
  long at = 0;
  for (int64_t sum = stretch(0); at + kStretch < size && before + sum <= wanted; sum = stretch(at)) {
    before += sum;
    at += kStretch;
  }
  while (at + 1 < size && (before += kept(at)) <= wanted) ++at;
  return at;
}

}  // namespace

// filters [rows][4]: temperature (above 0), top_k (from 1 up), top_p, min_p. u [rows]: from 0 to below 1. size < 2^19.
EXPORTED void draw_f32(const float* logits, const double* filters, const double* u, int64_t* out, long rows, long size,
                       int threads) {
  parallel_rows(threads, rows, rows * size * 8, [&](long begin, long end) {
    auto* weights = reinterpret_cast<float*>(scratch(2 * size * sizeof(float)));
    for (long r = begin; r < end; ++r) {
      const double* f = filters + 4 * r;
      const Draw draw = {static_cast<float>(f[0]), static_cast<float>(f[3]), f[2], u[r], static_cast<long>(f[1])};
      out[r] = draw_token(logits + r * size, weights, weights + size, size, draw);
    }
  });
}
