// Products of a panel of 64 outputs with many rows of bfloat16, by matrix tiles. Only linear.cpp includes it.
//
// Every tile that is loaded is 1 KB of consecutive memory: rows are packed once per call, in groups of 32, and a panel
// that is decompressed is written in the tiles' order. A group's sums are written to the output while the next group is
// multiplied, so that vector instructions and stores take turns with tiles.
//
// An element's sum is computed block after block, as tile_rows does: sums that are stored between two chunks of blocks
// and loaded again keep their bits.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear_tiles.h"

constexpr int kGroupRows = kMostTileRows;
constexpr int kTileSize = kTileRows * kTileWords;       // words
constexpr int kGroupBlockWords = 2 * kTileSize;         // of a block of 32 inputs of a group
constexpr int kGroupSums = kGroupRows * kPanel;         // [4][32][16]
constexpr int kChunkBlocks = 12;                        // 24 KB of a group's rows, which both halves of a panel read
constexpr long kRowsInL2 = 768 << 10;                   // bytes of rows that are multiplied with one panel after another

INLINE int blocks_of(int steps) { return (steps + kTileWords - 1) / kTileWords; }

// The rows [begin, end) of x, as one group: [blocks][32][16 words], filled up with zeros.
INLINE void pack_group(const uint32_t* x, int steps, long begin, long end, uint32_t* to) {
  const int blocks = blocks_of(steps), last = steps - (blocks - 1) * kTileWords;
  const int rows = static_cast<int>(end - begin);
  for (int b = 0; b < blocks; ++b, to += kGroupBlockWords) {
    const int words = b == blocks - 1 ? last : kTileWords;
    const uint32_t* from = x + begin * steps + b * kTileWords;
    for (int r = 0; r < rows; ++r) {
      uint32_t* row = to + r * kTileWords;
      if (words == kTileWords) {
        std::memcpy(row, from + static_cast<long>(r) * steps, 4 * kTileWords);
      } else {
        std::memcpy(row, from + static_cast<long>(r) * steps, 4L * words);
        std::fill_n(row + words, kTileWords - words, 0u);
      }
    }
    std::fill_n(to + rows * kTileWords, (kGroupRows - rows) * kTileWords, 0u);
  }
}

// Groups of 32 rows of x; the last one may have fewer. The memory is this thread's until its next call.
inline const uint32_t* pack_groups(const uint32_t* x, int steps, long rows, int threads) {
  static thread_local std::vector<uint32_t> memory;  // it grows to what the largest call needs and is kept
  const long groups = (rows + kGroupRows - 1) / kGroupRows, words = 1L * blocks_of(steps) * kGroupBlockWords;
  if (static_cast<long>(memory.size()) < groups * words + 16) memory.resize(groups * words + 16);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  uint32_t* to = memory.data() + (64 - address % 64) % 64 / 4;
  parallel_rows(threads, groups, groups * words, [&](long begin, long end) {
    for (long g = begin; g < end; ++g)
      pack_group(x, steps, g * kGroupRows, std::min(rows, (g + 1) * kGroupRows), to + g * words);
  });
  return to;
}

// Where the tiles of a panel's words are, in words but for the stride: block b's of 16 outputs c is at
// words + c / 2 * half + b * block + c % 2 * odd.
struct PanelTiles {
  const uint32_t* words;
  long half, block, odd, stride_bytes;
};

// As linear.cpp packs a panel whose inner dimension is a whole number of blocks.
INLINE PanelTiles packed_tiles(const uint32_t* words) { return {words, 32, kBlockWords, 16, 4 * kPanel}; }

// Each tile consecutive, and the tiles of each half of the outputs.
INLINE PanelTiles consecutive_tiles(const uint32_t* words, int blocks) {
  return {words, blocks * 2L * kTileSize, 2 * kTileSize, kTileSize, 4 * kTileWords};
}

// Where consecutive_tiles has 16 outputs c of step s.
INLINE uint32_t* at_step(uint32_t* words, int blocks, int s, int c) {
  return words + (static_cast<long>(c / 2 * blocks + s / kTileWords) * 2 + c % 2) * kTileSize +
         s % kTileWords * kTileWords;
}

// Multiplies a group with a panel, to sums. `fetch(b)` is called once for each block, and finish(i) for each i below
// `pieces`, in their order, between the products.
template <class Fetch, class Finish>
void multiply_group(const uint32_t* x, const PanelTiles& panel, int blocks, float* sums, const Fetch& fetch, int pieces,
                    const Finish& finish) {
  const int each = (pieces + 2 * blocks - 1) / (2 * blocks);
  int finished = 0;
  shape_tiles(kTileRows, kTileRows);
  for (int begin = 0; begin < blocks; begin += kChunkBlocks) {
    const int end = std::min(blocks, begin + kChunkBlocks);
    for (int half = 0; half < 2; ++half) {
      float* to = sums + half * kGroupSums / 2;
      if (begin) {
        tile_load<0>(to, 64), tile_load<2>(to + kTileSize, 64);
        tile_load<1>(to + 2 * kTileSize, 64), tile_load<3>(to + 3 * kTileSize, 64);
      } else {
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      }
      for (int b = begin; b < end; ++b) {
        const uint32_t* rows = x + static_cast<long>(b) * kGroupBlockWords;
        const uint32_t* words = panel.words + half * panel.half + b * panel.block;
        tile_load<4>(rows, 64);
        tile_load<6>(words, panel.stride_bytes);
        tile_dot<0, 4, 6>();
        tile_load<5>(rows + kTileSize, 64);
        tile_dot<2, 5, 6>();
        tile_load<7>(words + panel.odd, panel.stride_bytes);
        tile_dot<1, 4, 7>();
        tile_dot<3, 5, 7>();
        if (half) fetch(b);
        for (const int until = std::min(pieces, finished + each); finished < until; ++finished) finish(finished);
      }
      tile_store<0>(to, 64), tile_store<2>(to + kTileSize, 64);
      tile_store<1>(to + 2 * kTileSize, 64), tile_store<3>(to + 3 * kTileSize, 64);
    }
  }
  for (; finished < pieces; ++finished) finish(finished);
}
