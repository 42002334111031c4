// A mixture of experts. Rows are sorted by the experts that the router chose for them, and each expert multiplies its
// rows at once: its weights are read once, and those of an expert that no row chose are not read at all.
//
// A row's bits depend on nothing but the row: linears promise it, its choice and its shares are computed alone, and
// what its experts give is added in the order of the experts, whatever the other rows chose.
#include "../kernels.h"

namespace {

// Memory for intermediate results. It grows to what the largest call needs and is kept.
template <class T>
struct Workspace {
  std::vector<float> scores, shares, sums;  // [rows, experts], [rows, chosen], [rows, hidden]
  std::vector<int> chosen;                  // [rows, chosen]
  std::vector<long> starts, order;          // per expert, the first of its entries in `order`: row * chosen + rank
  std::vector<T> x, gate_up, gated, y;      // of one expert's rows
};

template <class V>
void fit(std::vector<V>& memory, long size) {
  if (static_cast<long>(memory.size()) < size) memory.resize(size);
}

// The experts of a row: those of its largest scores, of equal ones the first; and their shares, a softmax of the scores
// of all experts, or of the chosen ones.
void choose(const Experts& experts, const float* scores, int* chosen, float* shares) {
  int found = 0;
  for (int e = 0; e < experts.count; ++e) {
    int at = found < experts.chosen ? found++ : experts.chosen;
    for (; at > 0 && scores[e] > scores[chosen[at - 1]]; --at)
      if (at < experts.chosen) chosen[at] = chosen[at - 1];
    if (at < experts.chosen) chosen[at] = e;
  }
  const float peak = scores[chosen[0]];
  float total = 0;
  for (int i = 0; i < experts.chosen; ++i) total += shares[i] = __builtin_expf(scores[chosen[i]] - peak);
  if (!experts.normalized) {
    total = 0;
    for (int e = 0; e < experts.count; ++e) total += __builtin_expf(scores[e] - peak);
  }
  for (int i = 0; i < experts.chosen; ++i) shares[i] /= total;
}

template <class T>
void sort_by_expert(const Experts& experts, long rows, Workspace<T>& work) {
  const long entries = rows * experts.chosen;
  work.starts.assign(experts.count + 1, 0);
  fit(work.order, entries);
  for (long i = 0; i < entries; ++i) ++work.starts[work.chosen[i] + 1];
  for (int e = 0; e < experts.count; ++e) work.starts[e + 1] += work.starts[e];
  std::vector<long> next(work.starts.begin(), work.starts.end() - 1);
  for (long i = 0; i < entries; ++i) work.order[next[work.chosen[i]]++] = i;
}

// Adds what expert e gives for `count` rows, whose entries are `order`, to their sums.
template <class T>
void run_expert(const Experts& experts, int e, const T* x, const long* order, long count, Workspace<T>& work,
                int threads) {
  using K = Kernels<T>;
  const PackedLinear &gate_up = experts.gate_up[e], &down = experts.down[e];
  const int hidden = gate_up.in, inner = down.in;
  fit(work.x, count * hidden);
  fit(work.gate_up, count * 2 * inner);
  fit(work.gated, count * inner);
  fit(work.y, count * hidden);
  parallel_rows(threads, count, count * hidden, [&](long begin, long end) {
    for (long r = begin; r < end; ++r)
      __builtin_memcpy(&work.x[r * hidden], x + order[r] / experts.chosen * hidden, hidden * sizeof(T));
  });
  K::linear(&gate_up, work.x.data(), work.gate_up.data(), count, threads, nullptr);
  if (experts.limit > 0)
    K::clamped_mul(work.gate_up.data(), work.gated.data(), count, inner, experts.alpha, experts.limit, threads);
  else
    K::silu_mul(work.gate_up.data(), work.gated.data(), count, inner, threads);
  K::linear(&down, work.gated.data(), work.y.data(), count, threads, nullptr);
  parallel_rows(threads, count, count * hidden, [&](long begin, long end) {
    for (long r = begin; r < end; ++r) {
      float* sum = &work.sums[order[r] / experts.chosen * hidden];
      const Vec share = vset(work.shares[order[r]]);
      for (int i = 0; i < hidden; i += 16) {
        const int n = hidden - i;
        vstore_first(sum + i, vfma(vload_first(&work.y[r * hidden + i], n), share, vload_first(sum + i, n)), n);
      }
    }
  });
}

template <class T>
void mix(const Experts& experts, const T* x, T* out, long rows, Workspace<T>& work, int threads) {
  const int hidden = experts.router->in, count = experts.count, chosen = experts.chosen;
  fit(work.scores, rows * count);
  fit(work.shares, rows * chosen);
  fit(work.chosen, rows * chosen);
  work.sums.assign(rows * hidden, 0.0f);
  Kernels<T>::linear(experts.router, x, work.scores.data(), rows, threads, nullptr);
  for (long r = 0; r < rows; ++r)
    choose(experts, &work.scores[r * count], &work.chosen[r * chosen], &work.shares[r * chosen]);
  sort_by_expert(experts, rows, work);
  for (int e = 0; e < count; ++e)
    if (const long some = work.starts[e + 1] - work.starts[e])
      run_expert(experts, e, x, &work.order[work.starts[e]], some, work, threads);
  parallel_rows(threads, rows, rows * hidden, [&](long begin, long end) {
    for (long i = begin * hidden; i < end * hidden; i += 16) {
      const int n = end * hidden - i < 16 ? static_cast<int>(end * hidden - i) : 16;
      vstore_first(out + i, vload_first(&work.sums[i], n), n);
    }
  });
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void mix_experts_##suffix(const Experts* experts, const T* x, T* out, long rows, int threads) {             \
    static thread_local Workspace<T> work;                                                                             \
    mix(*experts, x, out, rows, work, threads);                                                                        \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
