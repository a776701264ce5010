// The arithmetic of one row, apart from torch: rows.cpp is compiled once for each instruction set.
#pragma once

#include <cstdint>

struct BFloat16 {
  uint16_t bits;
};

// float32 accumulation for every T. Pointers need no alignment; n may be any number, 0 too.
template <class T>
struct RowKernels {
  // 1 / sqrt(mean(x^2) + eps)
  float (*rstd)(const T* x, float eps, int64_t n);

  // out = x * rstd * weight; gives rstd.
  float (*rms_norm)(T* out, const T* x, const T* weight, float eps, int64_t n);

  // grad_x is written, grad_weight is added to.
  void (*rms_norm_backward)(
      T* grad_x, float* grad_weight, const T* grad_output, const T* x, const T* weight, float rstd, int64_t n);

  // out[i] = the sum of column i of sums, which has `rows` rows of n.
  void (*sum_rows)(T* out, const float* sums, int64_t rows, int64_t n);

  // out = silu(gate) * up
  void (*swiglu)(T* out, const T* gate, const T* up, int64_t n);

  void (*swiglu_backward)(
      T* grad_gate, T* grad_up, const T* grad_output, const T* gate, const T* up, int64_t n);
};

struct InstructionSet {
  RowKernels<float> float32;
  RowKernels<BFloat16> bfloat16;
};

extern const InstructionSet rows_baseline;
#ifdef __x86_64__
extern const InstructionSet rows_v3;
extern const InstructionSet rows_v4;
#endif
