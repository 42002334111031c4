// Attention of a few rows over one tile of keys: scores, softmax within the tile, weighted values.
//
// The bitwise contract is kept here. Tiles are kTile keys, aligned to position 0. Within a tile a row's arithmetic
// depends on nothing but its query, its keys and where they lie in the tile; a block that is left out because none of
// the rows sees it would only have added zeros. Tiles are merged in order (attention.cpp).
#pragma once

#include <type_traits>

constexpr int kTileBlocks = 16;
constexpr int kTile = kTileBlocks * kBlock;

struct Softmax {
  float scale;    // of scores
  int window;     // keys a query sees at most; 0: all before it
  float softcap;  // 0: none
};

// One tile of one kv_head: where its blocks are. Values have a padded row of `width` dimensions.
struct TileBlocks {
  const uint32_t* keys[kTileBlocks];
  const uint32_t* values[kTileBlocks];
  const uint32_t* after[kTileBlocks];  // what will be wanted after this tile, block by block: keys, most likely
  int dim, width;
};

// What a row knows of one or more tiles: the largest score (in log2 units), the sum of weights, the weighted values.
struct Partial {
  float peak, total;
};

// Queries and their positions, which do not fall from row to row, relative to the tile's first key.
struct Rows {
  const uint32_t* query[kRows];
  long at[kRows];
};

template <class T, int R, int C>
INLINE void score_blocks(const Rows& rows, const TileBlocks& tile, int block, float (&scores)[R][kTile]) {
  Vec acc[R][C];
  const uint32_t *query[R], *keys[C], *ahead[C];
  for (int c = 0; c < C; ++c) {
    keys[c] = tile.keys[block + c];
    ahead[c] = tile.values[block + c];
  }
  for (int r = 0; r < R; ++r) {
    query[r] = rows.query[r];
    for (int c = 0; c < C; ++c) acc[r][c] = vset(0.0f);
  }
  multiply<T, R, C>(acc, query, keys, kBlock, tile.dim / kPack<T>, [&](int s) {
    for (int c = 0; c < C; ++c) __builtin_prefetch(ahead[c] + s * kBlock, 0, 2);
  });
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) vstore(scores[r] + (block + c) * kBlock, acc[r][c]);
}

// Turns a row's scores of blocks [begin, end) into weights 2^(score - peak); keys outside [from, to) weigh nothing,
// whatever their scores (a page's unwritten slots hold anything). The scale is positive.
template <class T>
INLINE Partial soften(float* scores, T* weights, int begin, int end, int from, int to, const Softmax& how) {
  const bool capped = how.softcap > 0;
  const Vec scale = vset(capped ? kLog2E : how.scale * kLog2E);
  Vec peaks = vset(-kInfinity);
  for (int b = begin; b < end; ++b) {
    Vec x = vload(scores + b * kBlock);
    if (capped) x = vmul(vtanh(vmul(x, vset(how.scale / how.softcap))), vset(how.softcap));
    const bool hidden = b * kBlock < from || (b + 1) * kBlock > to;
    if (hidden) x = vkeep(x, from - b * kBlock, to - b * kBlock, -kInfinity);
    if (hidden || capped) vstore(scores + b * kBlock, x);
    peaks = vmax(peaks, x);
  }
  const float peak = vpeak(vmul(peaks, scale));
  const Vec anchor = vset(peak == -kInfinity ? 0.0f : -peak);
  Vec sums = vset(0.0f);
  for (int b = begin; b < end; ++b) {
    vstore(weights + b * kBlock, vexp2_below<T>(vfma(vload(scores + b * kBlock), scale, anchor)));
    sums = vadd(sums, vload(weights + b * kBlock));  // as rounded, so that the weights used sum to 1
  }
  return {peak, vsum(sums)};
}

template <class T, int R, int C>
INLINE void weigh_values(const T (&weights)[R][kTile], const TileBlocks& tile, int begin, int end, int column,
                         float* out) {
  constexpr int kSteps = kBlock / kPack<T>;
  Vec acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = vset(0.0f);
  for (int b = begin; b < end; ++b) {
    const uint32_t *weight[R], *values[C], *ahead[C];
    for (int r = 0; r < R; ++r) weight[r] = reinterpret_cast<const uint32_t*>(weights[r]) + b * kSteps;
    for (int c = 0; c < C; ++c) {
      values[c] = tile.values[b] + (column + c) * 16;
      ahead[c] = tile.after[b] + (column + c) * 16;
    }
    multiply<T, R, C>(acc, weight, values, tile.width, kSteps, [&](int s) {
      for (int c = 0; c < C; ++c) __builtin_prefetch(ahead[c] + s * tile.width, 0, 2);
    });
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) vstore(out + r * tile.width + (column + c) * 16, acc[r][c]);
}

// Columns of blocks or of dimensions from `begin` to `end`, at first as many at a time as there are accumulators.
template <int C, class Work>
INLINE void for_columns(int begin, int end, const Work& work) {
  for (; begin + C <= end; begin += C) work(begin, std::integral_constant<int, C>());
  if constexpr (C > 1) for_columns<C / 2>(begin, end, work);
}

// R rows over one tile: partial[R] and out [R, width]. The tile's blocks up to the last row's position are valid.
template <class T, int R>
void attend_tile(const Rows& rows, const TileBlocks& tile, const Softmax& how, Partial* partial, float* out) {
  alignas(64) float scores[R][kTile];
  alignas(64) T weights[R][kTile];
  const auto inside = [](long x) { return static_cast<int>(x < 0 ? 0 : x > kTile ? kTile : x); };
  const auto first_seen = [&](int r) { return how.window > 0 ? inside(rows.at[r] - how.window + 1) : 0; };
  const int end = (inside(rows.at[R - 1] + 1) + kBlock - 1) / kBlock;
  const int begin = first_seen(0) / kBlock < end ? first_seen(0) / kBlock : end;
  for_columns<kColumns<R>>(begin, end, [&](int b, auto c) { score_blocks<T, R, c()>(rows, tile, b, scores); });
  for (int r = 0; r < R; ++r)
    partial[r] = soften(scores[r], weights[r], begin, end, first_seen(r), inside(rows.at[r] + 1), how);
  for_columns<kColumns<R>>(0, tile.width / 16, [&](int d, auto c) {
    weigh_values<T, R, c()>(weights, tile, begin, end, d, out);
  });
}

template <class T, int R = kRows>
INLINE void attend_rows(int count, const Rows& rows, const TileBlocks& tile, const Softmax& how, Partial* partial,
                        float* out) {
  if constexpr (R == 1) {
    attend_tile<T, 1>(rows, tile, how, partial, out);
  } else {
    if (count == R) return attend_tile<T, R>(rows, tile, how, partial, out);
    attend_rows<T, R - 1>(count, rows, tile, how, partial, out);
  }
}

// Adds what `next` knows of `count` rows to what `sum` knows (log-sum-exp merge); the rows' values are [width] each.
// Merging into an empty sum, {-infinity, 0} and zeros, is an exact copy. The powers of all rows are taken at once.
INLINE void merge(int count, Partial* sum, float* values, const Partial* next, const float* next_values, int width) {
  static_assert(kRows <= 8);
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
