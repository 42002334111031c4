// Linears with their own inputs and outputs, one per head of latent attention. A thread multiplies some rows with one
// of the linears. A row's bits depend only on the row, as in linear.cpp.
#include "../kernels.h"

#include "../panels.h"

namespace {

template <class T>
void multiply_block(const LinearBlocks& blocks, int b, const T* x, T* out, long begin, long end) {
  const PackedLinear& linear = blocks.linears[b];
  const int in = linear.in, outs = linear.outs;
  const long x_block = in + blocks.passed, out_block = outs + blocks.passed, rows = end - begin;
  const auto from = [&](long r) { return x + (r * blocks.count + b) * x_block; };
  const auto to = [&](long r) { return out + (r * blocks.count + b) * out_block; };
  if (rows == 1) {
    Kernels<T>::linear(&linear, from(begin), to(begin), 1, 1, nullptr);
  } else {
    T* inputs = reinterpret_cast<T*>(scratch(rows * (in + outs) * sizeof(T)));
    T* outputs = inputs + rows * in;
    for (long r = 0; r < rows; ++r) __builtin_memcpy(inputs + r * in, from(begin + r), in * sizeof(T));
    Kernels<T>::linear(&linear, inputs, outputs, rows, 1, nullptr);
    for (long r = 0; r < rows; ++r) __builtin_memcpy(to(begin + r), outputs + r * outs, outs * sizeof(T));
  }
  for (long r = begin; r < end; ++r) __builtin_memcpy(to(r) + outs, from(r) + in, blocks.passed * sizeof(T));
}

template <class T>
void multiply_blocks(const LinearBlocks& blocks, const T* x, T* out, long rows, int threads) {
  constexpr long kOneThreadWork = 900000;  // as in linear.cpp
  const PackedLinear& first = blocks.linears[0];
  if ((rows + static_cast<long>(sizeof(T))) * first.in * first.outs * blocks.count < kOneThreadWork) threads = 1;
  const long parts = (rows + kRowBlock - 1) / kRowBlock;
  parallel_for(threads, blocks.count * parts, [&](long i) {
    const long part = i % parts;
    const int block = static_cast<int>(i / parts);
    multiply_block(blocks, block, x, out, rows * part / parts, rows * (part + 1) / parts);
  });
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void linear_blocks_##suffix(const LinearBlocks* blocks, const T* x, T* out, long rows, int threads) {       \
    multiply_blocks(*blocks, x, out, rows, threads);                                                                   \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
