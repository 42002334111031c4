// How codes of 2, 3 and 4 bits of 32 outputs are packed, and how they become bytes. quantized.h defines steps.
//
//   4 bits   128 bytes are two steps: one in the low nibbles, the next in the high ones.
//   2 bits   128 bytes are four steps, the first in the lowest bits.
//   3 bits   192 bytes are four steps, in three vectors of 64. The first two, one per column of 16 outputs,
//            have step 0 in the lowest bits of low nibbles, and step 1 in those of high nibbles. The third vector has
//            step 2, and the highest bits of all nibbles are step 3, both with the first column in the low nibbles.
#pragma once

#include "../quantized.h"

namespace {

INLINE Words load_words(const uint8_t* p) { return wload(reinterpret_cast<const uint32_t*>(p)); }

struct CodeTables {
  Words low, high;  // high: looks up 2-bit codes that are in the upper half of a nibble
};

template <int kBits>
struct Codes {
  const uint8_t* at;
  CodeTables tables;

  // Bytes of step `first` + i. `first` is a multiple of four, and i is less than four.
  __attribute__((always_inline)) Words load(int first, int i, int column) const {
    constexpr int kColumn = kStepBytes / 2;
    if constexpr (kBits == 8) return load_words(at + (first + i) * kStepBytes + kColumn * column);
    if constexpr (kBits == 4) {
      const Words words = load_words(at + (first / 2 + i / 2) * kStepBytes + kColumn * column);
      return i % 2 ? look_up_high(tables.low, words) : look_up_low(tables.low, words);
    }
    if constexpr (kBits == 2) {
      const Words words = load_words(at + first / 4 * kStepBytes + kColumn * column);
      const Words table = i % 2 ? tables.high : tables.low;
      return i < 2 ? look_up_low(table, words) : look_up_high(table, words);
    }
    const uint8_t* from = at + first / 4 * 3 * kColumn;
    if (i == 0) return look_up_low(tables.low, load_words(from + kColumn * column));
    if (i == 1) return look_up_high(tables.low, load_words(from + kColumn * column));
    const Words third = load_words(from + 2 * kColumn);
    const Words nibbles = i == 2 ? third : join_high_bits(load_words(from), load_words(from + kColumn), third);
    return column == 0 ? look_up_low(tables.low, nibbles) : look_up_high(tables.low, nibbles);
  }
};

// Calls `work` with `bits` as a compile-time constant.
template <class Work>
INLINE void with_bits(int bits, const Work& work) {
  if (bits == 8) return work(std::integral_constant<int, 8>());
  if (bits == 4) return work(std::integral_constant<int, 4>());
  if (bits == 3) return work(std::integral_constant<int, 3>());
  work(std::integral_constant<int, 2>());
}

// Sets the code of an input and output in a group at `at`, whose codes must be 0 before unless they have 8 bits.
INLINE void put_code(uint8_t* at, int bits, int input, int output, int code) {
  const int step = input / 4, byte = output * 4 + input % 4, column = output / 16;
  if (bits == 8) at[step * kStepBytes + byte] = static_cast<uint8_t>(code);
  if (bits == 4) at[step / 2 * kStepBytes + byte] |= static_cast<uint8_t>(code << step % 2 * 4);
  if (bits == 2) at[step / 4 * kStepBytes + byte] |= static_cast<uint8_t>(code << step % 4 * 2);
  if (bits != 3) return;
  constexpr int kColumn = kStepBytes / 2;
  uint8_t* own = at + step / 4 * 3 * kColumn + byte % kColumn;
  if (step % 4 < 2) own[column * kColumn] |= static_cast<uint8_t>(code << step % 4 * 4);
  if (step % 4 == 2) own[2 * kColumn] |= static_cast<uint8_t>(code << column * 4);
  if (step % 4 < 3) return;
  for (int b = 0; b < 3; ++b) own[b * kColumn] |= static_cast<uint8_t>((code >> b & 1) << (column * 4 + 3));
}

// Returns the code that put_code set.
INLINE int code_at(const uint8_t* at, int bits, int input, int output) {
  const int step = input / 4, byte = output * 4 + input % 4, column = output / 16;
  if (bits == 8) return at[step * kStepBytes + byte];
  if (bits == 4) return at[step / 2 * kStepBytes + byte] >> step % 2 * 4 & 15;
  if (bits == 2) return at[step / 4 * kStepBytes + byte] >> step % 4 * 2 & 3;
  constexpr int kColumn = kStepBytes / 2;
  const uint8_t* own = at + step / 4 * 3 * kColumn + byte % kColumn;
  if (step % 4 < 2) return own[column * kColumn] >> step % 4 * 4 & 7;
  if (step % 4 == 2) return own[2 * kColumn] >> column * 4 & 7;
  int code = 0;
  for (int b = 0; b < 3; ++b) code |= (own[b * kColumn] >> (column * 4 + 3) & 1) << b;
  return code;
}

}  // namespace
