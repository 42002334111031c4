// Rows of x in the form in which linears multiply them.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "fetch.h"
#include "panels.h"

// Floats if no instruction multiplies pairs of bfloat16, which would otherwise be converted again for each panel.
template <class T>
using Row = std::conditional_t<kHalvesApart, float, T>;

// Calls work(begin, end) for parts of the rows, one after the other. A part's temporary data, `bytes` per row, takes at
// most 8 MB, unless one block of rows takes more. A panel is read again for each block in any case.
template <class Work>
void in_parts(long rows, long bytes, const Work& work) {
  constexpr long kMost = 8L << 20;
  const long most = kRowBlock * std::max(1L, kMost / (kRowBlock * bytes)), parts = (rows + most - 1) / most;
  for (long p = 0; p < parts; ++p) work(rows * p / parts, rows * (p + 1) / parts);
}

// Calls work(x, begin, count) with the converted rows, some at a time.
template <class T, class Work>
void with_converted(const T* x, long rows, int in, int threads, const Work& work) {
  if constexpr (std::is_same_v<Row<T>, T>) {
    work(x, 0L, rows);
  } else {
    static thread_local std::vector<float> floats;  // grows to the needs of the largest call and is never freed
    in_parts(rows, 4L * in, [&](long begin, long end) {
      const long size = (end - begin) * in;
      if (static_cast<long>(floats.size()) < size) floats.resize(size);
      const T* from = x + begin * in;
      float* to = floats.data();
      parallel_rows(threads, size, size, [&](long first, long last) {
        for (long i = first; i < last; i += 16) {
          const int n = last - i < 16 ? static_cast<int>(last - i) : 16;
          vstore_first(to + i, vload_first(from + i, n), n);
        }
      });
      work(to, begin, end - begin);
    });
  }
}

// What to prefetch into L2 while a group of rows is multiplied: `lines` cache lines of each step of the next panel, and
// the lines of `extra`.
struct Prefetch {
  const char* from = nullptr;
  int lines = 0, stride = 0;
  mutable Fetch::Lines extra = {};

  __attribute__((always_inline)) void operator()(long step) const {
    extra.step();
    for (int i = 0; i < lines; ++i) __builtin_prefetch(from + step * stride + 64 * i, 0, 2);
  }
  // What to prefetch in the i-th of n passes.
  Prefetch part(int i, int n) const {
    const int first = lines * i / n;
    return {from + 64 * first, lines * (i + 1) / n - first, stride, i == 0 ? extra : Fetch::Lines()};
  }
};
