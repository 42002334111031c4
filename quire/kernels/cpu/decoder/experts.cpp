// A mixture of experts. Rows are sorted by the experts that the router chose for them, and each expert multiplies its
// rows at once. So its weights are read once, and those of an expert that no row chose are not read.
//
// A row's bits depend only on the row. Linears guarantee this, a row's experts and shares are computed from its scores
// alone, and the experts' outputs are added in the order of the experts.
#include "../kernels.h"
#include "mapped.h"
#include "routing.h"

namespace {

// Memory for intermediate results. It grows to the needs of the largest call and is never freed.
template <class T>
struct Workspace {
  std::vector<float> scores, shares, sums;  // [rows, experts], [rows, chosen], [rows, inputs of experts]
  std::vector<float> wide, memory;          // x for a router in float32; memory of `route` for each row
  std::vector<int> chosen, numbers;         // both are [rows, chosen]
  std::vector<long> starts, order;          // per expert, the first of its entries in `order`: row * chosen + rank
  std::vector<T> x, gate_up, gated, y;      // rows of one expert
};

template <class V>
void fit(std::vector<V>& memory, long size) {
  if (static_cast<long>(memory.size()) < size) memory.resize(size);
}

// Scores of all experts [rows, count], in float32 arithmetic.
template <class T>
void score(const Experts& experts, const T* x, long rows, Workspace<T>& work, int threads) {
  const int hidden = experts.router->in;
  if (!experts.float_router)
    return static_cast<void>(Kernels<T>::linear(experts.router, x, work.scores.data(), rows, threads, nullptr));
  fit(work.wide, rows * hidden);
  parallel_rows(threads, rows, rows * hidden, [&](long begin, long end) {
    for (long i = begin * hidden; i < end * hidden; i += 16) {
      const int n = end * hidden - i < 16 ? static_cast<int>(end * hidden - i) : 16;
      vstore_first(&work.wide[i], vload_first(x + i, n), n);
    }
  });
  Kernels<float>::linear(experts.router, work.wide.data(), work.scores.data(), rows, threads, nullptr);
}

template <class T>
void choose(const Experts& experts, long rows, Workspace<T>& work, int threads) {
  const int count = experts.count, chosen = experts.routing.chosen;
  fit(work.memory, 2 * rows * count);
  fit(work.numbers, rows * count);
  parallel_rows(threads, rows, rows * count * 8, [&](long begin, long end) {
    for (long r = begin; r < end; ++r)
      routing::route(experts.routing, &work.scores[r * count], count, &work.chosen[r * chosen],
                     &work.shares[r * chosen], &work.memory[2 * r * count], &work.numbers[r * count]);
  });
}

template <class T>
void sort_by_expert(const Experts& experts, long rows, Workspace<T>& work) {
  const long entries = rows * experts.routing.chosen;
  work.starts.assign(experts.count + 1, 0);
  fit(work.order, entries);
  for (long i = 0; i < entries; ++i) ++work.starts[work.chosen[i] + 1];
  for (int e = 0; e < experts.count; ++e) work.starts[e + 1] += work.starts[e];
  std::vector<long> next(work.starts.begin(), work.starts.end() - 1);
  for (long i = 0; i < entries; ++i) work.order[next[work.chosen[i]]++] = i;
}

// Requests the parts of a mapped file that the step reads.
template <class T>
void ask(const Experts& experts, const Workspace<T>& work) {
  const MappedExperts& file = *experts.mapped;
  for (int place = 0; place < experts.held; ++place) {
    const long* starts = &work.starts[experts.first + place];
    if (starts[1] > starts[0]) mapped::read(file, place);
    file.guessed[place] = 0;
  }
}

// Requests the experts that the next layer's router chooses for this layer's input, which resembles the next layer's
// input. With many rows it does nothing, because all experts are read anyway.
template <class T>
void guess(const Experts& next, const T* x, long rows, Workspace<T>& work, int threads) {
  const long entries = rows * next.routing.chosen;
  if (entries > next.held) return;
  fit(work.scores, rows * next.count);
  fit(work.shares, entries);
  fit(work.chosen, entries);
  score(next, x, rows, work, threads);
  choose(next, rows, work, threads);
  for (long i = 0; i < entries; ++i) {
    const int place = work.chosen[i] - next.first;
    if (place >= 0 && place < next.held) mapped::guess(*next.mapped, place);
  }
}

// Adds the outputs of the expert at `place` to the sums of `count` rows, whose entries are in `order`.
template <class T>
void run_expert(const Experts& experts, int place, const T* x, const long* order, long count, Workspace<T>& work,
                int threads) {
  using K = Kernels<T>;
  const PackedLinear &gate_up = experts.gate_up[place], &down = experts.down[place];
  const int hidden = gate_up.in, inner = down.in;
  fit(work.x, count * hidden);
  fit(work.gate_up, count * 2 * inner);
  fit(work.gated, count * inner);
  fit(work.y, count * hidden);
  const bool inputs = experts.routing.inputs;
  parallel_rows(threads, count, count * hidden, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      const T* from = x + order[r] / experts.routing.chosen * hidden;
      T* to = &work.x[r * hidden];
      if (!inputs) {
        __builtin_memcpy(to, from, hidden * sizeof(T));
        continue;
      }
      const Vec share = vset(work.shares[order[r]]);
      for (int i = 0; i < hidden; i += 16) {
        const int n = hidden - i;
        vstore_first(to + i, vmul(vload_first(from + i, n), share), n);
      }
    }
  });
  K::linear(&gate_up, work.x.data(), work.gate_up.data(), count, threads, nullptr);
  if (experts.activation >= 0) {
    K::activate(work.gate_up.data(), count * inner, experts.activation, 0.0f, 0.0f, 0.0f, threads);
    work.gated.swap(work.gate_up);
  } else if (experts.limit > 0)
    K::clamped_mul(work.gate_up.data(), work.gated.data(), count, inner, experts.alpha, experts.limit, threads);
  else if (experts.gelu)
    K::gelu_mul(work.gate_up.data(), work.gated.data(), count, inner, threads);
  else
    K::silu_mul(work.gate_up.data(), work.gated.data(), count, inner, threads);
  K::linear(&down, work.gated.data(), work.y.data(), count, threads, nullptr);
  parallel_rows(threads, count, count * hidden, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      float* sum = &work.sums[order[r] / experts.routing.chosen * hidden];
      const Vec share = vset(inputs ? 1.0f : work.shares[order[r]]);
      for (int i = 0; i < hidden; i += 16) {
        const int n = hidden - i;
        vstore_first(sum + i, vfma(vload_first(&work.y[r * hidden + i], n), share, vload_first(sum + i, n)), n);
      }
    }
  });
}

template <class T>
void mix(const Experts& experts, const T* x, const T* routed, T* out, long rows, Workspace<T>& work,
         Workspace<T>& ahead, int threads) {
  const int hidden = experts.gate_up[0].in, count = experts.count, chosen = experts.routing.chosen;
  fit(work.scores, rows * count);
  fit(work.shares, rows * chosen);
  fit(work.chosen, rows * chosen);
  work.sums.assign(rows * hidden, 0.0f);
  score(experts, routed, rows, work, threads);
  choose(experts, rows, work, threads);
  sort_by_expert(experts, rows, work);
  if (experts.mapped) {
    ask(experts, work);
    if (experts.mapped->next) guess(*experts.mapped->next, routed, rows, ahead, threads);
  }
  for (int place = 0; place < experts.held; ++place) {
    const long* starts = &work.starts[experts.first + place];
    if (const long some = starts[1] - starts[0])
      run_expert(experts, place, x, &work.order[starts[0]], some, work, threads);
  }
  parallel_rows(threads, rows, rows * hidden, [&](long begin, long end) {
    for (long i = begin * hidden; i < end * hidden; i += 16) {
      const int n = end * hidden - i < 16 ? static_cast<int>(end * hidden - i) : 16;
      vstore_first(out + i, vload_first(&work.sums[i], n), n);
    }
  });
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void mix_experts_##suffix(const Experts* experts, const T* x, const T* routed, T* out, long rows,           \
                                     int threads) {                                                                    \
    static thread_local Workspace<T> work, ahead;                                                                      \
    mix(*experts, x, routed, out, rows, work, ahead, threads);                                                         \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
