// Latent attention (kernels/latent_params.py): normalizes the latent of each token, applies the rotary embedding to the
// ends of its queries and of its key, and stores latent and key, side by side as one key of one head, in its page.
#include "../kernels.h"

#include "../rms.h"
#include "rotate.h"

namespace {

template <class T>
struct Latents {
  T* q;                         // [tokens, heads, latent + rotated]
  const T* kv;                  // [tokens, latent + rotated]
  const float *norm, *cos_sin;  // null: no rotary embedding
  int neighbours;
  const int64_t *positions, *slots;
  char* cache;
  KVFormat format;
  long stride;
  int heads, latent, rotated;
  float eps;

  int dim() const { return latent + rotated; }
};

template <class T>
void store_token(const Latents<T>& l, long token) {
  const int dim = l.dim();
  const float* cosines = l.cos_sin ? l.cos_sin + l.positions[token] * l.rotated : nullptr;
  for (int h = 0; cosines && h < l.heads; ++h) {
    T* end = l.q + (token * l.heads + h) * dim + l.latent;
    rotate(end, cosines, l.rotated, l.neighbours, end);
  }
  if (l.slots[token] == kElsewhere) return;
  const T* row = l.kv + token * dim;
  T* key = reinterpret_cast<T*>(scratch(dim * (sizeof(T) + 1)));
  const Vec factor = vset(rms_factor(row, l.latent, l.eps));
  for (int i = 0; i < l.latent; i += 16) {
    const int n = l.latent - i;
    vstore_first(key + i, vmul(vmul(vload_first(row + i, n), factor), vload_first(l.norm + i, n)), n);
  }
  if (cosines) {
    rotate(row + l.latent, cosines, l.rotated, l.neighbours, key + l.latent);
  } else {
    __builtin_memcpy(key + l.latent, row + l.latent, l.rotated * sizeof(T));
  }
  char* page = l.cache + l.slots[token] / kBlock * l.stride * element_bytes<T>(l.format);
  const int at = static_cast<int>(l.slots[token] % kBlock);
  if (l.format.held == kPlain) return store_key(key, reinterpret_cast<T*>(page), at, dim);
  auto* codes = reinterpret_cast<uint8_t*>(key + dim);
  store_key_codes(key, l.format, reinterpret_cast<uint8_t*>(page), at, dim, codes);
}

template <class T>
int store_latents(const Latents<T>& l, long tokens, long pages, int threads) {
  for (long t = 0; t < tokens; ++t)
    if (l.slots[t] < kElsewhere || l.slots[t] >= pages * kBlock) return 1;
  const long cost = tokens * (static_cast<long>(l.heads) * l.rotated + l.dim()) * 4;
  parallel_rows(threads, tokens, cost, [&](long begin, long end) {
    for (long t = begin; t < end; ++t) store_token(l, t);
  });
  return 0;
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int latent_store_##suffix(T* q, const T* kv, const float* norm, const float* cos_sin, int neighbours,       \
                                     const int64_t* positions, const int64_t* slots, void* cache,                      \
                                     const KVFormat* format, long stride, long tokens, long pages, int heads,          \
                                     int latent, int rotated, float eps, int threads) {                                \
    const Latents<T> latents = {                                                                                       \
        q,      kv,    norm,   cos_sin, neighbours, positions, slots, static_cast<char*>(cache), held_as(format),      \
        stride, heads, latent, rotated, eps};                                                                          \
    return store_latents(latents, tokens, pages, threads);                                                             \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
