// Matrix tiles (AMX): a tile has up to 16 rows of 64 bytes, and one instruction multiplies 16 rows of x, 32 inputs
// each, with these inputs of 16 outputs. B is a weight as linear.cpp packs it: 16 words, each a pair of inputs, of 16
// outputs.
//
// An element of the result depends only on its row, its column and its value before, for any number of rows. The
// products of the even inputs and of the odd ones are summed separately, each from zero and in order by fused
// multiply-adds, and both sums are added to the element. Denormal inputs and results count as zero. Measured on Granite
// Rapids, and described by Intel's instruction manual (TDPBF16PS). 8-bit integers, four in a word and 64 inputs of a
// row, have their own instruction, whose sums are exact (TDPBSSD). tiles.cpp computes the same without the
// instructions, for tests, if EMULATE_TILES is defined.
#pragma once

#include <cstdint>

#include "../inline.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && !defined(EMULATE_TILES)
constexpr bool kTiles = true;
#define TILE_INSTRUCTIONS
#elif defined(EMULATE_TILES)
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

constexpr int kTileRows = 16, kTileWords = 16;

// Gives this thread's tiles their shapes. With `second` rows, tiles 0 and 1 have `first` rows of sums, tiles 2 and 3
// have `second`, and tiles 4 and 5 have rows of x. Without, tiles 0 to 3 have `first`, and tile 4 has x. A row of x has
// `bytes` bytes. The other tiles have weights, with a matching number of words in each column. Does nothing if the
// tiles have these shapes already.
void shape_tiles(int first, int second, int bytes = 64);
// For a thread with nothing to do. While its tiles have shapes, each switch to another program saves 8 KB more.
void release_tiles();

// Scope of a kernel's call. When the outermost one of a thread ends, it releases the tiles. Other code of the thread,
// such as a library with its own tiles, may give them other shapes, or none.
void begin_call();
void end_call();
class TilesOfCall {
 public:
  TilesOfCall() {
    if constexpr (kTiles) begin_call();
  }
  ~TilesOfCall() {
    if constexpr (kTiles) end_call();
  }
  TilesOfCall(const TilesOfCall&) = delete;
  TilesOfCall& operator=(const TilesOfCall&) = delete;
};

#ifdef TILE_INSTRUCTIONS
// "memory" stands for the memory that is read and written, which is not named.
template <int Tile>
INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
template <int Tile>
INLINE void tile_load(const void* from, long stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Tile), "r"(from), "r"(stride) : "memory");
}
template <int Tile>
INLINE void tile_store(void* to, long stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Tile), "r"(to), "r"(stride) : "memory");
}
template <int Sums, int X, int Weight>
INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(Weight));
}
// Like tile_dot, for signed bytes with integer sums.
template <int Sums, int X, int Weight>
INLINE void tile_dot_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(Weight));
}
#else
void emulate_shapes(const void* shapes);  // 64 bytes, in the format of LDTILECFG
void emulate_zero(int tile);
void emulate_load(int tile, const void* from, long stride);
void emulate_store(int tile, void* to, long stride);
void emulate_dot(int sums, int x, int weight);
void emulate_dot_bytes(int sums, int x, int weight);

template <int Tile>
INLINE void tile_zero() {
  emulate_zero(Tile);
}
template <int Tile>
INLINE void tile_load(const void* from, long stride) {
  emulate_load(Tile, from, stride);
}
template <int Tile>
INLINE void tile_store(void* to, long stride) {
  emulate_store(Tile, to, stride);
}
template <int Sums, int X, int Weight>
INLINE void tile_dot() {
  emulate_dot(Sums, X, Weight);
}
template <int Sums, int X, int Weight>
INLINE void tile_dot_bytes() {
  emulate_dot_bytes(Sums, X, Weight);
}
#endif
