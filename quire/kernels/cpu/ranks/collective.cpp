// Collectives of the ranks of one model. Each has a part of every layer (engine/layers/shard.py), and their partial
// results are summed, or put side by side, through memory that all of them have mapped.
//
// A rank writes its part to its own buffer and raises its count of steps. It reads the others' parts once their counts
// are as high. Each rank has two buffers, used in turns. A rank that has waited in a step has seen all others begin the
// step. They have thus read all of the step before, whose buffers the next step overwrites. One wait per step is
// enough.
#include "exchange.h"

#include <atomic>
#include <cstring>
#include <thread>

#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <ctime>
#endif

namespace {

constexpr long kLine = 64, kHeader = 8192;
constexpr long kWaitNanoseconds = 100'000'000;  // between two checks that the others still exist

// One rank's count, in its own cache line. The first line of the memory has only `closed`.
struct alignas(kLine) Place {
  std::atomic<uint32_t> steps, sleepers, closed;
};
static_assert(sizeof(Place) == kLine && std::atomic<uint32_t>::is_always_lock_free);

Place* place(const Collective& group, int rank) { return reinterpret_cast<Place*>(group.memory + kLine * (1 + rank)); }

#ifdef __linux__
// Not a private futex, because the waiters are other processes.
void sleep_while(std::atomic<uint32_t>& value, uint32_t seen) {
  const timespec longest{0, kWaitNanoseconds};
  syscall(SYS_futex, &value, FUTEX_WAIT, seen, &longest, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& value) { syscall(SYS_futex, &value, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }
#else
void sleep_while(std::atomic<uint32_t>&, uint32_t) { usleep(50); }
void wake_all(std::atomic<uint32_t>&) {}
#endif

// True if a rank has ended. The first rank closes the memory when another ends, and is the parent of all others.
bool gone(const Collective& group) {
  return reinterpret_cast<Place*>(group.memory)->closed.load() || (group.parent && getppid() != group.parent);
}

// Waits until `other` has begun this step. After `looks` at its count it sleeps. False if a rank has ended.
bool await(const Collective& group, Place& other, int looks) {
  for (int spins = 0;; ++spins) {
    const uint32_t steps = other.steps.load();
    if (static_cast<int32_t>(steps - group.steps) >= 0) return true;
    if (spins < looks) {
      if (spins % 64 == 63) std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    if (gone(group)) return false;
    other.sleepers.fetch_add(1);
    sleep_while(other.steps, steps);  // returns at once if the count has been raised meanwhile
    other.sleepers.fetch_sub(1);
  }
}

}  // namespace

char* rank_buffer(const Collective& group, int rank) {
  return group.memory + kHeader + group.capacity * (2 * rank + (group.steps & 1));
}

bool exchange(Collective& group, int looks) {
  Place& own = *place(group, group.rank);
  own.steps.store(group.steps);
  if (own.sleepers.load() > 0) wake_all(own.steps);
  for (int rank = 0; rank < group.count; ++rank)
    if (rank != group.rank && !await(group, *place(group, rank), looks)) return false;
  return true;
}

namespace {

// x = the sum of all ranks' x, added in the order of the ranks in float32 and rounded once, so that all have the same
// bits in every batch. Returns 1 if a rank has ended, else 0.
template <class T>
int sum_ranks(Collective& group, T* x, long size, int threads) {
  const long most = group.capacity / static_cast<long>(sizeof(T)), lines = 64;
  for (long begin = 0; begin < size; begin += most) {
    const long n = size - begin < most ? size - begin : most;
    ++group.steps;
    std::memcpy(rank_buffer(group, group.rank), x + begin, n * sizeof(T));
    if (!exchange(group, group.spins)) return 1;
    parallel_rows(threads, (n + lines - 1) / lines, n, [&](long first, long last) {
      const long end = last * lines < n ? last * lines : n;
      for (long i = first * lines; i < end; i += 16) {
        Vec sum = vload_first(reinterpret_cast<const T*>(rank_buffer(group, 0)) + i, end - i);
        for (int rank = 1; rank < group.count; ++rank)
          sum = vadd(sum, vload_first(reinterpret_cast<const T*>(rank_buffer(group, rank)) + i, end - i));
        vstore_first(x + begin + i, sum, end - i);
      }
    });
  }
  return 0;
}

}  // namespace

int sum_ranks_f32(Collective* group, float* x, long size, int threads) { return sum_ranks(*group, x, size, threads); }
int sum_ranks_bf16(Collective* group, bf16* x, long size, int threads) { return sum_ranks(*group, x, size, threads); }

// x [size] bytes = the first rank's x. Returns 1 if a rank has ended, else 0. Waiting ranks sleep at once, because the
// first rank computes something meanwhile that the others do not.
int share_rank(Collective* group, char* x, long size) {
  for (long begin = 0; begin < size; begin += group->capacity) {
    const long n = size - begin < group->capacity ? size - begin : group->capacity;
    ++group->steps;
    if (!group->rank) std::memcpy(rank_buffer(*group, 0), x + begin, n);
    if (!exchange(*group, 0)) return 1;
    if (group->rank) std::memcpy(x + begin, rank_buffer(*group, 0), n);
  }
  return 0;
}

// Puts the ranks' columns side by side: own [rows, starts[rank + 1] - starts[rank]] float32 to out [rows,
// starts[count]], unless null. Returns 1 if a rank has ended, else 0. A buffer must have room for a row of the widest
// rank.
int gather_ranks(Collective* group, const float* own, float* out, long rows, const int64_t* starts) {
  const auto width = [&](int rank) { return starts[rank + 1] - starts[rank]; };
  long widest = 1;
  for (int rank = 0; rank < group->count; ++rank) widest = width(rank) > widest ? width(rank) : widest;
  const long item = sizeof(float), most = group->capacity / (widest * item), mine = width(group->rank);
  for (long begin = 0; begin < rows; begin += most) {
    const long n = rows - begin < most ? rows - begin : most;
    ++group->steps;
    if (mine) std::memcpy(rank_buffer(*group, group->rank), own + begin * mine, n * mine * item);
    if (!exchange(*group, group->spins)) return 1;
    for (int rank = 0; out && rank < group->count; ++rank) {
      const auto* theirs = reinterpret_cast<const float*>(rank_buffer(*group, rank));
      for (long r = 0; r < n; ++r)
        std::memcpy(out + (begin + r) * starts[group->count] + starts[rank], theirs + r * width(rank),
                    width(rank) * item);
    }
  }
  return 0;
}
