// Work over the threads of a pool (parallel.cpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

void run_parallel(int threads, long items, void (*work)(const void*, long), const void* context);

// work(i) for each i below `items`, on up to `threads` threads, whoever is free next.
template <class Work>
void parallel_for(int threads, long items, const Work& work) {
  if (threads <= 1 || items <= 1) {
    for (long i = 0; i < items; ++i) work(i);
    return;
  }
  run_parallel(
      threads, items, [](const void* context, long i) { (*static_cast<const Work*>(context))(i); }, &work);
}

// Rows [0, rows) in one go, or in a few even pieces if their `cost` pays for waking threads: 3 microseconds, and one
// thread norms some 15,000 elements in one.
template <class Work>
void parallel_rows(int threads, long rows, long cost, const Work& work) {
  constexpr long kWorthwhile = 100000;
  if (threads <= 1 || rows <= 1 || cost < kWorthwhile) return work(0L, rows);
  const long pieces = rows < 2L * threads ? rows : 2L * threads;
  parallel_for(threads, pieces, [&](long i) { work(rows * i / pieces, rows * (i + 1) / pieces); });
}

// Scratch memory of a thread: grows, is never cleared, and holds whatever the last user left.
INLINE char* scratch(size_t bytes) {
  static thread_local std::vector<char> memory;
  if (memory.size() < bytes + 64) memory.resize(bytes + 64);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64;
}
