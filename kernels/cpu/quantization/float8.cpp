// x @ weight.T + bias for weights of 8-bit floats (float8.h), which become bfloat16 on the way; x is not rounded. Each
// output is the sum of its blocks of inputs in order, a block's the sum of its products in order, times the block's
// scale: so a row's result has the same bits in every batch. Matrix tiles multiply where x is bfloat16, in their own
// order, 32 of a block's inputs at a time.
//
// Panels, rows and threads are those of linear.cpp. A panel is packed as [steps of 4 inputs][64 words]. Where the rows
// are so many that a panel is read several times, its bfloat16 numbers are kept for the next rows.
#include "float8.h"

#include <algorithm>

#include "../kernels.h"
#include "../panels.h"
#include "../tiles/linear_tiles.h"

namespace {

constexpr long kStep = 4 * kPanel;  // bytes
constexpr long kAhead = 8192;       // bytes: how far ahead a weight that is read once is prefetched

INLINE Vec multiply_pair(Vec acc, Words weight, const bf16* x) {
  uint32_t word;
  __builtin_memcpy(&word, x, 4);
  return dot_pairs(acc, weight, wset(word));
}
INLINE Vec multiply_pair(Vec acc, Words weight, const float* x) {
  return vfma(high_halves(weight), vset(x[1]), vfma(low_halves(weight), vset(x[0]), acc));
}

// One panel of 64 outputs, and what is done with it.
struct Panel {
  const uint8_t* codes;
  const float *scales, *bias;  // [blocks][64]; [outs], may be null
  uint32_t* kept;              // [in / 2][64], bfloat16 pairs; null: none
  bool is_kept;                // the pairs are there already; else they are written
  int in, block, outs;         // outs: from 1 to 64
};

// Cache lines to prefetch: `lines` in each step until `end`, and those of `extra`.
struct Ahead {
  const char *at = nullptr, *end = nullptr;
  int lines = 0;
  Fetch::Lines extra = {};

  __attribute__((always_inline)) void step() {
    extra.step();
    for (int i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Adds the products of a block from input `begin` on: R rows, `stride` numbers apart, with C columns of 16 outputs.
template <bool kKept, int R, int C, class T>
INLINE void multiply_block(Vec (&acc)[R][C], const Panel& panel, const T* x, long stride, int column, int begin,
                           Ahead& ahead) {
  const int end = begin + panel.block < panel.in ? begin + panel.block : panel.in;
  for (int i = begin; i < end; i += 4) {
    ahead.step();
    Words weights[2][C];
    for (int c = 0; c < C; ++c) {
      uint32_t* pairs = panel.kept ? panel.kept + i / 2 * kPanel + (column + c) * 16 : nullptr;
      if (kKept) {
        weights[0][c] = wload(pairs);
        weights[1][c] = wload(pairs + kPanel);
        continue;
      }
      const Words codes = wload(reinterpret_cast<const uint32_t*>(panel.codes + i / 4 * kStep) + (column + c) * 16);
      weights[0][c] = upper_pairs(codes);
      weights[1][c] = lower_pairs(codes);
      if (!pairs) continue;
      wstore(pairs, weights[0][c]);
      wstore(pairs + kPanel, weights[1][c]);
    }
    for (int half = 0; half < 2; ++half)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
          acc[r][c] = multiply_pair(acc[r][c], weights[half][c], x + r * stride + i + 2 * half);
  }
}

template <bool kKept, int R, class T, class O>
void multiply_panel(const Panel& panel, const T* x, O* out, long out_stride, Ahead& ahead) {
  constexpr int C = kColumns<R>;
  for (int column = 0; column < kPanelColumns; column += C) {
    // As in linear.cpp: stores that miss the cache would delay the next tile.
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) __builtin_prefetch(out + r * out_stride + (column + c) * 16, 1);
    alignas(64) float sums[R][C][16] = {};
    for (int begin = 0; begin < panel.in; begin += panel.block) {
      Vec acc[R][C];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = vset(0.0f);
      multiply_block<kKept>(acc, panel, x, panel.in, column, begin, ahead);
      const float* scales = panel.scales + begin / panel.block * kPanel + column * 16;
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) vstore(sums[r][c], vfma(acc[r][c], vload(scales + c * 16), vload(sums[r][c])));
    }
    for (int c = 0; c < C; ++c) {
      const int at = (column + c) * 16, left = panel.outs - at < 16 ? panel.outs - at : 16;
      if (left <= 0) break;
      const Vec bias = panel.bias ? vload_first(panel.bias + at, left) : vset(0.0f);
      for (int r = 0; r < R; ++r) vstore_first(out + r * out_stride + at, vadd(vload(sums[r][c]), bias), left);
    }
  }
}

// Makes pairs of the codes of `steps` words of a row from input `begin` on; to [steps][64].
INLINE void expand_pairs(const uint8_t* codes, int begin, int steps, uint32_t* to) {
  for (int s = 0; s < steps; s += 2, to += 2 * kPanel) {
    const auto* from = reinterpret_cast<const uint32_t*>(codes + (begin / 4 + s / 2) * kStep);
    for (int c = 0; c < kPanel; c += 16) {
      const Words four = wload(from + c);
      wstore(to + c, upper_pairs(four));
      wstore(to + kPanel + c, lower_pairs(four));
    }
  }
}

// Multiplies up to 16 rows with a panel, by matrix tiles, or up to 32 whose pairs are kept. Pairs that are to be kept
// are written.
template <class O>
void multiply_by_tiles(const Panel& panel, const bf16* x, int rows, O* out, long out_stride, Ahead& ahead) {
  alignas(64) float sums[4 * kMostTileRows * 16], totals[4 * kMostTileRows * 16];
  alignas(64) uint32_t expanded[kBlockWords];
  const int apart = rows > kTileRows ? kMostTileRows : kTileRows;  // rows from one column of 16 outputs to the next
  std::fill_n(totals, 64 * apart, 0.0f);
  const auto fetch = [&](int) {
    for (int i = 0; i < kTileWords / 2; ++i) ahead.step();
  };
  for (int begin = 0; begin < panel.in; begin += panel.block) {
    const int steps = (begin + panel.block < panel.in ? panel.block : panel.in - begin) / 2;
    const auto* from = reinterpret_cast<const uint32_t*>(x + begin);
    uint32_t* kept = panel.kept ? panel.kept + begin / 2 * kPanel : nullptr;
    const auto pairs = [&](int s) {
      uint32_t* to = kept ? kept + s * kPanel : expanded;
      if (!panel.is_kept) expand_pairs(panel.codes, begin + 2 * s, std::min(kTileWords, steps - s), to);
      return static_cast<const uint32_t*>(to);
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

// Multiplies `count` rows with one panel. `next` is the panel to prefetch, or null.
template <class T, class O>
void multiply_rows(Panel panel, const T* x, long count, O* out, long out_stride, const uint8_t* next,
                   Fetch* meanwhile) {
  // Groups of rows: of nearly equal size, or by tiles 16, which expand the codes for all others, and 32 at a time.
  constexpr bool kByTiles = kTiles && sizeof(T) == 2;
  constexpr long kMost = kByTiles ? kMostTileRows : kRows, kFirst = kByTiles ? kTileRows : kRows;
  const long groups = (count + kMost - kFirst + kMost - 1) / kMost;
  const auto first = [&](long g) {
    return kByTiles ? (g ? std::min(count, kFirst + (g - 1) * kMost) : 0) : count * g / groups;
  };
  const long steps = panel.in / 4, bytes = steps * kStep;
  if (groups > 1) panel.kept = reinterpret_cast<uint32_t*>(scratch(2 * bytes));
  for (long g = 0; g < groups; ++g) {
    const long row = first(g), rows = first(g + 1) - row;
    Ahead ahead;
    const auto prefetch = [&](const uint8_t* from, long begin, long end) {
      const auto* base = reinterpret_cast<const char*>(from);
      ahead = {base + begin, base + end, static_cast<int>(((end - begin) / 64 + steps - 1) / steps), {}};
    };
    if (next) prefetch(next, bytes * g / groups / 64 * 64, bytes * (g + 1) / groups);
    if (groups == 1) prefetch(panel.codes + kAhead, 0, bytes);
    if (meanwhile && g > 0) ahead.extra = meanwhile->take(steps);
    const T* x_row = x + row * panel.in;
    O* out_row = out + row * out_stride;
    if constexpr (kByTiles) {
      multiply_by_tiles(panel, x_row, static_cast<int>(rows), out_row, out_stride, ahead);
    } else {
      with_rows(rows, [&](auto r) {
        const auto multiply = panel.is_kept ? multiply_panel<true, r(), T, O> : multiply_panel<false, r(), T, O>;
        multiply(panel, x_row, out_row, out_stride, ahead);
      });
    }
    panel.is_kept = panel.kept != nullptr;
  }
}

template <class T, class O>
void multiply_all(const PackedLinear& l, const T* x, O* out, long rows, int threads, Fetch* meanwhile) {
  constexpr long kOneThreadWork = 900000;  // as in linear.cpp: with less, waking a thread does not pay
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
      const Panel panel = {f.packed + number * bytes, scales, bias, nullptr, false, l.in, f.block, outs};
      const uint8_t* following = next < panels && end - begin > kRows ? f.packed + next * bytes : nullptr;
      multiply_rows(panel, x + begin * l.in, end - begin, out + begin * l.outs + first, l.outs, following, meanwhile);
    });
  });
}

template <class T>
void apply(const PackedLinear& l, const T* x, void* out, long rows, int threads, Fetch* meanwhile) {
  if (l.wide) return multiply_all(l, x, static_cast<float*>(out), rows, threads, meanwhile);
  multiply_all(l, x, static_cast<T*>(out), rows, threads, meanwhile);
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void float8_linear_##suffix(const PackedLinear* linear, const T* x, void* out, long rows, int threads,      \
                                       Fetch* meanwhile) {                                                             \
    apply(*linear, x, out, rows, threads, meanwhile);                                                                  \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)

// Packs codes [outs][in] to [outs / 64, rounded up][in / 4][64 words]; missing outputs become 0.
EXPORTED void pack_float8(const uint8_t* codes, uint8_t* packed, int in, int outs, int threads) {
  constexpr int kByte[4] = {1, 3, 0, 2};  // of a word, for each of four inputs
  parallel_for(threads, (outs + kPanel - 1) / kPanel, [&](long panel) {
    uint8_t* to = packed + panel * (in / 4) * kStep;
    for (int i = 0; i < in; ++i)
      for (long o = 0; o < kPanel; ++o) {
        const long out = panel * kPanel + o;
        to[i / 4 * kStep + o * 4 + kByte[i % 4]] = out < outs ? codes[out * in + i] : 0;
      }
  });
}
