// Memory that will be wanted soon, in pieces that lie anywhere, brought into the caches by threads that multiply
// meanwhile: multiplying many rows leaves memory idle, and what comes after, attention, waits for memory most.
#pragma once

#include <atomic>
#include <vector>

class Fetch {
 public:
  // Some of the lines: one with each step, until there are none.
  struct Lines {
    const char *const *piece = nullptr, *const *last = nullptr;
    long offset = 0, bytes = 0;

    __attribute__((always_inline)) void step() {
      if (piece == last) return;
      __builtin_prefetch(*piece + offset, 0, 2);
      offset += 64;
      if (offset < bytes) return;
      offset = 0;
      ++piece;
    }
  };

  // Pieces of `bytes` each are to come; nobody takes any meanwhile.
  void start(long bytes) {
    bytes_ = bytes;
    pieces_.clear();
    next_.store(0);
  }
  void add(const void* piece) { pieces_.push_back(static_cast<const char*>(piece)); }

  long size() const { return static_cast<long>(pieces_.size()); }

  // Whole pieces that nobody else takes, as many as can be fetched in `steps` steps.
  Lines take(long steps) {
    const long some = steps * 64 / bytes_;
    const long begin = next_.load() < size() ? next_.fetch_add(some) : size(), end = begin + some;
    if (begin >= size()) return {};
    return {pieces_.data() + begin, pieces_.data() + (end < size() ? end : size()), 0, bytes_};
  }

 private:
  std::vector<const char*> pieces_;
  long bytes_ = 64;
  std::atomic<long> next_{0};
};
