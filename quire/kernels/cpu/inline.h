#pragma once

// Of a function in a header: each source has its own, compiled for its instruction set.
#define INLINE static inline __attribute__((always_inline, unused))

// A loop over i from 0 to below n, a constant: each turn is written out, so that arrays it indexes are registers.
#define UNROLLED(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); ++i)
