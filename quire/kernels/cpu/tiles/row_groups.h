// Products of a panel of 64 outputs with many rows of bfloat16, by matrix tiles. Only linear.cpp includes it.
//
// Rows are multiplied in groups of 32. A group's sums are written to the output while the next group is multiplied, so
// that vector instructions and stores alternate with tiles. A decompressed panel is written tile after tile, because
// tiles of consecutive memory load faster.
//
// An element's sum is computed block after block, as in tile_rows. Sums that are stored between two chunks of blocks
// and loaded again keep their bits.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear_tiles.h"

constexpr int kGroupRows = kMostTileRows;
constexpr int kTileSize = kTileRows * kTileWords;  // words
constexpr int kGroupSums = kGroupRows * kPanel;    // [4][32][16]
constexpr int kChunkBlocks = 12;                   // 24 KB of a group's rows, which both halves of a panel read
constexpr long kRowsInL2 = 1536 << 10;             // bytes of rows that are multiplied with one panel after another

INLINE int blocks_of(int steps) { return (steps + kTileWords - 1) / kTileWords; }

// Where the tiles of a group's rows are, in words except the stride. Those of block b's second 16 rows are at words + b
// * block + second.
struct RowTiles {
  const uint32_t* words;
  long block, second, stride_bytes;
};

// Rows of x in groups of 32. If the inner dimension is a whole number of blocks, tiles are loaded from x itself. Other
// rows, and a last group of fewer rows, are copied and zero-padded: [blocks][32][16 words]. The copy is valid until
// this thread makes the next one.
class RowGroups {
 public:
  RowGroups(const uint32_t* x, int steps, long rows) : x_(x), steps_(steps), rows_(rows) {
    first_copied_ = steps % kTileWords ? 0 : rows / kGroupRows;
    static thread_local std::vector<uint32_t> memory;  // grows to the needs of the largest call and is never freed
    const size_t words = (groups() - first_copied_) * group_words();
    if (memory.size() < words) memory.resize(words);
    copy_ = memory.data();
    for (long g = first_copied_; g < groups(); ++g) copy_group(g, memory.data() + (g - first_copied_) * group_words());
  }

  long groups() const { return (rows_ + kGroupRows - 1) / kGroupRows; }
  int rows_of(long group) const { return static_cast<int>(std::min<long>(kGroupRows, rows_ - group * kGroupRows)); }
  RowTiles tiles(long group) const {
    if (group >= first_copied_)
      return {copy_ + (group - first_copied_) * group_words(), kGroupRows * kTileWords, kTileSize, 4 * kTileWords};
    return {x_ + group * kGroupRows * steps_, kTileWords, 1L * kTileRows * steps_, 4L * steps_};
  }

 private:
  long group_words() const { return 1L * blocks_of(steps_) * kGroupRows * kTileWords; }

  void copy_group(long group, uint32_t* to) const {
    std::fill_n(to, group_words(), 0u);
    const uint32_t* from = x_ + group * kGroupRows * steps_;
    for (int r = 0; r < rows_of(group); ++r, from += steps_)
      for (int s = 0; s < steps_; s += kTileWords)
        std::memcpy(to + s * kGroupRows + r * kTileWords, from + s, 4L * std::min(kTileWords, steps_ - s));
  }

  const uint32_t* x_;
  int steps_;
  long rows_, first_copied_;
  const uint32_t* copy_;
};

// Where the tiles of a panel's words are, in words except the stride. Block b's tile of the 16 outputs c is at words +
// c / 2 * half + b * block + c % 2 * odd.
struct PanelTiles {
  const uint32_t* words;
  long half, block, odd, stride_bytes;
};

// Tiles of a panel as linear.cpp packs it, if its inner dimension is a whole number of blocks.
INLINE PanelTiles packed_tiles(const uint32_t* words) { return {words, 32, kBlockWords, 16, 4 * kPanel}; }

// Tiles of a panel where each tile is consecutive, and so are the tiles of each half of the outputs.
INLINE PanelTiles consecutive_tiles(const uint32_t* words, int blocks) {
  return {words, blocks * 2L * kTileSize, 2 * kTileSize, kTileSize, 4 * kTileWords};
}

// Where consecutive_tiles has the 16 outputs c of step s.
INLINE uint32_t* at_step(uint32_t* words, int blocks, int s, int c) {
  return words + (static_cast<long>(c / 2 * blocks + s / kTileWords) * 2 + c % 2) * kTileSize +
         s % kTileWords * kTileWords;
}

// Multiplies a group with a panel, to sums. `fetch(b)` is called once for each block, and finish(i) for each i below
// `pieces`, in order, between the products.
template <class Fetch, class Finish>
void multiply_group(const RowTiles& x, const PanelTiles& panel, int blocks, float* sums, const Fetch& fetch, int pieces,
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
        const uint32_t* rows = x.words + b * x.block;
        const uint32_t* words = panel.words + half * panel.half + b * panel.block;
        tile_load<4>(rows, x.stride_bytes);
        tile_load<6>(words, panel.stride_bytes);
        tile_dot<0, 4, 6>();
        tile_load<5>(rows + x.second, x.stride_bytes);
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
