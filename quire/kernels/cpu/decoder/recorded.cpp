// Runs a list of calls of the other kernels, which layer_recorder.py records for all layers of a model. With one row,
// the calls from Python would take as much time as a small model's arithmetic.
#include <type_traits>
#include <utility>

#include "../kernels.h"

// How to compute an argument in a step from its `value`.
enum {
  kFixed = 0,     // the value itself: a number, a pointer, or the bits of a float
  kPerToken = 1,  // value * tokens
  kBuffer = 2,    // memory for intermediate results, from value * tokens bytes on
  kOfStep = 3,    // the step's number or pointer with index `value`
  kFetch = 4,     // the list of pages to prefetch meanwhile
};
struct Argument {
  int64_t kind, value;
};

using Kernel = int (*)(const int64_t* arguments);  // returns 0, or the kernel's own error
struct Call {
  Kernel kernel;
  const Argument* arguments;
  int64_t count;
};

namespace {

constexpr int kMostArguments = 32;

template <class A>
A as(int64_t value) {
  if constexpr (std::is_pointer_v<A>) return reinterpret_cast<A>(value);
  if constexpr (std::is_same_v<A, float>) {
    float number;
    __builtin_memcpy(&number, &value, sizeof number);
    return number;
  }
  if constexpr (std::is_integral_v<A>) return static_cast<A>(value);
}

template <class R, class... A, size_t... I>
int call_with(R (*kernel)(A...), const int64_t* arguments, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<R>) return kernel(as<A>(arguments[I])...), 0;
  if constexpr (!std::is_void_v<R>) return kernel(as<A>(arguments[I])...);
}
template <class R, class... A>
int call(R (*kernel)(A...), const int64_t* arguments) {
  static_assert(sizeof...(A) <= kMostArguments);
  return call_with(kernel, arguments, std::index_sequence_for<A...>());
}

constexpr long kMaxFetch = 8 << 20;  // bytes; more would not stay in the caches until it is read

// Lists the pages that an attention kernel will read. Takes that kernel's arguments except the first.
template <class T>
void list_pages(Fetch* pages, const void*, const void* keys, const void* values, const KVFormat* held, const int32_t*,
                const int32_t* contexts, const int32_t* table, long table_stride, long key_stride, long value_stride,
                long, int sequences, int, int kv_heads, int dim, float, int window) {
  const KVFormat format = held_as(held);
  const long size = element_bytes<T>(format), bytes = size * kv_heads * head_elements<T>(format, dim);
  pages->start(bytes);
  for (int s = 0; s < sequences; ++s) {
    const long context = contexts[s], first = first_seen(window, context - 1);
    for (long b = first > 0 ? first / kBlock : 0; b * kBlock < context; ++b) {
      const long page = table[s * table_stride + b];
      pages->add(static_cast<const char*>(keys) + page * key_stride * size);
      if (values != keys) pages->add(static_cast<const char*>(values) + page * value_stride * size);
    }
  }
  if (pages->size() * bytes > kMaxFetch) pages->start(bytes);
}

struct Step {
  const int64_t* values;
  long tokens;
  char* memory;
  Fetch* pages;

  void resolve(const Call& call, int64_t* arguments) const {
    for (long i = 0; i < call.count; ++i) {
      const Argument& each = call.arguments[i];
      switch (each.kind) {
        case kFixed:
          arguments[i] = each.value;
          break;
        case kPerToken:
          arguments[i] = each.value * tokens;
          break;
        case kBuffer:
          arguments[i] = reinterpret_cast<int64_t>(memory + each.value * tokens);
          break;
        case kOfStep:
          arguments[i] = values[each.value];
          break;
        default:
          arguments[i] = reinterpret_cast<int64_t>(pages);
      }
    }
  }
};

// Returns 0, or the number of the call that failed, from 1 on. If many sequences decode, the pages of the next
// attention are prefetched while linears multiply. With few rows the multiplications already use all of the memory
// bandwidth, and prompts read each page for many queries.
template <class T>
int run(const Call* calls, int count, const int64_t* values, long tokens, int sequences, long token_bytes,
        Kernel attention) {
  const TilesOfCall all;
  static thread_local std::vector<char> memory;  // grows to the needs of the largest step and is never freed
  if (static_cast<long>(memory.size()) < tokens * token_bytes) memory.resize(tokens * token_bytes);
  Fetch pages;
  const Step step = {values, tokens, memory.data(), &pages};
  const bool fetches = tokens == sequences && tokens > 2 * kRows;
  int64_t arguments[kMostArguments];
  for (int i = 0; i < count; ++i) {
    step.resolve(calls[i], arguments);
    if (calls[i].kernel(arguments)) return i + 1;
    if (!fetches || calls[i].kernel != attention) continue;
    pages.start(64);
    for (int next = i + 1; next < count; ++next) {
      if (calls[next].kernel != attention) continue;
      step.resolve(calls[next], arguments);
      arguments[0] = reinterpret_cast<int64_t>(&pages);
      call(list_pages<T>, arguments);
      break;
    }
  }
  return 0;
}

}  // namespace

#define CALLED(name)                                                                                                   \
  EXPORTED int call_##name(const int64_t* arguments) { return call(name, arguments); }
#define EXPORT(suffix, T)                                                                                              \
  CALLED(linear_##suffix)                                                                                              \
  CALLED(add_adapters_##suffix)                                                                                        \
  CALLED(mix_experts_##suffix)                                                                                         \
  CALLED(sum_ranks_##suffix)                                                                                           \
  CALLED(rms_norm_##suffix)                                                                                            \
  CALLED(add_rms_norm_##suffix)                                                                                        \
  CALLED(add_##suffix)                                                                                                 \
  CALLED(add_gated_##suffix)                                                                                           \
  CALLED(layer_norm_##suffix)                                                                                          \
  CALLED(activate_##suffix)                                                                                            \
  CALLED(silu_mul_##suffix)                                                                                            \
  CALLED(mul_columns_##suffix)                                                                                         \
  CALLED(gelu_mul_##suffix)                                                                                            \
  CALLED(rope_store_##suffix)                                                                                          \
  CALLED(latent_store_##suffix)                                                                                        \
  CALLED(linear_blocks_##suffix)                                                                                       \
  CALLED(short_conv_##suffix)                                                                                          \
  CALLED(delta_rule_##suffix)                                                                                          \
  CALLED(state_space_##suffix)                                                                                         \
  CALLED(selective_scan_##suffix)                                                                                      \
  CALLED(join_##suffix)                                                                                                \
  CALLED(cast_##suffix)                                                                                                \
  CALLED(sigmoid_mul_##suffix)                                                                                         \
  CALLED(paged_attention_##suffix)                                                                                     \
  CALLED(sparse_attention_##suffix)                                                                                    \
  CALLED(select_keys_##suffix)                                                                                         \
  CALLED(ranks_attention_##suffix)                                                                                     \
  EXPORTED int run_calls_##suffix(const Call* calls, int count, const int64_t* values, long tokens, int sequences,     \
                                  long token_bytes) {                                                                  \
    return run<T>(calls, count, values, tokens, sequences, token_bytes, call_paged_attention_##suffix);                \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
