#include "rows.h"

#include "vec.h"

namespace {

#define LAMBDA(...) [&](int64_t i, auto lanes) __attribute__((always_inline)) { __VA_ARGS__; }

template <class T>
float rstd(const T* x, float eps, int64_t n) {
  float squares = sum_over(n, LAMBDA(Vec value = load(x + i, lanes); return value * value));
  return 1.0f / __builtin_sqrtf(squares / n + eps);
}

template <class T>
float rms_norm(T* out, const T* x, const T* weight, float eps, int64_t n) {
  float scale = rstd(x, eps, n);
  sweep(n, LAMBDA(store(out + i, load(x + i, lanes) * scale * load(weight + i, lanes), lanes)));
  return scale;
}

template <class T>
void rms_norm_backward(
    T* grad_x, float* grad_weight, const T* grad_output, const T* x, const T* weight, float rstd, int64_t n) {
  float dot = sum_over(n, LAMBDA(return load(grad_output + i, lanes) * load(weight + i, lanes) * load(x + i, lanes)));
  float scale = dot / n * rstd * rstd;
  sweep(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    Vec g = load(grad_output + i, lanes), value = load(x + i, lanes);
    store(grad_x + i, (g * load(weight + i, lanes) - value * scale) * rstd, lanes);
    store(grad_weight + i, load(grad_weight + i, lanes) + g * value * rstd, lanes);
  });
}

template <class T>
void sum_rows(T* out, const float* sums, int64_t rows, int64_t n) {
  sweep(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    Vec total{};
    for (int64_t row = 0; row < rows; ++row) {
      total += load(sums + row * n + i, lanes);
    }
    store(out + i, total, lanes);
  });
}

template <class T>
void swiglu(T* out, const T* gate, const T* up, int64_t n) {
  sweep(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    Vec value = load(gate + i, lanes);
    store(out + i, value * sigmoid(value) * load(up + i, lanes), lanes);
  });
}

template <class T>
void swiglu_backward(T* grad_gate, T* grad_up, const T* grad_output, const T* gate, const T* up, int64_t n) {
  sweep(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    Vec g = load(grad_output + i, lanes), value = load(gate + i, lanes), s = sigmoid(value);
    store(grad_gate + i, g * load(up + i, lanes) * s * (1.0f + value * (1.0f - s)), lanes);
    store(grad_up + i, g * value * s, lanes);
  });
}

template <class T>
constexpr RowKernels<T> row_kernels() {
  return {rstd<T>, rms_norm<T>, rms_norm_backward<T>, sum_rows<T>, swiglu<T>, swiglu_backward<T>};
}

}  // namespace

// ROWS is rows_baseline, rows_v3 or rows_v4, by the -march that this file is compiled with.
extern const InstructionSet ROWS = {row_kernels<float>(), row_kernels<BFloat16>()};
