// Matrix tiles (AMX): a tile has up to 16 rows of 64 bytes, and one instruction multiplies 16 rows of x, 32 inputs of
// each, with these inputs of 16 outputs. B is a weight as linear.cpp packs it: 16 words, each a pair of inputs, of 16
// outputs.
//
// An element of the result depends on nothing but its row, its column and what it was before, whatever the number of
// rows: the products of the even inputs and of the odd ones are summed apart, each from zero and in their order by
// fused multiply-adds, and the sum of both is added to the element. Denormals count as zero, before and behind.
// Measured on Granite Rapids, and described by Intel's manual of instructions (TDPBF16PS). Integers of 8 bits, four in
// a word and 64 inputs of a row, have an instruction of their own, whose sums are exact (TDPBSSD). tiles.cpp computes
// the same without the instructions, for tests, where EMULATE_TILES is defined.
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

// Gives this thread's tiles their shapes: with `second` rows, 0 and 1 have `first` rows of sums, 2 and 3 `second`, and
// 4 and 5 are rows of x; without, 0 to 3 have `first`, and 4 is x. A row of x has `bytes` of them, and the others,
// which are of weights, as many words above each other. Nothing is done where they have these shapes already.
void shape_tiles(int first, int second, int bytes = 64);
// Once a thread has nothing to do: while it has shapes, each switch to another program saves 8 KB more.
void release_tiles();

// Of a kernel's call: when the outermost one of a thread ends, it gives the tiles back. What else the thread runs, such
// as a library with tiles of its own, may give them other shapes, or none.
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
// The memory that is read and written is not named, but all of it is, by "memory".
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
// The same of signed bytes, with sums that are integers.
template <int Sums, int X, int Weight>
INLINE void tile_dot_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(Weight));
}
#else
void emulate_shapes(const void* shapes);  // 64 bytes, as LDTILECFG reads them
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
