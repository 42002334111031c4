// Paged attention over a ragged batch. A piece of work is one kv_head of a few consecutive queries of one sequence
// with all their heads of the group, so that a tile of keys, once loaded, serves many rows: a decode step and a prompt
// differ in the number of rows only. Where the batch has too few pieces for the threads, every key tile becomes a
// piece of its own, and the tiles' results are merged afterwards in the same order.
#include "kernels.h"

#include "attention_tile.h"

namespace {

constexpr long kPieceRows = 48;
constexpr long kSmall = 400000;  // of work, about 7 microseconds: waking threads takes 3

struct Batch {
  void* out;
  const void *query, *keys, *values;
  const int32_t *starts, *contexts, *table;
  long table_stride, key_stride, value_stride;  // elements between rows of the table, between pages
  int heads, kv_heads, dim;
  Softmax how;

  int group() const { return heads / kv_heads; }
  int width() const { return (dim + 15) / 16 * 16; }
};

// `count` queries from token `first`, the first of them at `position`, and one tile or, where tile < 0, all of them.
struct Piece {
  int sequence, kv_head;
  long first, count, position;
  long tile;
  long partial_row;  // where a lone tile's results go
};

long first_tile(const Batch& batch, const Piece& piece) {
  const long earliest = batch.how.window > 0 ? piece.position - batch.how.window + 1 : 0;
  return earliest > 0 ? earliest / kTile : 0;
}
long end_tile(const Piece& piece) { return (piece.position + piece.count - 1) / kTile + 1; }

// A copy of a block of values, rows padded to `width`, with zeros after the first `valid` tokens.
template <class T>
void clean_values(const T* from, T* to, int dim, int width, int valid) {
  constexpr int kP = kPack<T>;
  const auto* words = reinterpret_cast<const uint32_t*>(from);
  auto* copy = reinterpret_cast<uint32_t*>(to);
  for (int slot = 0; slot < kBlock; slot += kP, words += dim, copy += width) {
    const uint32_t keep = valid >= slot + kP ? 0xffffffffu : valid > slot ? 0xffffu : 0;  // of a pair, the first is low
    for (int d = 0; d < dim; ++d) copy[d] = words[d] & keep;
    for (int d = dim; d < width; ++d) copy[d] = 0;
  }
}

// Finds the tile's blocks up to key `end` of the sequence. A block that is not full, or whose values have no whole
// number of 16 dimensions, is cleaned into `copies`.
template <class T>
void find_blocks(const Batch& batch, const Piece& piece, long tile, T* copies, TileBlocks& blocks) {
  const int32_t* pages = batch.table + piece.sequence * batch.table_stride;
  const long end = piece.position + piece.count, begin = tile * kTile;
  const long offset = piece_offset(piece.kv_head, batch.dim);
  const long context = batch.contexts[piece.sequence];
  blocks.dim = batch.dim;
  blocks.width = batch.width();
  // Blocks before the window may have been given to others: never looked at.
  const long earliest = batch.how.window > 0 ? piece.position - batch.how.window + 1 : 0;
  for (int b = 0; b < kTileBlocks && begin + b * kBlock < end; ++b) {
    if (begin + (b + 1) * kBlock <= earliest) continue;
    const long page = pages[begin / kBlock + b], valid = context - begin - b * kBlock;
    const T* keys = static_cast<const T*>(batch.keys) + page * batch.key_stride + offset;
    const T* values = static_cast<const T*>(batch.values) + page * batch.value_stride + offset;
    if (valid < kBlock || blocks.width != batch.dim) {
      T* copy = copies + static_cast<long>(b) * kBlock * blocks.width;
      clean_values(values, copy, batch.dim, blocks.width, static_cast<int>(valid < kBlock ? valid : kBlock));
      values = copy;
    }
    blocks.keys[b] = reinterpret_cast<const uint32_t*>(keys);
    blocks.values[b] = reinterpret_cast<const uint32_t*>(values);
  }
}

// Which keys come after this tile: those of the piece's next one, or of the next piece. Fetched, never needed.
template <class T>
void find_after(const Batch& batch, const Piece& piece, long tile, const Piece* next, TileBlocks& blocks) {
  const Piece& owner = next && tile + 1 >= end_tile(piece) ? *next : piece;
  const long begin = (&owner == &piece ? tile + 1 : first_tile(batch, owner)) * kTileBlocks;
  const long last = (batch.contexts[owner.sequence] - 1) / kBlock;
  const int32_t* pages = batch.table + owner.sequence * batch.table_stride;
  const T* keys = static_cast<const T*>(batch.keys) + piece_offset(owner.kv_head, batch.dim);
  for (int b = 0; b < kTileBlocks; ++b) {
    const long page = pages[begin + b < last ? begin + b : last];
    blocks.after[b] = reinterpret_cast<const uint32_t*>(keys + page * batch.key_stride);
  }
}

// All rows of the piece over one tile; done(row, count, partials, values) takes the results of `count` rows from `row`.
template <class T, class Done>
void attend_piece(const Batch& batch, const Piece& piece, long tile, const Piece* next, T* copies, float* values,
                  const Done& done) {
  TileBlocks blocks;
  find_blocks(batch, piece, tile, copies, blocks);
  find_after<T>(batch, piece, tile, next, blocks);
  const int group = batch.group();
  const long rows = piece.count * group;
  long query = 0, head = 0;
  for (long row = 0; row < rows; row += kRows) {
    const int count = static_cast<int>(rows - row < kRows ? rows - row : kRows);
    Rows some;
    for (int r = 0; r < count; ++r) {
      const long at = ((piece.first + query) * batch.heads + piece.kv_head * group + head) * batch.dim;
      some.query[r] = reinterpret_cast<const uint32_t*>(static_cast<const T*>(batch.query) + at);
      some.at[r] = piece.position + query - tile * kTile;
      if (++head == group) {
        head = 0;
        ++query;
      }
    }
    Partial partial[kRows];
    attend_rows<T>(count, some, blocks, batch.how, partial, values);
    done(row, count, partial, values);
  }
}

template <class T>
void write_rows(const Batch& batch, const Piece& piece, long row, int count, const Partial* sums, const float* values) {
  const int group = batch.group();
  for (int r = 0; r < count; ++r, values += batch.width()) {
    const long token = piece.first + (row + r) / group, head = piece.kv_head * group + (row + r) % group;
    T* out = static_cast<T*>(batch.out) + (token * batch.heads + head) * batch.dim;
    // Adding 0 turns -0, which an unmerged row may hold, into the 0 that merging makes of it.
    for (int d = 0; d < batch.dim; d += 16)
      vstore_first(out + d, vdiv(vadd(vload(values + d), vset(0.0f)), vset(sums[r].total)), batch.dim - d);
  }
}

template <class T>
void run_whole(const Batch& batch, const Piece& piece, const Piece* next) {
  const long rows = piece.count * batch.group(), width = batch.width();
  char* memory = scratch(kTile * width * sizeof(T) + (kRows + rows) * width * sizeof(float) + rows * sizeof(Partial));
  T* copies = reinterpret_cast<T*>(memory);
  float* values = reinterpret_cast<float*>(copies + kTile * width);
  float* sums = values + kRows * width;
  auto* partials = reinterpret_cast<Partial*>(sums + rows * width);
  const long first = first_tile(batch, piece), end = end_tile(piece);
  const auto write = [&](long row, int count, const Partial* all, const float* from) {
    write_rows<T>(batch, piece, row, count, all, from);
  };
  const auto add = [&](long row, int count, const Partial* next, const float* from) {
    merge(count, partials + row, sums + row * width, next, from, static_cast<int>(width));
  };
  if (end - first == 1) return attend_piece<T>(batch, piece, first, next, copies, values, write);
  for (long r = 0; r < rows; ++r) partials[r] = {-kInfinity, 0.0f};
  for (long i = 0; i < rows * width; ++i) sums[i] = 0.0f;
  for (long tile = first; tile < end; ++tile) attend_piece<T>(batch, piece, tile, next, copies, values, add);
  for (long r = 0; r < rows; ++r) write(r, 1, partials + r, sums + r * width);
}

// Where pieces are single tiles: each row's partial and its values, to be merged later.
struct Workspace {
  std::vector<Partial> partials;
  std::vector<float> values;
};

template <class T>
void run_tile(const Batch& batch, const Piece& piece, Workspace& space) {
  const long width = batch.width();
  char* memory = scratch(kTile * width * sizeof(T) + kRows * width * sizeof(float));
  T* copies = reinterpret_cast<T*>(memory);
  float* values = reinterpret_cast<float*>(copies + kTile * width);
  const auto keep = [&](long row, int count, const Partial* next, const float* from) {
    for (int r = 0; r < count; ++r) space.partials[piece.partial_row + row + r] = next[r];
    __builtin_memcpy(&space.values[(piece.partial_row + row) * width], from, count * width * sizeof(float));
  };
  attend_piece<T>(batch, piece, piece.tile, nullptr, copies, values, keep);
}

template <class T>
void merge_tiles(const Batch& batch, const Piece& piece, long tiles, Workspace& space) {
  const long rows = piece.count * batch.group(), width = batch.width();
  auto* sums = reinterpret_cast<float*>(scratch(width * sizeof(float)));
  for (long r = 0; r < rows; ++r) {
    Partial sum = {-kInfinity, 0.0f};
    for (long d = 0; d < width; ++d) sums[d] = 0.0f;
    for (long t = 0; t < tiles; ++t) {
      const long from = piece.partial_row + t * rows + r;
      merge(1, &sum, sums, &space.partials[from], &space.values[from * width], static_cast<int>(width));
    }
    write_rows<T>(batch, piece, r, 1, &sum, sums);
  }
}

template <class T>
void run_split(const Batch& batch, const std::vector<Piece>& pieces, int threads) {
  std::vector<Piece> whole = pieces, split;
  Workspace space;
  long rows = 0;
  for (Piece& piece : whole) {
    piece.partial_row = rows;
    for (long tile = first_tile(batch, piece); tile < end_tile(piece); ++tile) {
      Piece part = piece;
      part.tile = tile;
      part.partial_row = rows;
      split.push_back(part);
      rows += piece.count * batch.group();
    }
  }
  space.partials.resize(rows);
  space.values.resize(rows * batch.width());
  parallel_for(threads, static_cast<long>(split.size()), [&](long i) { run_tile<T>(batch, split[i], space); });
  const int mergers = rows * batch.width() < 32768 ? 1 : threads;
  parallel_for(mergers, static_cast<long>(whole.size()), [&](long i) {
    merge_tiles<T>(batch, whole[i], end_tile(whole[i]) - first_tile(batch, whole[i]), space);
  });
}

// One kv_head after the other, so that its keys stay in L2; of each, the longest pieces first, so that the threads end
// at nearly the same time. `work` is in multiply-adds, where a key read counts as 4.
std::vector<Piece> cut(const Batch& batch, int sequences, long& work) {
  std::vector<Piece> pieces;
  const long queries = kPieceRows / batch.group() > 1 ? kPieceRows / batch.group() : 1;
  for (int s = 0; s < sequences; ++s) {
    const long begin = batch.starts[s], end = batch.starts[s + 1];
    const long before = batch.contexts[s] - (end - begin);
    for (int kv_head = 0; kv_head < batch.kv_heads; ++kv_head)
      for (long last = end; last > begin; last -= queries) {
        const long first = last - queries > begin ? last - queries : begin;
        const Piece piece = {s, kv_head, first, last - first, before + first - begin, -1, 0};
        const long keys = piece.position + piece.count - first_tile(batch, piece) * kTile;
        work += keys * (piece.count * batch.group() + 4) * batch.dim;
        pieces.push_back(piece);
      }
  }
  return pieces;
}

template <class T>
int attend(const Batch& batch, int sequences, long pages, int threads) {
  for (int s = 0; s < sequences; ++s)
    for (long b = 0; b * kBlock < batch.contexts[s]; ++b) {
      const int32_t page = batch.table[s * batch.table_stride + b];
      if (page < 0 || page >= pages) return 1;
    }
  long work = 0;
  const std::vector<Piece> pieces = cut(batch, sequences, work);
  if (work < kSmall) threads = 1;
  if (threads > 1 && static_cast<long>(pieces.size()) < 4L * threads)
    run_split<T>(batch, pieces, threads);
  else
    parallel_for(threads, static_cast<long>(pieces.size()), [&](long i) {
      run_whole<T>(batch, pieces[i], i + 1 < static_cast<long>(pieces.size()) ? &pieces[i + 1] : nullptr);
    });
  return 0;
}

}  // namespace

#define PAGED_ATTENTION(name, T)                                                                                       \
  EXPORTED int name(void* out, const void* query, const void* keys, const void* values, const int32_t* starts,       \
                      const int32_t* contexts, const int32_t* table, long table_stride, long key_stride,               \
                      long value_stride, long pages, int sequences, int heads, int kv_heads, int dim, float scale,     \
                      int window, float softcap, int threads) {                                                        \
    const Batch batch = {out,        query,      keys,         values, starts,   contexts, table, table_stride,        \
                         key_stride, value_stride, heads, kv_heads, dim,      {scale, window, softcap}};               \
    return attend<T>(batch, sequences, pages, threads);                                                                \
  }
PAGED_ATTENTION(paged_attention_f32, float)
PAGED_ATTENTION(paged_attention_bf16, bf16)
