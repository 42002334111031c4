// The indexer of DeepSeek Sparse Attention (kernels/latent_params.py): stores an index key for each token, scores all
// keys up to each token with its index queries, and lists the positions of the best ones.
//
// A token's list must be the same whatever else is in the batch. A score depends on its query and key alone: heads are
// added in order, each with one product (attention_tile.h).
#include "../kernels.h"

#include <algorithm>

#include "../attention_tile.h"
#include "../panels.h"
#include "../rms.h"
#include "rotate.h"

namespace {

template <class T>
struct Indexer {
  T* q;                  // [tokens, heads, dim]
  const T *k, *weights;  // [tokens, dim], [tokens, heads]
  const float *norm, *norm_bias, *cos_sin;
  int neighbours;
  const int64_t *positions, *slots;
  T* cache;
  long stride;  // elements from one page to the next
  const int32_t *starts, *contexts, *table;
  long table_stride;
  int32_t* out;  // [tokens, top]: ascending positions, then -1
  int heads, dim, rotated, top;
  float eps;
};

// A token that sees more than `top` keys.
struct Query {
  long token;
  int sequence;
  long keys;  // number of keys that it sees
};

// Rotates the token's queries, and stores its key.
template <class T>
void prepare_token(const Indexer<T>& x, long token) {
  const int dim = x.dim;
  const float* cosines = x.cos_sin + x.positions[token] * x.rotated;
  for (int h = 0; h < x.heads; ++h) {
    T* query = x.q + (token * x.heads + h) * dim;
    rotate(query, cosines, x.rotated, x.neighbours, query);
  }
  if (x.slots[token] == kElsewhere) return;
  const T* row = x.k + token * dim;
  T* key = reinterpret_cast<T*>(scratch(dim * sizeof(T)));
  float average;
  const Vec factor = vset(centred_factor(row, dim, x.eps, &average)), mean = vset(average);
  for (int i = 0; i < dim; i += 16) {
    const int n = dim - i;
    const Vec scaled = vmul(vsub(vload_first(row + i, n), mean), factor);
    vstore_first(key + i, vfma(scaled, vload_first(x.norm + i, n), vload_first(x.norm_bias + i, n)), n);
  }
  rotate(key, cosines, x.rotated, x.neighbours, key);
  store_key(key, x.cache + x.slots[token] / kBlock * x.stride, static_cast<int>(x.slots[token] % kBlock), dim);
}

// Writes the scores of the keys of tile `tile` to scores [kTile]. In the last tile unwritten slots get scores too.
template <class T>
void score_tile(const Indexer<T>& x, const Query& query, long tile, float* scores) {
  const long left = query.keys - tile * kTile;
  const int blocks = static_cast<int>(left < kTile ? (left + kBlock - 1) / kBlock : kTileBlocks);
  TileBlocks keys;
  keys.dim = x.dim;
  const int32_t* pages = x.table + query.sequence * x.table_stride + tile * kTileBlocks;
  for (int b = 0; b < blocks; ++b)
    keys.keys[b] = keys.values[b] = reinterpret_cast<const uint32_t*>(x.cache + pages[b] * x.stride);
  for (int b = 0; b < blocks; ++b) vstore(scores + b * kBlock, vset(0.0f));
  for (int head = 0; head < x.heads; head += kRows)
    with_rows(x.heads - head, [&](auto count) {
      constexpr int R = count();
      alignas(64) float products[R][kTile];
      float weights[R];
      unpack(x.weights + query.token * x.heads + head, weights, R);
      Rows rows;
      for (int r = 0; r < R; ++r)
        rows.query[r] = reinterpret_cast<const uint32_t*>(x.q + (query.token * x.heads + head + r) * x.dim);
      for_columns<kColumns<R>>(0, blocks, [&](int b, auto c) { score_blocks<T, R, c()>(rows, keys, b, products); });
      for (int b = 0; b < blocks; ++b) {
        Vec sum = vload(scores + b * kBlock);
        for (int r = 0; r < R; ++r)
          sum = vfma(vset(weights[r]), vmax(vload(products[r] + b * kBlock), vset(0.0f)), sum);
        vstore(scores + b * kBlock, sum);
      }
    });
}

// Lists the positions of the `top` largest of `keys` scores, in ascending order. Of equal scores, the earlier one
// counts as larger. NaN is replaced by -infinity.
void list_largest(float* scores, long keys, int top, int32_t* out) {
  static thread_local std::vector<float> ordered;
  for (long i = 0; i < keys; ++i)
    if (scores[i] != scores[i]) scores[i] = -kInfinity;
  ordered.assign(scores, scores + keys);
  std::nth_element(ordered.begin(), ordered.begin() + top - 1, ordered.end(), std::greater<float>());
  const float least = ordered[top - 1];
  long equal = top;
  for (long i = 0; i < top; ++i) equal -= ordered[i] > least;
  for (long i = 0; i < keys; ++i) {
    if (!(scores[i] >= least) || (scores[i] == least && equal-- <= 0)) continue;
    *out++ = static_cast<int32_t>(i);
  }
}

template <class T>
int select_keys(const Indexer<T>& x, long tokens, long pages, int sequences, int threads) {
  constexpr long kOneThreadWork = 400000;  // as in attention.cpp
  constexpr long kMostScores = 1 << 21;    // scores that are in memory at once
  for (long t = 0; t < tokens; ++t)
    if (x.slots[t] < kElsewhere || x.slots[t] >= pages * kBlock) return 1;
  for (int s = 0; s < sequences; ++s)
    for (long b = 0; b * kBlock < x.contexts[s]; ++b) {
      const int32_t page = x.table[s * x.table_stride + b];
      if (page < 0 || page >= pages) return 1;
    }
  parallel_rows(threads, tokens, tokens * (x.heads * x.rotated + x.dim) * 4L, [&](long begin, long end) {
    for (long t = begin; t < end; ++t) prepare_token(x, t);
  });
  std::vector<Query> queries;
  long work = 0;
  for (int s = 0; s < sequences; ++s)
    for (long t = x.starts[s]; t < x.starts[s + 1]; ++t) {
      const long keys = x.contexts[s] - (x.starts[s + 1] - t) + 1;
      int32_t* out = x.out + t * x.top;
      if (keys > x.top) {
        queries.push_back({t, s, keys});
        work += keys * x.heads * x.dim;
      } else {
        for (int i = 0; i < x.top; ++i) out[i] = i < keys ? i : -1;
      }
    }
  if (work < kOneThreadWork) threads = 1;
  std::vector<float> scores;
  std::vector<std::pair<long, long>> tiles;  // a query, and one of its tiles
  std::vector<long> begins;                  // where each query's scores begin
  for (size_t done = 0; done < queries.size(); done += begins.size()) {
    tiles.clear();
    begins.clear();
    long size = 0;
    for (size_t i = done; i < queries.size() && (begins.empty() || size < kMostScores); ++i) {
      const long count = (queries[i].keys + kTile - 1) / kTile;
      for (long tile = 0; tile < count; ++tile) tiles.emplace_back(i, tile);
      begins.push_back(size);
      size += count * kTile;
    }
    if (static_cast<long>(scores.size()) < size + 16) scores.resize(size + 16);
    float* first = scores.data() + (64 - reinterpret_cast<uintptr_t>(scores.data()) % 64) % 64 / sizeof(float);
    parallel_for(threads, static_cast<long>(tiles.size()), [&](long i) {
      const auto [query, tile] = tiles[i];
      score_tile(x, queries[query], tile, first + begins[query - done] + tile * kTile);
    });
    parallel_for(threads, static_cast<long>(begins.size()), [&](long i) {
      const Query& query = queries[done + i];
      list_largest(first + begins[i], query.keys, x.top, x.out + query.token * x.top);
    });
  }
  return 0;
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int select_keys_##suffix(                                                                                   \
      T* q, const T* k, const T* weights, const float* norm, const float* norm_bias, const float* cos_sin,             \
      int neighbours, const int64_t* positions, const int64_t* slots, T* cache, long stride, const int32_t* starts,    \
      const int32_t* contexts, const int32_t* table, long table_stride, int32_t* out, long tokens, long pages,         \
      int sequences, int heads, int dim, int rotated, int top, float eps, int threads) {                               \
    const Indexer<T> indexer = {q,     k,     weights, norm,   norm_bias, cos_sin, neighbours,   positions,            \
                                slots, cache, stride,  starts, contexts,  table,   table_stride, out,                  \
                                heads, dim,   rotated, top,    eps};                                                   \
    return select_keys(indexer, tokens, pages, sequences, threads);                                                    \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
