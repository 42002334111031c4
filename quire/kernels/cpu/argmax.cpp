// Greedy sampling: the index of the first largest value in each row of logits.
#include "kernels.h"

namespace {

constexpr long kStretch = 512;

float largest(const float* x, long size) {
  float best = x[0];
  long i = 0;
  if (size >= 16) {
    Vec most = vload(x);
    for (i = 16; i + 16 <= size; i += 16) most = vmax(most, vload(x + i));
    float lanes[16];
    vstore(lanes, most);
    for (const float lane : lanes) best = lane > best ? lane : best;
  }
  for (; i < size; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

}  // namespace

EXPORTED void argmax_f32(const float* x, int64_t* out, long rows, long size, int threads) {
  parallel_rows(threads, rows, rows * size / 2, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      const float* row = x + r * size;
      float best = row[0];
      long block = 0;
      for (long i = 0; i < size; i += kStretch) {
        const float most = largest(row + i, size - i < kStretch ? size - i : kStretch);
        if (most > best) best = most, block = i;
      }
      long at = block;
      while (at + 1 < size && row[at] != best) ++at;  // finds `best` in its stretch, unless a value is NaN
      out[r] = at;
    }
  });
}
