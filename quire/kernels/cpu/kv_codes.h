// Keys and values in 8 bits. The part of a KV head in a page is then
//   keys   [dim][16 tokens] codes
//   values [16 tokens][dim] codes
// and with integers, 16 scales after each: a token's numbers are its codes times its scale. A head of one token is
// rounded by itself, so codes depend only on the token. kernels/kv_quantization.py computes the same.
//
// Attention expands the codes of a tile to the words that it multiplies (layout.h), which represent them exactly.
// Scales are applied later: a key's to its score, a value's to its weight.
#pragma once

constexpr float kMostInteger = 127.0f;
constexpr float kLeastScale = 0x1p-126f;

INLINE KVFormat held_as(const KVFormat* format) { return format ? *format : KVFormat{kPlain, 1.0f, 1.0f}; }

// Elements, not bytes, of a KV head's part of a page of keys or of values.
template <class T>
INLINE long head_elements(const KVFormat& format, int dim) {
  const long scales = format.held == kInt8 ? kBlock * static_cast<long>(sizeof(bf16)) : 0;
  return static_cast<long>(kBlock) * dim + scales;
}
template <class T>
INLINE long element_bytes(const KVFormat& format) {
  return format.held == kPlain ? sizeof(T) : 1;
}

// The nearest 8-bit float (four bits of exponent, three of fraction), ties to even. Larger values become 448.
INLINE uint8_t to_float8(float x) {
  uint32_t bits, small;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  bits = bits < 0x43e00000 ? bits : 0x43e00000;  // 448
  float size;
  __builtin_memcpy(&size, &bits, 4);
  size += 0x1p14f;  // rounds to multiples of 2^-9, as numbers below 2^-6 are
  __builtin_memcpy(&small, &size, 4);
  const uint32_t rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
  return static_cast<uint8_t>(sign | (bits < 0x3c800000 ? small & 15 : rounded - (120 << 3)));
}

// Rounds a head of `dim` numbers to codes. Returns the scale of integers, in bfloat16. For 8-bit floats the result
// means nothing.
template <class T>
INLINE bf16 round_head(const T* x, int dim, int held, float scale, uint8_t* codes) {
  float numbers[16];
  if (held == kFloat8) {
    for (int d = 0; d < dim; d += 16) {
      const int n = dim - d < 16 ? dim - d : 16;
      vstore(numbers, vdiv(vload_first(x + d, n), vset(scale)));
      uint8_t some[16];
      for (int i = 0; i < 16; ++i) some[i] = to_float8(numbers[i]);
      __builtin_memcpy(codes + d, some, n);
    }
    return {};
  }
  Vec most = vset(0.0f);
  for (int d = 0; d < dim; d += 16) {
    const Vec some = vload_first(x + d, dim - d);
    most = vmax(most, vmax(some, vsub(vset(0.0f), some)));
  }
  const float wanted = vpeak(most) / kMostInteger;
  bf16 rounded[16];
  vstore(rounded, vset(wanted > kLeastScale ? wanted : kLeastScale));
  const Vec exact = vload(rounded);
  for (int d = 0; d < dim; d += 16) {
    int8_t some[16];
    store_bytes(some, to_integers(vdiv(vload_first(x + d, dim - d), exact)));
    __builtin_memcpy(codes + d, some, dim - d < 16 ? dim - d : 16);
  }
  return rounded[0];
}

// Writes a head of one token to its page's part of keys. `codes` [dim] is temporary memory.
template <class T>
INLINE void store_key_codes(const T* key, const KVFormat& format, uint8_t* keys, int slot, int dim, uint8_t* codes) {
  const bf16 scale = round_head(key, dim, format.held, format.key_scale, codes);
  for (int d = 0; d < dim; ++d) keys[d * kBlock + slot] = codes[d];
  if (format.held == kInt8) __builtin_memcpy(keys + kBlock * dim + slot * sizeof(bf16), &scale, sizeof(bf16));
}

// Writes a head of one token to its page's parts of keys and of values.
template <class T>
INLINE void store_codes(const T* key, const T* value, const KVFormat& format, uint8_t* keys, uint8_t* values, int slot,
                        int dim, uint8_t* codes) {
  store_key_codes(key, format, keys, slot, dim, codes);
  const bf16 value_scale =
      round_head(value, dim, format.held, format.value_scale, values + static_cast<long>(slot) * dim);
  if (format.held != kInt8) return;
  __builtin_memcpy(values + kBlock * dim + slot * sizeof(bf16), &value_scale, sizeof(bf16));
}

// The first n of 16 codes. The others become 0.
template <class Code>
INLINE Vec load_codes(const uint8_t* p, int n) {
  if (n >= 16) return vload(reinterpret_cast<const Code*>(p));
  Code some[16] = {};
  if (n > 0) __builtin_memcpy(some, p, n);
  return vload(some);
}

// Expands a block's keys to the words of layout.h. Meanwhile it prefetches as many codes from `ahead` on.
template <class T, class Code>
void expand_keys(const uint8_t* codes, uint32_t* words, int dim, const void* ahead) {
  const auto load = [&](int d) { return vload(reinterpret_cast<const Code*>(codes) + static_cast<long>(d) * kBlock); };
  for (int s = 0; s < dim / kPack<T>; ++s) {
    __builtin_prefetch(static_cast<const uint8_t*>(ahead) + s * kPack<T> * kBlock, 0, 2);
    if constexpr (kPack<T> == 1)
      vstore(reinterpret_cast<float*>(words) + s * kBlock, load(s));
    else
      wstore(words + s * kBlock, exact_pairs(load(2 * s), load(2 * s + 1)));
  }
}

// Expands a block's values, with rows padded to `width` and with zeros for the tokens after the first `valid`.
template <class T, class Code>
void expand_values(const uint8_t* codes, uint32_t* words, int dim, int width, int valid, const void* ahead) {
  const auto load = [&](int slot, int d) {
    return load_codes<Code>(codes + static_cast<long>(slot) * dim + d, slot < valid ? dim - d : 0);
  };
  for (int slot = 0; slot < kBlock; slot += kPack<T>, words += width)
    for (int d = 0; d < width; d += 16) {
      __builtin_prefetch(static_cast<const uint8_t*>(ahead) + slot * dim + d * kPack<T>, 0, 2);
      if constexpr (kPack<T> == 1)
        vstore(reinterpret_cast<float*>(words) + d, load(slot, d));
      else
        wstore(words + d, exact_pairs(load(slot, d), load(slot + 1, d)));
    }
}
