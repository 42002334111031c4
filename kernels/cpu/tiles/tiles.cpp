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

thread_local int first_rows = 0, second_rows = 0;  // 0: the thread's tiles have no shapes

Shapes shapes_of(int first, int second) {
  Shapes shapes;
  const int rows[8] = {first, first, second ? second : first, second ? second : first, first, second ? second : 16,
                       16,    16};
  for (int tile = 0; tile < 8; ++tile) shapes.bytes[tile] = 64, shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
  return shapes;
}

}  // namespace

#ifdef TILE_INSTRUCTIONS
void shape_tiles(int first, int second) {
  if (first == first_rows && second == second_rows) return;
  const Shapes shapes = shapes_of(first, second);
  asm volatile("ldtilecfg %0" ::"m"(shapes));
  first_rows = first, second_rows = second;
}
void release_tiles() {
  if (first_rows) asm volatile("tilerelease");
  first_rows = second_rows = 0;
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

void shape_tiles(int first, int second) {
  if (first == first_rows && second == second_rows) return;
  shaped = shapes_of(first, second);
  std::memset(tiles, 0, sizeof tiles);
  first_rows = first, second_rows = second;
}
void release_tiles() { first_rows = second_rows = 0; }

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
#endif
