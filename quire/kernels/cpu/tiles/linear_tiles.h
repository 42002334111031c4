// Computes a panel's 64 outputs of up to 32 rows of bfloat16 by tiles, for linear.cpp and quantization/float8.cpp.
//
// The inner dimension is always divided into blocks of 32 inputs from its beginning, and zero-padded. So a row's result
// has the same bits with any number of other rows.
#pragma once

#include <cstring>

#include "../panels.h"
#include "tiles.h"

constexpr int kMostTileRows = 2 * kTileRows;
constexpr int kBlockWords = kTileWords * kPanel;  // of a block of 32 inputs of a panel

// The last block of x and of a panel's words, if it is not whole.
struct Rest {
  uint32_t x[kMostTileRows][kTileWords] = {};
  uint32_t words[kBlockWords] = {};

  Rest(const uint32_t* from, long row_words, int rows, int begin, int steps) {
    for (int r = 0; r < rows; ++r) std::memcpy(x[r], from + r * row_words + begin, 4L * (steps - begin));
  }
};

// Multiplies up to 16 rows, `row_words` apart. The weight is read once, block after block. source(s) returns the words
// of the block from step s on. The last block has only `steps % 16` steps. sums [4][16][16].
template <class Source, class Fetch>
void tile_rows(const uint32_t* x, long row_words, int rows, int steps, float* sums, const Source& source,
               const Fetch& fetch) {
  shape_tiles(rows, 0);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  const auto multiply = [](const uint32_t* x, long stride, const uint32_t* words) {
    tile_load<4>(x, stride);
    tile_load<5>(words, 4 * kPanel);
    tile_dot<0, 4, 5>();
    tile_load<6>(words + 16, 4 * kPanel);
    tile_dot<1, 4, 6>();
    tile_load<7>(words + 32, 4 * kPanel);
    tile_dot<2, 4, 7>();
    tile_load<5>(words + 48, 4 * kPanel);
    tile_dot<3, 4, 5>();
  };
  int s = 0;
  for (; s + kTileWords <= steps; s += kTileWords) {
    multiply(x + s, 4 * row_words, source(s));
    fetch(s);
  }
  if (s < steps) {
    Rest rest(x, row_words, rows, s, steps);
    std::memcpy(rest.words, source(s), 4L * kPanel * (steps - s));
    multiply(rest.x[0], 4 * kTileWords, rest.words);
  }
  tile_store<0>(sums, 64), tile_store<1>(sums + 256, 64), tile_store<2>(sums + 512, 64), tile_store<3>(sums + 768, 64);
}

// Multiplies 17 to 32 rows with the words of a whole panel. sums [4][32][16].
template <class Fetch>
void tile_more_rows(const uint32_t* x, long row_words, int rows, int steps, float* sums, const uint32_t* words,
                    const Fetch& fetch) {
  shape_tiles(kTileRows, rows - kTileRows);
  const int whole = steps / kTileWords * kTileWords;
  Rest rest(x, row_words, rows, whole, steps);
  std::memcpy(rest.words, words + static_cast<long>(whole) * kPanel, 4L * kPanel * (steps - whole));
  for (int half = 0; half < 2; ++half) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    const auto multiply = [half](const uint32_t* x, long stride, const uint32_t* words) {
      tile_load<4>(x, stride);
      tile_load<5>(reinterpret_cast<const char*>(x) + kTileRows * stride, stride);
      tile_load<6>(words + 32 * half, 4 * kPanel);
      tile_dot<0, 4, 6>();
      tile_dot<2, 5, 6>();
      tile_load<7>(words + 32 * half + 16, 4 * kPanel);
      tile_dot<1, 4, 7>();
      tile_dot<3, 5, 7>();
    };
    for (int s = 0; s < whole; s += kTileWords) {
      multiply(x + s, 4 * row_words, words + static_cast<long>(s) * kPanel);
      if (half) fetch(s);
    }
    if (whole < steps) multiply(rest.x[0], 4 * kTileWords, rest.words);
    float* to = sums + 2 * half * kMostTileRows * 16;
    tile_store<0>(to, 64), tile_store<2>(to + kTileRows * 16, 64);
    tile_store<1>(to + kMostTileRows * 16, 64), tile_store<3>(to + (kMostTileRows + kTileRows) * 16, 64);
  }
}
