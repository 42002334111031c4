// x @ weight.T + bias for weights of 8, 4, 3 or 2 bits (quantized.h). Rows of x are quantized too, once for all
// outputs. Products of integers are summed exactly. The sum of a block is multiplied by the scales of x and of the
// weight, and added to a float32 in the order of the blocks, so a row's result has the same bits in every batch.
//
// Rows and threads are those of linear.cpp, but tiles of rows are fixed when they are quantized. Smaller codes become
// bytes on the way. If there are so many rows that a panel is read several times, the bytes are kept for the next
// tiles. Matrix tiles, if available, multiply (tiles/quantized_tiles.h) and give the same bits.
#include "kernels.h"

#include <algorithm>
#include <vector>

#include "quantization/panel.h"
#include "rows.h"
#include "tiles/quantized_tiles.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-pre")  // this optimization moves half of the sums into memory
#endif

namespace {

// Whether a tile of R rows may be one of several, for which bytes are kept. Such tiles have nearly equal size.
template <int R>
constexpr bool kMayKeep = 2 * R >= kRows;

// acc[r][c] += the products of a step, for R rows whose lines follow each other.
template <int R, int C>
INLINE void multiply_step(Words (&acc)[R][C], const Words (&weights)[C], const int8_t* x) {
  constexpr int kLine = 4 * kCodeBytes * kTogether;
  UNROLLED (pass, kCodeBytes) {
    Words factors[C];
    UNROLLED (c, C) factors[c] = factors_of(weights[c], pass);
    UNROLLED (r, R) {
      const Words row = wset(word_at(x + kLine * r + 4 * pass));
      UNROLLED (c, C) acc[r][c] = idot(acc[r][c], factors[c], row);
    }
  }
}

// acc[r][c] += the products of a block of `steps` steps: R rows, packed in a tile, with C columns of 16 outputs.
template <int R, int C, int kBits>
INLINE void multiply_block(Words (&acc)[R][C], const Codes<kBits>& codes, const int8_t* x, int column, int steps,
                           uint8_t* keep, Ahead& ahead) {
  for (int s = 0; s < steps; s += kTogether, x += 4 * kCodeBytes * kTogether * R) {
    ahead.step();
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) {
      Words weights[C];
      UNROLLED (c, C) weights[c] = codes.load(s, i, column + c);
      if (kBits < 8 && kMayKeep<R> && keep)
        UNROLLED (c, C)
          wstore(reinterpret_cast<uint32_t*>(keep + (s + i) * kStepBytes) + 16 * (column + c), weights[c]);
      multiply_step(acc, weights, x + 4 * kCodeBytes * i);
    }
  }
}

template <int R, int C, class O>
INLINE void finish(const Panel& panel, const Tile<O>& tile, int column, const Vec (&sums)[R][C]) {
  UNROLLED (c, C) {
    const int at = (column + c) * 16, left = panel.outs - at < 16 ? panel.outs - at : 16;
    if (left <= 0) break;
    const Vec factor = vload_first(panel.factors + at, left);
    const Vec bias = panel.bias ? vload_first(panel.bias + at, left) : vset(0.0f);
    UNROLLED (r, R) vstore_first(tile.out + r * tile.stride + at, vfma(sums[r][c], factor, bias), left);
  }
}

// Multiplies a tile of R rows with C columns of 16 outputs of a panel.
template <int R, int C, int kBits, Form kForm, class O>
void multiply_tile(const Panel& panel, const Tile<O>& tile, int column, Ahead& ahead) {
  const int block = panel.block, steps = block / 4;
  const long code_bytes = static_cast<long>(block) * kOuts * kBits / 8;
  // As in linear.cpp: stores that miss the cache would delay the next tile.
  UNROLLED (r, R)
    for (int c = 0; c < C; c += kPack<O>) __builtin_prefetch(tile.out + r * tile.stride + (column + c) * 16, 1);
  Vec sums[R][C];
  UNROLLED (r, R)
    UNROLLED (c, C) sums[r][c] = vset(0.0f);
  Codes<kBits> codes = {panel.kept, {wtable(panel.part.table[0]), wtable(panel.part.table[1])}};
  uint8_t* keep = panel.is_kept ? nullptr : panel.kept;
  const uint8_t* group = panel.groups;
  const int8_t* x = tile.x;
  const BlockOfRow* of_row = tile.blocks;
  Ahead nothing;
  for (long number = 0; group < panel.end; group += panel.group_bytes, ++number) {
    if (!panel.is_kept) codes.at = group + panel.header;
    for (int i = 0; i < panel.per_group; ++i) {
      Words acc[R][C];
      UNROLLED (r, R)
        UNROLLED (c, C) acc[r][c] = wset(kCodeBytes == 2 ? of_row[r].start : 0);
      multiply_block(acc, codes, x, column, steps, keep, ahead);
      if constexpr (kCodeBytes == 1) {
        UNROLLED (r, R)
          UNROLLED (c, C) acc[r][c] = wadd(wtimes256(acc[r][c]), wset(of_row[r].start));
        if (of_row[0].low) multiply_block(acc, codes, x + tile.lows, column, steps, nullptr, nothing);
      }
      UNROLLED (c, C) {
        const GroupScales of_group = load_scales<kForm>(panel.part, panel.begin, group, number, column + c);
        UNROLLED (r, R) {
          const Vec exact = to_floats(acc[r][c]), scale = vset(of_row[r].scale);
          if (kForm == kOffsets) sums[r][c] = vfma(vset(of_row[r].moment), of_group.offsets, sums[r][c]);
          sums[r][c] =
              kForm == kCodes ? vfma(exact, scale, sums[r][c]) : vfma(vmul(exact, scale), of_group.scales, sums[r][c]);
        }
      }
      x += block * kCodeBytes * R;
      of_row += R;
      codes.at += code_bytes;
      if (keep) keep += block * kOuts;
    }
  }
  finish(panel, tile, column, sums);
}

template <int R, int kBits, class O>
void multiply_panel(const Panel& panel, const Tile<O>& tile, Ahead& ahead) {
  constexpr int C = kTileColumns<R>;
  const QuantizedPart& part = panel.part;
  const auto multiply = part.offsets  ? multiply_tile<R, C, kBits, kOffsets, O>
                        : part.scales ? multiply_tile<R, C, kBits, kScales, O>
                                      : multiply_tile<R, C, kBits, kCodes, O>;
  for (int column = 0; column < kOuts / 16; column += C) multiply(panel, tile, column, ahead);
}

// Multiplies tiles [begin, end) of rows with one panel. `next` is the panel of `next_bytes` to prefetch, or null.
template <class O>
void multiply_tiles(Panel panel, const QuantizedRows& rows, long begin, long end, O* out, long stride,
                    const uint8_t* next, long next_bytes, Fetch* meanwhile) {
  const long count = end - begin;
  const long times = rows.inner / (4 * kTogether);
  if (panel.part.bits < 8 && count > 1) panel.kept = reinterpret_cast<uint8_t*>(scratch(1L * rows.inner * kOuts));
  long row = rows.first(begin);
  for (long t = begin; t < end; ++t) {
    const long from = next_bytes * (t - begin) / count / 64 * 64, next_row = rows.first(t + 1);
    Ahead ahead;
    if (next) ahead = {next + from, next_bytes * (t - begin + 1) / count - from, times};
    if (count == 1) ahead = {panel.groups + kAhead, panel.end - panel.groups, times};
    if (meanwhile && t > begin) ahead.extra = meanwhile->take(times * kTogether);
    const Tile<O> tile = {rows.codes_of(t), rows.lows, rows.blocks_of(t), out + row * stride + panel.first, stride};
    if constexpr (kTiles) {
      multiply_by_tiles(panel, rows, tile, static_cast<int>(next_row - row), ahead);
    } else {
      with_rows(next_row - row, [&](auto r) {
        with_bits(panel.is_kept ? 8 : panel.part.bits,
                  [&](auto bits) { multiply_panel<r(), bits(), O>(panel, tile, ahead); });
      });
    }
    panel.is_kept = panel.kept != nullptr;
    row = next_row;
  }
}

// Finds the panel with this number, counted over all parts.
Panel find_panel(const PackedLinear& l, int inner, long panel) {
  const QuantizedPart* part = l.quantized->parts;
  long first = 0;
  for (; panel >= panels_of(*part); ++part) {
    panel -= panels_of(*part);
    first += part->outs;
  }
  const long at = panel * kOuts;
  const float* bias = l.bias ? static_cast<const float*>(l.bias) + first + at : nullptr;
  const int outs = static_cast<int>(part->outs - at < kOuts ? part->outs - at : kOuts);
  const uint8_t* begin = part->packed + panel * panel_bytes(*part, inner);
  const int block = l.quantized->block;
  return {*part,
          begin,
          begin + nested_bytes(*part, inner),
          begin + panel_bytes(*part, inner),
          group_bytes(*part),
          header_bytes(*part),
          block,
          part->group / block,
          first + at,
          outs,
          part->factors + at,
          bias};
}

// Number of blocks in a row of x.
int blocks_of(const PackedLinear& l) { return (l.in + l.quantized->block - 1) / l.quantized->block; }

template <class T>
void quantize_all(const PackedLinear& l, const T* x, const QuantizedRows& to, int threads) {
  const QuantizedLinear& q = *l.quantized;
  parallel_rows(threads, to.tiles, 2 * to.rows * l.in, [&](long begin, long end) {
    auto* peaks = reinterpret_cast<float*>(scratch((to.blocks + 16) * sizeof(float) + l.in * sizeof(T)));
    T* ordered = reinterpret_cast<T*>(peaks + to.blocks + 16);
    for (long t = begin; t < end; ++t) {
      const long first = to.first(t), rows = to.first(t + 1) - first;
      BlockOfRow* blocks = to.blocks_of(t);
      for (long b = 0; b < to.blocks * rows; ++b) blocks[b].low = false;
      for (long r = first; r < first + rows; ++r) {
        const T* row = x + r * l.in;
        if (q.order) {
          for (int i = 0; i < l.in; ++i) ordered[i] = row[q.order[i]];
          row = ordered;
        }
        quantize_row(row, l.in, to, t, r, peaks);
      }
      for (int b = 0; b < to.blocks; ++b) {
        for (long r = 1; r < rows; ++r) blocks[b * rows].low |= blocks[b * rows + r].low;
        if (kTiles && !blocks[b * rows].low)  // then the high codes are not shifted; both give the same bits
          for (long r = 0; r < rows; ++r) blocks[b * rows + r].scale *= 256;
      }
    }
  });
}

template <class T, class O>
void multiply_part(const PackedLinear& l, const T* x, O* out, long rows, int threads, Fetch* meanwhile) {
  constexpr long kOneThreadWork = 1200000;  // as in linear.cpp: with less work, waking a thread does not pay
  static thread_local std::vector<char> memory;
  const QuantizedLinear& q = *l.quantized;
  const int blocks = blocks_of(l), inner = blocks * q.block;
  const size_t wanted = QuantizedRows::bytes(rows, inner, blocks);
  if (memory.size() < wanted) memory.resize(wanted);
  const QuantizedRows to(memory.data(), rows, inner, blocks, q.outliers);
  if ((rows + 2) * l.in * l.outs < kOneThreadWork) threads = 1;
  quantize_all(l, x, to, threads);
  long panels = 0;
  for (int p = 0; p < q.count; ++p) panels += panels_of(q.parts[p]);
  // Rows of this division are tiles, but blocks have kRowBlock rows, as elsewhere.
  const Shares shares = {to.tiles, panels, threads, kRowBlock, 4, (rows + kRowBlock - 1) / kRowBlock};
  parallel_for(threads, shares.items(), [&](long i) {
    shares.run(i, [&](long number, long begin, long end, long next) {
      const uint8_t* following = nullptr;
      long bytes = 0;
      if (next < panels && end - begin > 1) {
        const Panel after = find_panel(l, inner, next);
        following = after.begin;
        bytes = panel_bytes(after.part, inner);
      }
      multiply_tiles(find_panel(l, inner, number), to, begin, end, out, l.outs, following, bytes, meanwhile);
    });
  });
}

// Computes a part of the rows at a time, because their codes take memory.
template <class T, class O>
void multiply_all(const PackedLinear& l, const T* x, O* out, long rows, int threads, Fetch* meanwhile) {
  const int blocks = blocks_of(l);
  in_parts(rows, QuantizedRows::bytes(1, blocks * l.quantized->block, blocks), [&](long begin, long end) {
    multiply_part(l, x + begin * l.in, out + begin * l.outs, end - begin, threads, meanwhile);
  });
}

template <class T>
void apply(const PackedLinear& l, const T* x, void* out, long rows, int threads, Fetch* meanwhile) {
  if (l.wide) return multiply_all(l, x, static_cast<float*>(out), rows, threads, meanwhile);
  multiply_all(l, x, static_cast<T*>(out), rows, threads, meanwhile);
}

// Writes the weights of one output, which are a row of an embedding, as T.
template <class T>
void look_up_row(const PackedLinear& l, int inner, long id, T* out) {
  const QuantizedPart& part = *l.quantized->parts;  // an embedding has one part
  const int lane = static_cast<int>(id % kOuts);
  const uint8_t* begin = part.packed + id / kOuts * panel_bytes(part, inner);
  const uint8_t* group = begin + nested_bytes(part, inner);
  const auto load = part.offsets ? load_scales<kOffsets> : part.scales ? load_scales<kScales> : load_scales<kCodes>;
  for (int g = 0; g * part.group < l.in; ++g, group += group_bytes(part)) {
    float scales[16], offsets[16];
    const GroupScales of_group = load(part, begin, group, g, lane / 16);
    vstore(scales, of_group.scales);
    vstore(offsets, of_group.offsets);
    for (int i = 0; i < part.group && g * part.group + i < l.in; ++i) {
      const int code = code_at(group + header_bytes(part), part.bits, i, lane);
      const int number = part.bits == 8 ? value_of(static_cast<uint8_t>(code)) : part.table[0][code] - 128;
      const int from = g * part.group + i;
      const float value = (static_cast<float>(number) * scales[lane % 16] + offsets[lane % 16]) * part.factors[id];
      vstore_first(out + (l.quantized->order ? l.quantized->order[from] : from), vset(value), 1);
    }
  }
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED void quantized_linear_##suffix(const PackedLinear* linear, const T* x, void* out, long rows, int threads,   \
                                          Fetch* meanwhile) {                                                          \
    apply(*linear, x, out, rows, threads, meanwhile);                                                                  \
  }                                                                                                                    \
  EXPORTED void look_up_##suffix(const PackedLinear* table, const int64_t* ids, T* out, long rows) {                   \
    const int block = table->quantized->block, inner = (table->in + block - 1) / block * block;                        \
    for (long r = 0; r < rows; ++r) look_up_row(*table, inner, ids[r], out + r * table->in);                           \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)

// Bytes of a packed part with `inner` inputs, including the padding.
EXPORTED long quantized_size(const QuantizedPart* part, int inner) {
  return panels_of(*part) * panel_bytes(*part, inner);
}

// Packs a part whose other fields are set. codes are [outs][in] or, if they have less than 8 bits, [outs][in / 2] with
// the even input's code in the low half. scales and offsets are [outs][groups], or [outs][inner / nested] with
// multiples [outs][groups]. They may be null as the part says.
EXPORTED void pack_quantized(const QuantizedPart* to, const uint8_t* codes, const half* scales, const half* offsets,
                             const uint8_t* multiples, int in, int inner, int threads) {
  const QuantizedPart& part = *to;
  const int groups = inner / part.group, scaled = part.nested ? inner / part.nested : groups;
  const auto code = [&](long out, int i) -> int {
    const bool there = out < part.outs && i < in;
    if (part.bits < 8) return there ? codes[(out * in + i) / 2] >> i % 2 * 4 & ((1 << part.bits) - 1) : 0;
    return code_of(there ? codes[out * in + i] : 0);
  };
  const auto put_halves = [&](half* at, long panel, int index) {
    for (const half* from : {part.scales ? scales : nullptr, part.offsets ? offsets : nullptr}) {
      if (!from) continue;
      for (long o = 0; o < kOuts; ++o, ++at) {
        const long out = panel * kOuts + o;
        *at = out < part.outs ? from[out * scaled + index] : half{0};
      }
    }
    return at;
  };
  parallel_for(threads, panels_of(part), [&](long panel) {
    uint8_t* group = part.packed + panel * panel_bytes(part, inner);
    std::fill_n(group, panel_bytes(part, inner), uint8_t{0});
    for (int b = 0; part.nested && b < scaled; ++b)
      group = reinterpret_cast<uint8_t*>(put_halves(reinterpret_cast<half*>(group), panel, b));
    for (int g = 0; g < groups; ++g, group += group_bytes(part)) {
      if (!part.nested) put_halves(reinterpret_cast<half*>(group), panel, g);
      for (int o = 0; o < kOuts; ++o) {
        const long out = panel * kOuts + o;
        if (part.nested && out < part.outs) group[o] = multiples[out * groups + g];
        for (int i = 0; i < part.group; ++i)
          put_code(group + header_bytes(part), part.bits, i, o, code(out, g * part.group + i));
      }
    }
  });
}
