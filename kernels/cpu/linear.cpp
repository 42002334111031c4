// x @ weight.T + bias in bfloat16, for any number of rows: each output sums its products in order, over the whole of
// in_features, in one float32 register, so a row's bits are the same in every batch. The weight is packed once as
// [out / 64][in / 2][64][2]: one stream of memory per panel of 64 outputs, the last panel filled up with zeros.
//
// Few rows: the weight streams through once and memory is the limit. Many rows: a panel stays in L2 while the rows
// pass it, six at a time, in 24 accumulators.
#include "kernels.h"

namespace {

constexpr int kPanel = 64;
constexpr int kPanelColumns = kPanel / 16;
constexpr long kRowBlock = 192;

struct Linear {
  const bf16 *x, *bias;  // bias may be null
  const uint32_t* weight;
  bf16* out;
  int in, outs;
};

template <int R>
void multiply_block(const Linear& l, long row, long panel) {
  constexpr int C = kPanelColumns;
  const int steps = l.in / 2;
  const uint32_t *rows[R], *columns[C];
  Vec acc[R][C];
  for (int c = 0; c < C; ++c) columns[c] = l.weight + panel * steps * kPanel + c * 16;
  for (int r = 0; r < R; ++r) {
    rows[r] = reinterpret_cast<const uint32_t*>(l.x + (row + r) * l.in);
    // The lines of `out` are fetched while the sums are made: stores that miss would hold up the next block.
    __builtin_prefetch(l.out + (row + r) * l.outs + panel * kPanel, 1);
    __builtin_prefetch(l.out + (row + r) * l.outs + panel * kPanel + 32, 1);
    for (int c = 0; c < C; ++c) acc[r][c] = vset(0.0f);
  }
  multiply<bf16, R, C>(acc, rows, columns, kPanel, steps);
  for (int c = 0; c < C; ++c) {
    const long at = panel * kPanel + c * 16;
    const int left = l.outs - at;
    if (left <= 0) break;
    const Vec bias = l.bias ? vload_first(l.bias + at, left) : vset(0.0f);
    for (int r = 0; r < R; ++r) vstore_first(l.out + (row + r) * l.outs + at, vadd(acc[r][c], bias), left);
  }
}

template <int R = kRows>
INLINE void multiply_rows(const Linear& l, long row, long count, long panel) {
  if constexpr (R == 1) {
    multiply_block<1>(l, row, panel);
  } else {
    if (count == R) return multiply_block<R>(l, row, panel);
    multiply_rows<R - 1>(l, row, count, panel);
  }
}

}  // namespace

// weight [outs, in], `in` even, to packed [outs rounded up to 64, in].
EXPORTED void pack_linear_bf16(const bf16* weight, bf16* packed, int in, int outs, int threads) {
  constexpr int kTogether = 16;  // words of a row: a line read at once, a few lines written in turn
  const auto* from = reinterpret_cast<const uint32_t*>(weight);
  auto* to = reinterpret_cast<uint32_t*>(packed);
  const int steps = in / 2;
  parallel_for(threads, (outs + kPanel - 1) / kPanel, [&](long panel) {
    for (int s = 0; s < steps; s += kTogether)
      for (long o = 0; o < kPanel; ++o)
        for (int i = s; i < s + kTogether && i < steps; ++i) {
          const long out = panel * kPanel + o;
          to[(panel * steps + i) * kPanel + o] = out < outs ? from[out * steps + i] : 0;
        }
  });
}

EXPORTED void linear_bf16(const bf16* x, const bf16* packed, const bf16* bias, bf16* out, long rows, int in, int outs,
                          int threads) {
  constexpr long kSmall = 1 << 17;  // multiply-adds below which waking threads costs more than it brings
  const Linear l = {x, bias, reinterpret_cast<const uint32_t*>(packed), out, in, outs};
  const long panels = (outs + kPanel - 1) / kPanel, blocks = (rows + kRowBlock - 1) / kRowBlock;
  if (rows * in * outs < kSmall) threads = 1;
  parallel_for(threads, panels * blocks, [&](long i) {
    const long block = i / panels, begin = rows * block / blocks, count = rows * (block + 1) / blocks - begin;
    const long groups = (count + kRows - 1) / kRows;  // nearly equal ones: 8 rows are 4 + 4
    for (long g = 0; g < groups; ++g) {
      const long row = count * g / groups;
      multiply_rows(l, begin + row, count * (g + 1) / groups - row, i % panels);
    }
  });
}
