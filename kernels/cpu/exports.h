// The functions that the library exports, for float (_f32) and bfloat16 (_bf16); native.py has the same arguments.
// Those that return int return 0, or 1 when a page or slot is outside of the caches. Shapes are those of `Backend` in
// kernels/backend.py.
#pragma once

#include "fetch.h"

// All other symbols are hidden, because a process may load several of these libraries, one per instruction set.
#define EXPORTED extern "C" __attribute__((visibility("default")))

struct PackedLinear {
  void* weight;  // packed by pack_linear, and compressed by compress if `compressed` is set
  void* bias;    // may be null
  int in, outs;  // numbers of inputs and outputs
  int compressed;
  int wide;  // whether results are float32 instead of the weight's type
};

EXPORTED long compressed_size(const uint16_t* packed, int in, int outs, int threads);
EXPORTED void compress(const uint16_t* packed, uint8_t* to, int in, int outs, int threads);
EXPORTED void draw_f32(const float* logits, const double* filters, const double* u, int64_t* out, long rows, long size,
                       int threads);

#define EXPORTS(suffix, T)                                                                                             \
  EXPORTED void pack_linear_##suffix(const T* weight, T* packed, int in, int outs, int threads);                       \
  EXPORTED void linear_##suffix(const PackedLinear* linear, const T* x, void* out, long rows, int threads,             \
                                Fetch* meanwhile);                                                                     \
  EXPORTED void rms_norm_##suffix(const T* x, const float* weight, T* out, long rows, int size, float eps,             \
                                  int threads);                                                                        \
  EXPORTED void add_rms_norm_##suffix(T* x, T* residual, const float* weight, long rows, int size, float eps,          \
                                      int threads);                                                                    \
  EXPORTED void silu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads);                         \
  EXPORTED void gelu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads);                         \
  EXPORTED int rope_store_##suffix(const T* qkv, const float* q_norm, const float* k_norm, const float* cos_sin,       \
                                   const int64_t* positions, const int64_t* slots, T* query, T* keys, T* values,       \
                                   long key_stride, long value_stride, long tokens, long pages, int heads,             \
                                   int kv_heads, int dim, float eps, int threads);                                     \
  EXPORTED int store_kv_##suffix(const T* k, const T* v, T* keys, T* values, const int64_t* slots, long key_stride,    \
                                 long value_stride, long tokens, long pages, int kv_heads, int dim);                   \
  EXPORTED int paged_attention_##suffix(void* out, const void* query, const void* keys, const void* values,            \
                                        const int32_t* starts, const int32_t* contexts, const int32_t* table,          \
                                        long table_stride, long key_stride, long value_stride, long pages,             \
                                        int sequences, int heads, int kv_heads, int dim, float scale, int window,      \
                                        float softcap, int threads);
EXPORTS(f32, float)
EXPORTS(bf16, bf16)

// The same functions by type: Kernels<float>::linear is linear_f32.
template <class T>
struct Kernels;
#define KERNELS(suffix, T)                                                                                             \
  template <>                                                                                                          \
  struct Kernels<T> {                                                                                                  \
    static constexpr auto pack_linear = pack_linear_##suffix;                                                          \
    static constexpr auto linear = linear_##suffix;                                                                    \
    static constexpr auto rms_norm = rms_norm_##suffix;                                                                \
    static constexpr auto add_rms_norm = add_rms_norm_##suffix;                                                        \
    static constexpr auto silu_mul = silu_mul_##suffix;                                                                \
    static constexpr auto gelu_mul = gelu_mul_##suffix;                                                                \
    static constexpr auto store_kv = store_kv_##suffix;                                                                \
    static constexpr auto rope_store = rope_store_##suffix;                                                            \
    static constexpr auto paged_attention = paged_attention_##suffix;                                                  \
  };
KERNELS(f32, float)
KERNELS(bf16, bf16)
