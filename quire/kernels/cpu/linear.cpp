// x @ weight.T + bias for any number of rows. Each output is the sum of its products in order, over all inputs, in one
// float32 register, so a row's result has the same bits in every batch. The weight is packed once as [out / 64][words
// of a row][64 words]: each panel of 64 outputs is one contiguous stream, the last one zero-padded. Packed bfloat16 can
// also be compressed (compress12.h).
//
// With few rows, the weight is read once and memory bandwidth is the limit. With many rows, a panel stays in L2 while
// the rows are multiplied with it, six at a time in 24 accumulators, and the next panel is prefetched meanwhile.
#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "compress12.h"
#include "panels.h"
#include "rows.h"
#include "tiles/linear_tiles.h"
#include "tiles/row_groups.h"

namespace {

constexpr int kPrefetchSteps = 32;  // how far ahead to prefetch; with 4 rows or more a shorter distance is too late
                                    // (docs/internals/lab-notes/cpu.md)

// O is the type of the result: T, or float if it is not rounded (logits).
template <class T, class O>
struct Linear {
  const Row<T>* x;
  const T* bias;  // may be null
  O* out;
  int in, outs;
  const uint32_t* packed;        // the weight is either this
  const Compressed* compressed;  // or this; the other one is null
  Fetch* meanwhile;              // what to prefetch while multiplying; may be null

  long panels() const { return (outs + kPanel - 1) / kPanel; }
  int steps() const { return in / kPack<T>; }
};

template <class T, int R, int C, class O>
INLINE void finish_block(const Linear<T, O>& l, long row, long column, const Vec (&acc)[R][C]) {
  UNROLLED (c, C) {
    const long at = (column + c) * 16;
    const int left = static_cast<int>(l.outs - at < 16 ? l.outs - at : 16);
    if (left <= 0) break;
    const Vec bias = l.bias ? vload_first(l.bias + at, left) : vset(0.0f);
    UNROLLED (r, R) vstore_first(l.out + (row + r) * l.outs + at, vadd(acc[r][c], bias), left);
  }
}

template <class T, int R, int C, class O>
INLINE void start_block(const Linear<T, O>& l, long row, long column, const Row<T>* (&rows)[R], Vec (&acc)[R][C]) {
  UNROLLED (r, R) {
    rows[r] = l.x + (row + r) * l.in;
    // The lines of `out` are prefetched while the sums are computed, because stores that miss the cache would delay the
    // next block.
    for (int c = 0; c < C; c += kPack<O>) __builtin_prefetch(l.out + (row + r) * l.outs + (column + c) * 16, 1);
    UNROLLED (c, C) acc[r][c] = vset(0.0f);
  }
}

// Multiplies R rows with a panel of 64 outputs, whose uncompressed words are given.
template <class T, int R, class O>
void multiply_panel(const Linear<T, O>& l, long row, long panel, const uint32_t* words, const Prefetch& prefetch) {
  constexpr int C = kColumns<R>;
  static_assert(kPanelColumns % C == 0);
  for (int column = 0; column < kPanelColumns; column += C) {
    const Row<T>* rows[R];
    const uint32_t* columns[C];
    Vec acc[R][C];
    start_block<T, R, C>(l, row, panel * kPanelColumns + column, rows, acc);
    UNROLLED (c, C) columns[c] = words + (column + c) * 16;
    multiply<T, R, C>(acc, rows, columns, kPanel, l.steps(), prefetch.part(column / C, kPanelColumns / C));
    finish_block<T, R, C>(l, row, panel * kPanelColumns + column, acc);
  }
}

// Reads a compressed panel step by step.
struct Decompressed {
  const Compressed& from;
  const Codebook book;
  const long begin;  // the panel's first step
  const uint8_t* step;
  long kept, next;  // of the steps that are stored whole: the next one's number, and its place in the panel

  Decompressed(const Compressed& from, long panel, int steps)
      : from(from),
        book(*from.header),
        begin(panel * steps),
        step(from.steps + begin * kCompressedStep),
        kept(from.first[panel]),
        next(from.where[kept] - begin) {}

  // The words of step s. Steps are read in order.
  __attribute__((always_inline)) inline void read(int s, Words (&column)[kPanelColumns]) {
    expand(book, step, column);
    for (int i = 0; i < 3; ++i) __builtin_prefetch(step + kPrefetchSteps * kCompressedStep + 64 * i, 0, 2);
    step += kCompressedStep;
    if (s != next) return;
    for (int c = 0; c < kPanelColumns; ++c) column[c] = wload(from.whole + kept * kPanel + c * 16);
    next = from.where[++kept] - begin;
  }
};

// Multiplies R rows with a compressed panel, and decompresses it meanwhile. If `words` is not null, the decompressed
// words are also written there, for the next rows.
template <class T, int R, class O>
void multiply_compressed(const Linear<T, O>& l, long row, long panel, uint32_t* words) {
  constexpr int C = kPanelColumns;
  const Row<T>* rows[R];
  Vec acc[R][C];
  start_block<T, R, C>(l, row, panel * C, rows, acc);
  const int steps = l.steps();
  Decompressed from(*l.compressed, panel, steps);
  for (int s = 0; s < steps; ++s) {
    Words column[C];
    from.read(s, column);
    if (words)
      for (int c = 0; c < C; ++c) wstore(words + s * kPanel + c * 16, column[c]);
    for (int r = 0; r < R; ++r) {
      const Words value = wset(word_at(rows[r] + s * kPack<T>));
      for (int c = 0; c < C; ++c) acc[r][c] = dot<T>(acc[r][c], column[c], value);
    }
  }
  finish_block<T, R, C>(l, row, panel * C, acc);
}

// Multiplies rows [row, row + rows) with a panel by tiles. `words` are the uncompressed panel. If they are null, up to
// 16 rows read the compressed panel and, unless `kept` is null, write its words there for the next rows.
template <class O>
void multiply_tiles(const Linear<bf16, O>& l, long row, int rows, long panel, const uint32_t* words, uint32_t* kept,
                    const Prefetch& prefetch) {
  alignas(64) float sums[4 * kMostTileRows * 16];
  const auto* x = reinterpret_cast<const uint32_t*>(l.x + row * l.in);
  const int steps = l.steps(), tile_rows_there = rows > kTileRows ? kMostTileRows : kTileRows;
  const auto fetch = [&](int s) {
    for (int i = 0; i < kTileWords; ++i) prefetch(s + i);
  };
  if (rows > kTileRows) {
    tile_more_rows(x, steps, rows, steps, sums, words, fetch);
  } else if (words) {
    constexpr long kAhead = 4L * kBlockWords;  // words; 16 KB was the largest distance measured
    tile_rows(
        x, steps, rows, steps, sums, [&](int s) { return words + static_cast<long>(s) * kPanel; },
        [&](int s) {
          fetch(s);
          const uint32_t* ahead = words + static_cast<long>(s) * kPanel + kAhead;
          for (int line = 0; line < kBlockWords / 16; ++line) __builtin_prefetch(ahead + 16 * line, 0, 2);
        });
  } else {
    alignas(64) uint32_t block[kBlockWords];
    Decompressed from(*l.compressed, panel, steps);
    const auto source = [&](int s) {
      uint32_t* to = kept ? kept + static_cast<long>(s) * kPanel : block;
      for (int i = 0; i < std::min(kTileWords, steps - s); ++i) {
        Words column[kPanelColumns];
        from.read(s + i, column);
        for (int c = 0; c < kPanelColumns; ++c) wstore(to + i * kPanel + c * 16, column[c]);
      }
      return static_cast<const uint32_t*>(to);
    };
    tile_rows(x, steps, rows, steps, sums, source, [](int) {});
  }
  for (int c = 0; c < kPanelColumns; ++c) {
    const long at = panel * kPanel + c * 16;
    const int left = static_cast<int>(l.outs - at < 16 ? l.outs - at : 16);
    if (left <= 0) break;
    const Vec bias = l.bias ? vload_first(l.bias + at, left) : vset(0.0f);
    const float* from = sums + c * tile_rows_there * 16;
    for (int r = 0; r < rows; ++r)
      vstore_first(l.out + (row + r) * l.outs + at, vadd(vload(from + r * 16), bias), left);
  }
}

// Like multiply_rows, for up to 32 rows [begin, begin + count), by tiles.
template <class O>
void multiply_rows_by_tiles(const Linear<bf16, O>& l, long begin, long count, long panel, const char* next) {
  const uint32_t* words = l.packed ? l.packed + panel * l.steps() * kPanel : nullptr;
  if (l.compressed && count > kTileRows) {  // the first 16 rows decompress it for the others
    auto* kept = reinterpret_cast<uint32_t*>(scratch(4L * l.steps() * kPanel));
    multiply_tiles(l, begin, kTileRows, panel, nullptr, kept, Prefetch());
    words = kept, begin += kTileRows, count -= kTileRows;
  }
  const int stride = l.compressed ? kCompressedStep : 4 * kPanel;
  Prefetch prefetch;
  if (next) prefetch = {next, stride / 64, stride};
  multiply_tiles(l, begin, static_cast<int>(count), panel, words, nullptr, prefetch);
}

// The tiles of a panel. If they are not stored in the required form, they are written to this thread's scratch memory.
template <class O>
PanelTiles tiles_of(const Linear<bf16, O>& l, long panel) {
  const int steps = l.steps(), blocks = blocks_of(steps);
  const uint32_t* packed = l.compressed ? nullptr : l.packed + panel * steps * kPanel;
  if (packed && steps % kTileWords == 0) return packed_tiles(packed);
  auto* words = reinterpret_cast<uint32_t*>(scratch(4L * blocks * kBlockWords));
  const auto write = [&](int s, int c, Words column) { wstore(at_step(words, blocks, s, c), column); };
  if constexpr (kCanCompress) {
    if (l.compressed) {
      Decompressed from(*l.compressed, panel, steps);
      for (int s = 0; s < steps; ++s) {
        Words column[kPanelColumns];
        from.read(s, column);
        for (int c = 0; c < kPanelColumns; ++c) write(s, c, column[c]);
      }
    }
  }
  for (int s = packed ? 0 : steps; s < blocks * kTileWords; ++s)
    for (int c = 0; c < kPanelColumns; ++c) write(s, c, s < steps ? wload(packed + s * kPanel + c * 16) : wset(0u));
  return consecutive_tiles(words, blocks);
}

// Writes 16 outputs of one row of a group of up to 32. Piece i belongs to row i / 4.
template <class O>
struct GroupOutput {
  const Linear<bf16, O>& l;
  long row, column;  // the group's first row, the panel's first output
  int rows;
  const float* sums;

  int pieces() const { return rows * kPanelColumns; }
  __attribute__((always_inline)) inline void operator()(int i) const {
    const int r = i / kPanelColumns, c = i % kPanelColumns;
    const long at = column + c * 16;
    const int left = static_cast<int>(std::min(16L, l.outs - at));
    if (left <= 0) return;
    const Vec bias = l.bias ? vload_first(l.bias + at, left) : vset(0.0f);
    const Vec sum = vadd(vload(sums + (c * kGroupRows + r) * 16), bias);
    O* to = l.out + (row + r) * l.outs + at;
    left == 16 ? vstore(to, sum) : vstore_first(to, sum, left);
  }
};

// Multiplies groups [begin, end) of 32 rows with one panel. `next` is the panel to prefetch, or null.
template <class O>
void multiply_groups(const Linear<bf16, O>& l, const RowGroups& x, long begin, long end, long panel, const char* next) {
  const int blocks = blocks_of(l.steps());
  const PanelTiles tiles = tiles_of(l, panel);
  const int stride = l.compressed ? kCompressedStep : 4 * kPanel, lines = stride / 64;
  alignas(64) float sums[2][kGroupSums];
  const auto output = [&](long g) {
    return GroupOutput<O>{l, g * kGroupRows, panel * kPanel, x.rows_of(g), sums[g % 2]};
  };
  for (long g = begin; g < end; ++g) {
    const long line = lines * (g - begin) / (end - begin);
    Prefetch prefetch;
    if (next) prefetch = {next + line * 64, static_cast<int>(lines * (g + 1 - begin) / (end - begin) - line), stride};
    if (l.meanwhile && g > begin) prefetch.extra = l.meanwhile->take(l.steps());
    const auto fetch = [&](int b) {
      for (int s = b * kTileWords; s < std::min((b + 1) * kTileWords, l.steps()); ++s) prefetch(s);
    };
    const GroupOutput<O> before = output(std::max(begin, g - 1));
    multiply_group(x.tiles(g), tiles, blocks, sums[g % 2], fetch, g > begin ? before.pieces() : 0, before);
  }
  const GroupOutput<O> last = output(end - 1);
  for (int i = 0; i < last.pieces(); ++i) last(i);
}

// Like multiply_all, for more than 32 rows of bfloat16, by matrix tiles.
template <class O>
void multiply_all_groups(const Linear<bf16, O>& l, long rows, int threads) {
  const RowGroups x(reinterpret_cast<const uint32_t*>(l.x), l.steps(), rows);
  const char* stream =
      l.compressed ? reinterpret_cast<const char*>(l.compressed->steps) : reinterpret_cast<const char*>(l.packed);
  const long panel_bytes = static_cast<long>(l.steps()) * (l.compressed ? kCompressedStep : 4 * kPanel);
  const long most = std::clamp(kRowsInL2 / (2L * kGroupRows * l.in), 4L, 16L);  // groups per reading of a panel
  const Shares shares = {x.groups(), l.panels(), threads, most, 1};
  parallel_for(threads, shares.items(), [&](long i) {
    shares.run(i, [&](long panel, long begin, long end, long next) {
      if (begin < end)
        multiply_groups(l, x, begin, end, panel, next < l.panels() ? stream + next * panel_bytes : nullptr);
    });
  });
}

// Multiplies rows [begin, begin + count) with one panel. `next` is the panel to prefetch, or null.
template <class T, class O>
void multiply_rows(const Linear<T, O>& l, long begin, long count, long panel, const char* next) {
  if constexpr (kTiles && sizeof(T) == 2) return multiply_rows_by_tiles(l, begin, count, panel, next);
  const long groups = (count + kRows - 1) / kRows;  // of nearly equal size: 8 rows are 4 + 4
  const uint32_t* words = l.packed + panel * l.steps() * kPanel;
  if constexpr (kCanCompress && sizeof(T) == 2)
    if (l.compressed) words = groups == 1 ? nullptr : reinterpret_cast<uint32_t*>(scratch(4L * l.steps() * kPanel));
  const int stride = l.compressed ? kCompressedStep : 4 * kPanel, lines = stride / 64;
  for (long g = 0; g < groups; ++g) {
    const long row = count * g / groups, line = lines * g / groups;
    Prefetch prefetch;
    if (next) prefetch = {next + line * 64, static_cast<int>(lines * (g + 1) / groups - line), stride};
    if (l.meanwhile && g > 0) prefetch.extra = l.meanwhile->take(l.steps());
    with_rows(count * (g + 1) / groups - row, [&](auto r) {
      if constexpr (kCanCompress && sizeof(T) == 2)
        if (l.compressed && g == 0)
          return multiply_compressed<T, r()>(l, begin + row, panel, const_cast<uint32_t*>(words));
      multiply_panel<T, r()>(l, begin + row, panel, words, prefetch);
    });
  }
}

template <class T, class O>
void multiply_all(const Linear<T, O>& l, long rows, int threads) {
  // With less work one thread does everything. It needs about 7 microseconds for this much work; waking threads takes
  // 3.
  constexpr long kOneThreadWork = 900000;
  if ((rows + static_cast<long>(sizeof(T))) * l.in * l.outs < kOneThreadWork) threads = 1;
  if constexpr (kTiles && sizeof(T) == 2)
    if (rows > kGroupRows) return multiply_all_groups(l, rows, threads);
  const char* stream =
      l.compressed ? reinterpret_cast<const char*>(l.compressed->steps) : reinterpret_cast<const char*>(l.packed);
  const long panel_bytes = static_cast<long>(l.steps()) * (l.compressed ? kCompressedStep : 4 * kPanel);
  const Shares shares = {rows, l.panels(), threads};
  parallel_for(threads, shares.items(), [&](long i) {
    shares.run(i, [&](long panel, long begin, long end, long next) {
      // If registers hold the sums of a whole panel, few rows read the panel once, and the CPU predicts what follows.
      constexpr int kOnce = std::min(kRows, kAccumulators / kPanelColumns);
      const bool fetch = next < l.panels() && end - begin > kOnce;
      multiply_rows(l, begin, end - begin, panel, fetch ? stream + next * panel_bytes : nullptr);
    });
  });
}

// Packs weight [outs, in] to packed [outs rounded up to 64, in]. A row must be a whole number of words.
template <class T>
void pack(const T* weight, T* packed, int in, int outs, int threads) {
  constexpr int kTogether = 16;  // words of a row that are copied at a time: one cache line of the input
  const auto* from = reinterpret_cast<const uint32_t*>(weight);
  auto* to = reinterpret_cast<uint32_t*>(packed);
  const int steps = in / kPack<T>;
  parallel_for(threads, (outs + kPanel - 1) / kPanel, [&](long panel) {
    const long outputs = std::min<long>(kPanel, outs - panel * kPanel);
    if (outputs < kPanel) std::fill_n(to + panel * steps * kPanel, static_cast<long>(steps) * kPanel, 0u);
    for (int s = 0; s < steps; s += kTogether) {
      const int count = std::min(kTogether, steps - s);
      for (long o = 0; o < outputs; ++o) {
        const uint32_t* row = from + (panel * kPanel + o) * steps + s;
        uint32_t* column = to + (panel * steps + s) * kPanel + o;
        for (int i = 0; i < count; ++i) column[i * kPanel] = row[i];
      }
    }
  });
}

template <class T>
void apply(const PackedLinear& l, const T* input, void* out, long rows, int threads, Fetch* meanwhile) {
  const auto* bias = static_cast<const T*>(l.bias);
  const auto run = [&](const uint32_t* packed, const Compressed* compressed) {
    with_converted(input, rows, l.in, threads, [&](const Row<T>* x, long begin, long count) {
      const auto multiply = [&](auto* to) {
        using O = std::remove_pointer_t<decltype(to)>;
        multiply_all<T, O>({x, bias, to + begin * l.outs, l.in, l.outs, packed, compressed, meanwhile}, count, threads);
      };
      if (l.wide) return multiply(static_cast<float*>(out));
      multiply(static_cast<T*>(out));
    });
  };
  if (!l.compressed) return run(static_cast<const uint32_t*>(l.weight), nullptr);
  auto* at = static_cast<uint8_t*>(l.weight);
  const long panels = (l.outs + kPanel - 1) / kPanel;
  const Compressed parts(at, panels, l.in / 2, reinterpret_cast<const CompressedHeader*>(at)->whole);
  run(nullptr, &parts);
}

// Compresses a packed bfloat16 matrix to 12 bits.
struct Compressor {
  const uint16_t* packed;
  long panels, panel_steps;
  int threads, base;
  std::vector<long> first;  // by panel: the number of whole steps before it; at the end, their total number

  Compressor(const uint16_t* packed, int in, int outs, int threads)
      : packed(packed),
        panels((outs + kPanel - 1) / kPanel),
        panel_steps(in / 2),
        threads(threads),
        base(choose_base(packed, panels * panel_steps)),
        first(panels + 1) {
    parallel_for(threads, panels, [&](long p) {
      for (long s = 0; s < panel_steps; ++s) first[p + 1] += !can_compress(step(p, s), base);
    });
    for (long p = 0; p < panels; ++p) first[p + 1] += first[p];
  }

  const uint16_t* step(long panel, long s) const { return packed + (panel * panel_steps + s) * 2 * kPanel; }

  void write(uint8_t* to) const {
    const Compressed parts(to, panels, panel_steps, first[panels]);
    parts.header->whole = first[panels];
    fill_codebook(*parts.header, base);
    parts.where[first[panels]] = static_cast<int>(panels * panel_steps);
    parallel_for(threads, panels, [&](long p) {
      long kept = parts.first[p] = first[p];
      for (long s = 0; s < panel_steps; ++s) {
        compress_step(step(p, s), base, parts.steps + (p * panel_steps + s) * kCompressedStep);
        if (can_compress(step(p, s), base)) continue;
        std::memcpy(parts.whole + kept * kPanel, step(p, s), 4 * kPanel);
        parts.where[kept++] = static_cast<int>(p * panel_steps + s);
      }
    });
  }
};

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void pack_linear_##suffix(const T* weight, T* packed, int in, int outs, int threads) {                      \
    pack(weight, packed, in, outs, threads);                                                                           \
  }                                                                                                                    \
  EXPORTED void linear_##suffix(const PackedLinear* linear, const T* x, void* out, long rows, int threads,             \
                                Fetch* meanwhile) {                                                                    \
    if (linear->quantized) return quantized_linear_##suffix(linear, x, out, rows, threads, meanwhile);                 \
    if (linear->float8) return float8_linear_##suffix(linear, x, out, rows, threads, meanwhile);                       \
    apply(*linear, x, out, rows, threads, meanwhile);                                                                  \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)

// Bytes of the compressed form of a packed matrix; 0 if this instruction set cannot compress, or if it does not pay.
EXPORTED long compressed_size(const uint16_t* packed, int in, int outs, int threads) {
  if (!kCanCompress) return 0;
  const Compressor compressor(packed, in, outs, threads);
  const long whole = compressor.first[compressor.panels], steps = compressor.panels * compressor.panel_steps;
  return whole * 8 < steps ? static_cast<long>(Compressed(nullptr, compressor.panels, in / 2, whole).bytes) : 0;
}

EXPORTED void compress(const uint16_t* packed, uint8_t* to, int in, int outs, int threads) {
  Compressor(packed, in, outs, threads).write(to);
}
