// x @ weight.T + bias for weights of 8-bit floats (float8.h), which become bfloat16 meanwhile; x is not rounded. Each
// output is the sum of its blocks of inputs in order. A block's sum is the sum of its products in order, times the
// block's scale. So a row's result has the same bits in every batch. Matrix tiles multiply if x is bfloat16, in their
// own order, 32 of a block's inputs at a time.
//
// Panels, rows and threads are those of linear.cpp. A panel is packed as [steps of 4 inputs][64 words]. If there are so
// many rows that a panel is read several times, its bfloat16 numbers are made first, and stored for all of them.
#include "float8.h"

#include <algorithm>

#include "../kernels.h"
#include "../panels.h"
#include "../rows.h"
#include "../tiles/linear_tiles.h"

namespace {

constexpr long kStep = 4 * kPanel;  // bytes
constexpr long kAhead = 8192;       // bytes: how far ahead to prefetch a weight that is read once

template <class X>
constexpr bool kByTiles = kTiles && sizeof(X) == 2;
template <class X>  // maximum of rows with which a panel is read once
constexpr long kOnce = kByTiles<X> ? kTileRows : std::min(kRows, kAccumulators / kPanelColumns);

// One panel of 64 outputs, and its parameters.
struct Panel {
  const uint8_t* codes;
  const float *scales, *bias;  // [blocks][64]; [outs], may be null
  const uint32_t* kept;        // [in / 2][64], bfloat16 pairs; null: none
  int in, block, outs;         // outs: from 1 to 64
};

// Adds the products of R rows with the codes of C columns of 16 outputs: floats, or pairs of bfloat16 for such rows.
template <int R, int C, class X, class Fetch>
INLINE void multiply_codes(Vec (&acc)[R][C], const X* const (&rows)[R], const uint32_t* codes, int inputs,
                           const Fetch& fetch) {
  constexpr bool kFloats = std::is_same_v<X, float>;
  constexpr int kSteps = kFloats ? 4 : 2;
  for (long i = 0; i < inputs; i += 4) {
    fetch(i / 2);
    fetch(i / 2 + 1);
    long at = i;
    UNROLLED (c, C)
      UNROLLED (step, kSteps) {
        const Words four = wload(codes + at / 4 * kPanel + c * 16);
        const Words weights = kFloats ? as_words(numbers_of(four, step)) : pairs_of(four, step);
        UNROLLED (r, R) {
          const Words row = wset(word_at(rows[r] + at + 4 / kSteps * step));
          acc[r][c] = dot<X>(acc[r][c], weights, row);
        }
        if (kHalvesApart && R > 1 && step % 2) asm("" : "+r"(at));  // as in multiply(): the codes are loaded again
      }
  }
}

// Adds the products of a block from input `begin` on: R rows, `stride` numbers apart, with C columns of 16 outputs.
template <bool kKept, int R, int C, class X>
INLINE void multiply_block(Vec (&acc)[R][C], const Panel& panel, const X* x, long stride, int column, int begin,
                           const Prefetch& prefetch) {
  const int inputs = begin + panel.block < panel.in ? panel.block : panel.in - begin;
  const X* rows[R];
  UNROLLED (r, R) rows[r] = x + r * stride + begin;
  const auto fetch = [&](long s) { prefetch(begin / 2 + s); };
  if constexpr (kKept) {
    const uint32_t* pairs[C];
    UNROLLED (c, C) pairs[c] = panel.kept + begin / 2 * kPanel + (column + c) * 16;
    multiply<bf16, R, C>(acc, rows, pairs, kPanel, inputs / 2, fetch);
  } else {
    const auto* codes = reinterpret_cast<const uint32_t*>(panel.codes + begin / 4 * kStep) + column * 16;
    multiply_codes(acc, rows, codes, inputs, fetch);
  }
}

template <bool kKept, int R, class X, class O>
void multiply_panel(const Panel& panel, const X* x, O* out, long out_stride, const Prefetch& all) {
  constexpr int C = kColumns<R>;
  for (int column = 0; column < kPanelColumns; column += C) {
    // As in linear.cpp: stores that miss the cache would delay the next tile.
    UNROLLED (r, R)
      for (int c = 0; c < C; ++c) __builtin_prefetch(out + r * out_stride + (column + c) * 16, 1);
    const Prefetch prefetch = all.part(column / C, kPanelColumns / C);
    alignas(64) float sums[R][C][16] = {};
    for (int begin = 0; begin < panel.in; begin += panel.block) {
      Vec acc[R][C];
      UNROLLED (r, R)
        UNROLLED (c, C) acc[r][c] = vset(0.0f);
      multiply_block<kKept>(acc, panel, x, panel.in, column, begin, prefetch);
      const float* scales = panel.scales + begin / panel.block * kPanel + column * 16;
      UNROLLED (r, R)
        UNROLLED (c, C) vstore(sums[r][c], vfma(acc[r][c], vload(scales + c * 16), vload(sums[r][c])));
    }
    for (int c = 0; c < C; ++c) {
      const int at = (column + c) * 16, left = panel.outs - at < 16 ? panel.outs - at : 16;
      if (left <= 0) break;
      const Vec bias = panel.bias ? vload_first(panel.bias + at, left) : vset(0.0f);
      for (int r = 0; r < R; ++r) vstore_first(out + r * out_stride + at, vadd(vload(sums[r][c]), bias), left);
    }
  }
}

// Makes pairs of the codes of `steps` words of a row from input `begin` on, to [steps][64].
INLINE void expand_pairs(const uint8_t* codes, int begin, int steps, uint32_t* to) {
  for (int s = 0; s < steps; s += 2, to += 2 * kPanel) {
    const auto* from = reinterpret_cast<const uint32_t*>(codes + (begin / 4 + s / 2) * kStep);
    for (int c = 0; c < kPanel; c += 16) {
      const Words four = wload(from + c);
      wstore(to + c, pairs_of(four, 0));
      wstore(to + kPanel + c, pairs_of(four, 1));
    }
  }
}

// Multiplies up to 16 rows with a panel by matrix tiles, or up to 32 if its pairs are stored.
template <class O>
void multiply_by_tiles(const Panel& panel, const bf16* x, int rows, O* out, long out_stride, const Prefetch& prefetch) {
  alignas(64) float sums[4 * kMostTileRows * 16], totals[4 * kMostTileRows * 16];
  alignas(64) uint32_t expanded[kBlockWords];
  const int apart = rows > kTileRows ? kMostTileRows : kTileRows;  // rows from one column of 16 outputs to the next
  std::fill_n(totals, 64 * apart, 0.0f);
  for (int begin = 0; begin < panel.in; begin += panel.block) {
    const auto fetch = [&](int s) {
      for (int i = 0; i < kTileWords; ++i) prefetch(begin / 2 + s + i);
    };
    const int steps = (begin + panel.block < panel.in ? panel.block : panel.in - begin) / 2;
    const auto* from = reinterpret_cast<const uint32_t*>(x + begin);
    const uint32_t* kept = panel.kept ? panel.kept + begin / 2 * kPanel : nullptr;
    const auto pairs = [&](int s) {
      if (kept) return kept + s * kPanel;
      expand_pairs(panel.codes, begin + 2 * s, std::min(kTileWords, steps - s), expanded);
      return static_cast<const uint32_t*>(expanded);
    };
    if (rows > kTileRows)
      tile_more_rows(from, panel.in / 2, rows, steps, sums, kept, fetch);
    else
      tile_rows(from, panel.in / 2, rows, steps, sums, pairs, fetch);
    for (int c = 0; c < kPanelColumns; ++c) {
      const Vec scale = vload(panel.scales + begin / panel.block * kPanel + c * 16);
      for (int r = 0; r < rows; ++r) {
        float* total = totals + (c * apart + r) * 16;
        vstore(total, vfma(vload(sums + (c * apart + r) * 16), scale, vload(total)));
      }
    }
  }
  for (int at = 0; at < panel.outs; at += 16) {
    const int left = std::min(16, panel.outs - at);
    const Vec bias = panel.bias ? vload_first(panel.bias + at, left) : vset(0.0f);
    for (int r = 0; r < rows; ++r)
      vstore_first(out + r * out_stride + at, vadd(vload(totals + at * apart + r * 16), bias), left);
  }
}

// Multiplies `count` rows with one panel. `next` is what to prefetch, or null.
template <class X, class O>
void multiply_rows(Panel panel, const X* x, long count, O* out, long out_stride, const char* next, Fetch* meanwhile) {
  // Groups of rows have nearly equal size. With tiles, the first has 16 rows, the others 32.
  constexpr long kMost = kByTiles<X> ? kMostTileRows : kRows, kFirst = kByTiles<X> ? kTileRows : kRows;
  constexpr long kLines = kStep / 2 / 64;  // of a step of two inputs
  const long groups = (count + kMost - kFirst + kMost - 1) / kMost;
  const auto first = [&](long g) {
    return kByTiles<X> ? (g ? std::min(count, kFirst + (g - 1) * kMost) : 0) : count * g / groups;
  };
  const int steps = panel.in / 2;
  if (groups > 1) {
    auto* pairs = reinterpret_cast<uint32_t*>(scratch(4L * steps * kPanel));
    expand_pairs(panel.codes, 0, steps, pairs);
    panel.kept = pairs;
  }
  for (long g = 0; g < groups; ++g) {
    const long row = first(g), rows = first(g + 1) - row, line = kLines * g / groups;
    Prefetch prefetch;
    if (next) prefetch = {next + line * 64, static_cast<int>(kLines * (g + 1) / groups - line), kStep / 2};
    if (meanwhile && g > 0) prefetch.extra = meanwhile->take(steps);
    const X* x_row = x + row * panel.in;
    O* out_row = out + row * out_stride;
    if constexpr (kByTiles<X>) {
      multiply_by_tiles(panel, x_row, static_cast<int>(rows), out_row, out_stride, prefetch);
    } else {
      with_rows(rows, [&](auto r) {
        const auto multiply = panel.kept ? multiply_panel<true, r(), X, O> : multiply_panel<false, r(), X, O>;
        multiply(panel, x_row, out_row, out_stride, prefetch);
      });
    }
  }
}

template <class X, class O>
void multiply_all(const PackedLinear& l, const X* x, O* out, long rows, int threads, Fetch* meanwhile) {
  constexpr long kOneThreadWork = 900000;  // as in linear.cpp: with less work, waking a thread does not pay
  if ((rows + 1) * l.in * l.outs < kOneThreadWork) threads = 1;
  const Float8Linear& f = *l.float8;
  const long panels = (l.outs + kPanel - 1) / kPanel, bytes = l.in / 4 * kStep;
  const long blocks = (l.in + f.block - 1) / f.block;
  const Shares shares = {rows, panels, threads};
  parallel_for(threads, shares.items(), [&](long i) {
    shares.run(i, [&](long number, long begin, long end, long next) {
      const long first = number * kPanel;
      const float* bias = l.bias ? static_cast<const float*>(l.bias) + first : nullptr;
      const int outs = static_cast<int>(l.outs - first < kPanel ? l.outs - first : kPanel);
      const float* scales = f.scales + number * blocks * kPanel;
      const Panel panel = {f.packed + number * bytes, scales, bias, nullptr, l.in, f.block, outs};
      const uint8_t* ahead = end - begin <= kOnce<X> ? panel.codes + kAhead
                             : next < panels         ? f.packed + next * bytes
                                                     : nullptr;
      multiply_rows(panel, x + begin * l.in, end - begin, out + begin * l.outs + first, l.outs,
                    reinterpret_cast<const char*>(ahead), meanwhile);
    });
  });
}

template <class T>
void apply(const PackedLinear& l, const T* input, void* out, long rows, int threads, Fetch* meanwhile) {
  with_converted(input, rows, l.in, threads, [&](const Row<T>* x, long begin, long count) {
    if (l.wide) return multiply_all(l, x, static_cast<float*>(out) + begin * l.outs, count, threads, meanwhile);
    multiply_all(l, x, static_cast<T*>(out) + begin * l.outs, count, threads, meanwhile);
  });
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void float8_linear_##suffix(const PackedLinear* linear, const T* x, void* out, long rows, int threads,      \
                                       Fetch* meanwhile) {                                                             \
    apply(*linear, x, out, rows, threads, meanwhile);                                                                  \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)

// Packs codes [outs][in] to [outs / 64, rounded up][in / 4][64 words]. Missing outputs become 0.
EXPORTED void pack_float8(const uint8_t* codes, uint8_t* packed, int in, int outs, int threads) {
  constexpr int kByte[4] = {1, 3, 0, 2};  // the byte of a word, for each of four inputs
  parallel_for(threads, (outs + kPanel - 1) / kPanel, [&](long panel) {
    uint8_t* to = packed + panel * (in / 4) * kStep;
    for (int i = 0; i < in; ++i)
      for (long o = 0; o < kPanel; ++o) {
        const long out = panel * kPanel + o;
        to[i / 4 * kStep + o * 4 + kByte[i % 4]] = out < outs ? codes[out * in + i] : 0;
      }
  });
}
