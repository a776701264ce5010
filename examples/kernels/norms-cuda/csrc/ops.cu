// The operators, over torch's stable ABI: one build serves torch 2.11 and later.
#include <Python.h>

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "kernels.cuh"
#include "tensors.h"

namespace {

constexpr int FORWARD_THREADS = 1024;
constexpr int BLOCK_THREADS = 256;

// torch 2.11's stable headers have no checks of CUDA's own errors yet.
void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("norms_cuda: ") + cudaGetErrorString(error));
}

void check_launch() { check(cudaGetLastError()); }

// Makes x's device the current one, and knows its stream.
struct Launch {
  torch::stable::accelerator::DeviceGuard guard;
  int device;
  cudaStream_t stream;

  explicit Launch(const Tensor& x) : guard(x.get_device_index()), device(x.get_device_index()) {
    void* current;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
    stream = static_cast<cudaStream_t>(current);
  }

  int attribute(cudaDeviceAttr which) const {
    int value;
    check(cudaDeviceGetAttribute(&value, which, device));
    return value;
  }
};

template <int N>
struct Width {
  static constexpr int value = N;
};

// Calls body with a null pointer of x's element type, and how many elements its kernels take at once.
template <class T, class Body>
void with_width(bool aligned, Body body) {
  if (aligned) {
    body(static_cast<T*>(nullptr), Width<WIDE<T>>());
  } else {
    body(static_cast<T*>(nullptr), Width<1>());
  }
}

template <class Body>
void with_type(const Tensor& x, bool aligned, Body body) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return with_width<float>(aligned, body);
    case ScalarType::BFloat16:
      return with_width<__nv_bfloat16>(aligned, body);
    default:
      return with_width<__half>(aligned, body);
  }
}

// As many threads as a row wants, a power of two, and rows side by side that fill a block.
dim3 threads_for_short(int64_t wanted) {
  unsigned lanes = 1;
  while (lanes < wanted && lanes < BLOCK_THREADS) {
    lanes *= 2;
  }
  return dim3(lanes, BLOCK_THREADS / lanes);
}

// Threads for rows of which each thread keeps KEPT vectors of `width`: see kernels.cuh.
dim3 threads_for(int64_t hidden, int width, int most) {
  int64_t wanted = (hidden + width * KEPT - 1) / (width * KEPT);
  if (wanted <= WARP) {
    return threads_for_short(wanted);
  }
  return dim3(static_cast<unsigned>(std::min<int64_t>((wanted + WARP - 1) / WARP * WARP, most)));
}

int hidden_of(const char* op, const Tensor& x) {
  int64_t hidden = x.size(x.dim() - 1);
  check(hidden < 1 << 30, op, "the last dim of x is ", hidden, ", but must be below 2^30");
  return static_cast<int>(hidden);
}

void rms_norm_into(const char* op, const Tensor& out, float* rstd, const Tensor& x, const Tensor& weight, double eps) {
  int hidden = hidden_of(op, x);
  Rows from = as_rows(x), to = as_rows(out), scale = as_rows(weight);
  if (x.numel() == 0) {
    return;
  }
  Launch launch(x);
  with_type(x, from.aligned() && to.aligned() && scale.aligned(), [&](auto* element, auto width) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int N = decltype(width)::value;
    dim3 threads = threads_for(hidden, N, FORWARD_THREADS);
    rms_norm_kernel<T, N><<<(from.count + threads.y - 1) / threads.y, threads, 0, launch.stream>>>(
        to.data<T>(), rstd, from.data<T>(), scale.data<T>(), from.stride, from.count, hidden, static_cast<float>(eps));
  });
  check_launch();
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_norm("rms_norm", x, weight);
  Tensor out = contiguous_like(x);
  rms_norm_into("rms_norm", out, nullptr, x, weight, eps);
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor& x, const Tensor& weight, double eps) {
  check_norm("rms_norm_forward", x, weight);
  Tensor out = contiguous_like(x), rstd = empty_per_row(x);
  rms_norm_into("rms_norm_forward", out, static_cast<float*>(rstd.data_ptr()), x, weight, eps);
  return {out, rstd};
}

// Without rstd, it is found again from x.
std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad_output, const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& rstd) {
  const char* op = "rms_norm_backward";
  check_norm(op, x, weight);
  check_like(op, "grad_output", grad_output, "x", x);
  check(!rstd || (same_device(*rstd, x) && rstd->scalar_type() == ScalarType::Float && rstd->is_contiguous() &&
                  rstd->numel() * x.size(x.dim() - 1) == x.numel()),
        op, "rstd must be what rms_norm_forward gave for x");
  Tensor grad_x = contiguous_like(x), grad_weight = contiguous_like(weight);
  if (weight.numel() == 0) {
    return {grad_x, grad_weight};
  }
  int hidden = hidden_of(op, x);
  Launch launch(x);
  Rows from = as_rows(x), incoming = as_rows(grad_output), to = as_rows(grad_x), scale = as_rows(weight);
  bool aligned = from.aligned() && incoming.aligned() && to.aligned() && scale.aligned();
  int memory = launch.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int processors = launch.attribute(cudaDevAttrMultiProcessorCount);
  with_type(x, aligned, [&](auto* element, auto width) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int N = decltype(width)::value;
    constexpr int BYTES = THREAD_BYTES<T, N>;
    dim3 threads = threads_for(hidden, N, std::min(memory / BYTES / WARP * WARP, BACKWARD_THREADS));
    int together = threads.x * threads.y;
    int64_t most = static_cast<int64_t>(processors) * std::max(BACKWARD_THREADS / together, 1);
    int64_t blocks = std::min<int64_t>((from.count + threads.y - 1) / threads.y, most);
    int64_t sizes[2] = {blocks, hidden};
    Tensor sums = make_contiguous(x, sizes, 2, aoti_torch_dtype_float32());
    if (blocks > 0) {
      auto kernel = rms_norm_backward_kernel<T, N>;
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES * together));
      kernel<<<blocks, threads, BYTES * together, launch.stream>>>(
          to.data<T>(), static_cast<float*>(sums.data_ptr()), incoming.data<T>(), from.data<T>(), scale.data<T>(),
          rstd ? static_cast<const float*>(rstd->data_ptr()) : nullptr, incoming.stride, from.stride, from.count,
          hidden, static_cast<float>(eps));
    }
    sum_rows_kernel<T><<<(hidden + WARP - 1) / WARP, dim3(WARP, SUM_WARPS), 0, launch.stream>>>(
        static_cast<T*>(grad_weight.data_ptr()), static_cast<const float*>(sums.data_ptr()), blocks, hidden);
  });
  check_launch();
  return {grad_x, grad_weight};
}

// Contiguous tensors are one long row.
Rows as_long_rows(const Tensor& tensor, bool one_row) {
  return one_row ? Rows{tensor, 1, tensor.numel(), tensor.numel()} : as_rows(tensor);
}

// How SwiGLU's rows are cut: see kernels.cuh.
struct Pieces {
  dim3 threads;
  unsigned of_row, blocks;

  Pieces(const Rows& rows, int width) : threads(threads_for_short((rows.length + width - 1) / width)) {
    int64_t piece = static_cast<int64_t>(threads.x) * width;
    of_row = static_cast<unsigned>((rows.length + piece - 1) / piece);
    blocks = static_cast<unsigned>((rows.count + threads.y - 1) / threads.y * of_row);
  }
};

void swiglu_into(const Rows& to, const Rows& gate, const Rows& up) {
  if (to.count * to.length == 0) {
    return;
  }
  Launch launch(to.tensor);
  with_type(to.tensor, to.aligned() && gate.aligned() && up.aligned(), [&](auto* element, auto width) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int N = decltype(width)::value;
    Pieces pieces(to, N);
    swiglu_kernel<T, N><<<pieces.blocks, pieces.threads, 0, launch.stream>>>(
        to.data<T>(), gate.data<T>(), up.data<T>(), gate.stride, up.stride, to.count, to.length, pieces.of_row);
  });
  check_launch();
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check_input("swiglu", "gate", gate);
  check_like("swiglu", "up", up, "gate", gate);
  Tensor out = contiguous_like(gate);
  bool one_row = gate.is_contiguous() && up.is_contiguous();
  swiglu_into(as_long_rows(out, one_row), as_long_rows(gate, one_row), as_long_rows(up, one_row));
  return out;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad_output, const Tensor& gate, const Tensor& up) {
  const char* op = "swiglu_backward";
  check_input(op, "gate", gate);
  check_like(op, "up", up, "gate", gate);
  check_like(op, "grad_output", grad_output, "gate", gate);
  Tensor grad_gate = contiguous_like(gate), grad_up = contiguous_like(gate);
  if (gate.numel() == 0) {
    return {grad_gate, grad_up};
  }
  bool one_row = gate.is_contiguous() && up.is_contiguous() && grad_output.is_contiguous();
  Rows g = as_long_rows(gate, one_row), u = as_long_rows(up, one_row), incoming = as_long_rows(grad_output, one_row);
  Rows to_gate = as_long_rows(grad_gate, one_row), to_up = as_long_rows(grad_up, one_row);
  Launch launch(gate);
  bool aligned = g.aligned() && u.aligned() && incoming.aligned() && to_gate.aligned() && to_up.aligned();
  with_type(gate, aligned, [&](auto* element, auto width) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int N = decltype(width)::value;
    Pieces pieces(g, N);
    swiglu_backward_kernel<T, N><<<pieces.blocks, pieces.threads, 0, launch.stream>>>(
        to_gate.data<T>(), to_up.data<T>(), incoming.data<T>(), g.data<T>(), u.data<T>(), incoming.stride, g.stride,
        u.stride, g.count, g.length, pieces.of_row);
  });
  check_launch();
  return {grad_gate, grad_up};
}

// out = silu(x[..., :d]) * x[..., d:]
void silu_and_mul(const Tensor& out, const Tensor& x) {
  const char* op = "silu_and_mul";
  check_input(op, "x", x);
  check(x.dim() > 0 && x.size(x.dim() - 1) % 2 == 0, op, "x is ", shape_of(x), ", but its last dim must be even");
  int64_t half = x.size(x.dim() - 1) / 2;
  std::vector<int64_t> wanted(x.sizes().begin(), x.sizes().end());
  wanted.back() = half;
  check(same_device(out, x) && out.scalar_type() == x.scalar_type(), op, "out must have the device and dtype of x");
  check(std::vector<int64_t>(out.sizes().begin(), out.sizes().end()) == wanted, op, "out is ", shape_of(out),
        ", but must have the shape of x with a last dim of ", half);
  check(out.is_contiguous(), op, "out must be contiguous");
  if (out.numel() == 0) {
    return;
  }
  Rows both = as_rows(x);
  Tensor gate = torch::stable::narrow(both.tensor, x.dim() - 1, 0, half);
  Tensor up = torch::stable::narrow(both.tensor, x.dim() - 1, half, half);
  swiglu_into(as_rows(out), {gate, both.count, half, both.stride}, {up, both.count, half, both.stride});
}

}  // namespace

// The macros paste their argument before it is expanded, so that OP_NAMESPACE needs one more step.
#define DEFINE_LIBRARY(name, library) STABLE_TORCH_LIBRARY(name, library)
#define IMPLEMENT_LIBRARY(name, library) STABLE_TORCH_LIBRARY_IMPL(name, CUDA, library)

DEFINE_LIBRARY(OP_NAMESPACE, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def(
      "rms_norm_backward(Tensor grad_output, Tensor x, Tensor weight, float eps, Tensor? rstd=None)"
      " -> (Tensor, Tensor)");
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  library.def("swiglu_backward(Tensor grad_output, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  library.def("silu_and_mul(Tensor(a!) out, Tensor x) -> ()");
}

IMPLEMENT_LIBRARY(OP_NAMESPACE, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("rms_norm_forward", TORCH_BOX(&rms_norm_forward));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  library.impl("swiglu", TORCH_BOX(&swiglu));
  library.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
  library.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
}

// Importing the module is what registers the operators.
#define INIT_OF(name) PyInit_##name
#define INIT_OF_EXPANDED(name) INIT_OF(name)

PyMODINIT_FUNC INIT_OF_EXPANDED(OP_NAMESPACE)() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, C10_STRINGIZE(OP_NAMESPACE), nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
