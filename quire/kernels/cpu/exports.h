// The functions that the library exports, for float (_f32) and bfloat16 (_bf16); native_library.py has the same
// arguments. Functions with an int result return 0, or 1 if a page or slot is outside of the caches, or a rank has
// ended. Shapes are those of `Backend` in kernels/backend.py.
#pragma once

#include "fetch.h"

// All other symbols are hidden, because a process may load several of these libraries, one per instruction set.
#define EXPORTED extern "C" __attribute__((visibility("default")))

// Consecutive outputs of a quantized linear (quantized.h) with codes of the same kind.
struct QuantizedPart {
  uint8_t* packed;
  const float* factors;  // [outs]: final factor of each output
  int outs, bits;
  int group;    // inputs that share a scale; all, with the padding, if there are no scales but the factors
  int scales;   // whether groups have scales, and
  int offsets;  // whether they have offsets as well
  int nested;   // inputs that share a half float, whose small multiples are groups' scales; 0: scales are half floats
  uint8_t table[2][16];  // what a nibble's lowest bits stand for, plus 128; then, for 2-bit codes, its highest bits
};

struct QuantizedLinear {
  const QuantizedPart* parts;
  const int32_t* order;  // [in]: the parts are of x[order]; null: of x itself
  int count;
  int block;       // inputs of a row of x per scale: 16, 32 .. 96, which divides each part's group
  float outliers;  // blocks of x have 16 bits instead of 8 if their peak exceeds this times the root mean square of a
                   // row's peaks
};

enum { kPlain = 0, kInt8 = 1, kFloat8 = 2 };

// How pages hold keys and values (kv_codes.h).
struct KVFormat {
  int held;                      // kPlain: the kernel's type; otherwise 8-bit integers or floats
  float key_scale, value_scale;  // of 8-bit floats: a layer's keys are its codes times key_scale; otherwise 1
};

// The weights of a linear as 8-bit floats (quantization/float8.cpp).
struct Float8Linear {
  const uint8_t* packed;
  const float* scales;  // [panels of 64 outputs][blocks][64]
  int block;            // inputs per scale: a multiple of 4
};

struct PackedLinear {
  void* weight;  // packed by pack_linear, and compressed by compress if `compressed` is set
  void* bias;    // may be null; float32 if one of the last two fields is set
  int in, outs;  // numbers of inputs and outputs
  int compressed;
  int wide;                          // whether results are float32 instead of the weight's type
  const QuantizedLinear* quantized;  // replaces the weight unless null;
  const Float8Linear* float8;        // replaces the weight unless null
};

// Linears with their own inputs and outputs, side by side (mla/linear_blocks.cpp).
struct LinearBlocks {
  const PackedLinear* linears;  // [count], all with the same numbers of inputs and outputs
  int count;
  int passed;  // numbers after a linear's inputs, copied to follow its outputs
};

// How scores choose a row's experts (decoder/routing.h); kernels/parameters/routing.py explains the fields.
struct Routing {
  const float* correction;  // [experts]; may be null
  const float* factors;     // [experts], final factors of their weights; may be null
  int chosen, weights, normalized, groups, groups_kept, group_best;
  int inputs;                           // whether weights multiply the experts' inputs instead of their outputs
  float added, scale, softcap, jitter;  // softcap 0: no cap
};

// Consecutive bytes of a mapped file.
struct MappedPiece {
  void* begin;
  long bytes;
};

struct Experts;

// State of a mixture's experts whose weights are in a mapped file (decoder/mapped.h).
struct MappedExperts {
  const MappedPiece* pieces;
  const int64_t* starts;  // [held + 1]: the first piece of each expert
  const uint8_t* kept;    // [held]: whether its weights are also in memory, and read there
  uint8_t* guessed;       // [held]: whether the layer before guessed and requested it
  int64_t* uses;          // [held]: number of steps that read it
  int64_t* counts;        // [4], over all layers: experts read, of these kept in memory, guessed, of these read
  const Experts* next;    // the experts of the next MoE layer; null: there is none
};

// A mixture of experts (experts.cpp): gated MLPs. The router chooses some of them for each row.
struct Experts {
  const PackedLinear* router;          // wide
  const PackedLinear *gate_up, *down;  // [held]
  Routing routing;
  int count;
  int first, held;              // the experts that are here; the others are on other ranks, and add nothing
  int float_router;             // whether the router's weights are float32, whatever the others are
  float alpha, limit;           // of clamped_mul; limit 0: the gate is SiLU
  int activation;               // its kind, if gate_up is only the up projection; -1: there are gates
  int gelu;                     // whether gates are GELU
  const MappedExperts* mapped;  // may be null
};

// An adapter's addition to some consecutive outputs of a linear.
struct LoraPart {
  const void* up;  // [outs / 16][rank][16] of the linear's type, padded with zeros
  int first, outs;
  int first_rank, rank;  // this part's rows of `down`
};

struct LoraAdapter {
  const void* down;  // [panels][words of in][16]: all parts in order, padded with zeros
  const LoraPart* parts;
  int count, panels;  // count: number of parts; 0: nothing is added to this linear
};

// A linear's adapters by slot, from slot 1 on.
struct LoraLinear {
  const LoraAdapter* adapters;
  int slots, in, outs;
  int wide;  // as in PackedLinear
};

// One rank's view of the ranks that share this model (ranks/collective.cpp).
struct Collective {
  char* memory;   // mapped by all: counts, then two buffers per rank
  long capacity;  // bytes of a buffer
  int rank, count;
  int parent;      // the parent process, without which waits fail; 0: none
  int spins;       // polls of another rank's count before sleeping
  uint32_t steps;  // steps begun so far
};

EXPORTED int sum_ranks_f32(Collective* group, float* x, long size, int threads);
EXPORTED int sum_ranks_bf16(Collective* group, bf16* x, long size, int threads);
EXPORTED int share_rank(Collective* group, char* x, long size);
EXPORTED int gather_ranks(Collective* group, const float* own, float* out, long rows, const int64_t* starts);
EXPORTED long compressed_size(const uint16_t* packed, int in, int outs, int threads);
EXPORTED void compress(const uint16_t* packed, uint8_t* to, int in, int outs, int threads);
EXPORTED long quantized_size(const QuantizedPart* part, int inner);
EXPORTED void pack_quantized(const QuantizedPart* part, const uint8_t* codes, const half* scales, const half* offsets,
                             const uint8_t* multiples, int in, int inner, int threads);
EXPORTED void pack_float8(const uint8_t* codes, uint8_t* packed, int in, int outs, int threads);
EXPORTED void draw_f32(const float* logits, const double* filters, const double* u, int64_t* out, long rows, long size,
                       int threads);

#define EXPORTS(suffix, T)                                                                                             \
  EXPORTED void pack_linear_##suffix(const T* weight, T* packed, int in, int outs, int threads);                       \
  EXPORTED void linear_##suffix(const PackedLinear* linear, const T* x, void* out, long rows, int threads,             \
                                Fetch* meanwhile);                                                                     \
  EXPORTED void quantized_linear_##suffix(const PackedLinear* linear, const T* x, void* out, long rows, int threads,   \
                                          Fetch* meanwhile);                                                           \
  EXPORTED void add_adapters_##suffix(const LoraLinear* linear, const int64_t* adapters, const T* x, void* out,        \
                                      long rows, int threads);                                                         \
  EXPORTED void float8_linear_##suffix(const PackedLinear* linear, const T* x, void* out, long rows, int threads,      \
                                       Fetch* meanwhile);                                                              \
  EXPORTED void fit_int4_##suffix(const T* weight, uint8_t* codes, float* scales, float* offsets, long groups,         \
                                  int zero_points, int threads);                                                       \
  EXPORTED void look_up_##suffix(const PackedLinear* table, const int64_t* ids, T* out, long rows);                    \
  EXPORTED void rms_norm_##suffix(const T* x, const float* weight, T* out, long rows, int size, float eps,             \
                                  int threads);                                                                        \
  EXPORTED void add_rms_norm_##suffix(T* x, T* residual, const float* weight, long rows, int size, float eps,          \
                                      int threads);                                                                    \
  EXPORTED void layer_norm_##suffix(const T* x, T* residual, const float* weight, const float* bias, T* out,           \
                                    long rows, int size, float eps, int threads);                                      \
  EXPORTED void add_##suffix(const T* x, T* residual, long size, int threads);                                         \
  EXPORTED void add_gated_##suffix(const T* x, const T* gate, T* residual, long rows, int size, int threads);          \
  EXPORTED void activate_##suffix(T* x, long size, int kind, float positive, float negative, float slope,              \
                                  int threads);                                                                        \
  EXPORTED void silu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads);                         \
  EXPORTED void gelu_mul_##suffix(const T* gate_up, T* out, long rows, int size, int threads);                         \
  EXPORTED void clamped_mul_##suffix(const T* gate_up, T* out, long rows, int size, float alpha, float limit,          \
                                     int threads);                                                                     \
  EXPORTED void mul_columns_##suffix(T* x, const T* beside, long rows, int size, int width, int first, int threads);   \
  EXPORTED void mix_experts_##suffix(const Experts* experts, const T* x, const T* routed, T* out, long rows,           \
                                     int threads);                                                                     \
  EXPORTED int rope_store_##suffix(const T* qkv, const float* q_norm, const float* k_norm, const float* v_norm,        \
                                   const float* cos_sin, const float* q_scale, int norm, int given,                    \
                                   const int64_t* positions, const int64_t* slots, T* query, void* keys, void* values, \
                                   const KVFormat* format, long key_stride, long value_stride, long tokens,            \
                                   long pages, int heads, int kv_heads, int dim, float eps, int threads);              \
  EXPORTED int store_kv_##suffix(const T* k, const T* v, void* keys, void* values, const KVFormat* format,             \
                                 const int64_t* slots, long key_stride, long value_stride, long tokens, long pages,    \
                                 int kv_heads, int dim);                                                               \
  EXPORTED int latent_store_##suffix(T* q, const T* kv, const float* norm, const float* cos_sin, int neighbours,       \
                                     const int64_t* positions, const int64_t* slots, void* cache,                      \
                                     const KVFormat* format, long stride, long tokens, long pages, int heads,          \
                                     int latent, int rotated, float eps, int threads);                                 \
  EXPORTED void linear_blocks_##suffix(const LinearBlocks* blocks, const T* x, T* out, long rows, int threads);        \
  EXPORTED int short_conv_##suffix(const T* bcx, const float* weight, const float* bias, T* out, T* ends, T* recent,   \
                                   const int32_t* starts, const int32_t* contexts, const int32_t* table,               \
                                   long table_stride, const int64_t* slots, long pages, long slot_count,               \
                                   int sequences, int channels, int width, int kept, int gated, int threads);          \
  EXPORTED int delta_rule_##suffix(                                                                                    \
      const T* qkv, const T* z, const T* ba, const float* rate, const float* shift, const float* norm, T* out,         \
      float* matrices, T* guesses, const int32_t* starts, const int32_t* contexts, const int32_t* seen,                \
      const int32_t* known, const int64_t* slots, long slot_count, int sequences, int key_heads, int heads, int key,   \
      int value, int drafts, float eps, int decay_per_row, int sigmoid_gate, int threads);                             \
  EXPORTED int state_space_##suffix(                                                                                   \
      const T* xbc, const T* z, const T* dt, const float* rate, const float* shift, const float* skip,                 \
      const float* norm, T* out, float* matrices, T* guesses, const int32_t* starts, const int32_t* contexts,          \
      const int32_t* seen, const int32_t* known, const int64_t* slots, long slot_count, int sequences, int groups,     \
      int heads, int key, int value, int drafts, float eps, float least, float most, int norm_first, int threads);     \
  EXPORTED int selective_scan_##suffix(                                                                                \
      const T* xbc, const T* z, const T* dt, const float* rate, const float* shift, const float* skip,                 \
      const float* write_norm, const float* read_norm, T* out, float* matrices, T* guesses, const int32_t* starts,     \
      const int32_t* contexts, const int32_t* seen, const int32_t* known, const int64_t* slots, long slot_count,       \
      int sequences, int groups, int heads, int key, int value, int drafts, float eps, int threads);                   \
  EXPORTED void join_##suffix(const T* x, const T* y, T* out, long rows, int first, int second, int threads);          \
  EXPORTED void cast_##suffix(const T* x, void* out, long size, int threads);                                          \
  EXPORTED void sigmoid_mul_##suffix(T* x, const T* gate, long gates, int each, int threads);                          \
  EXPORTED int paged_attention_##suffix(void* out, const void* query, const void* keys, const void* values,            \
                                        const KVFormat* format, const int32_t* starts, const int32_t* contexts,        \
                                        const int32_t* table, long table_stride, long key_stride, long value_stride,   \
                                        long pages, int sequences, int heads, int kv_heads, int dim, float scale,      \
                                        int window, float softcap, int ahead, const float* bias, long bias_stride,     \
                                        long bias_center, const float* sinks, int values_dim, int threads);            \
  EXPORTED int sparse_attention_##suffix(void* out, const void* query, const void* keys, const int32_t* selected,      \
                                         const int32_t* starts, const int32_t* contexts, const int32_t* table,         \
                                         long table_stride, long key_stride, long pages, int sequences, int heads,     \
                                         int dim, float scale, int values_dim, int most, int threads);                 \
  EXPORTED int select_keys_##suffix(                                                                                   \
      T* q, const T* k, const T* weights, const float* norm, const float* norm_bias, const float* cos_sin,             \
      int neighbours, const int64_t* positions, const int64_t* slots, T* cache, long stride, const int32_t* starts,    \
      const int32_t* contexts, const int32_t* table, long table_stride, int32_t* out, long tokens, long pages,         \
      int sequences, int heads, int dim, int rotated, int top, float eps, int threads);                                \
  EXPORTED int ranks_attention_##suffix(                                                                               \
      Collective* group, void* out, const void* query, const void* keys, const void* values, const KVFormat* format,   \
      const int32_t* starts, const int32_t* contexts, const int32_t* table, long table_stride, long key_stride,        \
      long value_stride, long pages, int sequences, int heads, int kv_heads, int dim, float scale, int window,         \
      float softcap, const float* bias, long bias_stride, long bias_center, const float* sinks, int values_dim,        \
      int threads);
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
    static constexpr auto quantized_linear = quantized_linear_##suffix;                                                \
    static constexpr auto add_adapters = add_adapters_##suffix;                                                        \
    static constexpr auto fit_int4 = fit_int4_##suffix;                                                                \
    static constexpr auto look_up = look_up_##suffix;                                                                  \
    static constexpr auto rms_norm = rms_norm_##suffix;                                                                \
    static constexpr auto add_rms_norm = add_rms_norm_##suffix;                                                        \
    static constexpr auto layer_norm = layer_norm_##suffix;                                                            \
    static constexpr auto add = add_##suffix;                                                                          \
    static constexpr auto add_gated = add_gated_##suffix;                                                              \
    static constexpr auto activate = activate_##suffix;                                                                \
    static constexpr auto silu_mul = silu_mul_##suffix;                                                                \
    static constexpr auto gelu_mul = gelu_mul_##suffix;                                                                \
    static constexpr auto clamped_mul = clamped_mul_##suffix;                                                          \
    static constexpr auto mul_columns = mul_columns_##suffix;                                                          \
    static constexpr auto mix_experts = mix_experts_##suffix;                                                          \
    static constexpr auto store_kv = store_kv_##suffix;                                                                \
    static constexpr auto rope_store = rope_store_##suffix;                                                            \
    static constexpr auto latent_store = latent_store_##suffix;                                                        \
    static constexpr auto linear_blocks = linear_blocks_##suffix;                                                      \
    static constexpr auto short_conv = short_conv_##suffix;                                                            \
    static constexpr auto delta_rule = delta_rule_##suffix;                                                            \
    static constexpr auto state_space = state_space_##suffix;                                                          \
    static constexpr auto selective_scan = selective_scan_##suffix;                                                    \
    static constexpr auto join = join_##suffix;                                                                        \
    static constexpr auto cast = cast_##suffix;                                                                        \
    static constexpr auto sigmoid_mul = sigmoid_mul_##suffix;                                                          \
    static constexpr auto sum_ranks = sum_ranks_##suffix;                                                              \
    static constexpr auto paged_attention = paged_attention_##suffix;                                                  \
    static constexpr auto sparse_attention = sparse_attention_##suffix;                                                \
    static constexpr auto select_keys = select_keys_##suffix;                                                          \
    static constexpr auto ranks_attention = ranks_attention_##suffix;                                                  \
  };
KERNELS(f32, float)
KERNELS(bf16, bf16)
