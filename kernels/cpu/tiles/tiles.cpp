#include "tiles.h"

#include <cmath>
#include <cstring>

namespace {

struct Shapes {  // as the instruction reads them
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};
static_assert(sizeof(Shapes) == 64);

thread_local int first_rows = 0, second_rows = 0, x_bytes = 0;  // 0: the thread's tiles have no shapes

// Notes the shapes that a thread's tiles get. False: they have them already.
bool are_new(int first, int second, int bytes) {
  if (first == first_rows && second == second_rows && bytes == x_bytes) return false;
  first_rows = first, second_rows = second, x_bytes = bytes;
  return true;
}

Shapes shapes_of(int first, int second, int bytes) {
  Shapes shapes;
  const int later = second ? second : first, deep = bytes / 4;
  const int rows[8] = {first, first, later, later, first, second ? second : deep, deep, deep};
  for (int tile = 0; tile < 8; ++tile) {
    const bool of_x = tile == 4 || (tile == 5 && second);
    shapes.bytes[tile] = static_cast<uint16_t>(of_x ? bytes : 64);
    shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
  }
  return shapes;
}

}  // namespace

#ifdef TILE_INSTRUCTIONS
void shape_tiles(int first, int second, int bytes) {
  if (!are_new(first, second, bytes)) return;
  const Shapes shapes = shapes_of(first, second, bytes);
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}
void release_tiles() {
  if (are_new(0, 0, 0)) asm volatile("tilerelease");
}
#else
// What the instructions do, one number after the other.
namespace {

thread_local Shapes shaped;
thread_local uint32_t tiles[8][16][16];

// A bfloat16 as a float; denormals are zero.
float wide(uint32_t half) {
  const uint32_t bits = (half & 0x7f80) ? half << 16 : (half & 0x8000) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

}  // namespace

void shape_tiles(int first, int second, int bytes) {
  if (!are_new(first, second, bytes)) return;
  shaped = shapes_of(first, second, bytes);
  std::memset(tiles, 0, sizeof tiles);
}
void release_tiles() { are_new(0, 0, 0); }

void emulate_zero(int tile) { std::memset(tiles[tile], 0, sizeof tiles[tile]); }
void emulate_load(int tile, const void* from, long stride) {
  emulate_zero(tile);
  for (int r = 0; r < shaped.rows[tile]; ++r)
    std::memcpy(tiles[tile][r], static_cast<const char*>(from) + r * stride, shaped.bytes[tile]);
}
void emulate_store(int tile, void* to, long stride) {
  for (int r = 0; r < shaped.rows[tile]; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile][r], shaped.bytes[tile]);
}
void emulate_dot(int sums, int x, int weight) {
  for (int r = 0; r < shaped.rows[sums]; ++r)
    for (int column = 0; column < 16; ++column) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int pair = 0; pair < 16; ++pair) {
        const uint32_t a = tiles[x][r][pair], b = tiles[weight][pair][column];
        even = flushed(std::fma(wide(a & 0xffff), wide(b & 0xffff), even));
        odd = flushed(std::fma(wide(a >> 16), wide(b >> 16), odd));
      }
      std::memcpy(&sum, &tiles[sums][r][column], 4);
      sum = flushed(flushed(sum) + flushed(even + odd));
      std::memcpy(&tiles[sums][r][column], &sum, 4);
    }
}
void emulate_dot_bytes(int sums, int x, int weight) {
  for (int r = 0; r < shaped.rows[sums]; ++r)
    for (int column = 0; column < 16; ++column)
      for (int word = 0; word < shaped.rows[weight]; ++word)
        for (int shift = 0; shift < 32; shift += 8) {
          const auto a = static_cast<int8_t>(tiles[x][r][word] >> shift);
          const auto b = static_cast<int8_t>(tiles[weight][word][column] >> shift);
          tiles[sums][r][column] += static_cast<uint32_t>(a * b);
        }
}
#endif
