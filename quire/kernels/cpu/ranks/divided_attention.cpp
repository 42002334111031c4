// Attention of ranks that divide the tokens of every sequence (decode context parallelism). Each has the keys and
// values of all heads for every `count`-th tile of a sequence (attention_tile.h), and computes the output of some query
// heads. The ranks put their queries side by side, each computes all heads over its tiles, and each merges the results
// of all ranks for its own heads, in the order of the tiles. So a row has the same bits as in one process with all
// tiles (../attention.cpp), in every batch and with any number of ranks.
#include "exchange.h"

#include <cstring>

#include "../attention_items.h"

namespace {

// One tile of an item. Its results are at `offset` bytes of its rank's buffer: a Partial for each row, then the rows'
// values.
struct Unit {
  long item, tile, offset;
};

constexpr long kAlign = 64;

template <class T>
struct RanksAttention {
  Collective& group;
  Batch batch;  // batch with all heads
  T* out;       // [tokens, own heads, dim]
  int threads;
  std::vector<WorkItem> items;
  std::vector<Partial> sums;  // [tokens, own heads]
  std::vector<float> values;  // [tokens, own heads, width]

  int own_heads() const { return batch.heads / group.count; }
  int first_head() const { return own_heads() * group.rank; }
  long rows(const WorkItem& item) const { return item.count * batch.group(); }
  long partial_bytes(const WorkItem& item) const {
    return (rows(item) * static_cast<long>(sizeof(Partial)) + kAlign - 1) / kAlign * kAlign;
  }
  long bytes(const WorkItem& item) const {
    return partial_bytes(item) + rows(item) * batch.width() * static_cast<long>(sizeof(float));
  }

  // Computes a unit of this rank.
  void compute(const Unit& unit) {
    const WorkItem& item = items[unit.item];
    const long width = batch.width(), copied = kTileBlocks * batch.copied();
    char* memory = scratch(copied * sizeof(T) + kMostTogether * width * sizeof(float));
    T* copies = reinterpret_cast<T*>(memory);
    auto* found = reinterpret_cast<float*>(copies + copied);
    char* to = rank_buffer(group, group.rank) + unit.offset;
    auto* partials = reinterpret_cast<Partial*>(to);
    auto* kept = reinterpret_cast<float*>(to + partial_bytes(item));
    attend_item<T>(batch, item, unit.tile, nullptr, copies, found,
                   [&](long row, int count, const Partial* next, const float* from) {
                     for (int r = 0; r < count; ++r) partials[row + r] = next[r];
                     std::memcpy(kept + row * width, from, count * width * sizeof(float));
                   });
  }

  // Adds a unit of any rank to the sums of this rank's heads.
  void add(const Unit& unit) {
    const WorkItem& item = items[unit.item];
    const int width = batch.width(), each = batch.group();
    const char* from = rank_buffer(group, static_cast<int>(unit.tile % group.count)) + unit.offset;
    const auto* partials = reinterpret_cast<const Partial*>(from);
    const auto* found = reinterpret_cast<const float*>(from + partial_bytes(item));
    for (long row = 0; row < rows(item); ++row) {
      const long head = item.kv_head * each + row % each - first_head();
      if (head < 0 || head >= own_heads()) continue;
      const long at = (item.first + row / each) * own_heads() + head;
      merge(1, &sums[at], &values[at * width], partials + row, found + row * width, width);
    }
  }

  // Computes some units together. No rank's units may need more than its buffer. False if a rank has ended.
  bool run(const std::vector<Unit>& units) {
    ++group.steps;
    std::vector<const Unit*> own;
    std::vector<size_t> begins;  // of the units of each item
    for (size_t u = 0; u < units.size(); ++u) {
      if (units[u].tile % group.count == group.rank) own.push_back(&units[u]);
      if (!u || units[u].item != units[u - 1].item) begins.push_back(u);
    }
    begins.push_back(units.size());
    parallel_for(threads, static_cast<long>(own.size()), [&](long i) { compute(*own[i]); });
    if (!exchange(group, group.spins)) return false;
    parallel_for(threads, static_cast<long>(begins.size()) - 1, [&](long i) {
      for (size_t u = begins[i]; u < begins[i + 1]; ++u) add(units[u]);
    });
    return true;
  }

  bool run_all() {
    std::vector<Unit> units;
    std::vector<long> used(group.count, 0);
    for (size_t i = 0; i < items.size(); ++i)
      for (long tile = first_tile(batch, items[i]); tile < end_tile(items[i]); ++tile) {
        const long rank = tile % group.count, needed = (bytes(items[i]) + kAlign - 1) / kAlign * kAlign;
        if (used[rank] + needed > group.capacity) {
          if (!run(units)) return false;
          units.clear();
          used.assign(group.count, 0);
        }
        units.push_back({static_cast<long>(i), tile, used[rank]});
        used[rank] += needed;
      }
    return units.empty() || run(units);
  }

  // Puts the ranks' queries [tokens, own heads, dim] side by side. False if a rank has ended.
  bool gather(const T* own, T* all, long tokens) {
    const long width = static_cast<long>(own_heads()) * batch.dim, size = width * static_cast<long>(sizeof(T));
    const long most = group.capacity / size;
    for (long begin = 0; begin < tokens; begin += most) {
      const long n = tokens - begin < most ? tokens - begin : most;
      ++group.steps;
      std::memcpy(rank_buffer(group, group.rank), own + begin * width, n * size);
      if (!exchange(group, group.spins)) return false;
      for (int rank = 0; rank < group.count; ++rank)
        for (long t = 0; t < n; ++t)
          std::memcpy(all + ((begin + t) * group.count + rank) * width, rank_buffer(group, rank) + t * size, size);
    }
    return true;
  }

  void begin(long tokens) {
    sums.assign(tokens * own_heads(), {-kInfinity, 0.0f});
    values.assign(sums.size() * batch.width(), 0.0f);
    if (const float* sinks = batch.softmax.sinks)  // of this rank's heads
      for (size_t at = 0; at < sums.size(); ++at) sums[at] = {sinks[at % own_heads()] * kLog2E, 1.0f};
  }

  void write(long tokens) {
    const int dim = batch.out_dim(), width = batch.width();
    const Vec scale = vset(batch.values_dim ? batch.format.key_scale : batch.format.value_scale);
    parallel_rows(threads, tokens, tokens * own_heads() * dim, [&](long first, long last) {
      for (long at = first * own_heads(); at < last * own_heads(); ++at)
        for (int d = 0; d < dim; d += 16) {
          const Vec sum = vadd(vload(&values[at * width + d]), vset(0.0f));
          vstore_first(out + at * dim + d, vmul(vdiv(sum, vset(sums[at].total)), scale), dim - d);
        }
    });
  }
};

// Returns 1 if a rank has ended, 2 if the table names a page outside of the cache, else 0.
template <class T>
int attend_over_ranks(Collective& group, Batch batch, T* out, int sequences, long pages, int threads) {
  const long span = static_cast<long>(kTile) * group.count, tokens = batch.starts[sequences];
  for (int s = 0; s < sequences; ++s)
    for (long p = 0; p * span < batch.contexts[s]; ++p) {
      const int32_t page = batch.table[s * batch.table_stride + p];
      if (page < 0 || page >= pages) return 2;
    }
  const T* own = static_cast<const T*>(batch.query);
  std::vector<T> queries(tokens * batch.heads * batch.dim);
  batch.query = queries.data();
  batch.rank = group.rank;
  batch.ranks = group.count;
  long work = 0;
  RanksAttention<T> attention = {group, batch, out, threads, split_work(batch, sequences, work), {}, {}};
  if (!attention.gather(own, queries.data(), tokens)) return 1;
  attention.begin(tokens);
  if (!attention.run_all()) return 1;
  attention.write(tokens);
  return 0;
}

}  // namespace

// Like paged_attention, but `heads` counts those of all ranks, while query, out and sinks have this rank's. A page of
// the table has a tile of each rank, and the caches here have this rank's tiles.
#define RANKS_ATTENTION(name, T)                                                                                       \
  EXPORTED int name(Collective* group, void* out, const void* query, const void* keys, const void* values,             \
                    const KVFormat* format, const int32_t* starts, const int32_t* contexts, const int32_t* table,      \
                    long table_stride, long key_stride, long value_stride, long pages, int sequences, int heads,       \
                    int kv_heads, int dim, float scale, int window, float softcap, const float* bias,                  \
                    long bias_stride, long bias_center, const float* sinks, int values_dim, int threads) {             \
    const KVFormat held = held_as(format);                                                                             \
    const Softmax softmax = {scale * held.key_scale, window, softcap, 0, bias, bias_stride, bias_center, sinks};       \
    const Batch batch = {nullptr,      query,      keys,         values, starts,   contexts, table,      held,         \
                         table_stride, key_stride, value_stride, heads,  kv_heads, dim,      values_dim, softmax};     \
    return attend_over_ranks<T>(*group, batch, static_cast<T*>(out), sequences, pages, threads);                       \
  }
RANKS_ATTENTION(ranks_attention_f32, float)
RANKS_ATTENTION(ranks_attention_bf16, bf16)
