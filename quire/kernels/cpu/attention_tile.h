// Attention of a few rows over one tile of keys: scores, softmax within the tile, weighted sum of the values. A row is
// one query head of one query.
//
// A row's result must have the same bits in every batch, and this file ensures it. Tiles have kTile keys, and the first
// one starts at position 0. Within a tile, a row's arithmetic depends only on its query, its keys, and their places in
// the tile. A block that no row sees is skipped, because it would only add zeros. Tiles are merged in order
// (attention.cpp).
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tiles/tiles.h"

constexpr int kTileBlocks = 16;
constexpr int kTile = kTileBlocks * kBlock;

// Rows that are computed together.
template <class T>
constexpr int kTogether = kTiles && sizeof(T) == 2 ? kTileRows : kRows;
constexpr int kMostTogether = kTogether<bf16> > kRows ? kTogether<bf16> : kRows;

struct Softmax {
  float scale;    // factor of scores
  int window;     // number of keys that a query sees; 0: all up to its own position; < 0: chunks of this size
  float softcap;  // scores become softcap * tanh(score / softcap); 0: no cap
  int ahead;      // number of keys after its own position that a query sees
  // Added to scores by the distance from query to key, if not null. bias[head * bias_stride + bias_center] is a head's
  // entry for distance 0. Up to 15 entries after a head's last distance are read.
  const float* bias;
  long bias_stride, bias_center;
  const float* sinks;  // by query head, if not null: a score that has a weight but no value
};

// One tile of one KV head, and where its blocks are. A token's values are padded to `width` numbers.
struct TileBlocks {
  const uint32_t* keys[kTileBlocks];
  const uint32_t* values[kTileBlocks];
  // What to prefetch meanwhile: the next keys and, if they are codes, the next values, because both are read when codes
  // are expanded.
  const uint32_t *next_keys[kTileBlocks], *next_values[kTileBlocks];
  const bf16 *key_scales[kTileBlocks], *value_scales[kTileBlocks];  // if `scaled`: factors of each token's codes
  bool scaled;
  int dim, width;
  const uint32_t* pairs;  // for matrix tiles: the values of all blocks in order, with zeros for missing blocks
};

// A row's result over one or more tiles, besides the weighted sum of its values: its largest score, in units of log2,
// and the sum of its weights.
struct Partial {
  float peak, total;
};

// The rows' queries. A row sees the keys from from[r] to before until[r], counted from the tile's first key. Both
// ascend with r. A bias is that of the tile's first key.
struct Rows {
  const uint32_t* query[kMostTogether];
  long from[kMostTogether], until[kMostTogether];
  const float* bias[kMostTogether];
};

template <class T, int R, int C>
INLINE void score_blocks(const Rows& rows, const TileBlocks& tile, int block, float (&scores)[R][kTile]) {
  Vec acc[R][C];
  const uint32_t *query[R], *keys[C], *ahead[C];
  UNROLLED (c, C) {
    keys[c] = tile.keys[block + c];
    ahead[c] = tile.values[block + c];
  }
  UNROLLED (r, R) {
    query[r] = rows.query[r];
    UNROLLED (c, C) acc[r][c] = vset(0.0f);
  }
  multiply<T, R, C>(acc, query, keys, kBlock, tile.dim / kPack<T>, [&](int s) {
    for (int c = 0; c < C; ++c) __builtin_prefetch(ahead[c] + s * kBlock, 0, 2);
  });
  UNROLLED (r, R)
    UNROLLED (c, C) vstore(scores[r] + (block + c) * kBlock, acc[r][c]);
}

// The largest of a row's scores of blocks [begin, end), times `scale`. First the scores get the scales of codes, the
// cap and the bias, if any, and -infinity for keys outside [from, to).
INLINE float find_peak(float* scores, int begin, int end, int from, int to, const TileBlocks& tile,
                       const Softmax& softmax, const float* bias, Vec scale) {
  const bool capped = softmax.softcap > 0, as_they_are = !capped && !bias && !tile.scaled;
  const auto hidden = [&](int b) { return b * kBlock < from || (b + 1) * kBlock > to; };
  const Vec unscaled = vset(1.0f / softmax.scale);
  Vec peaks = vset(-kInfinity);
  for (int b = begin; b < end; ++b) {
    Vec x = vload(scores + b * kBlock);
    if (as_they_are && !hidden(b)) {
      peaks = vmax(peaks, x);
      continue;
    }
    if (tile.scaled) x = vmul(x, vload(tile.key_scales[b]));
    if (capped) x = vmul(vtanh(vmul(x, vset(softmax.scale / softmax.softcap))), vset(softmax.softcap));
    if (bias) x = vfma(vload(bias + b * kBlock), unscaled, x);
    if (hidden(b)) x = vkeep(x, from - b * kBlock, to - b * kBlock, -kInfinity);
    vstore(scores + b * kBlock, x);
    peaks = vmax(peaks, x);
  }
  return vpeak(vmul(peaks, scale));
}

// Turns a row's scores of blocks [begin, end) into weights 2^(score - peak). Keys outside [from, to) get weight 0
// whatever their scores are, because a page's unwritten slots can contain anything. The scale must be positive.
template <class T>
INLINE Partial softmax_weights(float* scores, T* weights, int begin, int end, int from, int to, const TileBlocks& tile,
                               const Softmax& softmax, const float* bias) {
  const Vec scale = vset(softmax.softcap > 0 ? kLog2E : softmax.scale * kLog2E);
  const float peak = find_peak(scores, begin, end, from, to, tile, softmax, bias, scale);
  const Vec anchor = vset(peak == -kInfinity ? 0.0f : -peak);
  const auto weight = [&](int b) { return vexp2_below<T>(vfma(vload(scores + b * kBlock), scale, anchor)); };
  Vec sums = vset(0.0f);
  if (!tile.scaled) {  // the rounded weights are added, so that the weights in use sum to 1
    for (int b = begin; b < end; ++b) sums = store_and_add(weights + b * kBlock, weight(b), sums);
    return {peak, vsum(sums)};
  }
  for (int b = begin; b < end; ++b) {
    Vec factors = vload(tile.value_scales[b]);
    if (b * kBlock < from || (b + 1) * kBlock > to) factors = vkeep(factors, from - b * kBlock, to - b * kBlock, 0.0f);
    const Vec each = weight(b);
    vstore(weights + b * kBlock, vmul(each, factors));
    sums = vadd(sums, each);
  }
  return {peak, vsum(sums)};
}

template <class T, int R, int C>
INLINE void weigh_values(const T (&weights)[R][kTile], const TileBlocks& tile, int begin, int end, int column,
                         float* out) {
  constexpr int kSteps = kBlock / kPack<T>;
  Vec acc[R][C];
  UNROLLED (r, R)
    UNROLLED (c, C) acc[r][c] = vset(0.0f);
  for (int b = begin; b < end; ++b) {
    const uint32_t *weight[R], *values[C], *ahead[C];
    UNROLLED (r, R) weight[r] = reinterpret_cast<const uint32_t*>(weights[r]) + b * kSteps;
    UNROLLED (c, C) {
      values[c] = tile.values[b] + (column + c) * 16;
      ahead[c] = tile.next_keys[b] + (column + c) * 16;
    }
    multiply<T, R, C>(acc, weight, values, tile.width, kSteps, [&](int s) {
      for (int c = 0; c < C; ++c) __builtin_prefetch(ahead[c] + s * tile.width, 0, 2);
    });
  }
  UNROLLED (r, R)
    UNROLLED (c, C) vstore(out + r * tile.width + (column + c) * 16, acc[r][c]);
}

// Calls work(first column, count) for the columns (blocks, or groups of 16 dimensions) from `begin` to `end`: C at a
// time while enough are left, then C / 2 and so on.
template <int C, class Work>
INLINE void for_columns(int begin, int end, const Work& work) {
  for (; begin + C <= end; begin += C) work(begin, std::integral_constant<int, C>());
  if constexpr (C > 1) for_columns<C / 2>(begin, end, work);
}

// The keys of a tile that `count` rows see.
struct Seen {
  const Rows& rows;
  int begin, end;  // the blocks that any row sees

  Seen(const Rows& rows, int count) : rows(rows) {
    end = (until(count - 1) + kBlock - 1) / kBlock;
    begin = from(0) / kBlock < end ? from(0) / kBlock : end;
  }
  static int inside(long x) { return static_cast<int>(x < 0 ? 0 : x > kTile ? kTile : x); }
  int from(int r) const { return inside(rows.from[r]); }
  int until(int r) const { return inside(rows.until[r]); }
};

template <class T>
INLINE Partial weights_of(const Seen& seen, int r, float* scores, T* weights, const TileBlocks& tile,
                          const Softmax& softmax) {
  return softmax_weights(scores, weights, seen.begin, seen.end, seen.from(r), seen.until(r), tile, softmax,
                         softmax.bias ? seen.rows.bias[r] : nullptr);
}

// Computes R rows over one tile, to partial[R] and out [R, width]. The tile must have its blocks up to the last key
// that a row sees.
template <class T, int R>
void attend_tile(const Rows& rows, const TileBlocks& tile, const Softmax& softmax, Partial* partial, float* out) {
  alignas(64) float scores[R][kTile];
  alignas(64) T weights[R][kTile];
  const Seen seen(rows, R);
  for_columns<kColumns<R>>(seen.begin, seen.end,
                           [&](int b, auto c) { score_blocks<T, R, c()>(rows, tile, b, scores); });
  for (int r = 0; r < R; ++r) partial[r] = weights_of(seen, r, scores[r], weights[r], tile, softmax);
  for_columns<kColumns<R>>(
      0, tile.width / 16, [&](int d, auto c) { weigh_values<T, R, c()>(weights, tile, seen.begin, seen.end, d, out); });
}

// Calls work with 0 to C - 1, as compile-time constants.
template <int C, class Work>
INLINE void each_of(const Work& work) {
  if constexpr (C > 1) each_of<C - 1>(work);
  work(std::integral_constant<int, C - 1>());
}

// Scores of up to 16 rows with blocks [begin, end), by matrix tiles: 32 dimensions at a time from the first one on,
// zero-padded. Four blocks share the loaded part of the queries. scores [16][kTile].
INLINE void score_by_tiles(const Rows& rows, int count, const TileBlocks& tile, int begin, int end, float* scores) {
  const int words = tile.dim / 2, steps = (words + kTileWords - 1) / kTileWords, whole = words / kTileWords;
  const int row_words = steps * kTileWords;
  static thread_local std::vector<uint32_t> query;
  query.resize(kTileRows * row_words);
  for (int r = 0; r < count; ++r) {
    std::memcpy(&query[r * row_words], rows.query[r], 4L * words);
    std::fill_n(query.begin() + r * row_words + words, row_words - words, 0u);
  }
  for_columns<4>(begin, end, [&](int block, auto blocks) {
    constexpr int C = blocks();
    each_of<C>([](auto c) { tile_zero<c()>(); });
    for (int s = 0; s < steps; ++s) {
      alignas(64) uint32_t rest[kTileWords * kBlock];
      tile_load<4>(&query[s * kTileWords], 4L * row_words);
      each_of<C>([&](auto c) {
        const uint32_t* keys = tile.keys[block + c] + s * kTileWords * kBlock;
        if (s == whole) {  // anything may follow a page's keys
          std::memset(rest, 0, sizeof rest);
          std::memcpy(rest, keys, 4L * kBlock * (words - whole * kTileWords));
          keys = rest;
        }
        tile_load<5 + c % 3>(keys, 4 * kBlock);
        tile_dot<c(), 4, 5 + c % 3>();
        for (int line = 0; line < kTileWords; ++line)
          __builtin_prefetch(tile.next_keys[block + c] + (s * 16 + line) * 16, 0, 2);
      });
    }
    each_of<C>([&](auto c) { tile_store<c()>(scores + (block + c) * kBlock, 4 * kTile); });
  });
}

// The weighted sums of values, by matrix tiles: 32 keys at a time from the tile's first one on. Of two adjacent blocks,
// one may be outside of [begin, end). Its weights and values are then zero.
INLINE void weigh_by_tiles(const bf16* weights, const TileBlocks& tile, int begin, int end, float* out) {
  const long stride = 4L * tile.width;
  for_columns<4>(0, tile.width / 16, [&](int column, auto columns) {
    constexpr int C = columns();
    each_of<C>([](auto c) { tile_zero<c()>(); });
    for (int b = begin / 2 * 2; b < end; b += 2) {
      const uint32_t* values = tile.pairs + static_cast<long>(b) * kBlock / 2 * tile.width + column * 16;
      tile_load<4>(weights + b * kBlock, 2 * kTile);
      each_of<C>([&](auto c) {
        tile_load<5 + c % 3>(values + c * 16, stride);
        tile_dot<c(), 4, 5 + c % 3>();
      });
    }
    each_of<C>([&](auto c) { tile_store<c()>(out + (column + c) * 16, stride); });
  });
}

// Like attend_tile, for 1 to 16 rows of bfloat16, by matrix tiles.
INLINE void attend_by_tiles(int count, const Rows& rows, const TileBlocks& tile, const Softmax& softmax,
                            Partial* partial, float* out) {
  alignas(64) float scores[kTileRows * kTile];
  alignas(64) bf16 weights[kTileRows * kTile];
  const Seen seen(rows, count);
  shape_tiles(count, 0);
  score_by_tiles(rows, count, tile, seen.begin, seen.end, scores);
  for (int r = 0; r < count; ++r) {
    bf16* row = weights + r * kTile;
    partial[r] = weights_of(seen, r, scores + r * kTile, row, tile, softmax);
    if (seen.begin % 2) std::memset(row + (seen.begin - 1) * kBlock, 0, 2 * kBlock);
    if (seen.end % 2) std::memset(row + seen.end * kBlock, 0, 2 * kBlock);
  }
  weigh_by_tiles(weights, tile, seen.begin, seen.end, out);
}

// Like attend_tile, for `count` rows, 1 to kTogether<T>.
template <class T, int R = kRows>
INLINE void attend_rows(int count, const Rows& rows, const TileBlocks& tile, const Softmax& softmax, Partial* partial,
                        float* out) {
  if constexpr (kTogether<T> > kRows) {
    attend_by_tiles(count, rows, tile, softmax, partial, out);
  } else if constexpr (R == 1) {
    attend_tile<T, 1>(rows, tile, softmax, partial, out);
  } else {
    if (count == R) return attend_tile<T, R>(rows, tile, softmax, partial, out);
    attend_rows<T, R - 1>(count, rows, tile, softmax, partial, out);
  }
}

// Merges the results `next` of up to 8 rows into `sum` (log-sum-exp); values are [count, width]. Merging into an empty
// sum, which is {-infinity, 0} with zeros as values, gives an exact copy. The powers of 2 of all rows are computed in
// one vector.
INLINE void merge_few(int count, Partial* sum, float* values, const Partial* next, const float* next_values,
                      int width) {
  alignas(64) float keep[16] = {};
  float* gain = keep + 8;
  for (int r = 0; r < count; ++r) {
    const float peak = sum[r].peak > next[r].peak ? sum[r].peak : next[r].peak;
    const float anchor = peak == -kInfinity ? 0.0f : peak;
    keep[r] = sum[r].peak - anchor;
    gain[r] = next[r].peak - anchor;
    sum[r].peak = peak;
  }
  vstore(keep, vexp2_below(vload(keep)));
  for (int r = 0; r < count; ++r) {
    sum[r].total = sum[r].total * keep[r] + next[r].total * gain[r];
    float* to = values + r * width;
    for (int d = 0; d < width; d += 16)
      vstore(to + d, vfma(vload(to + d), vset(keep[r]), vmul(vload(next_values + r * width + d), vset(gain[r]))));
  }
}

// Like merge_few, for any number of rows.
INLINE void merge(int count, Partial* sum, float* values, const Partial* next, const float* next_values, int width) {
  constexpr int kMost = 8;  // rows
  for (; count > kMost;
       count -= kMost, sum += kMost, next += kMost, values += kMost * width, next_values += kMost * width)
    merge_few(kMost, sum, values, next, next_values, width);
  merge_few(count, sum, values, next, next_values, width);
}
