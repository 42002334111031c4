// Adds the deltas of rows' adapters (Hu et al., 2021) to a linear's outputs: out += up @ (down @ x). Rows of one
// adapter are computed four at a time, or sixteen by matrix tiles (tiles/lora_tiles.h), so its weights are read once
// for them. Many adapters may share a batch, as in Punica (Chen et al., 2023). A row's sums are float32, each in one
// order of its own inputs, so they do not depend on the batch.
//
// Both matrices are packed as panels of 16 outputs, which are contiguous streams: `down` as [outputs / 16][words][16],
// words of inputs as in layout.h, `up` as [outputs / 16][inputs][16].
#include "kernels.h"

#include <type_traits>
#include <vector>

#include "tiles/lora_tiles.h"

namespace {

constexpr int kFew = 4;
template <class T>
constexpr bool kByTiles = kTiles && sizeof(T) == 2;
template <class T>
constexpr int kGroup = kByTiles<T> ? kTileRows : kFew;  // rows

// Rows of one adapter.
struct Group {
  const LoraAdapter* adapter;
  const int32_t* rows;
  int count;
};

constexpr int kAhead = 2560;  // bytes: memory answers in the time that multiplying this many takes

// acc[r] = sum over s of rows[r][s] * panel[s], word by word (layout.h): even and odd words separately, then together.
template <class T, int R>
INLINE void multiply_words(const uint32_t* const* rows, const uint32_t* panel, int steps, Vec (&acc)[R]) {
  Vec odd[R];
  for (int r = 0; r < R; ++r) acc[r] = odd[r] = vset(0.0f);
  int s = 0;
  for (; s + 2 <= steps; s += 2) {
    __builtin_prefetch(reinterpret_cast<const char*>(panel + s * 16) + kAhead);
    __builtin_prefetch(reinterpret_cast<const char*>(panel + s * 16) + kAhead + 64);
    const Words first = wload(panel + s * 16), second = wload(panel + s * 16 + 16);
    for (int r = 0; r < R; ++r) acc[r] = dot<T>(acc[r], first, wset(rows[r][s]));
    for (int r = 0; r < R; ++r) odd[r] = dot<T>(odd[r], second, wset(rows[r][s + 1]));
  }
  if (s < steps) {
    const Words last = wload(panel + s * 16);
    for (int r = 0; r < R; ++r) acc[r] = dot<T>(acc[r], last, wset(rows[r][s]));
  }
  for (int r = 0; r < R; ++r) acc[r] = vadd(acc[r], odd[r]);
}

// acc[r] = sum over i of rows[r][i] * panel[i], floats times numbers of type T.
template <class T, int R>
INLINE void multiply_floats(const float* const* rows, const T* panel, int n, Vec (&acc)[R]) {
  for (int r = 0; r < R; ++r) acc[r] = vset(0.0f);
  for (int i = 0; i < n; ++i) {
    const Vec column = vload(panel + i * 16);
    for (int r = 0; r < R; ++r) acc[r] = vfma(vset(rows[r][i]), column, acc[r]);
  }
}

template <class Work>
INLINE void with_count(int count, const Work& work) {
  switch (count) {
    case 1:
      return work(std::integral_constant<int, 1>());
    case 2:
      return work(std::integral_constant<int, 2>());
    case 3:
      return work(std::integral_constant<int, 3>());
    default:
      return work(std::integral_constant<int, kFew>());
  }
}

// Computes panels [begin, end) of down @ x, to middle [kGroup<T>][all panels * 16].
template <class T>
void shrink(const LoraLinear& l, const Group& group, const T* x, float* middle, int begin, int end) {
  const long width = static_cast<long>(group.adapter->panels) * 16;
  const uint32_t* down = static_cast<const uint32_t*>(group.adapter->down);
  const int steps = l.in / kPack<T>;
  if constexpr (kByTiles<T>) {
    const Gathered gathered(x, l.in, group.rows, group.count);
    shape_tiles(group.count, 0);
    for (int p = begin; p < end; ++p)
      shrink_panel(gathered, group.count, down + static_cast<long>(p) * steps * 16, steps, middle + p * 16, width,
                   kAhead);
    return;
  }
  const uint32_t* rows[kGroup<T>];
  for (int r = 0; r < group.count; ++r)
    rows[r] = reinterpret_cast<const uint32_t*>(x + static_cast<long>(group.rows[r]) * l.in);
  with_count(group.count, [&](auto count) {
    constexpr int R = count();
    for (int p = begin; p < end; ++p) {
      Vec acc[R];
      multiply_words<T, R>(rows, down + static_cast<long>(p) * steps * 16, steps, acc);
      for (int r = 0; r < R; ++r) vstore(middle + r * width + p * 16, acc[r]);
    }
  });
}

// Adds panels [begin, end) of a part's up @ middle to out, by matrix tiles.
template <class O>
void expand_by_tiles(const LoraLinear& l, const Group& group, const LoraPart& part, const float* middle, long width,
                     O* out, long begin, long end) {
  static thread_local std::vector<uint32_t> pairs;
  pairs.resize(group.count * (part.rank + 15L));
  split_floats(middle + part.first_rank, width, group.count, part.rank, pairs.data());
  shape_tiles(group.count, 0);
  for (long p = begin; p < end; ++p) {
    alignas(64) float sums[kTileNumbers];
    const bf16* up = static_cast<const bf16*>(part.up) + p * part.rank * 16;
    for (int i = 0; i < part.rank; i += 2) __builtin_prefetch(reinterpret_cast<const char*>(up + i * 16) + kAhead);
    expand_panel(pairs.data(), up, part.rank, sums);
    const int left = static_cast<int>(part.outs - p * 16);
    for (int r = 0; r < group.count; ++r) {
      O* at = out + static_cast<long>(group.rows[r]) * l.outs + part.first + p * 16;
      vstore_first(at, vadd(vload_first(at, left), vload(sums + r * 16)), left);
    }
  }
}

// Adds panels [panels * piece / pieces, panels * (piece + 1) / pieces) of each part's up @ middle to out.
template <class T, class O>
void expand(const LoraLinear& l, const Group& group, const float* middle, O* out, int piece, int pieces) {
  const long width = static_cast<long>(group.adapter->panels) * 16;
  if constexpr (kByTiles<T>) {
    for (int k = 0; k < group.adapter->count; ++k) {
      const LoraPart& part = group.adapter->parts[k];
      const long panels = (part.outs + 15) / 16;
      expand_by_tiles(l, group, part, middle, width, out, panels * piece / pieces, panels * (piece + 1) / pieces);
    }
    return;
  }
  with_count(group.count, [&](auto count) {
    constexpr int R = count();
    for (int k = 0; k < group.adapter->count; ++k) {
      const LoraPart& part = group.adapter->parts[k];
      const float* rows[R];
      for (int r = 0; r < R; ++r) rows[r] = middle + r * width + part.first_rank;
      const long panels = (part.outs + 15) / 16;
      for (long p = panels * piece / pieces; p < panels * (piece + 1) / pieces; ++p) {
        Vec acc[R];
        const T* up = static_cast<const T*>(part.up) + p * part.rank * 16;
        for (int i = 0; i < part.rank; i += 4 / static_cast<int>(sizeof(T)))
          __builtin_prefetch(reinterpret_cast<const char*>(up + i * 16) + kAhead);
        multiply_floats<T, R>(rows, up, part.rank, acc);
        const int left = static_cast<int>(part.outs - p * 16);
        for (int r = 0; r < R; ++r) {
          O* at = out + static_cast<long>(group.rows[r]) * l.outs + part.first + p * 16;
          vstore_first(at, vadd(vload_first(at, left), acc[r]), left);
        }
      }
    }
  });
}

// The rows that have adapters, by adapter and then in their order.
struct Groups {
  std::vector<int32_t> rows, ends;
  std::vector<Group> groups;
  int most_panels;

  void find(const LoraLinear& l, const int64_t* adapters, long count, int together) {
    const auto has = [&](long i) { return adapters[i] > 0 && adapters[i] <= l.slots; };
    ends.assign(l.slots + 1, 0);
    rows.resize(count);
    groups.clear();
    most_panels = 0;
    for (long i = 0; i < count; ++i)
      if (has(i)) ++ends[adapters[i]];
    for (int s = 1; s <= l.slots; ++s) ends[s] += ends[s - 1];
    for (long i = 0; i < count; ++i)
      if (has(i)) rows[ends[adapters[i] - 1]++] = static_cast<int32_t>(i);
    for (int s = 0, begin = 0; s < l.slots; begin = ends[s++]) {
      const LoraAdapter& adapter = l.adapters[s];
      if (adapter.count == 0) continue;
      if (ends[s] > begin && adapter.panels > most_panels) most_panels = adapter.panels;
      for (int i = begin; i < ends[s]; i += together)
        groups.push_back({&adapter, rows.data() + i, ends[s] - i < together ? ends[s] - i : together});
    }
  }
};

template <class T, class O>
void add(const LoraLinear& l, const int64_t* adapters, const T* x, O* out, long rows, int threads) {
  static thread_local Groups found;
  static thread_local std::vector<float> memory;
  found.find(l, adapters, rows, kGroup<T>);
  const long count = static_cast<long>(found.groups.size()),
             size = static_cast<long>(found.most_panels) * 16 * kGroup<T>;
  if (count == 0) return;
  if (static_cast<long>(memory.size()) < count * size) memory.resize(count * size);
  const Group* groups = found.groups.data();
  float* middles = memory.data();
  // With fewer products one thread does everything, because waking others takes 3 microseconds.
  constexpr long kOneThreadWork = 400000;
  const long each = static_cast<long>(found.most_panels) * 16 * kGroup<T> * (l.in + l.outs);
  if (count * each < kOneThreadWork) threads = 1;
  if (count >= threads)
    return parallel_for(threads, count, [&](long g) {
      shrink(l, groups[g], x, middles + g * size, 0, groups[g].adapter->panels);
      expand<T>(l, groups[g], middles + g * size, out, 0, 1);
    });
  const int pieces = threads;
  parallel_for(threads, count * pieces, [&](long i) {
    const long g = i / pieces, piece = i % pieces, panels = groups[g].adapter->panels;
    const int begin = static_cast<int>(panels * piece / pieces), end = static_cast<int>(panels * (piece + 1) / pieces);
    if (begin < end) shrink(l, groups[g], x, middles + g * size, begin, end);
  });
  parallel_for(threads, count * pieces, [&](long i) {
    const long g = i / pieces;
    expand<T>(l, groups[g], middles + g * size, out, static_cast<int>(i % pieces), pieces);
  });
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void add_adapters_##suffix(const LoraLinear* linear, const int64_t* adapters, const T* x, void* out,        \
                                      long rows, int threads) {                                                        \
    if (!adapters) return;                                                                                             \
    if (linear->wide)                                                                                                  \
      add(*linear, adapters, x, static_cast<float*>(out), rows, threads);                                              \
    else                                                                                                               \
      add(*linear, adapters, x, static_cast<T*>(out), rows, threads);                                                  \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
