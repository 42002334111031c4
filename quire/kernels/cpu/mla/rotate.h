// The rotary embedding of what latent attention caches.
#pragma once

// Rotates pairs of numbers, neighbours or one of each half; the results stand in halves either way, for queries and
// keys alike. In float32, rounded once. `out` may be x itself.
template <class T>
INLINE void rotate(const T* x, const float* cosines, int size, int neighbours, T* out) {
  constexpr int kMost = 256;
  const int half = size / 2;
  float turned[2 * kMost], numbers[2 * kMost];
  unpack(x, numbers, size);
  for (int i = 0; i < half; ++i) {
    const float first = numbers[neighbours ? 2 * i : i], second = numbers[neighbours ? 2 * i + 1 : half + i];
    const float cosine = cosines[i], sine = cosines[half + i];
    turned[i] = first * cosine - second * sine;
    turned[half + i] = second * cosine + first * sine;
  }
  for (int i = 0; i < size; i += 16) vstore_first(out + i, vload_first(turned + i, size - i), size - i);
}
