// The kernels' arithmetic: vectors of 16 bytes where the memory allows them, float32 accumulation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

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

// One load instruction: of a struct of bfloat16, the compiler would load the items one by one.
template <class T, int N>
__device__ Vec<T, N> load(const T* from) {
  if constexpr (N == 1) {
    return {*from};
  } else {
    union {
      uint4 word;
      Vec<T, N> vec;
    } both = {*reinterpret_cast<const uint4*>(from)};
    return both.vec;
  }
}

template <class T, int N>
__device__ void store(T* to, const Vec<T, N>& vec) {
  *reinterpret_cast<Vec<T, N>*>(to) = vec;
}

// RMSNorm. blockDim.x threads share a row: a power of two up to a warp, else whole warps. A block takes blockDim.y rows
// at once, more than one only where no row needs more than a warp. A thread keeps the first KEPT vectors of its columns
// close by; what a longer row has beyond them is read again from memory.
constexpr int KEPT = 4;

template <int COUNT>
struct Sums {
  float items[COUNT];
};

template <int COUNT>
__device__ void add_lanes(Sums<COUNT>& sums, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    for (int k = 0; k < COUNT; ++k) {
      sums.items[k] += __shfl_xor_sync(0xffffffff, sums.items[k], offset);
    }
  }
}

// The sums over the threads of a row, in every one of them.
template <int COUNT>
__device__ Sums<COUNT> row_sums(Sums<COUNT> sums) {
  if (blockDim.x <= WARP) {
    add_lanes(sums, blockDim.x);
    return sums;
  }
  __shared__ Sums<COUNT> of_warp[WARP];
  int warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
  add_lanes(sums, WARP);
  __syncthreads();  // of_warp may still be read from the last call
  if (lane == 0) {
    of_warp[threadIdx.x / WARP] = sums;
  }
  __syncthreads();
  sums = lane < warps ? of_warp[lane] : Sums<COUNT>{};
  add_lanes(sums, WARP);
  return sums;
}

template <class T, int N>
__device__ float squares_of(const Vec<T, N>& vec) {
  float squares = 0;
  for (int k = 0; k < N; ++k) {
    float value = static_cast<float>(vec.items[k]);
    squares += value * value;
  }
  return squares;
}

template <class T, int N>
__device__ Vec<T, N> scaled(Vec<T, N> vec, const Vec<T, N>& factor, float scale) {
  for (int k = 0; k < N; ++k) {
    vec.items[k] = static_cast<T>(static_cast<float>(vec.items[k]) * scale * static_cast<float>(factor.items[k]));
  }
  return vec;
}

// rstd may be null.
template <class T, int N>
__global__ void rms_norm_kernel(
    T* out, float* rstd, const T* x, const T* weight, int64_t x_stride, int64_t rows, int hidden, float eps) {
  int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.y) + threadIdx.y;
  if (row >= rows) {
    return;
  }
  x += row * x_stride;
  out += row * hidden;
  int first = threadIdx.x * N, step = blockDim.x * N;
  Vec<T, N> kept[KEPT];
#pragma unroll
  for (int k = 0; k < KEPT; ++k) {
    int i = first + k * step;
    kept[k] = i < hidden ? load<T, N>(x + i) : Vec<T, N>{};
  }
  Sums<1> squares = {};
#pragma unroll
  for (int k = 0; k < KEPT; ++k) {
    squares.items[0] += squares_of(kept[k]);
  }
  for (int i = first + KEPT * step; i < hidden; i += step) {
    squares.items[0] += squares_of(load<T, N>(x + i));
  }
  float scale = 1.0f / sqrtf(row_sums(squares).items[0] / hidden + eps);
  if (rstd && threadIdx.x == 0) {
    rstd[row] = scale;
  }
#pragma unroll
  for (int k = 0; k < KEPT; ++k) {
    int i = first + k * step;
    if (i < hidden) {
      store(out + i, scaled(kept[k], load<T, N>(weight + i), scale));
    }
  }
  for (int i = first + KEPT * step; i < hidden; i += step) {
    store(out + i, scaled(load<T, N>(x + i), load<T, N>(weight + i), scale));
  }
}

// Adds to {sum(g * weight * x), sum(x^2)}.
template <class T, int N>
__device__ void add_dots(Sums<2>& dots, const Vec<T, N>& g, const Vec<T, N>& value, const Vec<T, N>& factor) {
  for (int k = 0; k < N; ++k) {
    float at = static_cast<float>(value.items[k]);
    dots.items[0] += static_cast<float>(g.items[k]) * static_cast<float>(factor.items[k]) * at;
    dots.items[1] += at * at;
  }
}

// The gradient of x; adds that of the weight to total.
template <class T, int N>
__device__ Vec<T, N> gradient(
    float* total, const Vec<T, N>& g, const Vec<T, N>& value, const Vec<T, N>& factor, float scale, float shift) {
  Vec<T, N> result;
  for (int k = 0; k < N; ++k) {
    float of_g = static_cast<float>(g.items[k]), normed = static_cast<float>(value.items[k]) * scale;
    result.items[k] = static_cast<T>(of_g * static_cast<float>(factor.items[k]) * scale - normed * shift);
    total[k] += of_g * normed;
  }
  return result;
}

// From device memory to shared memory while the thread goes on; zeros where nothing exists.
template <class T, int N>
__device__ void copy_async(T* to, const T* from, bool exists) {
  if constexpr (sizeof(T) * N >= 4) {
    __pipeline_memcpy_async(to, from, sizeof(T) * N, exists ? 0 : sizeof(T) * N);
  } else {
    *to = exists ? *from : T{};
  }
}

// Shared memory of a block: for each of STAGES rows, KEPT vectors of g and of x for each thread.
constexpr int STAGES = 2;
constexpr int BACKWARD_THREADS = 512;

template <class T, int N>
constexpr int THREAD_BYTES = STAGES * 2 * KEPT * sizeof(Vec<T, N>);

// Writes what a block found for grad_weight to sums [hidden], its rows added in shared memory.
template <int N>
__device__ void write_totals(float* sums, float* shared, const float (*total)[N], int hidden) {
  float* to = blockDim.y == 1 ? sums : shared + threadIdx.y * hidden;
  for (int k = 0; k < KEPT; ++k) {
    int i = (threadIdx.x + k * blockDim.x) * N;
    for (int j = 0; j < N && i < hidden; ++j) {
      to[i + j] = total[k][j];
    }
  }
  if (blockDim.y == 1) {
    return;
  }
  __syncthreads();
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < hidden; i += blockDim.x * blockDim.y) {
    float of_rows = 0;
    for (int y = 0; y < blockDim.y; ++y) {
      of_rows += shared[y * hidden + i];
    }
    sums[i] = of_rows;
  }
}

// A block takes blockDim.y rows at once, then as many gridDim.x * blockDim.y rows further on, which are on their way
// meanwhile: each thread copies its own columns and reads no others, so that it waits for its own copies alone.
// sums [gridDim.x, hidden] gets what a block's rows add to grad_weight. A column belongs to one thread of a row, so the
// result is the same in every run. Without rstd, it is found again from x.
template <class T, int N>
__global__ void __launch_bounds__(BACKWARD_THREADS) rms_norm_backward_kernel(
    T* grad_x, float* sums, const T* grad_output, const T* x, const T* weight, const float* rstd, int64_t grad_stride,
    int64_t x_stride, int64_t rows, int hidden, float eps) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  int first = threadIdx.x * N, step = blockDim.x * N, vector = threads * N;
  T* slots = reinterpret_cast<T*>(shared_memory) + thread * N;  // [STAGES, 2, KEPT, threads, N]
  auto fetch = [&](int64_t row, int stage) {
    T* to = slots + stage * 2 * KEPT * vector;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
      int i = first + k * step;
      bool exists = row < rows && i < hidden;
      copy_async<T, N>(to + k * vector, grad_output + row * grad_stride + i, exists);
      copy_async<T, N>(to + (KEPT + k) * vector, x + row * x_stride + i, exists);
    }
    __pipeline_commit();
  };
  int64_t base = blockIdx.x * static_cast<int64_t>(blockDim.y), jump = gridDim.x * static_cast<int64_t>(blockDim.y);
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    fetch(base + stage * jump + threadIdx.y, stage);
  }
  Vec<T, N> factor[KEPT];
  float total[KEPT][N] = {};
#pragma unroll
  for (int k = 0; k < KEPT; ++k) {
    int i = first + k * step;
    factor[k] = i < hidden ? load<T, N>(weight + i) : Vec<T, N>{};
  }
  sums += blockIdx.x * static_cast<int64_t>(hidden);
  for (int i = first + KEPT * step; i < hidden; i += step) {
    store(sums + i, Vec<float, N>{});
  }
  for (int stage = 0; base < rows; base += jump, stage = (stage + 1) % STAGES) {
    int64_t row = base + threadIdx.y;
    int length = row < rows ? hidden : 0;
    fetch(row + (STAGES - 1) * jump, (stage + STAGES - 1) % STAGES);
    __pipeline_wait_prior(STAGES - 1);
    const T *g = slots + stage * 2 * KEPT * vector, *value = g + KEPT * vector;
    const T *g_row = grad_output + row * grad_stride, *x_row = x + row * x_stride;
    Sums<2> dots = {};
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
      add_dots(dots, load<T, N>(g + k * vector), load<T, N>(value + k * vector), factor[k]);
    }
    for (int i = first + KEPT * step; i < length; i += step) {
      add_dots(dots, load<T, N>(g_row + i), load<T, N>(x_row + i), load<T, N>(weight + i));
    }
    dots = row_sums(dots);
    float scale = rstd && length ? rstd[row] : 1.0f / sqrtf(dots.items[1] / hidden + eps);
    float shift = dots.items[0] / hidden * scale * scale;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
      int i = first + k * step;
      Vec<T, N> result = gradient(
          total[k], load<T, N>(g + k * vector), load<T, N>(value + k * vector), factor[k], scale, shift);
      if (i < length) {
        store(grad_x + row * hidden + i, result);
      }
    }
    for (int i = first + KEPT * step; i < length; i += step) {
      store(grad_x + row * hidden + i,
            gradient(sums + i, load<T, N>(g_row + i), load<T, N>(x_row + i), load<T, N>(weight + i), scale, shift));
    }
  }
  __pipeline_wait_prior(0);  // totals take the place of the copies: this thread's and, after the barrier, the others'
  __syncthreads();
  write_totals<N>(sums, reinterpret_cast<float*>(shared_memory), total, hidden);
}

// out[i] = the sum of column i; a block takes 32 columns, each of its warps every 32nd row.
constexpr int SUM_WARPS = 32;

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

// SwiGLU. A block takes blockDim.x * N elements, of which a row has `pieces`, of blockDim.y rows.
struct Place {
  int64_t row, column;
};

template <int N>
__device__ Place place(unsigned pieces) {
  return {
      blockIdx.x / pieces * static_cast<int64_t>(blockDim.y) + threadIdx.y,
      (blockIdx.x % pieces * static_cast<int64_t>(blockDim.x) + threadIdx.x) * N};
}

// The fast division is off by 2 units in the last place at most, and by all of a result below 2^-126.
__device__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + expf(-x));
}

template <class T, int N>
__global__ void swiglu_kernel(
    T* out, const T* gate, const T* up, int64_t gate_stride, int64_t up_stride, int64_t rows, int64_t length,
    unsigned pieces) {
  Place at = place<N>(pieces);
  if (at.row >= rows || at.column >= length) {
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
    int64_t gate_stride, int64_t up_stride, int64_t rows, int64_t length, unsigned pieces) {
  Place at = place<N>(pieces);
  if (at.row >= rows || at.column >= length) {
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
