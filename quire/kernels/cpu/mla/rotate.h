// The rotary embedding of latent attention's queries and keys.
#pragma once

// Rotates pairs of numbers: neighbors, or one of each half. Either way the first results of all pairs come first, then
// the second ones, in queries and keys alike. Computes in float32 and rounds once. `out` may be x.
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
