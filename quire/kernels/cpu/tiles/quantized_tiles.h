// A tile of up to 16 quantized rows with a panel of 32 outputs, by matrix tiles. Only quantized.cpp includes it.
//
// Sums of products are exact, and a block's end is computed as in quantized.cpp, in the order of the blocks. So a
// result has the same bits as without tiles, with any number of rows.
#pragma once

#include <algorithm>

#include "../quantization/panel.h"

namespace {

constexpr int kFew = 4096, kMany = 16384;  // bytes of codes that both columns multiply from L1

// Consecutive blocks of a panel.
struct Blocks {
  int begin, end;
  const uint8_t* bytes;  // their codes, one byte each; null: the panel has them
};

// Makes bytes of the blocks' codes of less than 8 bits.
INLINE void expand_blocks(const Panel& panel, int begin, int end, uint8_t* to) {
  alignas(64) uint8_t values[2][16];
  for (int i = 0; i < 32; ++i) values[i / 16][i % 16] = static_cast<uint8_t>(panel.part.table[i / 16][i % 16] - 128);
  const CodeTables tables = {wtable(values[0]), wtable(values[1])};
  with_bits(panel.part.bits, [&](auto bits) {
    for (int b = begin; b < end; ++b) {
      const uint8_t* from = panel.groups + b / panel.per_group * panel.group_bytes + panel.header;
      const Codes<bits()> codes = {from + b % panel.per_group * panel.block * kOuts * bits() / 8, tables};
      for (int s = 0; s < panel.block / 4; s += kTogether)
        UNROLLED (i, kTogether) {
          wstore(reinterpret_cast<uint32_t*>(to), codes.load(s, i, 0));
          wstore(reinterpret_cast<uint32_t*>(to) + 16, codes.load(s, i, 1));
          to += kStepBytes;
        }
    }
  });
}

// The products of a block's lines from x and `codes` on, in tile `To`, stored to [R][16].
template <int R, int To>
INLINE void multiply_lines(const Line& line, int lines, const int8_t* x, const uint8_t* codes, uint32_t* products) {
  tile_zero<To>();
  for (int i = 0; i < lines; ++i, x += line.bytes * R, codes += line.inputs * kOuts) {
    tile_load<4>(x, line.bytes);
    tile_load<5>(codes, kStepBytes);
    tile_dot_bytes<To, 4, 5>();
  }
  tile_store<To>(products, 64);
}

// Adds blocks of R rows and of a column of 16 outputs to `sums` [R][kOuts].
template <int R, Form kForm>
void add_blocks(const Panel& panel, const Line& line, const int8_t* x, long lows, const BlockOfRow* of_row,
                const Blocks& blocks, int column, float* sums, Ahead& ahead) {
  alignas(64) uint32_t products[R * 16], low[R * 16];
  const int lines = panel.block / line.inputs, block_bytes = panel.block * kOuts;
  int in_group = blocks.begin % panel.per_group;
  const uint8_t* group = panel.groups + blocks.begin / panel.per_group * panel.group_bytes;
  const uint8_t* kept = blocks.bytes;
  x += static_cast<long>(blocks.begin) * lines * line.bytes * R, of_row += static_cast<long>(blocks.begin) * R;
  Vec sum[R];
  UNROLLED (r, R) sum[r] = vload(sums + r * kOuts + column * 16);
  for (int b = blocks.begin; b < blocks.end; ++b, x += lines * line.bytes * R, of_row += R) {
    const uint8_t* codes = (kept ? kept : group + panel.header + in_group * block_bytes) + column * 64;
    multiply_lines<R, 0>(line, lines, x, codes, products);
    if (of_row[0].low) {
      multiply_lines<R, 1>(line, lines, x + lows, codes, low);
      for (int r = 0; r < R; ++r)
        wstore(products + r * 16, wadd(wtimes256(wload(products + r * 16)), wload(low + r * 16)));
    }
    if (column == 0)
      for (int i = 0; i < panel.block; i += 4 * kTogether) ahead.step();
    const auto [scales, offsets] = load_scales<kForm>(panel.part, panel.begin, group, b / panel.per_group, column);
    UNROLLED (r, R) {
      const Vec exact = to_floats(wload(products + r * 16)), scale = vset(of_row[r].scale);
      if (kForm == kOffsets) sum[r] = vfma(vset(of_row[r].moment), offsets, sum[r]);
      sum[r] = kForm == kCodes ? vfma(exact, scale, sum[r]) : vfma(vmul(exact, scale), scales, sum[r]);
    }
    if (kept) kept += block_bytes;
    if (++in_group == panel.per_group) in_group = 0, group += panel.group_bytes;
  }
  UNROLLED (r, R) vstore(sums + r * kOuts + column * 16, sum[r]);
}

template <class O>
INLINE void finish_rows(const Panel& panel, const Tile<O>& tile, int count, const float* sums) {
  for (int at = 0; at < panel.outs; at += 16) {
    const int left = std::min(16, panel.outs - at);
    const Vec factor = vload_first(panel.factors + at, left);
    const Vec bias = panel.bias ? vload_first(panel.bias + at, left) : vset(0.0f);
    for (int r = 0; r < count; ++r)
      vstore_first(tile.out + r * tile.stride + at, vfma(vload(sums + r * kOuts + at), factor, bias), left);
  }
}

// Multiplies a tile of `count` rows with a panel. Codes of less than 8 bits become bytes in the panel's `kept` memory,
// or without it a few blocks at a time.
template <class O>
void multiply_by_tiles(const Panel& panel, const QuantizedRows& rows, const Tile<O>& tile, int count, Ahead& ahead) {
  alignas(64) float sums[kTileRows * kOuts];
  alignas(64) uint8_t expanded[kFew];
  std::fill_n(sums, count * kOuts, 0.0f);
  for (int r = 0; r < count; ++r)
    for (int at = 0; at < kOuts; at += 16 * kPack<O>) __builtin_prefetch(tile.out + r * tile.stride + at, 1);
  const bool expands = panel.part.bits < 8 && !panel.is_kept;
  const long block_bytes = static_cast<long>(panel.block) * kOuts;
  const int some = static_cast<int>((expands && !panel.kept ? kFew : kMany) / block_bytes);
  const Form form = form_of(panel.part);
  shape_tiles(count, 0, rows.line.inputs);
  with_rows<kTileRows>(count, [&](auto r) {
    const auto add = form == kOffsets  ? add_blocks<r(), kOffsets>
                     : form == kScales ? add_blocks<r(), kScales>
                                       : add_blocks<r(), kCodes>;
    for (int begin = 0; begin < rows.blocks; begin += some) {
      const int end = std::min(rows.blocks, begin + some);
      uint8_t* bytes = panel.kept ? panel.kept + begin * block_bytes : expands ? expanded : nullptr;
      if (expands) expand_blocks(panel, begin, end, bytes);
      for (int column = 0; column < kOuts / 16; ++column)
        add(panel, rows.line, tile.x, tile.lows, tile.blocks, {begin, end, bytes}, column, sums, ahead);
    }
  });
  finish_rows(panel, tile, count, sums);
}

}  // namespace
