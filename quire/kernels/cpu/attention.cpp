// Paged attention over a ragged batch. If the batch has too few items (attention_items.h) for the threads, every key
// tile of an item becomes its own item. The results of the tiles are then merged in the usual order.
#include "kernels.h"

#include "attention_items.h"

namespace {

// With less work (in units of split_work) one thread does everything. It needs about 7 microseconds for this much work;
// waking threads takes 3.
constexpr long kOneThreadWork = 400000;

template <class T>
void run_all_tiles(const Batch& batch, const WorkItem& item, const WorkItem* next) {
  const long rows = item.count * batch.group(), width = batch.width();
  const long copied = kTileBlocks * batch.copied();
  char* memory = scratch(copied * sizeof(T) + (kMostTogether + rows) * width * sizeof(float) + rows * sizeof(Partial));
  T* copies = reinterpret_cast<T*>(memory);
  float* values = reinterpret_cast<float*>(copies + copied);
  float* sums = values + kMostTogether * width;
  auto* partials = reinterpret_cast<Partial*>(sums + rows * width);
  const long first = first_tile(batch, item), end = end_tile(item);
  const auto write = [&](long row, int count, const Partial* all, const float* from) {
    write_rows<T>(batch, item, row, count, all, from);
  };
  const auto add = [&](long row, int count, const Partial* next, const float* from) {
    merge(count, partials + row, sums + row * width, next, from, static_cast<int>(width));
  };
  if (end - first == 1 && !batch.softmax.sinks) return attend_item<T>(batch, item, first, next, copies, values, write);
  for (long r = 0; r < rows; ++r) partials[r] = before_tiles(batch, item, r);
  for (long i = 0; i < rows * width; ++i) sums[i] = 0.0f;
  for (long tile = first; tile < end; ++tile) attend_item<T>(batch, item, tile, next, copies, values, add);
  for (long r = 0; r < rows; ++r) write(r, 1, partials + r, sums + r * width);
}

// Results of work items with one tile each, by row, until they are merged.
struct TileResults {
  std::vector<Partial> partials;
  std::vector<float> values;
};

template <class T>
void run_tile(const Batch& batch, const WorkItem& item, TileResults& results) {
  const long width = batch.width();
  const long copied = kTileBlocks * batch.copied();
  char* memory = scratch(copied * sizeof(T) + kMostTogether * width * sizeof(float));
  T* copies = reinterpret_cast<T*>(memory);
  float* values = reinterpret_cast<float*>(copies + copied);
  const auto keep = [&](long row, int count, const Partial* next, const float* from) {
    for (int r = 0; r < count; ++r) results.partials[item.partial_row + row + r] = next[r];
    __builtin_memcpy(&results.values[(item.partial_row + row) * width], from, count * width * sizeof(float));
  };
  attend_item<T>(batch, item, item.tile, nullptr, copies, values, keep);
}

template <class T>
void merge_tiles(const Batch& batch, const WorkItem& item, long tiles, TileResults& results) {
  const long rows = item.count * batch.group(), width = batch.width();
  auto* sums = reinterpret_cast<float*>(scratch(width * sizeof(float)));
  for (long r = 0; r < rows; ++r) {
    Partial sum = before_tiles(batch, item, r);
    for (long d = 0; d < width; ++d) sums[d] = 0.0f;
    for (long t = 0; t < tiles; ++t) {
      const long from = item.partial_row + t * rows + r;
      merge(1, &sum, sums, &results.partials[from], &results.values[from * width], static_cast<int>(width));
    }
    write_rows<T>(batch, item, r, 1, &sum, sums);
  }
}

template <class T>
void run_tiles_apart(const Batch& batch, const std::vector<WorkItem>& items, int threads) {
  std::vector<WorkItem> whole = items, split;
  TileResults results;
  long rows = 0;
  for (WorkItem& item : whole) {
    item.partial_row = rows;
    for (long tile = first_tile(batch, item); tile < end_tile(item); ++tile) {
      WorkItem part = item;
      part.tile = tile;
      part.partial_row = rows;
      split.push_back(part);
      rows += item.count * batch.group();
    }
  }
  results.partials.resize(rows);
  results.values.resize(rows * batch.width());
  parallel_for(threads, static_cast<long>(split.size()), [&](long i) { run_tile<T>(batch, split[i], results); });
  const int merge_threads = rows * batch.width() < 32768 ? 1 : threads;
  parallel_for(merge_threads, static_cast<long>(whole.size()), [&](long i) {
    merge_tiles<T>(batch, whole[i], end_tile(whole[i]) - first_tile(batch, whole[i]), results);
  });
}

template <class T>
int attend(const Batch& batch, int sequences, long pages, int threads) {
  for (int s = 0; s < sequences; ++s)
    for (long b = 0; b * kBlock < batch.contexts[s]; ++b) {
      const int32_t page = batch.table[s * batch.table_stride + b];
      if (page < 0 || page >= pages) return 1;
    }
  long work = 0;
  const std::vector<WorkItem> items = split_work(batch, sequences, work);
  if (work < kOneThreadWork) threads = 1;
  if (threads > 1 && static_cast<long>(items.size()) < 4L * threads)
    run_tiles_apart<T>(batch, items, threads);
  else
    parallel_for(threads, static_cast<long>(items.size()), [&](long i) {
      run_all_tiles<T>(batch, items[i], i + 1 < static_cast<long>(items.size()) ? &items[i + 1] : nullptr);
    });
  return 0;
}

// Whether each token selects, in ascending order, keys up to its own position: all of them, or batch.most if that is
// fewer.
bool selects_seen_keys(const Batch& batch, int sequences) {
  for (int s = 0; s < sequences; ++s)
    for (long t = batch.starts[s]; t < batch.starts[s + 1]; ++t) {
      const long position = batch.contexts[s] - (batch.starts[s + 1] - t);
      const int32_t* selected = batch.selected + t * batch.most;
      long before = -1;
      for (long i = 0; i < batch.most && i <= position; before = selected[i++])
        if (selected[i] <= before || selected[i] > position) return false;
    }
  return true;
}

}  // namespace

#define PAGED_ATTENTION(name, T)                                                                                       \
  EXPORTED int name(void* out, const void* query, const void* keys, const void* values, const KVFormat* format,        \
                    const int32_t* starts, const int32_t* contexts, const int32_t* table, long table_stride,           \
                    long key_stride, long value_stride, long pages, int sequences, int heads, int kv_heads, int dim,   \
                    float scale, int window, float softcap, int ahead, const float* bias, long bias_stride,            \
                    long bias_center, const float* sinks, int values_dim, int threads) {                               \
    const KVFormat held = held_as(format);                                                                             \
    const Softmax softmax = {scale * held.key_scale, window, softcap, ahead, bias, bias_stride, bias_center, sinks};   \
    const Batch batch = {out,          query,      keys,         values, starts,   contexts, table,      held,         \
                         table_stride, key_stride, value_stride, heads,  kv_heads, dim,      values_dim, softmax};     \
    return attend<T>(batch, sequences, pages, threads);                                                                \
  }
PAGED_ATTENTION(paged_attention_f32, float)
PAGED_ATTENTION(paged_attention_bf16, bf16)

#define SPARSE_ATTENTION(name, T)                                                                                      \
  EXPORTED int name(void* out, const void* query, const void* keys, const int32_t* selected, const int32_t* starts,    \
                    const int32_t* contexts, const int32_t* table, long table_stride, long key_stride, long pages,     \
                    int sequences, int heads, int dim, float scale, int values_dim, int most, int threads) {           \
    const Softmax softmax = {scale, 0, 0.0f, 0, nullptr, 0, 0, nullptr};                                               \
    const Batch batch = {out,          query,      keys,       keys,  starts, contexts, table,      held_as(nullptr),  \
                         table_stride, key_stride, key_stride, heads, 1,      dim,      values_dim, softmax,           \
                         selected,     most};                                                                          \
    return selects_seen_keys(batch, sequences) ? attend<T>(batch, sequences, pages, threads) : 1;                      \
  }
SPARSE_ATTENTION(sparse_attention_f32, float)
SPARSE_ATTENTION(sparse_attention_bf16, bf16)
