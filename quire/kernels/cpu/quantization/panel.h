// Parameters for multiplying a tile of rows with a panel of a quantized weight, for quantized.cpp and
// tiles/quantized_tiles.h.
#pragma once

#include "../fetch.h"
#include "codes.h"

namespace {

constexpr long kAhead = 4096;  // bytes: how far ahead to prefetch a weight that is read once

// What to prefetch while a tile is multiplied: until `end`, some cache lines in every kTogether steps, and the lines of
// `extra`.
struct Ahead {
  const char *at = nullptr, *end = nullptr;
  int lines = 0;
  Fetch::Lines extra = {};

  Ahead() = default;
  Ahead(const uint8_t* begin, long bytes, long times)
      : at(reinterpret_cast<const char*>(begin)),
        end(at + bytes),
        lines(static_cast<int>((bytes + 64 * times - 1) / (64 * times))) {}

  __attribute__((always_inline)) void step() {
    if (extra.region != extra.last)
      for (int i = 0; i < kTogether; ++i) extra.step();
    if (at >= end) return;
    const char* from = at;
    for (int i = 0; i < lines; ++i, from += 64) __builtin_prefetch(from, 0, 2);
    at = from;
  }
};

// A panel of a part: its groups, and its codes as bytes if these are stored elsewhere.
struct Panel {
  const QuantizedPart& part;
  const uint8_t* begin;
  const uint8_t *groups, *end;
  long group_bytes, header;
  int block, per_group;         // inputs of a block; blocks of a group
  long first;                   // the first output's place in a row of the result
  int outs;                     // from 1 to kOuts
  const float *factors, *bias;  // of the first output; bias may be null
  uint8_t* kept = nullptr;      // [inner][kOuts]; null: none
  bool is_kept = false;         // if true, the bytes are there already; otherwise they are written
};

// R rows of x, and the place of their results.
template <class O>
struct Tile {
  const int8_t* x;
  long lows;  // distance from x to its low codes
  const BlockOfRow* blocks;
  O* out;  // the first row's first output of the panel
  long stride;
};

// What a group has besides its codes.
enum Form { kCodes, kScales, kOffsets };
INLINE Form form_of(const QuantizedPart& part) { return part.offsets ? kOffsets : part.scales ? kScales : kCodes; }

// What the codes of 16 outputs of a group are multiplied by, and what is added.
struct GroupScales {
  Vec scales, offsets;
};

template <Form kForm>
INLINE GroupScales load_scales(const QuantizedPart& part, const uint8_t* panel, const uint8_t* group, long number,
                               int column) {
  if (kForm == kCodes) return {vset(1.0f), vset(0.0f)};
  if (!part.nested) {
    const auto* halves = reinterpret_cast<const half*>(group) + column * 16;
    return {vload(halves), kForm == kOffsets ? vload(halves + kOuts) : vset(0.0f)};
  }
  const long block = number >> __builtin_ctz(static_cast<unsigned>(part.nested / part.group));
  const auto* halves = reinterpret_cast<const half*>(panel) + block * kOuts * (kForm == kOffsets ? 2 : 1) + column * 16;
  const uint8_t* multiples = group + column * 16;
  if (kForm == kScales) return {vmul(vload(halves), vload(reinterpret_cast<const int8_t*>(multiples))), vset(0.0f)};
  return {vmul(vload(halves), vload_nibbles(multiples, false)),
          vmul(vload(halves + kOuts), vload_nibbles(multiples, true))};
}

}  // namespace
