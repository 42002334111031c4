#pragma once

// Of a function in a header: each source has its own, compiled for its instruction set.
#define INLINE static inline __attribute__((always_inline, unused))
