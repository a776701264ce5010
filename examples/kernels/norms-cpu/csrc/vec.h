// One register's float32 lanes, in the compiler's own vector type.
#pragma once

#include <cstdint>

#include "rows.h"

// Everything has internal linkage: the same text is compiled for several instruction sets.
namespace {

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

using Vec = float __attribute__((vector_size(LANES * 4)));
using Bits = uint32_t __attribute__((vector_size(LANES * 4)));
using Halves = uint16_t __attribute__((vector_size(LANES * 2)));

// How many lanes of a vector exist in memory: all, known while compiling, or the rest of a row.
struct All {};
struct First {
  int64_t count;
};

INLINE Vec splat(float value) {
  return value - Vec{};
}

template <class To, class From>
INLINE To same_bits(From value) {
  return reinterpret_cast<To>(value);
}

INLINE Vec widen(Halves halves) {
  return same_bits<Vec>(__builtin_convertvector(halves, Bits) << 16);
}

// Rounds to nearest, ties to even; every NaN becomes the quiet one.
INLINE Halves narrow(Vec value) {
  Bits bits = same_bits<Bits>(value);
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(value == value ? rounded : Bits{} + 0x7fc0, Halves);
}

INLINE Vec load(const float* from, All) {
  Vec value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

INLINE Vec load(const BFloat16* from, All) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  return widen(halves);
}

// The lanes past the end are 0, and nothing past the end is read.
INLINE Vec load(const float* from, First some) {
  Vec value{};
  __builtin_memcpy(&value, from, some.count * sizeof(float));
  return value;
}

INLINE Vec load(const BFloat16* from, First some) {
  Halves halves{};
  __builtin_memcpy(&halves, from, some.count * sizeof(BFloat16));
  return widen(halves);
}

INLINE void store(float* to, Vec value, All) {
  __builtin_memcpy(to, &value, sizeof value);
}

INLINE void store(BFloat16* to, Vec value, All) {
  Halves halves = narrow(value);
  __builtin_memcpy(to, &halves, sizeof halves);
}

INLINE void store(float* to, Vec value, First some) {
  __builtin_memcpy(to, &value, some.count * sizeof(float));
}

INLINE void store(BFloat16* to, Vec value, First some) {
  Halves halves = narrow(value);
  __builtin_memcpy(to, &halves, some.count * sizeof(BFloat16));
}

// Calls body(i, lanes) for i = 0, LANES, 2 * LANES, ...; the last call may have fewer lanes.
template <class Body>
INLINE void sweep(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    body(i, All{});
  }
  if (i < n) {
    body(i, First{n - i});
  }
}

INLINE float sum_of_lanes(Vec value) {
  float sum = 0;
  for (int64_t lane = 0; lane < LANES; ++lane) {
    sum += value[lane];
  }
  return sum;
}

// The sum of term(i, lanes), whose lanes past the end must be 0. Four sums hide the latency of addition.
template <class Term>
INLINE float sum_over(int64_t n, Term term) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    for (int k = 0; k < 4; ++k) {
      sums[k] += term(i + k * LANES, All{});
    }
  }
  sweep(n - i, [&](int64_t j, auto lanes) __attribute__((always_inline)) { sums[0] += term(i + j, lanes); });
  return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// e^x to 2 units in the last place: 2^k * e^r with |r| <= ln(2) / 2, and a polynomial for e^r. The bounds of x let k
// be -127 to 128, whose powers have the bits of 0 and of infinity.
INLINE Vec exp(Vec x) {
  const Vec lowest = splat(-88.0f), highest = splat(89.0f);
  const Vec round_to_int = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
  Vec inside = lowest > x ? lowest : x;
  inside = highest < inside ? highest : inside;
  Vec shifted = inside * 1.44269504f + round_to_int;
  Vec k = shifted - round_to_int;
  Vec r = inside - k * 0.693359375f + k * 2.12194440e-4f;  // ln(2) in two parts, the first exact
  Vec series = splat(1.0f / 720);
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  Bits power = (same_bits<Bits>(shifted) + 127) << 23;
  return series * same_bits<Vec>(power);
}

INLINE Vec sigmoid(Vec x) {
  return 1.0f / (1.0f + exp(-x));
}

}  // namespace
