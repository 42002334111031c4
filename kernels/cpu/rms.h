// The factor by which RMSNorm multiplies a row: 1 / sqrt(mean(x^2) + eps).
#pragma once

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
