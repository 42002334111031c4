// The layout of the KV cache. A page has 16 tokens of one layer: for each KV head 16 * dim elements, addressed as
// 32-bit words. A word is one float, or a pair of bfloat16 (pack = 2).
//   keys   [dim / pack][16 tokens]  one load gives the same dimension(s) of 16 keys, so a query scores all of them at
//                                   once without a sum across lanes
//   values [16 / pack][dim]         one load gives 16 dimensions of one token, or of two
// Keys and values have equally large parts. Pages of 8-bit codes have a layout of their own (kv_codes.h).
#pragma once

#include <cstdint>

constexpr int kBlock = 16;

template <class T>
constexpr int kPack = 4 / static_cast<int>(sizeof(T));

template <class T>
INLINE void store_key(const T* key, T* head, int slot, int dim) {
  const auto* from = reinterpret_cast<const uint32_t*>(key);
  auto* to = reinterpret_cast<uint32_t*>(head);
  for (int s = 0; s < dim / kPack<T>; ++s) __builtin_memcpy(to + s * kBlock + slot, from + s, 4);
}
template <class T>
INLINE void store_value(const T* value, T* head, int slot, int dim) {
  T* to = head + static_cast<long>(slot / kPack<T>) * dim * kPack<T> + slot % kPack<T>;
  for (int d = 0; d < dim; ++d) to[d * kPack<T>] = value[d];
}
