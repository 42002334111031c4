// A thread pool in which a call never waits for a thread that has taken no work. With OpenMP, every thread must arrive
// at the end of a parallel region. On a machine that also runs other programs, each of a step's hundreds of regions
// then waits for a thread that the system has not scheduled, and a step takes fifty times as long. Here the threads
// that happen to run take the work items, and the caller waits only for items that another thread has begun.
#include "kernels.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

// What a spinning thread does between two checks, so that its core's other hyperthread or another process can proceed.
INLINE void relax(int spins) {
  if (spins % 64 == 63) return std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

class Pool {
 public:
  void run(int threads, long items, void (*work)(const void*, long), const void* context) {
    std::unique_lock<std::mutex> one(caller_, std::try_to_lock);
    if (!one.owns_lock()) {  // another thread's call uses the pool
      for (long i = 0; i < items; ++i) work(context, i);
      return;
    }
    grow(threads - 1);
    work_ = work;
    context_ = context;
    threads_ = threads;
    while (static_cast<int>(shares_.size()) < threads) shares_.emplace_back();
    for (int t = 0; t < threads; ++t) {
      shares_[t].end = items * (t + 1) / threads;
      shares_[t].next.store(items * t / threads);
    }
    open_.store(true);  // from here on helpers may take items
    calls_.fetch_add(1);
    if (sleepers_.load() > 0) {
      {
        const std::lock_guard<std::mutex> lock(sleep_);
      }
      wake_.notify_all();
    }
    take(0);
    open_.store(false);  // from here on no further helper starts
    // When the caller slept here after some 15 microseconds, to leave its core to a suspended helper, 8 streams became
    // a tenth slower.
    for (int spins = 0; inside_.load() > 0; ++spins) relax(spins);
  }

 private:
  static constexpr int kSpins = 4000;          // some 100 microseconds, longer than the pause between calls of a step
  static constexpr long kRetryCalls = 100000;  // after a failure to start a thread, calls until the next attempt

  // Each thread has a share of consecutive items, so that it reads memory as one stream. A thread that has finished its
  // share takes items from the others' shares.
  void take(int me) {
    for (int t = 0; t < threads_; ++t) {
      Share& share = shares_[(me + t) % threads_];
      while (share.next.load() < share.end) {
        const long i = share.next.fetch_add(1);
        if (i < share.end) work_(context_, i);
      }
    }
  }

  // Starts threads until there are `helpers`. If the system allows no more, the existing ones do the work, and the next
  // attempt is many calls later.
  void grow(int helpers) {
    if (started_ >= helpers || calls_.load() < next_attempt_) return;
    try {
      for (; started_ < helpers; ++started_) std::thread([this, me = started_ + 1] { help(me); }).detach();
    } catch (const std::system_error&) {
      next_attempt_ = calls_.load() + kRetryCalls;
    }
  }

  void help(int me) {
    const TilesOfCall all;  // tiles keep their shapes from one call to the next, until this thread sleeps
    long seen = 0;
    for (;;) {
      seen = await(seen);
      inside_.fetch_add(1);
      if (open_.load() && me < threads_) take(me);
      inside_.fetch_sub(1);
    }
  }

  // Waits for a call after number `seen`, first spinning and then asleep. Returns the number of calls so far.
  long await(long seen) {
    for (int spins = 0; spins < kSpins; ++spins) {
      const long calls = calls_.load();
      if (calls != seen) return calls;
      relax(spins);
    }
    if constexpr (kTiles) release_tiles();
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return calls_.load() != seen; });
    sleepers_.fetch_sub(1);
    return calls_.load();
  }

  // The current call. Only the caller writes these, while no helper is working.
  void (*work_)(const void*, long) = nullptr;
  const void* context_ = nullptr;
  int threads_ = 0;

  struct alignas(64) Share {
    std::atomic<long> next{0};
    long end = 0;
  };
  std::deque<Share> shares_;
  alignas(64) std::atomic<long> calls_{0};
  std::atomic<bool> open_{false};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<int> sleepers_{0};
  std::mutex caller_, sleep_;
  std::condition_variable wake_;
  int started_ = 0;
  long next_attempt_ = 0;
};

}  // namespace

void run_parallel(int threads, long items, void (*work)(const void*, long), const void* context) {
  static Pool* pool = new Pool;  // never destroyed, because its threads end with the process
  pool->run(threads, items, work, context);
}
