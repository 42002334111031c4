// Decoder layers, one after the other: the kernels beside this file, called from here instead of from Python, where at
// one row the calls cost as much as a small model's arithmetic. Same functions, same order, same bits.
#include "kernels.h"

struct DecoderLayer {
  PackedLinear qkv, out, gate_up, down;
  const float *input_norm, *output_norm;
  const float *q_norm, *k_norm, *attention_norm, *mlp_norm;  // each may be null
  const float* cos_sin;                                      // null: no rotation
  void *keys, *values;
  long key_stride, value_stride;  // elements between pages
  int window;                     // keys a query sees; 0: all
  float scale, softcap;           // of attention scores; softcap 0: none
  int gelu;                       // the gate; else SiLU
};

struct DecoderShape {
  int hidden, heads, kv_heads, dim, gate;  // gate: outputs of gate_up / 2
  float eps;
};

struct DecoderStep {
  void *x, *residual;  // [tokens, hidden]
  const int32_t *starts, *contexts, *table;
  const int64_t *positions, *slots;
  long table_stride, tokens, pages;
  int sequences;
  int starts_stream;  // x holds embeddings, residual nothing yet
};

namespace {

// What a layer works in; grows to the largest step and stays.
template <class T>
struct Space {
  std::vector<T> memory;
  T *qkv, *query, *attended, *gate_up, *gated;

  void fit(const DecoderShape& shape, long tokens) {
    const long q = tokens * shape.heads * shape.dim, kv = tokens * shape.kv_heads * shape.dim, gate = tokens * shape.gate;
    const size_t wanted = 3 * q + 2 * kv + 3 * gate;
    if (memory.size() < wanted) memory.resize(wanted);
    qkv = memory.data();
    query = qkv + q + 2 * kv;
    attended = query + q;
    gate_up = attended + q;
    gated = gate_up + 2 * gate;
  }
};

constexpr long kFetched = 8 << 20;  // bytes: more would not stay in the caches until it is read

// The pages that a layer's attention will read, where fetching them before pays: in decodes of many sequences. With few
// rows memory is what multiplying waits for; prompts read each page for many queries.
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
  if (pages.size() * bytes > kFetched) pages.start(bytes);
}

// `pages`: those of this layer, until its attention; from then on those of the next one, if there is one.
template <class T>
int run_layer(const DecoderLayer& layer, const DecoderLayer* next, const DecoderShape& shape, const DecoderStep& step,
              Space<T>& space, Fetch& pages, int threads) {
  using K = Kernels<T>;
  T *x = static_cast<T*>(step.x), *residual = static_cast<T*>(step.residual);
  const long n = step.tokens;
  K::linear(&layer.qkv, x, space.qkv, n, threads, &pages);
  if (K::rope_store(space.qkv, layer.q_norm, layer.k_norm, layer.cos_sin, step.positions, step.slots, space.query,
                    static_cast<T*>(layer.keys), static_cast<T*>(layer.values), layer.key_stride, layer.value_stride, n,
                    step.pages, shape.heads, shape.kv_heads, shape.dim, shape.eps, threads) ||
      K::paged_attention(space.attended, space.query, layer.keys, layer.values, step.starts, step.contexts, step.table,
                         step.table_stride, layer.key_stride, layer.value_stride, step.pages, step.sequences,
                         shape.heads, shape.kv_heads, shape.dim, layer.scale, layer.window, layer.softcap, threads))
    return 1;
  K::linear(&layer.out, space.attended, x, n, threads, nullptr);
  if (layer.attention_norm) K::rms_norm(x, layer.attention_norm, x, n, shape.hidden, shape.eps, threads);
  K::add_rms_norm(x, residual, layer.output_norm, n, shape.hidden, shape.eps, threads);
  find_pages<T>(next, shape, step, pages);
  K::linear(&layer.gate_up, x, space.gate_up, n, threads, &pages);
  (layer.gelu ? K::gelu_mul : K::silu_mul)(space.gate_up, space.gated, n, shape.gate, threads);
  K::linear(&layer.down, space.gated, x, n, threads, &pages);
  if (layer.mlp_norm) K::rms_norm(x, layer.mlp_norm, x, n, shape.hidden, shape.eps, threads);
  return 0;
}

// x is the output of the MLP before, and at the end of the last one; residual the stream it is still to join.
template <class T>
int run_layers(const DecoderLayer* layers, int count, const DecoderShape& shape, const DecoderStep& step, int threads) {
  static thread_local Space<T> space;
  Fetch pages;
  space.fit(shape, step.tokens);
  T *x = static_cast<T*>(step.x), *residual = static_cast<T*>(step.residual);
  for (int i = 0; i < count; ++i) {
    const float* norm = layers[i].input_norm;
    if (i == 0 && step.starts_stream) {
      __builtin_memcpy(residual, x, step.tokens * shape.hidden * sizeof(T));
      Kernels<T>::rms_norm(residual, norm, x, step.tokens, shape.hidden, shape.eps, threads);
    } else {
      Kernels<T>::add_rms_norm(x, residual, norm, step.tokens, shape.hidden, shape.eps, threads);
    }
    if (run_layer(layers[i], i + 1 < count ? &layers[i + 1] : nullptr, shape, step, space, pages, threads)) return 1;
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
