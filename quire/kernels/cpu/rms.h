// The factors by which norms multiply a row.
#pragma once

// RMSNorm's factor: 1 / sqrt(mean(x^2) + eps).
template <class T>
INLINE float rms_factor(const T* x, int size, float eps) {
  Vec even = vset(0.0f), odd = even;  // two chains, to hide the latency of the addition
  int i = 0;
  for (; i + 32 <= size; i += 32) {
    const Vec a = vload(x + i), b = vload(x + i + 16);
    even = vfma(a, a, even);
    odd = vfma(b, b, odd);
  }
  for (; i < size; i += 16) {
    const Vec a = vload_first(x + i, size - i);
    even = vfma(a, a, even);
  }
  return 1.0f / __builtin_sqrtf(vsum(vadd(even, odd)) / static_cast<float>(size) + eps);
}

// Sum of the 16-lane partial sums of f(x[i .. i + 16]) over a row, in a fixed order.
template <class T, class Of>
INLINE float row_sum(const T* x, int size, const Of& of) {
  Vec sums = vset(0.0f);
  int i = 0;
  for (; i + 16 <= size; i += 16) sums = vadd(sums, of(vload(x + i)));
  if (i < size) sums = vadd(sums, vkeep(of(vload_first(x + i, size - i)), 0, size - i, 0.0f));
  return vsum(sums);
}

// LayerNorm's factor, 1 / sqrt(variance + eps), and the mean that it subtracts first.
template <class T>
INLINE float centred_factor(const T* x, int size, float eps, float* average) {
  *average = row_sum(x, size, [](Vec v) { return v; }) / size;
  const Vec mean = vset(*average);
  const float squares = row_sum(x, size, [&](Vec v) {
    const Vec apart = vsub(v, mean);
    return vmul(apart, apart);
  });
  return 1.0f / __builtin_sqrtf(squares / size + eps);
}
