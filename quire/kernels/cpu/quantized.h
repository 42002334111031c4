// Rows of x in 8 or 16 bits, and the layout of quantized weights.
//
// A row of x is divided into blocks of 16 or more inputs. A block's peak is its max|x|. Its integers are x * 127 /
// peak, rounded to nearest, times 256. In a few blocks of a row x is many times as large as in the others, and rounding
// these blocks causes most of the error. There the integers are x * 32512 / peak, rounded. All integers depend only on
// the row, and sums of products of integers are exact in any order: 128 * 32512 * 96 is below 2^31.
//
// If instructions multiply bytes, an integer is two bytes: 256 * high + low, from -128 to 127. A sum over the high ones
// is shifted, and continues over the low ones if any row of the tile has low bytes other than 0.
//
// Each part of a weight is packed as [panels of 32 outputs][groups]: a group's 32 scales and 32 offsets, if there are
// any, as half floats, then its codes. Codes are unsigned, as the instructions want them: a value plus 128, for which a
// sum starts at -128 times the sum of x. For matrix tiles, codes are the values, signed. A step is 4 inputs for 32
// outputs: 32 words, the inputs of an output beside each other. quantization/codes.h says how smaller codes are packed.
//
// Scales may be nested. A panel then begins with half floats, 32 for each `nested` inputs, and 32 more of offsets.
// Instead of half floats, groups have 32 bytes of multiples: signed bytes or, with offsets, two nibbles, of which the
// high one is the offset's.
#pragma once

#include "panels.h"
#include "tiles/tiles.h"

constexpr int kOuts = 32;  // outputs of a panel: with more, a tile would need two passes over prefetched memory
// Columns of 16 outputs that are multiplied with R rows: both of a panel if registers hold their integers, and with
// AVX-512 their float32 sums too. The inputs of a tile are packed so that one pointer finds them. With six pointers, a
// block's end was slower.
template <int R>
constexpr int kTileColumns = kAccumulators == 24 || 2 * R <= kAccumulators ? 2 : 1;
constexpr int kMostInBlock = 96;
constexpr int kTogether = 4;  // steps that are unrolled: a block has a multiple of them
constexpr int kStepBytes = 4 * kOuts;

INLINE long header_bytes(const QuantizedPart& part) {
  return part.nested ? kOuts : 2L * kOuts * ((part.scales != 0) + (part.offsets != 0));
}
INLINE long group_bytes(const QuantizedPart& part) {
  return header_bytes(part) + static_cast<long>(part.group) * kOuts * part.bits / 8;
}
INLINE long nested_bytes(const QuantizedPart& part, int inner) {
  return part.nested ? 2L * kOuts * (1 + (part.offsets != 0)) * (inner / part.nested) : 0;
}
INLINE long panel_bytes(const QuantizedPart& part, int inner) {
  return nested_bytes(part, inner) + inner / part.group * group_bytes(part);
}
INLINE long panels_of(const QuantizedPart& part) { return (part.outs + kOuts - 1) / kOuts; }

// A code of 8 bits for a value of -128 to 127, which is given as a byte, and the value of a code.
constexpr uint8_t kZeroCode = kTiles ? 0 : 128;
INLINE uint8_t code_of(uint8_t value) { return value ^ kZeroCode; }
INLINE int value_of(uint8_t code) { return static_cast<int8_t>(code ^ kZeroCode); }

// Parameters of a block of a row.
struct BlockOfRow {
  float scale;     // with matrix tiles, and no low codes in the tile: the high codes' scale
  uint32_t start;  // -128 times the sum of the integers, minus what idot subtracts itself
  float moment;    // scale times the sum of the integers
  bool low;        // whether any row of the tile has low codes; stored in the tile's first row
};
constexpr float kMost = 127.0f;

constexpr int kMostTogether = kTiles ? kTileRows : kRows;

// The layout of a row's codes: `inputs` of them beside each other, in a line of `bytes`, which one instruction
// multiplies. A block has whole lines.
struct Line {
  int inputs = 16, bytes = 16 * kCodeBytes;

  explicit Line(int block) {
    if (!kTiles) return;
    inputs = block <= 64 ? block : block % 32 ? 16 : block / 2;
    bytes = inputs <= 16 ? 16 : inputs <= 32 ? 32 : 64;
  }
  // Bytes of this many inputs of a row, in whole lines.
  long of(int some) const {
    return kTiles ? static_cast<long>(some / inputs) * bytes : static_cast<long>(some) * kCodeBytes;
  }
  // Distance from the codes at 16 * i inputs of a block to those at 16 * (i + 1), if a row's next line is `stride`
  // bytes after this one.
  __attribute__((always_inline)) long step(int i, long stride) const {
    if (!kTiles) return stride;
    const int steps = inputs / 16;
    return (i + 1) % steps ? 16 : stride - 16 * (steps - 1);
  }
};

// Quantized rows of x, in tiles of up to kMostTogether rows, of nearly equal size (with at most six, 8 rows are 4 + 4).
// A tile of R rows is [inner / line.inputs][R] lines of codes (in the order of store_codes) and [blocks][R] BlockOfRow.
// Codes of one byte are the high ones. The low ones are `lows` bytes after them.
struct QuantizedRows {
  int inner, blocks;  // of a row; inner is a whole number of blocks, the last one zero-padded
  float outliers;
  Line line;
  long rows, tiles, row_bytes, lows;
  BlockOfRow* of_rows;
  int8_t* codes;

  static size_t bytes(long rows, int inner, int blocks) {
    const long codes = Line(inner / blocks).of(inner) * (kCodeBytes == 1 ? 2 : 1);
    return rows * (codes + sizeof(BlockOfRow) * blocks) + (kTiles ? 64 : 0);
  }
  QuantizedRows(char* at, long rows, int inner, int blocks, float outliers)
      : inner(inner),
        blocks(blocks),
        outliers(outliers),
        line(inner / blocks),
        rows(rows),
        tiles((rows + kMostTogether - 1) / kMostTogether),
        row_bytes(line.of(inner)),
        lows(rows * row_bytes),
        of_rows(reinterpret_cast<BlockOfRow*>(at)),
        codes(reinterpret_cast<int8_t*>(of_rows + rows * blocks)) {
    if (kTiles) codes += -reinterpret_cast<uintptr_t>(codes) % 64;
  }

  long first(long tile) const { return rows * tile / tiles; }  // row
  int8_t* codes_of(long tile) const { return codes + first(tile) * row_bytes; }
  BlockOfRow* blocks_of(long tile) const { return of_rows + first(tile) * blocks; }
};

// The N * 16 inputs of a block, of which `count` exist. The others count as 0.
template <int N, class T>
INLINE void load_block(const T* x, int count, Vec (&v)[N]) {
  if (count >= 16 * N)
    for (int i = 0; i < N; ++i) v[i] = vload(x + 16 * i);
  else
    for (int i = 0; i < N; ++i) v[i] = count > 16 * i ? vload_first(x + 16 * i, count - 16 * i) : vset(0.0f);
}

// The peaks of up to 16 blocks of N * 16 inputs, of which `in` exist. Returns whether all inputs are finite.
template <int N, class T>
INLINE bool find_peaks(const T* x, int in, int blocks, float* peaks) {
  bool finite = true;
  for (int b = 0; b < blocks; ++b) {
    Vec v[N];
    Words peak = wset(0);
    load_block<N>(x + b * 16 * N, in - b * 16 * N, v);
    for (int i = 0; i < N; ++i) peak = wmax(peak, magnitude(v[i]));
    peaks[b] = as_float(wpeak(peak));
    finite &= peaks[b] < kInfinity;
  }
  return finite;
}

// A block of the row is an outlier if its peak exceeds this. `peaks` are padded with 0 to a multiple of 16.
INLINE float outlier_above(const float* peaks, int blocks, float outliers) {
  alignas(64) float lanes[16];
  Vec squares = vset(0.0f);
  for (int b = 0; b < blocks; b += 16) squares = vfma(vload(peaks + b), vload(peaks + b), squares);
  vstore(lanes, squares);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return outliers * __builtin_sqrtf(sum / static_cast<float>(blocks));
}

// Quantizes up to 16 blocks of N * 16 inputs, of which `in` exist, of one of a tile's `rows`. Parameters of a block are
// written every `rows` elements of `to`. The steps of a block wait for each other, so all blocks compute one step
// before any computes the next.
template <int N, class T>
INLINE void quantize_blocks(const T* x, int in, int blocks, const float* peaks, float above, int8_t* codes,
                            const QuantizedRows& all, BlockOfRow* to, long rows) {
  constexpr float kSmallest = 1e-30f;  // smaller numbers become 0: 32512 / x must be finite
  alignas(64) float factors[16], scales[16];
  uint32_t sums[16];
  const long stride = (kTiles ? all.line.bytes : 16 * kCodeBytes) * rows;
  const Vec peak = vmax(vload(peaks), vset(kSmallest));
  vstore(factors, vdiv(vset(kMost), peak));
  vstore(scales, vdiv(peak, vset(256 * kMost)));
  for (int b = 0; b < blocks; ++b) {
    Vec v[N];
    Words sum = wset(0);
    load_block<N>(x + b * 16 * N, in - b * 16 * N, v);
    const bool outlier = peaks[b] > above;
    const Vec factor = vset(outlier ? 256 * factors[b] : factors[b]);
    for (int i = 0; i < N; codes += all.line.step(i++, stride)) {
      const Words rounded = to_integers(vmul(v[i], factor)), integers = outlier ? rounded : wtimes256(rounded);
      sum = wadd(sum, integers);
      if constexpr (kCodeBytes == 2) {
        store_codes(codes, integers);
      } else {
        store_codes(codes, wby256(wadd(integers, wset(128))));
        store_codes(codes + all.lows, integers);  // the low bytes, as numbers from -128 to 127
      }
    }
    sums[b] = static_cast<uint32_t>(wsum(sum));
    to[b * rows].low |= outlier;
  }
  for (int b = 0; b < blocks; ++b) {
    BlockOfRow& of_row = to[b * rows];
    of_row.scale = scales[b];
    of_row.start = (kCentre - 128u) * sums[b];
    of_row.moment = scales[b] * static_cast<float>(static_cast<int32_t>(sums[b]));
  }
}

template <class T>
INLINE void quantize_row(const T* x, int in, const QuantizedRows& to, long tile, long row, float* peaks) {
  const long first = to.first(tile), rows = to.first(tile + 1) - first;
  BlockOfRow* of_row = to.blocks_of(tile) + (row - first);
  int8_t* codes = to.codes_of(tile) + (row - first) * to.line.bytes;
  bool finite = true;
  with_rows<kMostInBlock / 16>(to.inner / to.blocks / 16, [&](auto n) {
    const auto each = [&](const auto& work) {
      for (int b = 0; b < to.blocks; b += 16) work(b, to.blocks - b < 16 ? to.blocks - b : 16, b * n() * 16);
    };
    for (int b = 0; b < 16; ++b) peaks[to.blocks / 16 * 16 + b] = 0.0f;
    each([&](int b, int blocks, int at) { finite &= find_peaks<n()>(x + at, in - at, blocks, peaks + b); });
    const float above = outlier_above(peaks, to.blocks, to.outliers);
    each([&](int b, int blocks, int at) {
      quantize_blocks<n()>(x + at, in - at, blocks, peaks + b, above, codes + to.line.of(at) * rows, to,
                           of_row + b * rows, rows);
    });
  });
  if (!finite)  // then the whole result is NaN
    for (int b = 0; b < to.blocks; ++b) of_row[b * rows].scale = kInfinity - kInfinity;
}
