// Deltas of an adapter for up to 16 rows of bfloat16, by matrix tiles. Only lora.cpp includes it.
//
// A row's sums have one order, with any number of rows: `down` in blocks of 32 inputs from the first one on, in four
// alternating sums, which are added at the end; `up` 16 of its inputs at a time. Inputs of `up` are float32. Each is
// split into two bfloat16, where the second is the rounding error of the first. The two take the places of a pair of
// inputs, whose weights are equal.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "tiles.h"

constexpr int kTileNumbers = 16 * 16;  // of a tile

// Rows of x beside each other, zero-padded to whole tiles.
class Gathered {
 public:
  Gathered(const bf16* x, int in, const int32_t* rows, int count) : words_((in / 2 + 15) / 16 * 16) {
    memory().resize(count * words_);
    for (int r = 0; r < count; ++r) {
      uint32_t* to = &memory()[r * words_];
      std::memcpy(to, x + static_cast<long>(rows[r]) * in, 2L * in);
      std::fill(to + in / 2, to + words_, 0u);
    }
  }
  template <int Tile>
  void load(int step) const {
    tile_load<Tile>(&memory()[step * 16], 4 * words_);
  }
  int steps() const { return static_cast<int>(words_ / 16); }

 private:
  static std::vector<uint32_t>& memory() {
    static thread_local std::vector<uint32_t> words;
    return words;
  }
  long words_;  // words of a row
};

// Computes one panel of 16 outputs of down @ x, to `middle`, whose rows are `width` numbers apart.
INLINE void shrink_panel(const Gathered& x, int count, const uint32_t* panel, int words, float* middle, long width,
                         long ahead) {
  alignas(64) float sums[4][kTileNumbers];
  alignas(64) uint32_t rest[kTileNumbers] = {};
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int step = 0; step < x.steps(); ++step) {
    const uint32_t* weights = panel + step * kTileNumbers;
    for (int line = 0; line < 16; ++line)
      __builtin_prefetch(reinterpret_cast<const char*>(weights + line * 16) + ahead);
    if (const int left = words - step * 16; left < 16) {  // anything may follow
      std::memcpy(rest, weights, 64L * left);
      weights = rest;
    }
    x.load<4>(step);
    tile_load<5>(weights, 64);
    switch (step % 4) {
      case 0:
        tile_dot<0, 4, 5>();
        break;
      case 1:
        tile_dot<1, 4, 5>();
        break;
      case 2:
        tile_dot<2, 4, 5>();
        break;
      default:
        tile_dot<3, 4, 5>();
    }
  }
  tile_store<0>(sums[0], 64), tile_store<1>(sums[1], 64), tile_store<2>(sums[2], 64), tile_store<3>(sums[3], 64);
  for (int r = 0; r < count; ++r) {
    const auto sum = [&](int i) { return vload(sums[i] + r * 16); };
    vstore(middle + r * width, vadd(vadd(sum(0), sum(1)), vadd(sum(2), sum(3))));
  }
}

// Floats of `rank` columns of `count` rows, as pairs of bfloat16 with nearly that sum: [count][rank rounded up to 16],
// zero-padded.
INLINE void split_floats(const float* from, long width, int count, int rank, uint32_t* to) {
  const int padded = (rank + 15) / 16 * 16;
  for (int r = 0; r < count; ++r, to += padded)
    for (int i = 0; i < padded; i += 16) {
      bf16 upper[16], lower[16];
      const Vec x = i < rank ? vload_first(from + r * width + i, rank - i) : vset(0.0f);
      vstore(upper, x);
      vstore(lower, vsub(x, vload(upper)));
      for (int k = 0; k < 16; ++k) to[i + k] = upper[k].bits | static_cast<uint32_t>(lower[k].bits) << 16;
    }
}

// Computes one panel of 16 outputs of up @ middle, in the form of split_floats; sums [16][16].
INLINE void expand_panel(const uint32_t* middle, const bf16* up, int rank, float* sums) {
  const int padded = (rank + 15) / 16 * 16;
  tile_zero<0>();
  for (int begin = 0; begin < rank; begin += 16) {
    alignas(64) uint32_t weights[kTileNumbers];
    for (int i = 0; i < 16; ++i)
      for (int o = 0; o < 16; ++o)
        weights[i * 16 + o] = begin + i < rank ? up[(begin + i) * 16 + o].bits * 0x10001u : 0;
    tile_load<4>(middle + begin, 4L * padded);
    tile_load<5>(weights, 64);
    tile_dot<0, 4, 5>();
  }
  tile_store<0>(sums, 64);
}
