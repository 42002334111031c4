#pragma once

// Of a function in a header: each source has its own, compiled for its instruction set.
#define INLINE static inline __attribute__((always_inline, unused))

// Before a loop whose count is a constant: each turn is written out, so that arrays it indexes are registers.
#define UNROLLED _Pragma("GCC unroll 16")
