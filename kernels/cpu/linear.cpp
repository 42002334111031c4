// x @ weight.T + bias for any number of rows: each output sums its products in order, over the whole of in_features, in
// one float32 register, so a row's bits are the same in every batch. The weight is packed once as [out / 64][words of a
// row][64 words]: one stream of memory per panel of 64 outputs, the last panel filled up with zeros.
//
// Few rows: the weight streams through once and memory is the limit. Many rows: a panel stays in L2 while the rows
// pass it, six at a time, in 24 accumulators.
#include "kernels.h"

namespace {

constexpr int kPanel = 64;
constexpr int kPanelColumns = kPanel / 16;
constexpr long kRowBlock = 192;

// O is T, or float where the result is wanted as it was summed (logits).
template <class T, class O>
struct Linear {
  const T *x, *bias;  // bias may be null
  const uint32_t* weight;
  O* out;
  int in, outs;
};

// R rows by C columns of 16 outputs, from `column` on.
template <class T, int R, int C, class O>
INLINE void multiply_block(const Linear<T, O>& l, long row, long column) {
  static_assert(kPanelColumns % C == 0);
  const long panel = column / kPanelColumns;
  const int steps = l.in / kPack<T>;
  const uint32_t *rows[R], *columns[C];
  Vec acc[R][C];
  for (int c = 0; c < C; ++c)
    columns[c] = l.weight + panel * steps * kPanel + (column % kPanelColumns + c) * 16;
  for (int r = 0; r < R; ++r) {
    rows[r] = reinterpret_cast<const uint32_t*>(l.x + (row + r) * l.in);
    // The lines of `out` are fetched while the sums are made: stores that miss would hold up the next block.
    for (int c = 0; c < C; c += kPack<O>) __builtin_prefetch(l.out + (row + r) * l.outs + (column + c) * 16, 1);
    for (int c = 0; c < C; ++c) acc[r][c] = vset(0.0f);
  }
  multiply<T, R, C>(acc, rows, columns, kPanel, steps);
  for (int c = 0; c < C; ++c) {
    const long at = (column + c) * 16;
    const int left = static_cast<int>(l.outs - at < 16 ? l.outs - at : 16);
    if (left <= 0) break;
    const Vec bias = l.bias ? vload_first(l.bias + at, left) : vset(0.0f);
    for (int r = 0; r < R; ++r) vstore_first(l.out + (row + r) * l.outs + at, vadd(acc[r][c], bias), left);
  }
}

template <class T, int R, class O>
void multiply_panel(const Linear<T, O>& l, long row, long panel) {
  for (long column = 0; column < kPanelColumns; column += kColumns<R>)
    multiply_block<T, R, kColumns<R>>(l, row, panel * kPanelColumns + column);
}

template <class T, class O, int R = kRows>
INLINE void multiply_rows(const Linear<T, O>& l, long row, long count, long panel) {
  if constexpr (R == 1) {
    multiply_panel<T, 1>(l, row, panel);
  } else {
    if (count == R) return multiply_panel<T, R>(l, row, panel);
    multiply_rows<T, O, R - 1>(l, row, count, panel);
  }
}

template <class T, class O>
void multiply_all(const Linear<T, O>& l, long rows, int threads) {
  constexpr long kSmall = 900000;  // about 7 microseconds: waking threads takes 3
  const long panels = (l.outs + kPanel - 1) / kPanel, blocks = (rows + kRowBlock - 1) / kRowBlock;
  if ((rows + static_cast<long>(sizeof(T))) * l.in * l.outs < kSmall) threads = 1;
  parallel_for(threads, panels * blocks, [&](long i) {
    const long block = i / panels, begin = rows * block / blocks, count = rows * (block + 1) / blocks - begin;
    const long groups = (count + kRows - 1) / kRows;  // nearly equal ones: 8 rows are 4 + 4
    for (long g = 0; g < groups; ++g) {
      const long row = count * g / groups;
      multiply_rows(l, begin + row, count * (g + 1) / groups - row, i % panels);
    }
  });
}

// weight [outs, in] to packed [outs rounded up to 64, in]; a row is a whole number of words.
template <class T>
void pack(const T* weight, T* packed, int in, int outs, int threads) {
  constexpr int kTogether = 16;  // words of a row: a line read at once, a few lines written in turn
  const auto* from = reinterpret_cast<const uint32_t*>(weight);
  auto* to = reinterpret_cast<uint32_t*>(packed);
  const int steps = in / kPack<T>;
  parallel_for(threads, (outs + kPanel - 1) / kPanel, [&](long panel) {
    for (int s = 0; s < steps; s += kTogether)
      for (long o = 0; o < kPanel; ++o)
        for (int i = s; i < s + kTogether && i < steps; ++i) {
          const long out = panel * kPanel + o;
          to[(panel * steps + i) * kPanel + o] = out < outs ? from[out * steps + i] : 0;
        }
  });
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void pack_linear_##suffix(const T* weight, T* packed, int in, int outs, int threads) {                      \
    pack(weight, packed, in, outs, threads);                                                                           \
  }                                                                                                                    \
  EXPORTED void linear_##suffix(const T* x, const T* packed, const T* bias, T* out, long rows, int in, int outs,       \
                                int threads) {                                                                         \
    multiply_all<T, T>({x, bias, reinterpret_cast<const uint32_t*>(packed), out, in, outs}, rows, threads);            \
  }                                                                                                                    \
  EXPORTED void linear_wide_##suffix(const T* x, const T* packed, const T* bias, float* out, long rows, int in,        \
                                     int outs, int threads) {                                                          \
    multiply_all<T, float>({x, bias, reinterpret_cast<const uint32_t*>(packed), out, in, outs}, rows, threads);        \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
