// Runs a model's decoder layers in one call. It calls the other kernels in the order in which Python would, so results
// have the same bits. With one row, the calls from Python would cost as much time as a small model's arithmetic.
#include "kernels.h"

struct DecoderLayer {
  PackedLinear qkv, out, gate_up, down;
  const float *input_norm, *output_norm;
  const float *q_norm, *k_norm, *attention_norm, *mlp_norm;  // each may be null
  const float* cos_sin;                                      // null: no rotary embedding
  void *keys, *values;                                       // the layer's KV cache
  long key_stride, value_stride;                             // elements from one page to the next
  int window;                                                // how many keys a query sees; 0: all
  float scale, softcap;                                      // of attention scores; softcap 0: none
  int gelu;                                                  // the gate is GELU, else SiLU
};

struct DecoderShape {
  int hidden, heads, kv_heads, dim, gate;  // gate: half the outputs of gate_up
  float eps;
};

struct DecoderStep {
  void *x, *residual;  // [tokens, hidden]
  const int32_t *starts, *contexts, *table;
  const int64_t *positions, *slots;
  long table_stride, tokens, pages;
  int sequences;
  int starts_stream;  // x contains the embeddings, and residual is not set yet
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
  const long bytes = static_cast<long>(sizeof(T)) * kBlock * shape.kv_heads * shape.dim;
  pages.start(bytes);
  if (!layer || step.tokens != step.sequences || step.tokens <= 2 * kRows) return;
  for (int s = 0; s < step.sequences; ++s) {
    const long context = step.contexts[s], first = layer->window > 0 ? context - layer->window : 0;
    for (long b = first > 0 ? first / kBlock : 0; b * kBlock < context; ++b) {
      const long page = step.table[s * step.table_stride + b];
      pages.add(static_cast<const T*>(layer->keys) + page * layer->key_stride);
      pages.add(static_cast<const T*>(layer->values) + page * layer->value_stride);
    }
  }
  if (pages.size() * bytes > kMaxFetch) pages.start(bytes);
}

// `pages` are prefetched during multiplications: this layer's until its attention, from then on the next layer's, if
// there is one. Returns 1 if a page or slot is outside of the caches, else 0.
template <class T>
int run_layer(const DecoderLayer& layer, const DecoderLayer* next, const DecoderShape& shape, const DecoderStep& step,
              Workspace<T>& work, Fetch& pages, int threads) {
  using K = Kernels<T>;
  T *x = static_cast<T*>(step.x), *residual = static_cast<T*>(step.residual);
  const long n = step.tokens;
  K::linear(&layer.qkv, x, work.qkv, n, threads, &pages);
  if (K::rope_store(work.qkv, layer.q_norm, layer.k_norm, layer.cos_sin, step.positions, step.slots, work.query,
                    static_cast<T*>(layer.keys), static_cast<T*>(layer.values), layer.key_stride, layer.value_stride, n,
                    step.pages, shape.heads, shape.kv_heads, shape.dim, shape.eps, threads) ||
      K::paged_attention(work.attended, work.query, layer.keys, layer.values, step.starts, step.contexts, step.table,
                         step.table_stride, layer.key_stride, layer.value_stride, step.pages, step.sequences,
                         shape.heads, shape.kv_heads, shape.dim, layer.scale, layer.window, layer.softcap, threads))
    return 1;
  K::linear(&layer.out, work.attended, x, n, threads, nullptr);
  if (layer.attention_norm) K::rms_norm(x, layer.attention_norm, x, n, shape.hidden, shape.eps, threads);
  K::add_rms_norm(x, residual, layer.output_norm, n, shape.hidden, shape.eps, threads);
  find_pages<T>(next, shape, step, pages);
  K::linear(&layer.gate_up, x, work.gate_up, n, threads, &pages);
  (layer.gelu ? K::gelu_mul : K::silu_mul)(work.gate_up, work.gated, n, shape.gate, threads);
  K::linear(&layer.down, work.gated, x, n, threads, &pages);
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
    if (run_layer(layers[i], i + 1 < count ? &layers[i + 1] : nullptr, shape, step, work, pages, threads)) return 1;
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
