// Loops that are divided among the threads of a pool (parallel.cpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "tiles/tiles.h"

void run_parallel(int threads, long items, void (*work)(const void*, long), const void* context);

// Calls work(i) for each i below `items`, on up to `threads` threads. A free thread takes the next item.
template <class Work>
void parallel_for(int threads, long items, const Work& work) {
  const TilesOfCall call;
  if (threads <= 1 || items <= 1) {
    for (long i = 0; i < items; ++i) work(i);
    return;
  }
  run_parallel(threads, items, [](const void* context, long i) { (*static_cast<const Work*>(context))(i); }, &work);
}

// Calls work(begin, end) for rows [0, rows): once, or for a few equal parts if their `cost` pays for waking threads,
// which takes 3 microseconds. One unit of cost is an element of RMSNorm. A thread computes some 15,000 of these per
// microsecond.
template <class Work>
void parallel_rows(int threads, long rows, long cost, const Work& work) {
  constexpr long kWorthwhile = 100000;
  if (threads <= 1 || rows <= 1 || cost < kWorthwhile) return work(0L, rows);
  const long pieces = rows < 2L * threads ? rows : 2L * threads;
  parallel_for(threads, pieces, [&](long i) { work(rows * i / pieces, rows * (i + 1) / pieces); });
}

// Scratch memory of the calling thread, aligned to 64 bytes. It grows as needed and is never cleared.
INLINE char* scratch(size_t bytes) {
  static thread_local std::vector<char> memory;
  if (memory.size() < bytes + 64) memory.resize(bytes + 64);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64;
}
