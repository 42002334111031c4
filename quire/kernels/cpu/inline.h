#pragma once

// For a function in a header. Each source has its own copy, compiled for its instruction set.
#define INLINE static inline __attribute__((always_inline, unused))

// A loop over i from 0 to below the constant n. Each iteration is written out, so that the arrays that it indexes are
// registers.
#define UNROLLED(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); ++i)
