// The experts of a row, and their weights, as in kernels/routing.py. A row's result depends only on its scores.
#pragma once

#include "../exports.h"

namespace routing {

enum { kSoftmax = 0, kSigmoid = 1, kMixer = 2 };  // kernels/routing.py has the same numbers

// Inserts i into `first`, the indices of up to `most` largest values, of which `found` are known. Ties keep their
// order.
inline int insert(const float* values, int i, int* first, int found, int most) {
  int at = found < most ? found++ : most;
  for (; at > 0 && values[i] > values[first[at - 1]]; --at)
    if (at < most) first[at] = first[at - 1];
  if (at < most) first[at] = i;
  return found;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

inline float largest(const float* values, int count) {
  float peak = values[0];
  for (int e = 1; e < count; ++e) peak = values[e] > peak ? values[e] : peak;
  return peak;
}

// Lists the chosen groups in `kept` [groups]. `wanted` is [count]. `sums` [groups] is scratch memory.
inline void keep_groups(const Routing& rule, const float* wanted, int count, float* sums, int* kept) {
  const int size = count / rule.groups;
  int found = 0;
  for (int g = 0; g < rule.groups; ++g) {
    const float* own = wanted + g * size;
    int best[2], seen = 0;
    for (int e = 0; e < size; ++e) seen = insert(own, e, best, seen, rule.group_best);
    sums[g] = rule.group_best == 2 ? own[best[0]] + own[best[1]] : own[best[0]];
  }
  for (int g = 0; g < rule.groups; ++g) found = insert(sums, g, kept, found, rule.groups_kept);
}

inline void choose(const Routing& rule, const float* wanted, int count, int* chosen, float* sums, int* kept) {
  int found = 0;
  if (rule.groups == 1) {
    for (int e = 0; e < count; ++e) found = insert(wanted, e, chosen, found, rule.chosen);
    return;
  }
  keep_groups(rule, wanted, count, sums, kept);
  const int size = count / rule.groups;
  for (int g = 0; g < rule.groups; ++g) {
    bool is_kept = false;
    for (int k = 0; k < rule.groups_kept; ++k) is_kept |= kept[k] == g;
    for (int e = g * size; is_kept && e < (g + 1) * size; ++e) found = insert(wanted, e, chosen, found, rule.chosen);
  }
}

// SparseMixer. `left` [count] is scratch memory.
inline void mix(const Routing& rule, const float* scores, int count, int* chosen, float* weights, float* left) {
  for (int e = 0; e < count; ++e) left[e] = scores[e];
  for (int i = 0; i < rule.chosen; ++i) {
    insert(left, 0, chosen + i, 0, 1);
    for (int e = 1; e < count; ++e) insert(left, e, chosen + i, 1, 1);
    const float peak = left[chosen[i]];
    float total = 0;
    for (int e = 0; e < count; ++e) {
      const float size = __builtin_fabsf(scores[e]), factor = size > peak ? size : peak;
      if (!((peak - scores[e]) / factor > 2 * rule.jitter)) total += __builtin_expf(left[e] - peak);
    }
    weights[i] = rule.scale / total;
    left[chosen[i]] = -__builtin_inff();
  }
}

// Computes chosen and weights [rule.chosen] from scores [count], which may be overwritten. `memory` [2 * count] and
// `numbers` [count] are scratch memory.
inline void route(const Routing& rule, float* scores, int count, int* chosen, float* weights, float* memory,
                  int* numbers) {
  if (rule.softcap > 0)
    for (int e = 0; e < count; ++e) scores[e] = rule.softcap * __builtin_tanhf(scores[e] / rule.softcap);
  if (rule.weights == kMixer) return mix(rule, scores, count, chosen, weights, memory);
  const bool sigmoids = rule.weights == kSigmoid, by_weight = rule.correction || rule.group_best > 1;
  float* const wanted = by_weight ? memory : scores;
  const float peak = sigmoids ? 0.0f : largest(scores, count);
  float whole = 0;  // the softmax's sum, relative to the largest term
  if (!sigmoids && (by_weight || !rule.normalized))
    for (int e = 0; e < count; ++e) whole += __builtin_expf(scores[e] - peak);
  if (by_weight)
    for (int e = 0; e < count; ++e) {
      const float weight = sigmoids ? sigmoid(scores[e]) : __builtin_expf(scores[e] - peak) / whole;
      wanted[e] = rule.correction ? weight + rule.correction[e] : weight;
    }
  choose(rule, wanted, count, chosen, memory + count, numbers);
  float total = 0;
  for (int i = 0; i < rule.chosen; ++i) {
    const float score = scores[chosen[i]];
    total += weights[i] = sigmoids ? sigmoid(score) : __builtin_expf(score - peak);
  }
  // Softmax weights in `total` are relative to the largest weight, so `added` is too.
  const float divisor = rule.normalized ? total + rule.added : sigmoids ? 1.0f : whole;
  for (int i = 0; i < rule.chosen; ++i) weights[i] = weights[i] / divisor * rule.scale;
  if (rule.factors)
    for (int i = 0; i < rule.chosen; ++i) weights[i] *= rule.factors[chosen[i]];
}

}  // namespace routing
