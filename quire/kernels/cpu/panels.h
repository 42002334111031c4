// How a weight is divided into panels of 64 outputs, and how panels and rows are divided among threads.
#pragma once

#include <type_traits>

constexpr int kPanel = 64;
constexpr int kPanelColumns = kPanel / 16;
constexpr long kRowBlock = 192;

// Calls work with `count`, 1 to kRows, as a compile-time constant.
template <int R = kRows, class Work>
INLINE void with_rows(long count, const Work& work) {
  if constexpr (R > 1)
    if (count < R) return with_rows<R - 1>(count, work);
  work(std::integral_constant<int, R>());
}

// Divides panels and rows into work items for `threads` threads. If the panels cannot be divided evenly (`even`), each
// thread gets the same number of whole panels, and the remaining panels are divided among all threads by rows.
struct Shares {
  long rows, panels, threads;
  long row_block = kRowBlock, least_rows = 4;  // rows that a thread gets of a divided panel
  long blocks = (rows + row_block - 1) / row_block;
  bool even = blocks == 1 && panels >= threads && panels % threads && rows >= least_rows * threads;
  long whole = panels / threads, cut = panels % threads;

  long items() const { return even ? (whole + cut) * threads : panels * blocks; }

  // Runs item i: calls work(panel, first row, one past the last row, the panel that this thread needs next or, if there
  // is none, the number of panels).
  template <class Work>
  void run(long i, const Work& work) const {
    if (!even) return work(i % panels, rows * (i / panels) / blocks, rows * (i / panels + 1) / blocks, i % panels + 1);
    const long share = i / (whole + cut), at = i % (whole + cut);
    const auto panel = [&](long k) { return k < whole ? share * whole + k : threads * whole + k - whole; };
    if (at < whole) return work(panel(at), 0L, rows, panel(at + 1));
    work(panel(at), rows * share / threads, rows * (share + 1) / threads, panel(at) + 1);
  }
};
