// The instruction set that this CPU and its operating system support: 0 the baseline, 1 AVX2, 2 AVX-512, 3 AVX-512 with
// bfloat16. native.py asks the library that is built for the baseline first, and then loads the best one.
extern "C" __attribute__((visibility("default"))) int isa_level() {
#if defined(__x86_64__) || defined(__i386__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return 1;
  return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
  return 0;
#endif
}

#ifndef SUM_OF_SOURCES
#define SUM_OF_SOURCES 0
#endif
// A checksum of the sources that the library was built from, set by setup.py, by which an outdated build is noticed.
extern "C" __attribute__((visibility("default"))) unsigned sum_of_sources() { return SUM_OF_SOURCES; }
