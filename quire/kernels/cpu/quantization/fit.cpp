// Weights in 4 bits: for each group of 32, a scale and an offset (or a whole zero point), found as in
// kernels/int4_fit.py. Sixteen groups are searched at once, one in each lane.
#include "../kernels.h"

namespace {

constexpr int kGroup = 32, kTogether = 16;
constexpr int kFactors = 11;         // fractions of a group's range that 15 steps cover: 1, 0.97 ... 0.7
constexpr float kLeast = 0x1p-100f;  // the smallest scale with zero points

// Rounds to the 11 bits of half floats (kBits 13), or the 8 of bfloat16 (kBits 16), for any exponent: Dekker (1971).
template <int kBits>
INLINE Vec rounded(Vec x) {
  const Vec wide = vmul(x, vset(static_cast<float>((1 << kBits) + 1)));
  return vsub(wide, vsub(wide, x));
}
INLINE Vec vclamp(Vec x, Vec least, Vec most) { return vmin(most, vmax(least, x)); }

struct Groups {
  alignas(64) float weights[kGroup][kTogether];  // minus the mean of their group, if offsets are fitted
  Vec at(int i) const { return vload(weights[i]); }
};

// Scales and offsets to try. code() rounds a weight, scale * code + offset, to its code, which counts from the group's
// middle code and lies between `least` and `most`.
struct Trial {
  Vec scale, offset, least, most;
  Vec inverse = vdiv(vset(1.0f), vmax(scale, vset(kLeast)));

  __attribute__((always_inline)) Vec code(Vec weight) const {
    return vclamp(vround(vmul(vsub(weight, offset), inverse)), least, most);
  }
};

// Scale and offset by least squares for the codes of a trial. mean: what was subtracted from the weights.
INLINE Trial fitted(const Groups& groups, const Trial& trial, Vec mean, bool zero_points) {
  Vec sum = vset(0.0f), square = vset(0.0f), product = vset(0.0f);
  for (int i = 0; i < kGroup; ++i) {
    const Vec code = trial.code(groups.at(i));
    sum = vadd(sum, code);
    square = vfma(code, code, square);
    product = vfma(code, groups.at(i), product);
  }
  if (zero_points) {
    const Vec scale = vmax(rounded<16>(vdiv(product, vmax(square, vset(kLeast)))), vset(kLeast));
    return {scale, vset(0.0f), trial.least, trial.most};
  }
  const Vec middle = vmul(sum, vset(1.0f / kGroup));
  const Vec spread = vsub(square, vmul(sum, middle));
  const Vec scale = rounded<13>(vdiv(vmax(product, vset(0.0f)), vmax(spread, vset(kLeast))));
  const Vec offset = rounded<13>(vsub(mean, vmul(scale, middle)));
  return {scale, vsub(offset, mean), trial.least, trial.most};
}

INLINE Vec error_of(const Groups& groups, const Trial& trial) {
  Vec error = vset(0.0f);
  for (int i = 0; i < kGroup; ++i) {
    const Vec off = vsub(vfma(trial.code(groups.at(i)), trial.scale, trial.offset), groups.at(i));
    error = vfma(off, off, error);
  }
  return error;
}

// The best trial of each lane so far.
struct Best {
  alignas(64) float errors[kTogether], scales[kTogether], offsets[kTogether], least[kTogether];

  Best() {
    for (float& each : errors) each = kInfinity;
    for (auto* each : {scales, offsets, least})
      for (int lane = 0; lane < kTogether; ++lane) each[lane] = 0.0f;
  }
  void offer(const Groups& groups, const Trial& trial) {
    float error[kTogether], scale[kTogether], offset[kTogether], smallest[kTogether];
    vstore(error, error_of(groups, trial));
    vstore(scale, trial.scale);
    vstore(offset, trial.offset);
    vstore(smallest, trial.least);
    for (int lane = 0; lane < kTogether; ++lane) {
      if (!(error[lane] < errors[lane])) continue;
      errors[lane] = error[lane];
      scales[lane] = scale[lane];
      offsets[lane] = offset[lane];
      least[lane] = smallest[lane];
    }
  }
};

// mean: what was subtracted from the groups; 0 with zero points.
Best search(const Groups& groups, Vec mean, bool zero_points) {
  Vec low = groups.at(0), high = low;
  for (int i = 1; i < kGroup; ++i) {
    low = vmin(groups.at(i), low);
    high = vmax(groups.at(i), high);
  }
  if (zero_points) {
    low = vmin(low, vset(0.0f));
    high = vmax(high, vset(0.0f));
  }
  const Vec range = vsub(high, low);
  Best best;
  for (int f = 0; f < kFactors; ++f) {
    const float factor = 1.0f - 0.03f * static_cast<float>(f);
    const Vec start = vfma(range, vset((1.0f - factor) / 2), low), step = vmul(range, vset(factor / 15));
    if (!zero_points) {
      const Trial trial = {step, vfma(step, vset(8.0f), start), vset(-8.0f), vset(7.0f)};
      best.offer(groups, fitted(groups, trial, mean, false));
      continue;
    }
    const Vec scale = vmax(rounded<16>(step), vset(kLeast));
    const Vec nearest = vround(vdiv(vsub(vset(0.0f), start), scale));
    for (float more = -1.0f; more <= 1.0f; more += 1.0f) {
      const Vec zero = vclamp(vadd(nearest, vset(more)), vset(0.0f), vset(15.0f));
      const Trial trial = {scale, vset(0.0f), vsub(vset(0.0f), zero), vsub(vset(15.0f), zero)};
      best.offer(groups, fitted(groups, trial, mean, true));
    }
  }
  return best;
}

// Fits `count` groups, up to 16, from `weight` on.
template <class T>
void fit(const T* weight, uint8_t* codes, float* scales, float* offsets, int count, bool zero_points) {
  Groups groups;
  alignas(64) float means[kTogether] = {};
  for (int lane = 0; lane < kTogether; ++lane) {
    float row[kGroup] = {}, sum = 0.0f;
    if (lane < count) unpack(weight + lane * kGroup, row, kGroup);
    for (const float each : row) sum += each;
    if (!zero_points) means[lane] = sum / kGroup;
    for (int i = 0; i < kGroup; ++i) groups.weights[i][lane] = row[i] - means[lane];
  }
  const Best best = search(groups, vload(means), zero_points);
  const Vec least = vload(best.least);
  const Trial trial = {vload(best.scales), vload(best.offsets), least, vadd(least, vset(15.0f))};
  for (int i = 0; i < kGroup; ++i) {
    float code[kTogether];
    vstore(code, vsub(trial.code(groups.at(i)), least));
    for (int lane = 0; lane < count; ++lane) {
      uint8_t& byte = codes[(lane * kGroup + i) / 2];
      byte = static_cast<uint8_t>(i % 2 ? byte | static_cast<int>(code[lane]) << 4 : static_cast<int>(code[lane]));
    }
  }
  alignas(64) float sums[kTogether];  // the subtracted mean is added again
  vstore(sums, rounded<13>(vadd(trial.offset, vload(means))));
  for (int lane = 0; lane < count; ++lane) {
    scales[lane] = best.scales[lane];
    offsets[lane] = zero_points ? -best.least[lane] : sums[lane];
  }
}

template <class T>
void fit_all(const T* weight, uint8_t* codes, float* scales, float* offsets, long count, int zero_points, int threads) {
  constexpr long kPiece = 512;
  parallel_for(threads, (count + kPiece - 1) / kPiece, [&](long piece) {
    const long end = (piece + 1) * kPiece < count ? (piece + 1) * kPiece : count;
    for (long g = piece * kPiece; g < end; g += kTogether)
      fit(weight + g * kGroup, codes + g * kGroup / 2, scales + g, offsets + g,
          static_cast<int>(end - g < kTogether ? end - g : kTogether), zero_points != 0);
  });
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void fit_int4_##suffix(const T* weight, uint8_t* codes, float* scales, float* offsets, long groups,         \
                                  int zero_points, int threads) {                                                      \
    fit_all(weight, codes, scales, offsets, groups, zero_points, threads);                                             \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
