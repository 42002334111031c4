// A pool of threads that waits for nobody who has nothing to do. Under OpenMP every thread must arrive at the end of a
// region: on a machine that is busy otherwise, each of the hundreds of regions of a step then waits for a thread that
// the system has not even scheduled, and a step takes fifty times as long. Here whoever is running takes the pieces, and
// a caller waits only for pieces that somebody has begun.
#include "kernels.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

// What a spinning thread does between looks, so that its core's other half, or another process, gets on.
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
    if (!one.owns_lock()) {  // somebody else's call is under way
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
    open_.store(true);  // from here on helpers may come in
    calls_.fetch_add(1);
    if (sleepers_.load() > 0) {
      { const std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    take(0);
    open_.store(false);  // and from here on no more do
    // Sleeping here after some 15 microseconds, to leave a helper that was put aside a core, cost a tenth at 8 streams.
    for (int spins = 0; inside_.load() > 0; ++spins) relax(spins);
  }

 private:
  static constexpr int kSpins = 4000;  // some 100 microseconds: longer than from one call of a step to the next
  static constexpr long kPatience = 100000;

  // A thread's share is a run of items, so that its memory is one stream; whoever is done with his helps the others.
  void take(int me) {
    for (int t = 0; t < threads_; ++t) {
      Share& share = shares_[(me + t) % threads_];
      while (share.next.load() < share.end) {
        const long i = share.next.fetch_add(1);
        if (i < share.end) work_(context_, i);
      }
    }
  }

  // Where the system has no room for another thread those there are do the work; it is asked again many calls later.
  void grow(int helpers) {
    if (started_ >= helpers || calls_.load() < ask_again_) return;
    try {
      for (; started_ < helpers; ++started_) std::thread([this, me = started_ + 1] { help(me); }).detach();
    } catch (const std::system_error&) {
      ask_again_ = calls_.load() + kPatience;
    }
  }

  void help(int me) {
    long seen = 0;
    for (;;) {
      seen = await(seen);
      inside_.fetch_add(1);
      if (open_.load() && me < threads_) take(me);
      inside_.fetch_sub(1);
    }
  }

  // Waits for a call after the one last seen: first awake, then asleep.
  long await(long seen) {
    for (int spins = 0; spins < kSpins; ++spins) {
      const long calls = calls_.load();
      if (calls != seen) return calls;
      relax(spins);
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return calls_.load() != seen; });
    sleepers_.fetch_sub(1);
    return calls_.load();
  }

  // Of the call under way; written by the caller alone, while no helper is inside.
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
  long ask_again_ = 0;
};

}  // namespace

void run_parallel(int threads, long items, void (*work)(const void*, long), const void* context) {
  static Pool* pool = new Pool;  // never destroyed: its threads end with the process
  pool->run(threads, items, work, context);
}
