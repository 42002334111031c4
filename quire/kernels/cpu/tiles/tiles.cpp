#include "tiles.h"

#include <cfloat>
#include <cmath>
#include <cstring>

namespace {

struct Shapes {  // in the format of the instruction
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};
static_assert(sizeof(Shapes) == 64);

thread_local int first_rows = 0, second_rows = 0, x_bytes = 0;  // 0: the thread's tiles have no shapes
thread_local int calls = 0;                                     // nested calls of this thread

// Notes the shapes that a thread's tiles get. False if the tiles have these already.
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

void begin_call() { ++calls; }
void end_call() {
  if (--calls == 0) release_tiles();
}

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
// Emulates the instructions, one number after the other.
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
float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

}  // namespace

void shape_tiles(int first, int second, int bytes) {
  if (!are_new(first, second, bytes)) return;
  const Shapes shapes = shapes_of(first, second, bytes);
  emulate_shapes(&shapes);
}
void release_tiles() { are_new(0, 0, 0); }

void emulate_shapes(const void* shapes) {
  std::memcpy(&shaped, shapes, sizeof shaped);
  std::memset(tiles, 0, sizeof tiles);
}
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
  const auto &rows = tiles[x], &pairs = tiles[weight];
  for (int r = 0; r < shaped.rows[sums]; ++r) {
    float even[16] = {}, odd[16] = {}, sum[16];
    for (int pair = 0; pair < 16; ++pair) {
      const float first = wide(rows[r][pair] & 0xffff), second = wide(rows[r][pair] >> 16);
      for (int column = 0; column < 16; ++column) {
        even[column] = flushed(std::fma(first, wide(pairs[pair][column] & 0xffff), even[column]));
        odd[column] = flushed(std::fma(second, wide(pairs[pair][column] >> 16), odd[column]));
      }
    }
    std::memcpy(sum, tiles[sums][r], sizeof sum);
    for (int column = 0; column < 16; ++column)
      sum[column] = flushed(flushed(sum[column]) + flushed(even[column] + odd[column]));
    std::memcpy(tiles[sums][r], sum, sizeof sum);
  }
}
void emulate_dot_bytes(int sums, int x, int weight) {
  const auto &rows = tiles[x], &words = tiles[weight];
  for (int r = 0; r < shaped.rows[sums]; ++r)
    for (int word = 0; word < shaped.rows[weight]; ++word)
      for (int shift = 0; shift < 32; shift += 8) {
        const auto a = static_cast<int8_t>(rows[r][word] >> shift);
        for (int column = 0; column < 16; ++column)
          tiles[sums][r][column] += static_cast<uint32_t>(a * static_cast<int8_t>(words[word][column] >> shift));
      }
}
#endif
