// Attention of a few rows over one tile of keys: scores, softmax within the tile, weighted sum of the values. A row is
// one query head of one query.
//
// A row's result must have the same bits whatever else is in the batch, and this file ensures it. Tiles have kTile
// keys, the first one starting at position 0. Within a tile, a row's arithmetic depends only on its query, on its keys
// and on where they are in the tile. A block that no row sees is left out; it would only have added zeros. Tiles are
// merged in order (attention.cpp).
#pragma once

#include <type_traits>

constexpr int kTileBlocks = 16;
constexpr int kTile = kTileBlocks * kBlock;

struct Softmax {
  float scale;    // that scores are multiplied with
  int window;     // how many keys a query sees at most; 0: all up to its own position
  float softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
  int ahead;      // how many keys behind its own position a query sees
  // Added to scores by the distance from query to key, if not null: for a head, bias[head * bias_stride + bias_center]
  // is that of distance 0. Up to 15 entries behind a head's last distance are read.
  const float* bias;
  long bias_stride, bias_center;
  const float* sinks;  // by query head, if not null: a score that has a weight and no value
};

// One tile of one KV head: where its blocks are. A token's values are padded to `width` numbers.
struct TileBlocks {
  const uint32_t* keys[kTileBlocks];
  const uint32_t* values[kTileBlocks];
  // What is to be prefetched meanwhile: the keys that are read after this tile; of codes, which are read while they are
  // expanded, the values too.
  const uint32_t *next_keys[kTileBlocks], *next_values[kTileBlocks];
  const bf16 *key_scales[kTileBlocks], *value_scales[kTileBlocks];  // if `scaled`: what each token's are multiplied by
  bool scaled;
  int dim, width;
};

// A row's result over one or more tiles, beside the weighted sum of its values: its largest score, in units of log2,
// and the sum of its weights.
struct Partial {
  float peak, total;
};

// The rows' queries, and their positions and the first keys that they do not see any more, relative to the tile's first
// key, in ascending order. If there is a bias, it is that of the tile's first key.
struct Rows {
  const uint32_t* query[kRows];
  long at[kRows], until[kRows];
  const float* bias[kRows];
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

// The largest of a row's scores of blocks [begin, end), times `scale`. Before that they get the scales of codes, the
// cap and the bias, where there are any, and -infinity for keys outside [from, to).
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

// Turns a row's scores of blocks [begin, end) into weights 2^(score - peak). Keys outside [from, to) get weight 0,
// whatever their scores: a page's unwritten slots can contain anything. The scale must be positive.
template <class T>
INLINE Partial softmax_weights(float* scores, T* weights, int begin, int end, int from, int to, const TileBlocks& tile,
                               const Softmax& softmax, const float* bias) {
  const Vec scale = vset(softmax.softcap > 0 ? kLog2E : softmax.scale * kLog2E);
  const float peak = find_peak(scores, begin, end, from, to, tile, softmax, bias, scale);
  const Vec anchor = vset(peak == -kInfinity ? 0.0f : -peak);
  const auto weight = [&](int b) { return vexp2_below<T>(vfma(vload(scores + b * kBlock), scale, anchor)); };
  Vec sums = vset(0.0f);
  if (!tile.scaled) {  // the rounded weights are added, so that those that are used sum to 1
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
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = vset(0.0f);
  for (int b = begin; b < end; ++b) {
    const uint32_t *weight[R], *values[C], *ahead[C];
    for (int r = 0; r < R; ++r) weight[r] = reinterpret_cast<const uint32_t*>(weights[r]) + b * kSteps;
    for (int c = 0; c < C; ++c) {
      values[c] = tile.values[b] + (column + c) * 16;
      ahead[c] = tile.next_keys[b] + (column + c) * 16;
    }
    multiply<T, R, C>(acc, weight, values, tile.width, kSteps, [&](int s) {
      for (int c = 0; c < C; ++c) __builtin_prefetch(ahead[c] + s * tile.width, 0, 2);
    });
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) vstore(out + r * tile.width + (column + c) * 16, acc[r][c]);
}

// Calls work(first column, how many) for the columns (blocks, or groups of 16 dimensions) from `begin` to `end`: C at a
// time as long as so many are left, then C / 2 and so on.
template <int C, class Work>
INLINE void for_columns(int begin, int end, const Work& work) {
  for (; begin + C <= end; begin += C) work(begin, std::integral_constant<int, C>());
  if constexpr (C > 1) for_columns<C / 2>(begin, end, work);
}

// Computes R rows over one tile, to partial[R] and out [R, width]. The tile must have its blocks up to the last key
// that a row sees.
template <class T, int R>
void attend_tile(const Rows& rows, const TileBlocks& tile, const Softmax& softmax, Partial* partial, float* out) {
  alignas(64) float scores[R][kTile];
  alignas(64) T weights[R][kTile];
  const auto inside = [](long x) { return static_cast<int>(x < 0 ? 0 : x > kTile ? kTile : x); };
  const auto first_seen = [&](int r) { return softmax.window > 0 ? inside(rows.at[r] - softmax.window + 1) : 0; };
  const int end = (inside(rows.until[R - 1]) + kBlock - 1) / kBlock;
  const int begin = first_seen(0) / kBlock < end ? first_seen(0) / kBlock : end;
  for_columns<kColumns<R>>(begin, end, [&](int b, auto c) { score_blocks<T, R, c()>(rows, tile, b, scores); });
  for (int r = 0; r < R; ++r)
    partial[r] = softmax_weights(scores[r], weights[r], begin, end, first_seen(r), inside(rows.until[r]), tile, softmax,
                                 softmax.bias ? rows.bias[r] : nullptr);
  for_columns<kColumns<R>>(0, tile.width / 16,
                           [&](int d, auto c) { weigh_values<T, R, c()>(weights, tile, begin, end, d, out); });
}

// attend_tile for `count` rows, 1 to kRows.
template <class T, int R = kRows>
INLINE void attend_rows(int count, const Rows& rows, const TileBlocks& tile, const Softmax& softmax, Partial* partial,
                        float* out) {
  if constexpr (R == 1) {
    attend_tile<T, 1>(rows, tile, softmax, partial, out);
  } else {
    if (count == R) return attend_tile<T, R>(rows, tile, softmax, partial, out);
    attend_rows<T, R - 1>(count, rows, tile, softmax, partial, out);
  }
}

// Merges the results `next` of `count` rows into `sum` (log-sum-exp); values are [count, width]. Merging into an empty
// sum, which is {-infinity, 0} with zeros as values, gives an exact copy. The powers of 2 of all rows are computed in
// one vector.
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
