// Takes the fused q, k, v projection of each token, normalizes q and k per head, applies the rotary embedding to both,
// and stores k and v in their pages.
#include "kernels.h"

#include "rms.h"

namespace {

// One head of `dim` elements: RMSNorm if `weight` is not null, then the rotation if `cosines` is not null (the sines
// follow the cosines in memory). Computed in float32 and rounded once.
template <class T>
INLINE void norm_and_rotate(const T* x, const float* weight, const float* cosines, float eps, int dim, T* out) {
  const int half = dim / 2;
  const float factor = weight ? rms_factor(x, dim, eps) : 1.0f;
  for (int i = 0; i < half; i += 16) {
    const int n = half - i;
    Vec first = vload_first(x + i, n), second = vload_first(x + half + i, n);
    if (weight) {
      first = vmul(vmul(first, vset(factor)), vload_first(weight + i, n));
      second = vmul(vmul(second, vset(factor)), vload_first(weight + half + i, n));
    }
    if (cosines) {
      const Vec cosine = vload_first(cosines + i, n), sine = vload_first(cosines + half + i, n);
      const Vec rotated = vsub(vmul(first, cosine), vmul(second, sine));
      second = vfma(second, cosine, vmul(first, sine));
      first = rotated;
    }
    vstore_first(out + i, first, n);
    vstore_first(out + half + i, second, n);
  }
}

template <class T>
struct Projection {
  const T* qkv;
  const float *q_norm, *k_norm;
  const float* cos_sin;  // null: no rotary embedding
  const int64_t *positions, *slots;
  T* query;
  void *keys, *values;
  KVFormat format;
  long key_stride, value_stride;
  int heads, kv_heads, dim;
  float eps;
};

// Puts a head of one token into its slot.
template <class T>
INLINE void store_head(const T* key, const T* value, const Projection<T>& p, long slot, int kv_head, uint8_t* codes) {
  const long part = kv_head * head_elements<T>(p.format, p.dim), size = element_bytes<T>(p.format),
             page = slot / kBlock;
  char* keys = static_cast<char*>(p.keys) + (page * p.key_stride + part) * size;
  char* values = static_cast<char*>(p.values) + (page * p.value_stride + part) * size;
  const int at = static_cast<int>(slot % kBlock);
  if (p.format.held != kPlain)
    return store_codes(key, value, p.format, reinterpret_cast<uint8_t*>(keys), reinterpret_cast<uint8_t*>(values), at,
                       p.dim, codes);
  store_key(key, reinterpret_cast<T*>(keys), at, p.dim);
  store_value(value, reinterpret_cast<T*>(values), at, p.dim);
}

template <class T>
void rope_token(const Projection<T>& p, long token) {
  const T* row = p.qkv + token * (p.heads + 2L * p.kv_heads) * p.dim;
  const float* cosines = p.cos_sin ? p.cos_sin + p.positions[token] * p.dim : nullptr;
  T* query = p.query + token * p.heads * p.dim;
  for (int h = 0; h < p.heads; ++h)
    norm_and_rotate(row + h * p.dim, p.q_norm, cosines, p.eps, p.dim, query + h * p.dim);
  const T *key = row + static_cast<long>(p.heads) * p.dim, *value = key + static_cast<long>(p.kv_heads) * p.dim;
  T* rotated = reinterpret_cast<T*>(scratch(p.dim * (sizeof(T) + 1)));
  auto* codes = reinterpret_cast<uint8_t*>(rotated + p.dim);
  for (int h = 0; h < p.kv_heads; ++h) {
    norm_and_rotate(key + h * p.dim, p.k_norm, cosines, p.eps, p.dim, rotated);
    store_head(rotated, value + h * p.dim, p, p.slots[token], h, codes);
  }
}

bool slots_valid(const int64_t* slots, long tokens, long pages) {
  for (long t = 0; t < tokens; ++t)
    if (slots[t] < 0 || slots[t] >= pages * kBlock) return false;
  return true;
}

template <class T>
int rope_store(const Projection<T>& p, long tokens, long pages, int threads) {
  if (!slots_valid(p.slots, tokens, pages)) return 1;
  parallel_rows(threads, tokens, tokens * (p.heads + 2L * p.kv_heads) * p.dim * 4, [&](long begin, long end) {
    for (long t = begin; t < end; ++t) rope_token(p, t);
  });
  return 0;
}

template <class T>
int store_kv(const T* k, const T* v, const Projection<T>& p, long tokens, long pages) {
  if (!slots_valid(p.slots, tokens, pages)) return 1;
  auto* codes = reinterpret_cast<uint8_t*>(scratch(p.dim));
  for (long t = 0; t < tokens; ++t)
    for (int h = 0; h < p.kv_heads; ++h) {
      const long from = (t * p.kv_heads + h) * p.dim;
      store_head(k + from, v + from, p, p.slots[t], h, codes);
    }
  return 0;
}

}  // namespace

// Both return 1, and write nothing, if a slot is outside of the caches. No format: pages hold the type itself.
#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int rope_store_##suffix(const T* qkv, const float* q_norm, const float* k_norm, const float* cos_sin,       \
                                   const int64_t* positions, const int64_t* slots, T* query, void* keys, void* values, \
                                   const KVFormat* format, long key_stride, long value_stride, long tokens,            \
                                   long pages, int heads, int kv_heads, int dim, float eps, int threads) {             \
    const Projection<T> p = {qkv,    q_norm,          k_norm,     cos_sin,      positions, slots,    query, keys,      \
                             values, held_as(format), key_stride, value_stride, heads,     kv_heads, dim,   eps};      \
    return rope_store(p, tokens, pages, threads);                                                                      \
  }                                                                                                                    \
  EXPORTED int store_kv_##suffix(const T* k, const T* v, void* keys, void* values, const KVFormat* format,             \
                                 const int64_t* slots, long key_stride, long value_stride, long tokens, long pages,    \
                                 int kv_heads, int dim) {                                                              \
    const Projection<T> p = {nullptr, nullptr,         nullptr,    nullptr,      nullptr, slots,    nullptr, keys,     \
                             values,  held_as(format), key_stride, value_stride, 0,       kv_heads, dim,     0.0f};    \
    return store_kv(k, v, p, tokens, pages);                                                                           \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
