// Work items of paged attention, and where their keys and values are. One process uses these (attention.cpp), and so do
// ranks that divide the tokens (ranks/divided_attention.cpp). An item is one KV head for a few consecutive queries of
// one sequence, with all query heads that share this KV head. A row is one query head of one query. So a tile of keys,
// once loaded, serves many rows. Decode steps and prompts differ only in the number of rows.
#pragma once

#include <vector>

#include "attention_tile.h"

namespace {

constexpr long kItemRows = 48;  // maximum of rows in a work item

struct Batch {
  void* out;
  const void *query, *keys, *values;
  const int32_t *starts, *contexts, *table;
  KVFormat format;
  long table_stride, key_stride, value_stride;  // elements from one row of the table, or one page, to the next
  int heads, kv_heads, dim;
  int values_dim;  // 0: values have `dim` numbers; otherwise a value is the start of its key
  Softmax softmax;
  // If not null, the positions of the keys that each token sees: at most `most`, in ascending order. Tiles, windows and
  // the positions of work items then count only these keys.
  const int32_t* selected = nullptr;
  int most = 0;
  // If ranks divide the tokens, rank t % ranks has tile t, and a page of the table has one tile of each rank.
  int rank = 0, ranks = 1;

  int group() const { return heads / kv_heads; }
  int out_dim() const { return values_dim ? values_dim : dim; }
  int width() const { return padded(out_dim()); }
  static int padded(int numbers) { return (numbers + 15) / 16 * 16; }

  // The page with this block of a sequence's tokens, which must be in a tile of this rank.
  long page_of(int sequence, long block) const {
    const int32_t* pages = table + sequence * table_stride;
    if (ranks == 1) return pages[block];
    return static_cast<long>(pages[block / (kTileBlocks * ranks)]) * kTileBlocks + block % kTileBlocks;
  }

  // A KV head's part of a page of keys, and of a page of values.
  template <class T>
  const char* keys_of(long page, int kv_head) const {
    return part<T>(keys, page * key_stride, kv_head);
  }
  template <class T>
  const char* values_of(long page, int kv_head) const {
    return part<T>(values, page * value_stride, kv_head);
  }
  template <class T>
  const char* part(const void* pages, long offset, int kv_head) const {
    return static_cast<const char*>(pages) +
           (offset + kv_head * head_elements<T>(format, dim)) * element_bytes<T>(format);
  }
  // Elements of a block's copies: of its keys, if they are codes or selected, and of its values. A tile's copied values
  // follow its keys.
  long copied_keys() const { return format.held == kPlain && !selected ? 0 : static_cast<long>(kBlock) * padded(dim); }
  long copied_values() const { return static_cast<long>(kBlock) * width(); }
  long copied() const { return copied_keys() + copied_values(); }
};

struct WorkItem {
  int sequence, kv_head;
  long first, count;  // the first query, as a token of the batch, and the number of queries
  long position;      // of the first query in its sequence
  long end;           // the first key after those that the last query sees
  long tile;          // the only tile to compute; < 0: all
  long partial_row;   // with a single tile: the row of TileResults for its first row
};

long first_tile(const Batch& batch, const WorkItem& item) {
  const long earliest = first_seen(batch.softmax.window, item.position);
  return earliest > 0 ? earliest / kTile : 0;
}
long end_tile(const WorkItem& item) { return (item.end - 1) / kTile + 1; }

// The first key after those that a query at this position of its sequence sees.
long seen_until(const Batch& batch, int sequence, long position) {
  const long end = position + 1 + batch.softmax.ahead, context = batch.contexts[sequence];
  return end < context ? end : context;
}

// Copies a block of values. Pads rows to `width`, with zeros for the tokens after the first `valid`.
template <class T>
void clean_values(const T* from, T* to, int dim, int width, int valid) {
  constexpr int kP = kPack<T>;
  const auto* words = reinterpret_cast<const uint32_t*>(from);
  auto* copy = reinterpret_cast<uint32_t*>(to);
  for (int slot = 0; slot < kBlock; slot += kP, words += dim, copy += width) {
    // The low half of a bfloat16 pair has the first token's value.
    const uint32_t keep = valid >= slot + kP ? 0xffffffffu : valid > slot ? 0xffffu : 0;
    for (int d = 0; d < dim; ++d) copy[d] = words[d] & keep;
    for (int d = dim; d < width; ++d) copy[d] = 0;
  }
}

// Finds the keys and values that are read after this tile: those of the item's next tile, or of the next item. They are
// only prefetched, so a wrong guess takes time but changes no result.
template <class T>
void find_next(const Batch& batch, const WorkItem& item, long tile, const WorkItem* next, TileBlocks& blocks) {
  const WorkItem& owner = next && tile + batch.ranks >= end_tile(item) ? *next : item;
  const long begin = (&owner == &item ? tile + batch.ranks : first_tile(batch, owner)) * kTileBlocks;
  const long last = (batch.contexts[owner.sequence] - 1) / kBlock;
  for (int b = 0; b < kTileBlocks; ++b) {
    const long block = batch.selected ? 0 : begin + b < last ? begin + b : last;
    const long page = batch.page_of(owner.sequence, block);
    blocks.next_keys[b] = reinterpret_cast<const uint32_t*>(batch.keys_of<T>(page, owner.kv_head));
    blocks.next_values[b] = reinterpret_cast<const uint32_t*>(batch.values_of<T>(page, owner.kv_head));
  }
}

// Copies the values of a block, which are the beginnings of its keys, to `values_copy`. Codes are first expanded to
// `copy`.
template <class T>
void share_block(const Batch& batch, const char* keys, T* copy, T* values_copy, int b, int valid, TileBlocks& blocks) {
  const auto* codes = reinterpret_cast<const uint8_t*>(keys);
  auto* words = reinterpret_cast<uint32_t*>(copy);
  auto* values = reinterpret_cast<uint32_t*>(values_copy);
  if (batch.format.held == kPlain)
    blocks.keys[b] = reinterpret_cast<const uint32_t*>(keys);
  else {
    const auto expand = batch.format.held == kInt8 ? expand_keys<T, int8_t> : expand_keys<T, float8>;
    expand(codes, words, blocks.dim, blocks.next_keys[b]);
    blocks.keys[b] = words;
    blocks.key_scales[b] = blocks.value_scales[b] =
        reinterpret_cast<const bf16*>(codes + static_cast<long>(kBlock) * blocks.dim);
  }
  values_of_keys<T>(blocks.keys[b], values, batch.values_dim, blocks.width, valid);
  blocks.values[b] = values;
}

// Finds a block of the keys that the item's only query selects, and writes its values to `values_copy`. Keys are
// copied, unless they are a whole block of the cache.
template <class T>
void gather_block(const Batch& batch, const WorkItem& item, long first, int valid, T* copy, T* values_copy, int b,
                  TileBlocks& blocks) {
  const int32_t* selected = batch.selected + item.first * batch.most + first;
  const auto words = [&](long position) {
    const long page = batch.page_of(item.sequence, position / kBlock);
    return reinterpret_cast<const uint32_t*>(batch.keys_of<T>(page, item.kv_head)) + position % kBlock;
  };
  if (selected[0] % kBlock == 0 && selected[valid - 1] - selected[0] == valid - 1) {
    blocks.keys[b] = words(selected[0]);
  } else {
    auto* keys = reinterpret_cast<uint32_t*>(copy);
    const uint32_t* from[kBlock];
    for (int slot = 0; slot < kBlock; ++slot) from[slot] = words(selected[slot < valid ? slot : 0]);
    for (int s = 0; s < batch.dim / kPack<T>; ++s)
      for (int slot = 0; slot < kBlock; ++slot) keys[s * kBlock + slot] = from[slot][s * kBlock];
    blocks.keys[b] = keys;
  }
  values_of_keys<T>(blocks.keys[b], reinterpret_cast<uint32_t*>(values_copy), batch.values_dim, blocks.width, valid);
  blocks.values[b] = reinterpret_cast<const uint32_t*>(values_copy);
}

// Expands a block of codes to `copy` and `values_copy`.
template <class T, class Code>
void expand_block(const char* keys, const char* values, T* copy, T* values_copy, int b, int valid, TileBlocks& blocks) {
  const auto *key_codes = reinterpret_cast<const uint8_t*>(keys), *codes = reinterpret_cast<const uint8_t*>(values);
  auto* key_words = reinterpret_cast<uint32_t*>(copy);
  auto* words = reinterpret_cast<uint32_t*>(values_copy);
  expand_keys<T, Code>(key_codes, key_words, blocks.dim, blocks.next_keys[b]);
  expand_values<T, Code>(codes, words, blocks.dim, blocks.width, valid, blocks.next_values[b]);
  blocks.keys[b] = key_words;
  blocks.values[b] = words;
  blocks.key_scales[b] = reinterpret_cast<const bf16*>(key_codes + static_cast<long>(kBlock) * blocks.dim);
  blocks.value_scales[b] = reinterpret_cast<const bf16*>(codes + static_cast<long>(kBlock) * blocks.dim);
}

// Finds the tile's blocks, as far as the item's last query sees them. If a block is not full, or the number of
// dimensions is not a multiple of 16, its values are copied to `copies` with zeros in the gaps. Codes are always
// copied, with their keys. For matrix tiles all values are copied, because the values of two blocks are multiplied
// together.
template <class T>
void find_blocks(const Batch& batch, const WorkItem& item, long tile, T* copies, TileBlocks& blocks) {
  const long end = item.end, begin = tile * kTile;
  const long context = batch.contexts[item.sequence];
  blocks.dim = batch.dim;
  blocks.width = batch.width();
  blocks.scaled = batch.format.held == kInt8;
  // Pages before the window may now belong to another sequence, so they must not be read.
  const long earliest = first_seen(batch.softmax.window, item.position);
  T* all_values = copies + kTileBlocks * batch.copied_keys();
  blocks.pairs = reinterpret_cast<const uint32_t*>(all_values);
  const auto there = [&](int b) { return begin + b * kBlock < end && begin + (b + 1) * kBlock > earliest; };
  for (int b = 0; b < kTileBlocks; ++b) {
    T *copy = copies + b * batch.copied_keys(), *values_copy = all_values + b * batch.copied_values();
    if (kTogether<T> > kRows && !there(b) && there(b ^ 1))
      std::memset(values_copy, 0, batch.copied_values() * sizeof(T));
    if (!there(b)) continue;
    if (batch.selected) {
      const long first = begin + b * kBlock, count = end - first;
      gather_block(batch, item, first, static_cast<int>(count < kBlock ? count : kBlock), copy, values_copy, b, blocks);
      continue;
    }
    const long page = batch.page_of(item.sequence, begin / kBlock + b), left = context - begin - b * kBlock;
    const int valid = static_cast<int>(left < kBlock ? left : kBlock);
    const char *keys = batch.keys_of<T>(page, item.kv_head), *values = batch.values_of<T>(page, item.kv_head);
    if (batch.values_dim) {
      share_block(batch, keys, copy, values_copy, b, valid, blocks);
      continue;
    }
    if (batch.format.held != kPlain) {
      const auto expand = batch.format.held == kInt8 ? expand_block<T, int8_t> : expand_block<T, float8>;
      expand(keys, values, copy, values_copy, b, valid, blocks);
      continue;
    }
    if (valid < kBlock || blocks.width != batch.dim || kTogether<T> > kRows) {
      clean_values(reinterpret_cast<const T*>(values), values_copy, batch.dim, blocks.width, valid);
      values = reinterpret_cast<const char*>(values_copy);
    }
    blocks.keys[b] = reinterpret_cast<const uint32_t*>(keys);
    blocks.values[b] = reinterpret_cast<const uint32_t*>(values);
  }
}

// Computes all rows of the item over one tile, up to kTogether<T> at a time. Calls done(row, count, partials, values)
// with the results of `count` rows from `row` on.
template <class T, class Done>
void attend_item(const Batch& batch, const WorkItem& item, long tile, const WorkItem* next, T* copies, float* values,
                 const Done& done) {
  TileBlocks blocks;
  find_next<T>(batch, item, tile, next, blocks);
  find_blocks(batch, item, tile, copies, blocks);
  const int group = batch.group();
  const long rows = item.count * group;
  long query = 0, head = 0;
  for (long row = 0; row < rows; row += kTogether<T>) {
    const int count = static_cast<int>(rows - row < kTogether<T> ? rows - row : kTogether<T>);
    Rows some;
    for (int r = 0; r < count; ++r) {
      const long at = ((item.first + query) * batch.heads + item.kv_head * group + head) * batch.dim;
      some.query[r] = reinterpret_cast<const uint32_t*>(static_cast<const T*>(batch.query) + at);
      const long position = item.position + query;
      some.from[r] = first_seen(batch.softmax.window, position) - tile * kTile;
      some.until[r] = seen_until(batch, item.sequence, position) - tile * kTile;
      const Softmax& softmax = batch.softmax;
      if (softmax.bias)
        some.bias[r] = softmax.bias + (item.kv_head * group + head) * softmax.bias_stride + softmax.bias_center -
                       (position - tile * kTile);
      if (++head == group) {
        head = 0;
        ++query;
      }
    }
    Partial partial[kTogether<T>];
    attend_rows<T>(count, some, blocks, batch.softmax, partial, values);
    done(row, count, partial, values);
  }
}

template <class T>
void write_rows(const Batch& batch, const WorkItem& item, long row, int count, const Partial* sums,
                const float* values) {
  const int group = batch.group();
  const int dim = batch.out_dim();
  const Vec scale = vset(batch.values_dim ? batch.format.key_scale : batch.format.value_scale);
  for (int r = 0; r < count; ++r, values += batch.width()) {
    const long token = item.first + (row + r) / group, head = item.kv_head * group + (row + r) % group;
    T* out = static_cast<T*>(batch.out) + (token * batch.heads + head) * dim;
    // Adding 0 turns -0 into 0. Merging does so too, and a row must have the same bits with and without merging.
    for (int d = 0; d < dim; d += 16)
      vstore_first(out + d, vmul(vdiv(vadd(vload(values + d), vset(0.0f)), vset(sums[r].total)), scale), dim - d);
  }
}

// A row's state before its first tile: empty, or the weight of its head's sink.
INLINE Partial before_tiles(const Batch& batch, const WorkItem& item, long row) {
  if (!batch.softmax.sinks) return {-kInfinity, 0.0f};
  return {batch.softmax.sinks[item.kv_head * batch.group() + row % batch.group()] * kLog2E, 1.0f};
}

// Splits the batch into work items. Items of one KV head follow each other, so that its keys stay in L2. The longest
// come first, so that all threads end at nearly the same time. `work` is the sum of multiply-adds, where reading one
// number of a key counts as 4.
std::vector<WorkItem> split_work(const Batch& batch, int sequences, long& work) {
  std::vector<WorkItem> items;
  const long queries = kItemRows / batch.group() > 1 && !batch.selected ? kItemRows / batch.group() : 1;
  const auto among_seen = [&](long position) {
    return batch.selected && position >= batch.most ? batch.most - 1L : position;
  };
  for (int s = 0; s < sequences; ++s) {
    const long begin = batch.starts[s], end = batch.starts[s + 1];
    const long before = batch.contexts[s] - (end - begin);
    for (int kv_head = 0; kv_head < batch.kv_heads; ++kv_head)
      for (long last = end; last > begin; last -= queries) {
        const long first = last - queries > begin ? last - queries : begin;
        const long position = among_seen(before + first - begin);
        const long end = seen_until(batch, s, among_seen(before + last - begin - 1));
        const WorkItem item = {s, kv_head, first, last - first, position, end, -1, 0};
        const long keys = item.end - first_tile(batch, item) * kTile;
        work += keys * (item.count * batch.group() + 4) * batch.dim;
        items.push_back(item);
      }
  }
  return items;
}

}  // namespace
