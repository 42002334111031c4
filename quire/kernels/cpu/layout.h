// The layout of the KV cache. A page has 16 tokens of one layer: for each KV head 16 * dim elements, addressed as
// 32-bit words. A word is one float, or a pair of bfloat16 (pack = 2).
//   keys   [dim / pack][16 tokens]  one load gives the same dimension(s) of 16 keys, so a query scores all of them at
//                                   once without a sum across lanes
//   values [16 / pack][dim]         one load gives 16 dimensions of one token, or of two
// The parts of keys and values have equal sizes. Pages of 8-bit codes have their own layout (kv_codes.h). If values are
// the beginnings of their keys, as with latents, there are only pages of keys.
#pragma once

#include <cstdint>

constexpr int kBlock = 16;
constexpr int64_t kElsewhere = -1;  // slot of a token on another rank: ranks/divided_attention.cpp

// The first key that a query at this position sees, by Softmax::window (attention_tile.h). It may be below 0.
INLINE long first_seen(int window, long position) {
  return window > 0 ? position - window + 1 : window < 0 ? position / -window * -window : 0;
}

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

// The words of a block's values if these are the first `dim` numbers of its keys, whose words are given. Rows are
// padded to `width`, a multiple of 16, with zeros for the tokens after the first `valid`.
template <class T>
void values_of_keys(const uint32_t* keys, uint32_t* values, int dim, int width, int valid) {
  for (int d = 0; d < width; d += 16 * kPack<T>) {
    Words rows[16];
    for (int i = 0; i < 16; ++i) {
      const int at = d / kPack<T> + i;
      rows[i] = at < dim / kPack<T> ? wload(keys + at * kBlock) : wset(0);
    }
    transpose(rows);
    for (int slot = valid; slot < kBlock; ++slot) rows[slot] = wset(0);
    for (int i = 0; i < kBlock / kPack<T>; ++i) {
      uint32_t* to = values + static_cast<long>(i) * width + d;
      if constexpr (kPack<T> == 1) {
        wstore(to, rows[i]);
      } else {
        Words first, second;
        zip_halves(rows[2 * i], rows[2 * i + 1], first, second);
        wstore(to, first);
        if (d + 16 < width) wstore(to + 16, second);
      }
    }
  }
}
