// The instruction sets that this CPU and its operating system support, as bits in the order of ISAS in
// native_library.py, which first asks the library that is built for the baseline, and then loads the best one.
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

static bool has_avx_vnni() {
  unsigned a = 0, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
static bool has_tiles() {
  unsigned a, b, c, d = 0;
  const unsigned needs = 1u << 24 | 1u << 22 | 1u << 25;  // tiles, and their products of bf16 and int8
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needs) == needs;
}
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>

// Asks the system whether this process may use tiles, before any thread uses them. A container may refuse.
static bool may_use_tiles() {
  constexpr long kAskPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}
#else
static bool may_use_tiles() { return false; }
#endif
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
  if (has_dot_product()) usable |= 1 << 7;
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
  if (!__builtin_cpu_supports("avx512bf16")) return usable;
  usable |= has_tiles() && may_use_tiles() ? 1 << 5 | 1 << 6 : 1 << 5;
#endif
  return usable;
}

// True if the processor has tiles that the system refuses.
extern "C" __attribute__((visibility("default"))) int tiles_refused() {
#if defined(__x86_64__) || defined(__i386__)
  return has_tiles() && !may_use_tiles();
#else
  return 0;
#endif
}

#ifndef SUM_OF_SOURCES
#define SUM_OF_SOURCES 0
#endif
// A checksum of the library's sources, set by build.py, which reveals an outdated build.
extern "C" __attribute__((visibility("default"))) unsigned sum_of_sources() { return SUM_OF_SOURCES; }
