// Runs a model's decoder layers in one call. It calls the other kernels in the order in which Python would, so results
// have the same bits. With one row, the calls from Python would cost as much time as a small model's arithmetic.
#include "../kernels.h"

struct DecoderLayer {
  PackedLinear qkv, out, gate_up, down;  // the last two are not set where there are experts
  const float *input_norm, *output_norm;
  const float *q_norm, *k_norm, *attention_norm, *mlp_norm;  // each may be null
  const float* cos_sin;                                      // null: no rotary embedding
  void *keys, *values;                                       // the layer's KV cache
  KVFormat format;                                           // how it holds them
  long key_stride, value_stride;                             // elements from one page to the next
  int window;                                                // how many keys a query sees; 0: all
  int group;                                                 // whose table and slots it uses
  float scale, softcap;                                      // of attention scores; softcap 0: none
  const float* sinks;                                        // of the heads; may be null
  int gelu;                                                  // the gate is GELU, else SiLU
  const Experts* experts;                                    // what feeds forward instead of gate_up and down, or null
  // Adapters of the four linears; each may be null.
  const LoraLinear *qkv_adapters, *out_adapters, *gate_up_adapters, *down_adapters;
};

struct DecoderShape {
  int hidden, heads, kv_heads, dim, gate;  // gate: half the outputs of gate_up
  float eps;
};

struct DecoderStep {
  void *x, *residual;  // [tokens, hidden]
  const int32_t *starts, *contexts;
  const int32_t* const* tables;  // by group of layers
  const int64_t* positions;
  const int64_t* const* slots;  // by group
  long table_stride, tokens, pages;
  int sequences;
  int starts_stream;        // x contains the embeddings, and residual is not set yet
  const int64_t* adapters;  // [tokens]: slots, 0 for none; null: no token has an adapter
  Collective* group;        // whose ranks have parts of the layers; null: these are whole
};

namespace {

// Memory for a layer's intermediate results. It grows to what the largest step needs and is kept.
template <class T>
struct Workspace {
  std::vector<T> memory;
  T *qkv, *query, *attended, *gate_up, *gated;

  void fit(const DecoderShape& shape, long tokens) {
    const long q = tokens * shape.heads * shape.dim, kv = tokens * shape.kv_heads * shape.dim;
    const long gate = tokens * shape.gate;
    const size_t wanted = 3 * q + 2 * kv + 3 * gate;
    if (memory.size() < wanted) memory.resize(wanted);
    qkv = memory.data();
    query = qkv + q + 2 * kv;
    attended = query + q;
    gate_up = attended + q;
    gated = gate_up + 2 * gate;
  }
};

constexpr long kMaxFetch = 8 << 20;  // bytes; more would not stay in the caches until it is read

// Lists the pages that a layer's attention will read, if prefetching them pays: when many sequences decode. With few
// rows the multiplications already use all of the memory bandwidth, and prompts read each page for many queries.
template <class T>
void find_pages(const DecoderLayer* layer, const DecoderShape& shape, const DecoderStep& step, Fetch& pages) {
  const KVFormat format = layer ? layer->format : held_as(nullptr);
  const long size = element_bytes<T>(format), bytes = size * shape.kv_heads * head_elements<T>(format, shape.dim);
  pages.start(bytes);
  if (!layer || step.tokens != step.sequences || step.tokens <= 2 * kRows) return;
  for (int s = 0; s < step.sequences; ++s) {
    const int32_t* table = step.tables[layer->group] + s * step.table_stride;
    const long context = step.contexts[s], first = layer->window > 0 ? context - layer->window : 0;
    for (long b = first > 0 ? first / kBlock : 0; b * kBlock < context; ++b) {
      const long page = table[b];
      pages.add(static_cast<const char*>(layer->keys) + page * layer->key_stride * size);
      pages.add(static_cast<const char*>(layer->values) + page * layer->value_stride * size);
    }
  }
  if (pages.size() * bytes > kMaxFetch) pages.start(bytes);
}

// A linear with what the tokens' adapters add to it.
template <class T>
void run_linear(const PackedLinear& linear, const LoraLinear* adapters, const DecoderStep& step, const T* x, T* out,
                int threads, Fetch* pages) {
  Kernels<T>::linear(&linear, x, out, step.tokens, threads, pages);
  if (step.adapters && adapters) Kernels<T>::add_adapters(adapters, step.adapters, x, out, step.tokens, threads);
}

// `pages` are prefetched during multiplications: this layer's until its attention, from then on the next layer's, if
// there is one. Returns 1 if a page or slot is outside of the caches, 2 if a rank has ended, else 0.
template <class T>
int run_layer(const DecoderLayer& layer, const DecoderLayer* next, const DecoderShape& shape, const DecoderStep& step,
              Workspace<T>& work, Fetch& pages, int threads) {
  using K = Kernels<T>;
  T *x = static_cast<T*>(step.x), *residual = static_cast<T*>(step.residual);
  const long n = step.tokens;
  run_linear(layer.qkv, layer.qkv_adapters, step, x, work.qkv, threads, &pages);
  if (K::rope_store(work.qkv, layer.q_norm, layer.k_norm, layer.cos_sin, step.positions, step.slots[layer.group],
                    work.query, layer.keys, layer.values, &layer.format, layer.key_stride, layer.value_stride, n,
                    step.pages, shape.heads, shape.kv_heads, shape.dim, shape.eps, threads) ||
      K::paged_attention(work.attended, work.query, layer.keys, layer.values, &layer.format, step.starts, step.contexts,
                         step.tables[layer.group], step.table_stride, layer.key_stride, layer.value_stride, step.pages,
                         step.sequences, shape.heads, shape.kv_heads, shape.dim, layer.scale, layer.window,
                         layer.softcap, 0, nullptr, 0, 0, layer.sinks, threads))
    return 1;
  run_linear<T>(layer.out, layer.out_adapters, step, work.attended, x, threads, nullptr);
  if (step.group && K::sum_ranks(step.group, x, n * shape.hidden, threads)) return 2;
  if (layer.attention_norm) K::rms_norm(x, layer.attention_norm, x, n, shape.hidden, shape.eps, threads);
  K::add_rms_norm(x, residual, layer.output_norm, n, shape.hidden, shape.eps, threads);
  find_pages<T>(next, shape, step, pages);
  if (layer.experts) {
    K::mix_experts(layer.experts, x, x, n, threads);
    return 0;
  }
  run_linear(layer.gate_up, layer.gate_up_adapters, step, x, work.gate_up, threads, &pages);
  (layer.gelu ? K::gelu_mul : K::silu_mul)(work.gate_up, work.gated, n, shape.gate, threads);
  run_linear<T>(layer.down, layer.down_adapters, step, work.gated, x, threads, &pages);
  if (step.group && K::sum_ranks(step.group, x, n * shape.hidden, threads)) return 2;
  if (layer.mlp_norm) K::rms_norm(x, layer.mlp_norm, x, n, shape.hidden, shape.eps, threads);
  return 0;
}

// At the start x is the previous layer's MLP output, at the end that of the last layer; it has not been added to the
// residual stream `residual` yet.
template <class T>
int run_layers(const DecoderLayer* layers, int count, const DecoderShape& shape, const DecoderStep& step, int threads) {
  static thread_local Workspace<T> work;
  Fetch pages;
  work.fit(shape, step.tokens);
  T *x = static_cast<T*>(step.x), *residual = static_cast<T*>(step.residual);
  for (int i = 0; i < count; ++i) {
    const float* norm = layers[i].input_norm;
    if (i == 0 && step.starts_stream) {
      __builtin_memcpy(residual, x, step.tokens * shape.hidden * sizeof(T));
      Kernels<T>::rms_norm(residual, norm, x, step.tokens, shape.hidden, shape.eps, threads);
    } else {
      Kernels<T>::add_rms_norm(x, residual, norm, step.tokens, shape.hidden, shape.eps, threads);
    }
    const DecoderLayer* next = i + 1 < count ? &layers[i + 1] : nullptr;
    if (const int failed = run_layer(layers[i], next, shape, step, work, pages, threads)) return failed;
  }
  return 0;
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int decoder_layers_##suffix(const DecoderLayer* layers, int count, const DecoderShape* shape,               \
                                       const DecoderStep* step, int threads) {                                         \
    return run_layers<T>(layers, count, *shape, *step, threads);                                                       \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
