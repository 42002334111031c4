// The instruction sets that this CPU and its operating system support, as bits in the order of native.py's ISAS.
// native.py asks the library that is built for the baseline first, and then loads the best one.
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

static bool has_avx_vnni() {
  unsigned a = 0, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
static bool has_f16c() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

#ifdef __aarch64__
#ifdef __APPLE__
#include <sys/sysctl.h>

static bool has_dot_product() {
  int there = 0;
  size_t size = sizeof there;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &there, &size, nullptr, 0) == 0 && there;
}
#else
#include <sys/auxv.h>

static bool has_dot_product() { return getauxval(AT_HWCAP) >> 20 & 1; }  // HWCAP_ASIMDDP
#endif
#endif

extern "C" __attribute__((visibility("default"))) int usable_isas() {
  int usable = 1;
#ifdef __aarch64__
  if (has_dot_product()) usable |= 1 << 6;
#endif
#if defined(__x86_64__) || defined(__i386__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return usable;
  usable |= has_avx_vnni() ? 1 << 1 | 1 << 2 : 1 << 1;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return usable;
  usable |= 1 << 3;
  if (!__builtin_cpu_supports("avx512vnni")) return usable;
  usable |= 1 << 4;
  if (__builtin_cpu_supports("avx512bf16")) usable |= 1 << 5;
#endif
  return usable;
}

#ifndef SUM_OF_SOURCES
#define SUM_OF_SOURCES 0
#endif
// A checksum of the sources that the library was built from, set by build.py, by which an outdated build is noticed.
extern "C" __attribute__((visibility("default"))) unsigned sum_of_sources() { return SUM_OF_SOURCES; }
