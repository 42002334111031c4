// Runs programs that use matrix tiles (AMX) on processors that have none. There each of their instructions ends in
// SIGILL; the handler below reads the instruction, does what it would, and goes on behind it. So what the compiler made
// of the kernels runs as it is: its registers, addresses and strides, the order of its loads, the shapes it sets. What
// Intel's manual demands of an instruction is checked, and who breaks it ends as there, by SIGILL or SIGSEGV, with a
// line that says why. The arithmetic is that of kernels/cpu/tiles/tiles.cpp, compiled with EMULATE_TILES.
//
// trapped.py loads it, or preloads it into programs: then it also answers for the system, which a process must ask
// before it uses tiles (arch_prctl). In the environment TILES says what it answers: "refused", else permission;
// "permitted" is for a program that does not ask.
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "../../quire/kernels/cpu/tiles/tiles.h"

#define VISIBLE extern "C" __attribute__((visibility("default")))

namespace {

enum Kind { kConfigure, kTellShapes, kRelease, kZero, kLoad, kStore, kDot, kDotBytes, kKinds };
const char* const kNames[kKinds] = {"ldtilecfg", "sttilecfg",  "tilerelease", "tilezero",
                                    "tileloadd", "tilestored", "tdpbf16ps",   "tdpbssd"};

struct Instruction {
  Kind kind;
  int length;
  int tile, x, weight;  // of ModRM's reg and rm, and of VEX.vvvv
  char* memory;
  long stride;
};

// What VEX and ModRM say, with the operand in memory.
struct Fields {
  int prefix;  // 0: none, 1: 66, 2: F3, 3: F2
  int opcode, mode, reg, rm, third;
  bool has_index;
  char* base;  // with the displacement
  long index;  // scaled
  int length;
};

constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

int32_t number(const uint8_t* at, int bytes) {
  if (bytes == 1) return static_cast<int8_t>(*at);
  int32_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Reads an instruction of VEX.128.0F38.W0. False: it is none.
bool read_fields(const uint8_t* at, const greg_t* registers, Fields& made) {
  if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || (at[2] & 0x84) != 0) return false;
  const int high = ~at[1] >> 5, modrm = at[4];  // R, X and B, which are stored inverted
  made.prefix = at[2] & 3;
  made.third = ~at[2] >> 3 & 15;
  made.opcode = at[3];
  made.mode = modrm >> 6;
  made.reg = (modrm >> 3 & 7) | (high & 4) << 1;
  made.rm = (modrm & 7) | (high & 1) << 3;
  made.has_index = false;
  made.base = nullptr;
  made.index = 0;
  made.length = 5;
  if (made.mode == 3) return true;
  const auto value = [&](int r) { return static_cast<long>(registers[kRegisters[r]]); };
  int bytes = made.mode == 1 ? 1 : made.mode == 2 ? 4 : 0;
  long base = 0;
  if ((modrm & 7) == 4) {
    const int sib = at[made.length++], index = (sib >> 3 & 7) | (high & 2) << 2;
    made.has_index = true;
    if (index != 4) made.index = value(index) << (sib >> 6);
    if ((sib & 7) == 5 && made.mode == 0)
      bytes = 4;
    else
      base = value((sib & 7) | (high & 1) << 3);
  } else if ((modrm & 7) == 5 && made.mode == 0) {
    bytes = 4, base = reinterpret_cast<long>(at) + made.length + bytes;  // relative to the next instruction
  } else {
    base = value(made.rm);
  }
  if (bytes) base += number(at + made.length, bytes);
  made.length += bytes;
  made.base = reinterpret_cast<char*>(base);
  return true;
}

// Which instruction of tiles it is; false: none that the kernels have.
bool decode(const uint8_t* at, const greg_t* registers, Instruction& made) {
  Fields f;
  if (!read_fields(at, registers, f)) return false;
  made = {kConfigure, f.length, f.reg, f.rm, f.third, f.base, f.index};
  const auto is = [&](Kind kind, bool fits) {
    made.kind = kind;
    return fits;
  };
  const bool alone = f.third == 0;
  switch (f.opcode) {
    case 0x49:
      if (f.mode < 3) {
        made.memory += f.index;
        return is(f.prefix ? kTellShapes : kConfigure, f.prefix < 2 && f.reg == 0 && alone);
      }
      if (f.prefix == 0) return is(kRelease, f.reg == 0 && f.rm == 0 && alone);
      return is(kZero, f.prefix == 3 && f.rm == 0 && alone);
    case 0x4b:
      if (f.mode == 3 || !f.has_index || !alone) return false;
      return is(f.prefix == 2 ? kStore : kLoad, f.prefix != 0);  // with 66: a hint that it is not needed again
    case 0x5c:
      return is(kDot, f.mode == 3 && f.prefix == 2);
    case 0x5e:
      return is(kDotBytes, f.mode == 3 && f.prefix == 3);
    default:
      return false;
  }
}

struct Shapes {  // 64 bytes, as LDTILECFG reads them
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};
constexpr int kTilesThere = 8, kMostRows = 16, kMostBytes = 64;

thread_local Shapes shapes;  // palette 0: there are none
std::atomic<long> done[kKinds], traps;
std::atomic<bool> asked{false};  // the system, which gave its permission

struct Fault {
  int signal;
  const char* why;  // null: there is none
};
constexpr Fault kNone = {0, nullptr};
Fault undefined(const char* why) { return {SIGILL, why}; }
Fault forbidden(const char* why) { return {SIGSEGV, why}; }

Fault configure(const char* memory) {
  Shapes made;
  std::memcpy(&made, memory, sizeof made);
  if (made.palette > 1) return forbidden("there is no such palette");
  if (made.palette) {
    for (const uint8_t each : made.reserved)
      if (each) return forbidden("bytes 2 to 15 of the shapes are not zero");
    for (int t = 0; t < 16; ++t) {
      if (t >= kTilesThere && (made.rows[t] || made.bytes[t])) return forbidden("there are 8 tiles");
      if (made.rows[t] > kMostRows || made.bytes[t] > kMostBytes) return forbidden("a tile has 16 rows of 64 bytes");
      if (!made.rows[t] != !made.bytes[t]) return forbidden("a tile has rows without columns, or these without rows");
    }
  } else {
    made = {};
  }
  shapes = made;
  emulate_shapes(&shapes);
  return kNone;
}

Fault usable(int tile) {
  if (!shapes.palette) return undefined("this thread's tiles have no shapes");
  if (tile >= kTilesThere) return undefined("there are 8 tiles");
  if (!shapes.rows[tile]) return undefined("this tile has no shape");
  if (shapes.bytes[tile] % 4) return undefined("a row is not of whole words");
  return shapes.start ? undefined("a row to start at is for what was interrupted") : kNone;
}

Fault multipliable(const Instruction& i) {
  for (const int tile : {i.tile, i.x, i.weight})
    if (const Fault fault = usable(tile); fault.why) return fault;
  if (i.tile == i.x || i.tile == i.weight || i.x == i.weight) return undefined("two operands are one tile");
  const uint8_t* rows = shapes.rows;
  const uint16_t* bytes = shapes.bytes;
  if (rows[i.tile] != rows[i.x]) return undefined("sums and x have other numbers of rows");
  if (bytes[i.tile] != bytes[i.weight]) return undefined("sums and weight have other numbers of columns");
  return bytes[i.x] / 4 == rows[i.weight] ? kNone : undefined("x has not as many words as the weight has rows");
}

Fault run(const Instruction& i) {
  if (!asked) return undefined("the process has not asked for tiles, or was refused them");
  switch (i.kind) {
    case kConfigure:
      return configure(i.memory);
    case kTellShapes:
      std::memcpy(i.memory, &shapes, sizeof shapes);
      return kNone;
    case kRelease:
      shapes = {};
      emulate_shapes(&shapes);
      return kNone;
    case kDot:
    case kDotBytes:
      if (const Fault fault = multipliable(i); fault.why) return fault;
      (i.kind == kDot ? emulate_dot : emulate_dot_bytes)(i.tile, i.x, i.weight);
      return kNone;
    default:
      break;
  }
  if (const Fault fault = usable(i.tile); fault.why) return fault;
  if (i.kind == kZero) emulate_zero(i.tile);
  if (i.kind == kLoad) emulate_load(i.tile, i.memory, i.stride);
  if (i.kind == kStore) emulate_store(i.tile, i.memory, i.stride);
  return kNone;
}

using Set = int (*)(int, const struct sigaction*, struct sigaction*);
Set set_action() {
  static const auto set = reinterpret_cast<Set>(dlsym(RTLD_NEXT, "sigaction"));
  return set;
}
struct sigaction other;  // whose handler takes what is no instruction of tiles

// Ends the process as the processor would have it end.
void end(const Instruction& i, const uint8_t* at, Fault fault) {
  Dl_info where = {};
  dladdr(at, &where);
  const auto offset = at - static_cast<const uint8_t*>(where.dli_fbase);
  dprintf(2, "%s at %s+0x%lx: %s\n", kNames[i.kind], where.dli_fname, static_cast<long>(offset), fault.why);
  struct sigaction plain = {};
  plain.sa_handler = SIG_DFL;
  set_action()(fault.signal, &plain, nullptr);
  kill(getpid(), fault.signal);
}

void handle(int signal, siginfo_t* info, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  const uint8_t* begin = at;
  // Instructions that follow each other cost one trap.
  for (Instruction i; decode(at, registers, i); at += i.length) {
    if (const Fault fault = run(i); fault.why) return end(i, at, fault);
    done[i.kind].fetch_add(1, std::memory_order_relaxed);
  }
  traps.fetch_add(1, std::memory_order_relaxed);
  registers[REG_RIP] = reinterpret_cast<greg_t>(at);
  if (at != begin) return;
  if (other.sa_flags & SA_SIGINFO) return other.sa_sigaction(signal, info, context);
  if (other.sa_handler != SIG_DFL && other.sa_handler != SIG_IGN) return other.sa_handler(signal);
  set_action()(SIGILL, &other, nullptr);  // it happens again, and ends the process
}

bool told(const char* what) {
  const char* tiles = std::getenv("TILES");
  return tiles && !std::strcmp(tiles, what);
}

__attribute__((constructor)) void install() {
  asked = told("permitted");
  struct sigaction ours = {};
  ours.sa_sigaction = handle;
  ours.sa_flags = SA_SIGINFO;
  set_action()(SIGILL, &ours, &other);
}

}  // namespace

// Gives the permission that the system gives where this is preloaded.
VISIBLE void permit_tiles() { asked = true; }
// Whether the calling thread's tiles have shapes.
VISIBLE int has_shapes() { return shapes.palette; }
// How many of an instruction were done, by its name; -1: there is no such instruction.
VISIBLE long done_of(const char* name) {
  for (int kind = 0; kind < kKinds; ++kind)
    if (!std::strcmp(kNames[kind], name)) return done[kind];
  return -1;
}
VISIBLE long traps_taken() { return traps; }

// The rest takes the place of the C library's functions where this is preloaded.

// A handler of others, such as Python's faulthandler, comes behind ours.
VISIBLE int sigaction(int signal, const struct sigaction* given, struct sigaction* before) noexcept {
  if (signal != SIGILL) return set_action()(signal, given, before);
  const struct sigaction next = given ? *given : other;
  if (before) *before = other;
  other = next;
  return 0;
}

// Who blocks SIGILL, so that others' signals wait (as an engine does), would end at the first instruction.
VISIBLE int pthread_sigmask(int how, const sigset_t* given, sigset_t* before) noexcept {
  static const auto set = reinterpret_cast<decltype(&pthread_sigmask)>(dlsym(RTLD_NEXT, "pthread_sigmask"));
  if (!given || how == SIG_UNBLOCK) return set(how, given, before);
  sigset_t others = *given;
  sigdelset(&others, SIGILL);
  return set(how, &others, before);
}

VISIBLE long syscall(long number, ...) noexcept {
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  long a[6];
  va_list list;
  va_start(list, number);
  for (long& each : a) each = va_arg(list, long);
  va_end(list);
  long result;
  if (number == SYS_arch_prctl && a[0] == kAsk && a[1] == kTileData) {
    asked = !told("refused");
    result = asked ? 0 : -EPERM;
  } else {
    register long fourth asm("r10") = a[3];
    register long fifth asm("r8") = a[4];
    register long sixth asm("r9") = a[5];
    asm volatile("syscall"
                 : "=a"(result)
                 : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(fourth), "r"(fifth), "r"(sixth)
                 : "rcx", "r11", "memory");
  }
  if (result >= 0 || result < -4095) return result;
  errno = static_cast<int>(-result);
  return -1;
}
