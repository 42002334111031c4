// A page holds 16 tokens of one layer, [kv_heads] pieces of 16 * dim elements, addressed as 32-bit words (a float, or a
// pair of bfloat16):
//   keys   [dim / pack][16 tokens]  so that one load holds the same dimension(s) of 16 keys: a query scores them all
//                                   at once, with no sum across lanes
//   values [16 / pack][dim]         so that one load holds 16 dimensions of one token (or of two)
#pragma once

#include <cstdint>

constexpr int kBlock = 16;

template <class T>
constexpr int kPack = 4 / static_cast<int>(sizeof(T));

// Elements, not words, from the start of a page to its kv_head's piece.
INLINE long piece_offset(int kv_head, int dim) { return static_cast<long>(kv_head) * kBlock * dim; }

template <class T>
INLINE void store_key(const T* key, T* piece, int slot, int dim) {
  const auto* from = reinterpret_cast<const uint32_t*>(key);
  auto* to = reinterpret_cast<uint32_t*>(piece);
  for (int s = 0; s < dim / kPack<T>; ++s) __builtin_memcpy(to + s * kBlock + slot, from + s, 4);
}
template <class T>
INLINE void store_value(const T* value, T* piece, int slot, int dim) {
  T* to = piece + static_cast<long>(slot / kPack<T>) * dim * kPack<T> + slot % kPack<T>;
  for (int d = 0; d < dim; ++d) to[d * kPack<T>] = value[d];
}
