// Short convolutions. kernels/recurrent/short_conv.py defines them and the place of a column.
#include "../kernels.h"

namespace {

constexpr int kChannels = 64;     // channels of each thread at a time
constexpr int kMostColumns = 16;  // tokens that a token sees, itself included

// Where the columns of one sequence are. A page stores the columns of its last tokens, because here a piece is a page.
template <class T>
struct Places {
  T* recent;  // [kept, channels]
  T* ends;    // [pages, before, channels]; null: pages have none
  const int32_t* pages;
  int kept, before, channels;

  bool is_end(long position) const { return ends && position % kBlock >= kBlock - before; }
  T* of(long position) const {
    if (!is_end(position)) return recent + position % kept * channels;
    return ends +
           (static_cast<long>(pages[position / kBlock]) * before + position % kBlock - (kBlock - before)) * channels;
  }
};

// Convolves channels [from, from + count) of a sequence's tokens [first, context), from bcx [tokens, 3 * channels],
// without gates [tokens, channels], to out [tokens, channels]. `window` has the columns of the last tokens; that of
// position p is at p % width.
template <bool gated, class T>
void convolve(const T* bcx, const float* weight, const float* bias, T* out, const Places<T>& places, long first,
              long context, int width, int from, int count) {
  T window[kMostColumns][kChannels];
  const int channels = places.channels;
  for (long at = first - places.before; at < first; ++at) {
    T* column = window[(at + width) % width];
    if (at < 0) {
      __builtin_memset(column, 0, sizeof window[0]);
    } else {
      __builtin_memcpy(column, places.of(at) + from, count * sizeof(T));
    }
  }
  for (long at = first; at < context; ++at) {
    const T *b = bcx + (at - first) * (gated ? 3 : 1) * channels + from, *c = b + channels, *x = c + channels;
    T *column = window[at % width], *row = out + (at - first) * channels + from;
    for (int i = 0; i < count; i += 16) {
      const int lanes = count - i;
      const Vec own = vload_first(b + i, lanes);
      vstore_first(column + i, gated ? vmul(own, vload_first(x + i, lanes)) : own, lanes);
      Vec sum = bias ? vload_first(bias + from + i, lanes) : vset(0.0f);
      for (int tap = 0; tap < width; ++tap) {
        const T* seen = window[(at + 1 + tap) % width];
        sum = vfma(vload_first(weight + static_cast<long>(tap) * channels + from + i, lanes),
                   vload_first(seen + i, lanes), sum);
      }
      vstore_first(row + i, gated ? vmul(vload_first(c + i, lanes), sum) : vsilu(sum), lanes);
    }
    if (at >= context - places.kept || places.is_end(at))
      __builtin_memcpy(places.of(at) + from, column, count * sizeof(T));
  }
}

// Each thread processes the sequences in order, for its own channels, because a sequence may begin with columns that an
// earlier one stores.
template <class T>
int short_conv(const T* bcx, const float* weight, const float* bias, T* out, T* ends, T* recent, const int32_t* starts,
               const int32_t* contexts, const int32_t* table, long table_stride, const int64_t* slots, long pages,
               long slot_count, int sequences, int channels, int width, int kept, int gated, int threads) {
  const int before = width - 1;
  for (int s = 0; s < sequences; ++s) {
    const long context = contexts[s], first = context - (starts[s + 1] - starts[s]) - before;
    if (slots[s] < 0 || slots[s] >= slot_count) return 1;
    for (long page = first > 0 ? first / kBlock : 0; ends && page * kBlock < context; ++page) {
      const long id = table[s * table_stride + page];
      if (id < 0 || id >= pages) return 1;
    }
  }
  const long parts = (channels + kChannels - 1) / kChannels, cost = 3L * starts[sequences] * channels * width;
  parallel_rows(threads, parts, cost, [&](long begin, long end) {
    for (int s = 0; s < sequences; ++s) {
      const long context = contexts[s], row = starts[s], first = context - (starts[s + 1] - row);
      const Places<T> places = {
          recent + slots[s] * kept * channels, ends, table + s * table_stride, kept, before, channels};
      for (long part = begin; part < end; ++part) {
        const int from = static_cast<int>(part) * kChannels, left = channels - from;
        const int count = left < kChannels ? left : kChannels;
        if (gated)
          convolve<true>(bcx + row * 3 * channels, weight, bias, out + row * channels, places, first, context, width,
                         from, count);
        else
          convolve<false>(bcx + row * channels, weight, bias, out + row * channels, places, first, context, width, from,
                          count);
      }
    }
  });
  return 0;
}

}  // namespace

#define EXPORT(suffix, T)                                                                                              \
  EXPORTED int short_conv_##suffix(const T* bcx, const float* weight, const float* bias, T* out, T* ends, T* recent,   \
                                   const int32_t* starts, const int32_t* contexts, const int32_t* table,               \
                                   long table_stride, const int64_t* slots, long pages, long slot_count,               \
                                   int sequences, int channels, int width, int kept, int gated, int threads) {         \
    return short_conv(bcx, weight, bias, out, ends, recent, starts, contexts, table, table_stride, slots, pages,       \
                      slot_count, sequences, channels, width, kept, gated, threads);                                   \
  }
EXPORT(f32, float)
EXPORT(bf16, bf16)
