// A list of memory regions that will be read soon, which threads prefetch into the caches while they multiply.
// Multiplying many rows leaves the memory bus idle, and attention, which follows it, waits mostly for memory.
#pragma once

#include <atomic>
#include <vector>

class Fetch {
 public:
  // The cache lines of some regions. Each step() prefetches the next one, until none is left.
  struct Lines {
    const char *const *region = nullptr, *const *last = nullptr;
    long offset = 0, bytes = 0;

    __attribute__((always_inline)) void step() {
      if (region == last) return;
      __builtin_prefetch(*region + offset, 0, 2);
      offset += 64;
      if (offset < bytes) return;
      offset = 0;
      ++region;
    }
  };

  // Start a new list, of regions of `bytes` each. No thread may call `take` before all regions are added.
  void start(long bytes) {
    bytes_ = bytes;
    regions_.clear();
    next_.store(0);
  }
  void add(const void* region) { regions_.push_back(static_cast<const char*>(region)); }

  long size() const { return static_cast<long>(regions_.size()); }

  // Take regions that no other thread gets, as many as `steps` calls of Lines::step can prefetch.
  Lines take(long steps) {
    const long some = steps * 64 / bytes_;
    const long begin = next_.load() < size() ? next_.fetch_add(some) : size(), end = begin + some;
    if (begin >= size()) return {};
    return {regions_.data() + begin, regions_.data() + (end < size() ? end : size()), 0, bytes_};
  }

 private:
  std::vector<const char*> regions_;
  long bytes_ = 64;
  std::atomic<long> next_{0};
};
