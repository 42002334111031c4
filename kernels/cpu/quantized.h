// Rows of x in 8 bits, and the layout of quantized weights.
//
// A row of x is cut into blocks of 16 or more inputs; a block's integers are x * 127 / max|x|, rounded to nearest, so
// that they depend on nothing but the row. Sums of products of integers are exact, in whatever order.
//
// Each part of a weight is packed as [panels of 32 outputs][groups]: a group's 32 scales and 32 offsets, if there are
// any, as half floats, then its codes. Codes are unsigned, as the instructions want them: a value plus 128, for which a
// sum starts at -128 times the sum of x. A step is 4 inputs for 32 outputs: 32 words, the inputs of an output beside
// each other. Of 4-bit codes, the low halves of 128 bytes are one step, the high halves are the next.
#pragma once

#include "panels.h"

constexpr int kOuts = 32;  // of a panel: with more, a tile would need two passes through what memory brings
// Columns of 16 outputs that are multiplied with kRows rows. With AVX-512 their integers and their float32 sums are all
// in registers, and the inputs of a tile are packed so that one pointer finds them: with six, a block's end was slower.
constexpr int kTileColumns = kAccumulators == 24 ? 2 : 1;
constexpr int kMostInBlock = 96;
constexpr int kTogether = 4;  // steps that are unrolled: a block has a multiple of them
constexpr int kStepBytes = 4 * kOuts;

INLINE long header_bytes(const QuantizedPart& part) { return 2L * kOuts * ((part.scales != 0) + (part.offsets != 0)); }
INLINE long group_bytes(const QuantizedPart& part) {
  return header_bytes(part) + static_cast<long>(part.group) * kOuts * part.bits / 8;
}
INLINE long panel_bytes(const QuantizedPart& part, int inner) { return inner / part.group * group_bytes(part); }
INLINE long panels_of(const QuantizedPart& part) { return (part.outs + kOuts - 1) / kOuts; }

// What belongs to a block of a row.
struct BlockOfRow {
  float scale;
  uint32_t start;  // -128 times the sum of the codes, less what idot takes itself
  float moment;    // scale times the sum of the codes
};

// Rows of x in 8 bits, in tiles of up to kRows rows, of nearly equal size (8 rows are 4 + 4). A tile of R rows is
// [inner / 16][R][16] codes of kCodeBytes (in the order of store_codes) and [blocks][R] BlockOfRow.
struct QuantizedRows {
  int inner, blocks;  // of a row; inner is a whole number of blocks, the last one padded with zeros
  long rows, tiles;
  BlockOfRow* of_rows;
  int8_t* codes;

  static size_t bytes(long rows, int inner, int blocks) {
    return rows * (inner * kCodeBytes + sizeof(BlockOfRow) * blocks);
  }
  QuantizedRows(char* at, long rows, int inner, int blocks)
      : inner(inner),
        blocks(blocks),
        rows(rows),
        tiles((rows + kRows - 1) / kRows),
        of_rows(reinterpret_cast<BlockOfRow*>(at)),
        codes(reinterpret_cast<int8_t*>(of_rows + rows * blocks)) {}

  long first(long tile) const { return rows * tile / tiles; }  // row
  int8_t* codes_of(long tile) const { return codes + first(tile) * inner * kCodeBytes; }
  BlockOfRow* blocks_of(long tile) const { return of_rows + first(tile) * blocks; }
};

// The N * 16 inputs of a block, of which `count` are there; the others count as 0.
template <int N, class T>
INLINE void load_block(const T* x, int count, Vec (&v)[N]) {
  if (count >= 16 * N)
    for (int i = 0; i < N; ++i) v[i] = vload(x + 16 * i);
  else
    for (int i = 0; i < N; ++i) v[i] = count > 16 * i ? vload_first(x + 16 * i, count - 16 * i) : vset(0.0f);
}

// Quantizes up to 16 blocks of N * 16 inputs, of which `in` are there. Sixteen codes are written each `stride` bytes,
// and what belongs to a block each `rows` elements of `to`. Returns whether all inputs are finite. The steps of a block
// wait for each other, so all blocks take one step before any takes the next.
template <int N, class T>
INLINE bool quantize_blocks(const T* x, int in, int blocks, int8_t* codes, long stride, BlockOfRow* to, long rows) {
  constexpr float kSmallest = 1e-30f;  // smaller numbers become 0: 127 / x must be finite
  alignas(64) float peaks[16] = {}, factors[16], scales[16];
  uint32_t sums[16];
  for (int b = 0; b < blocks; ++b) {
    Vec v[N];
    Words peak = wset(0);
    load_block<N>(x + b * 16 * N, in - b * 16 * N, v);
    for (int i = 0; i < N; ++i) peak = wmax(peak, magnitude(v[i]));
    peaks[b] = as_float(wpeak(peak));
  }
  const Vec peak = vmax(vload(peaks), vset(kSmallest));
  vstore(factors, vdiv(vset(127.0f), peak));
  vstore(scales, vdiv(peak, vset(127.0f)));
  for (int b = 0; b < blocks; ++b) {
    Vec v[N];
    Words sum = wset(0);
    load_block<N>(x + b * 16 * N, in - b * 16 * N, v);
    for (int i = 0; i < N; ++i, codes += stride) {
      const Words rounded = to_integers(vmul(v[i], vset(factors[b])));
      sum = wadd(sum, rounded);
      store_codes(codes, rounded);
    }
    sums[b] = static_cast<uint32_t>(wsum(sum));
  }
  bool finite = true;
  for (int b = 0; b < blocks; ++b) {
    to[b * rows] = {scales[b], (kCentre - 128u) * sums[b],
                    scales[b] * static_cast<float>(static_cast<int32_t>(sums[b]))};
    finite &= peaks[b] < kInfinity;
  }
  return finite;
}

template <class T>
INLINE void quantize_row(const T* x, int in, const QuantizedRows& to, long tile, long row) {
  constexpr long kStored = 16 * kCodeBytes;
  const long first = to.first(tile), rows = to.first(tile + 1) - first;
  BlockOfRow* of_row = to.blocks_of(tile) + (row - first);
  int8_t* codes = to.codes_of(tile) + (row - first) * kStored;
  bool finite = true;
  with_rows<kMostInBlock / 16>(to.inner / to.blocks / 16, [&](auto n) {
    for (int b = 0; b < to.blocks; b += 16) {
      const int blocks = to.blocks - b < 16 ? to.blocks - b : 16, at = b * n() * 16;
      finite &= quantize_blocks<n()>(x + at, in - at, blocks, codes + at * kCodeBytes * rows, kStored * rows,
                                     of_row + b * rows, rows);
    }
  });
  if (!finite)  // the whole result is NaN, then
    for (int b = 0; b < to.blocks; ++b) of_row[b * rows].scale = kInfinity - kInfinity;
}
