// Normalizes q and k of the fused q, k, v projection of each token per head, applies the rotary embedding to both, and
// stores k and v in their pages.
#include "kernels.h"

#include "rms.h"

namespace {

// Kinds of norm, by the numbers in kernels/qk_norm_rope.py.
enum { kHeads = 0, kWhole = 1, kCentred = 2, kAfter = 3 };
// What is projected: only queries; queries and keys, which are also the values; or all three.
enum { kQueries = 0, kKeys = 1, kAll = 2 };
struct Head {
  const float* weight;   // weight of its norm; null: no norm
  float mean, factor;    // of the norm: (x - mean) * factor * weight
  bool after;            // whether the norm follows the rotation
  const float* cosines;  // null: no rotation; the sines follow the cosines in memory
  float scale;           // factor of the result
};

// Norms and rotates one head of `dim` elements, in float32, and rounds once.
template <class T>
INLINE void norm_and_rotate(const T* x, const Head& head, int dim, T* out) {
  const int half = dim / 2;
  const bool before = head.weight && !head.after, after = head.weight && head.after;
  for (int i = 0; i < half; i += 16) {
    const int n = half - i;
    Vec first = vload_first(x + i, n), second = vload_first(x + half + i, n);
    const auto norm = [&] {
      const Vec mean = vset(head.mean), factor = vset(head.factor);
      first = vmul(vmul(vsub(first, mean), factor), vload_first(head.weight + i, n));
      second = vmul(vmul(vsub(second, mean), factor), vload_first(head.weight + half + i, n));
    };
    if (before) norm();
    if (head.cosines) {
      const Vec cosine = vload_first(head.cosines + i, n), sine = vload_first(head.cosines + half + i, n);
      const Vec rotated = vsub(vmul(first, cosine), vmul(second, sine));
      second = vfma(second, cosine, vmul(first, sine));
      first = rotated;
    }
    if (after) norm();
    if (head.scale != 1.0f) first = vmul(first, vset(head.scale)), second = vmul(second, vset(head.scale));
    vstore_first(out + i, first, n);
    vstore_first(out + half + i, second, n);
  }
}

template <class T>
struct Projection {
  const T* qkv;
  const float *q_norm, *k_norm, *v_norm;
  const float *cos_sin, *q_scale;  // null: no rotary embedding; null: queries are not scaled
  int norm, given;
  const int64_t *positions, *slots;
  T* query;
  void *keys, *values;
  KVFormat format;
  long key_stride, value_stride;
  int heads, kv_heads, dim;
  float eps;
};

// Writes a head of one token to its slot.
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

// Norm and rotation of head h of `heads` queries or keys of one token.
template <class T>
INLINE Head head_of(const T* all, int h, int heads, const float* weights, const float* cosines, float scale,
                    const Projection<T>& p) {
  Head head = {weights, 0.0f, 1.0f, p.norm == kAfter, cosines, scale};
  if (!weights) return head;
  const T* x = all + static_cast<long>(h) * p.dim;
  if (p.norm == kWhole || p.norm == kCentred) head.weight += static_cast<long>(h) * p.dim;
  if (p.norm == kWhole)
    head.factor = rms_factor(all, heads * p.dim, p.eps);
  else if (p.norm == kCentred)
    head.factor = centred_factor(x, p.dim, p.eps, &head.mean);
  else
    head.factor = rms_factor(x, p.dim, p.eps);
  return head;
}

template <class T>
void rope_token(const Projection<T>& p, long token) {
  const T* row = p.qkv + token * (p.heads + static_cast<long>(p.given) * p.kv_heads) * p.dim;
  const float* cosines = p.cos_sin ? p.cos_sin + p.positions[token] * p.dim : nullptr;
  const float scale = p.q_scale ? p.q_scale[p.positions[token]] : 1.0f;
  T* query = p.query + token * p.heads * p.dim;
  Head head;
  for (int h = 0; h < p.heads; ++h) {
    if (!h || p.norm != kWhole) head = head_of(row, h, p.heads, p.q_norm, cosines, scale, p);
    norm_and_rotate(row + h * p.dim, head, p.dim, query + h * p.dim);
    if (p.norm == kWhole && head.weight) head.weight += p.dim;
  }
  if (p.given == kQueries || p.slots[token] == kElsewhere) return;
  const T* key = row + static_cast<long>(p.heads) * p.dim;
  const T* value = p.given == kAll ? key + static_cast<long>(p.kv_heads) * p.dim : key;
  T* rotated = reinterpret_cast<T*>(scratch(p.dim * (2 * sizeof(T) + 1)));
  T* normed = rotated + p.dim;
  auto* codes = reinterpret_cast<uint8_t*>(normed + p.dim);
  for (int h = 0; h < p.kv_heads; ++h) {
    if (!h || p.norm != kWhole) head = head_of(key, h, p.kv_heads, p.k_norm, cosines, 1.0f, p);
    norm_and_rotate(key + h * p.dim, head, p.dim, rotated);
    if (p.norm == kWhole && head.weight) head.weight += p.dim;
    const T* own = value + h * p.dim;
    if (p.v_norm) {
      norm_and_rotate(own, {p.v_norm, 0.0f, rms_factor(own, p.dim, p.eps), false, nullptr, 1.0f}, p.dim, normed);
      own = normed;
    }
    store_head(rotated, own, p, p.slots[token], h, codes);
  }
}

bool slots_valid(const int64_t* slots, long tokens, long pages) {
  for (long t = 0; t < tokens; ++t)
    if (slots[t] < kElsewhere || slots[t] >= pages * kBlock) return false;
  return true;
}

template <class T>
int rope_store(const Projection<T>& p, long tokens, long pages, int threads) {
  if (p.given != kQueries && !slots_valid(p.slots, tokens, pages)) return 1;
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
    for (int h = 0; h < p.kv_heads && p.slots[t] != kElsewhere; ++h) {
      const long from = (t * p.kv_heads + h) * p.dim;
      store_head(k + from, v + from, p, p.slots[t], h, codes);
    }
  return 0;
}

}  // namespace

// Both return 1, and write nothing, if a slot is outside of the caches. Without a format, pages have the kernel's type.
#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int rope_store_##suffix(const T* qkv, const float* q_norm, const float* k_norm, const float* v_norm,        \
                                   const float* cos_sin, const float* q_scale, int norm, int given,                    \
                                   const int64_t* positions, const int64_t* slots, T* query, void* keys, void* values, \
                                   const KVFormat* format, long key_stride, long value_stride, long tokens,            \
                                   long pages, int heads, int kv_heads, int dim, float eps, int threads) {             \
    const Projection<T> p = {qkv,        q_norm,       k_norm, v_norm,   cos_sin, q_scale, norm,                       \
                             given,      positions,    slots,  query,    keys,    values,  held_as(format),            \
                             key_stride, value_stride, heads,  kv_heads, dim,     eps};                                \
    return rope_store(p, tokens, pages, threads);                                                                      \
  }                                                                                                                    \
  EXPORTED int store_kv_##suffix(const T* k, const T* v, void* keys, void* values, const KVFormat* format,             \
                                 const int64_t* slots, long key_stride, long value_stride, long tokens, long pages,    \
                                 int kv_heads, int dim) {                                                              \
    const Projection<T> p = {nullptr,    nullptr,      nullptr, nullptr,  nullptr, nullptr, kHeads,                    \
                             kAll,       nullptr,      slots,   nullptr,  keys,    values,  held_as(format),           \
                             key_stride, value_stride, 0,       kv_heads, dim,     0.0f};                              \
    return store_kv(k, v, p, tokens, pages);                                                                           \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
