// The kernels' arithmetic: vectors of 16 bytes where the memory allows them, float32 accumulation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace {

constexpr int WARP = 32;

// Side by side elements that are loaded and stored at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T items[N];
};

template <class T>
constexpr int WIDE = 16 / sizeof(T);

template <class T, int N>
__device__ Vec<T, N> load(const T* from) {
  return *reinterpret_cast<const Vec<T, N>*>(from);
}

template <class T, int N>
__device__ void store(T* to, const Vec<T, N>& vec) {
  *reinterpret_cast<Vec<T, N>*>(to) = vec;
}

__device__ float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

// The sum of a value over the threads of a block, in every thread. Two sums at once cost one round.
__device__ float2 block_sum(float2 value) {
  __shared__ float2 of_warp[WARP];
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(0xffffffff, value.x, offset);
    value.y += __shfl_xor_sync(0xffffffff, value.y, offset);
  }
  int warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
  __syncthreads();  // of_warp may still be read from the last call
  if (lane == 0) {
    of_warp[threadIdx.x / WARP] = value;
  }
  __syncthreads();
  value = lane < warps ? of_warp[lane] : float2{0, 0};
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(0xffffffff, value.x, offset);
    value.y += __shfl_xor_sync(0xffffffff, value.y, offset);
  }
  return value;
}

// One block for each row. rstd may be null.
template <class T, int N>
__global__ void rms_norm_kernel(
    T* out, float* rstd, const T* x, const T* weight, int64_t x_stride, int64_t hidden, float eps) {
  x += blockIdx.x * x_stride;
  out += blockIdx.x * hidden;
  float squares = 0;
  for (int64_t i = threadIdx.x * N; i < hidden; i += blockDim.x * N) {
    Vec<T, N> vec = load<T, N>(x + i);
    for (int k = 0; k < N; ++k) {
      float value = static_cast<float>(vec.items[k]);
      squares += value * value;
    }
  }
  float scale = 1.0f / sqrtf(block_sum({squares, 0}).x / hidden + eps);
  if (rstd && threadIdx.x == 0) {
    rstd[blockIdx.x] = scale;
  }
  for (int64_t i = threadIdx.x * N; i < hidden; i += blockDim.x * N) {
    Vec<T, N> vec = load<T, N>(x + i), factor = load<T, N>(weight + i);
    for (int k = 0; k < N; ++k) {
      vec.items[k] = static_cast<T>(static_cast<float>(vec.items[k]) * scale * static_cast<float>(factor.items[k]));
    }
    store(out + i, vec);
  }
}

// Block b takes rows b, b + gridDim.x, ...; sums [gridDim.x, hidden] gets what each adds to grad_weight. A thread
// keeps to its own columns, so that nothing is shared. Without rstd, it is found again from x.
template <class T, int N>
__global__ void rms_norm_backward_kernel(
    T* grad_x, float* sums, const T* grad_output, const T* x, const T* weight, const float* rstd, int64_t grad_stride,
    int64_t x_stride, int64_t rows, int64_t hidden, float eps, bool sums_in_shared_memory) {
  extern __shared__ float shared_sums[];
  sums += blockIdx.x * hidden;
  float* mine = sums_in_shared_memory ? shared_sums : sums;
  for (int64_t i = threadIdx.x * N; i < hidden; i += blockDim.x * N) {
    for (int k = 0; k < N; ++k) {
      mine[i + k] = 0;
    }
  }
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* g_row = grad_output + row * grad_stride;
    const T* x_row = x + row * x_stride;
    float2 found = {0, 0};  // sum(g * weight * x), sum(x^2)
    for (int64_t i = threadIdx.x * N; i < hidden; i += blockDim.x * N) {
      Vec<T, N> g = load<T, N>(g_row + i), value = load<T, N>(x_row + i), factor = load<T, N>(weight + i);
      for (int k = 0; k < N; ++k) {
        float at = static_cast<float>(value.items[k]);
        found.x += static_cast<float>(g.items[k]) * static_cast<float>(factor.items[k]) * at;
        found.y += at * at;
      }
    }
    found = block_sum(found);
    float scale = rstd ? rstd[row] : 1.0f / sqrtf(found.y / hidden + eps);
    float shift = found.x / hidden * scale * scale;
    for (int64_t i = threadIdx.x * N; i < hidden; i += blockDim.x * N) {
      Vec<T, N> g = load<T, N>(g_row + i), value = load<T, N>(x_row + i), factor = load<T, N>(weight + i);
      Vec<T, N> result;
      for (int k = 0; k < N; ++k) {
        float of_g = static_cast<float>(g.items[k]), at = static_cast<float>(value.items[k]);
        result.items[k] = static_cast<T>((of_g * static_cast<float>(factor.items[k]) - at * shift) * scale);
        mine[i + k] += of_g * at * scale;
      }
      store(grad_x + row * hidden + i, result);
    }
  }
  if (sums_in_shared_memory) {
    for (int64_t i = threadIdx.x * N; i < hidden; i += blockDim.x * N) {
      for (int k = 0; k < N; ++k) {
        sums[i + k] = mine[i + k];
      }
    }
  }
}

// out[i] = the sum of column i; a block takes 32 columns, each of its warps every 8th row.
constexpr int SUM_WARPS = 8;

template <class T>
__global__ void sum_rows_kernel(T* out, const float* sums, int64_t rows, int64_t hidden) {
  __shared__ float of_warp[SUM_WARPS][WARP];
  int64_t column = blockIdx.x * static_cast<int64_t>(WARP) + threadIdx.x;
  float total = 0;
  if (column < hidden) {
    for (int64_t row = threadIdx.y; row < rows; row += SUM_WARPS) {
      total += sums[row * hidden + column];
    }
  }
  of_warp[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y == 0 && column < hidden) {
    for (int warp = 1; warp < SUM_WARPS; ++warp) {
      total += of_warp[warp][threadIdx.x];
    }
    out[column] = static_cast<T>(total);
  }
}

// Where this thread works: a block takes blockDim.x * N elements of one row.
struct Place {
  int64_t row, column;
};

template <int N>
__device__ Place place(int64_t length) {
  int64_t piece = static_cast<int64_t>(blockDim.x) * N;
  int64_t pieces = (length + piece - 1) / piece;
  return {blockIdx.x / pieces, blockIdx.x % pieces * piece + threadIdx.x * N};
}

template <class T, int N>
__global__ void swiglu_kernel(
    T* out, const T* gate, const T* up, int64_t gate_stride, int64_t up_stride, int64_t length) {
  Place at = place<N>(length);
  if (at.column >= length) {
    return;
  }
  Vec<T, N> g = load<T, N>(gate + at.row * gate_stride + at.column);
  Vec<T, N> u = load<T, N>(up + at.row * up_stride + at.column);
  for (int k = 0; k < N; ++k) {
    float value = static_cast<float>(g.items[k]);
    u.items[k] = static_cast<T>(value * sigmoid(value) * static_cast<float>(u.items[k]));
  }
  store(out + at.row * length + at.column, u);
}

template <class T, int N>
__global__ void swiglu_backward_kernel(
    T* grad_gate, T* grad_up, const T* grad_output, const T* gate, const T* up, int64_t grad_stride,
    int64_t gate_stride, int64_t up_stride, int64_t length) {
  Place at = place<N>(length);
  if (at.column >= length) {
    return;
  }
  Vec<T, N> incoming = load<T, N>(grad_output + at.row * grad_stride + at.column);
  Vec<T, N> g = load<T, N>(gate + at.row * gate_stride + at.column);
  Vec<T, N> u = load<T, N>(up + at.row * up_stride + at.column);
  for (int k = 0; k < N; ++k) {
    float outer = static_cast<float>(incoming.items[k]), value = static_cast<float>(g.items[k]);
    float s = sigmoid(value), factor = static_cast<float>(u.items[k]);
    g.items[k] = static_cast<T>(outer * factor * s * (1.0f + value * (1.0f - s)));
    u.items[k] = static_cast<T>(outer * value * s);
  }
  store(grad_gate + at.row * length + at.column, g);
  store(grad_up + at.row * length + at.column, u);
}

}  // namespace
