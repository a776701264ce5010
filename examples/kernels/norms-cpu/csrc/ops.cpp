// The operators, over torch's stable ABI: one build serves torch 2.11 and later.
#include "manylinux.h"

#include <Python.h>

#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <optional>
#include <tuple>

#include "rows.h"
#include "tensors.h"

namespace {

constexpr int64_t GRAIN = 16384;  // elements that are worth a thread of their own

// The widest instruction set that this CPU has; NORMS_CPU_ISA=baseline or v3 asks for less (the tests do).
const InstructionSet& chosen_rows() {
#ifdef __x86_64__
  const char* asked = std::getenv("NORMS_CPU_ISA");
  std::string limit = asked ? asked : "v4";
  if (limit == "v4" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd")) {
    return rows_v4;
  }
  if (limit != "baseline" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    return rows_v3;
  }
#endif
  return rows_baseline;
}

const InstructionSet& instruction_set() {
  static const InstructionSet& chosen = chosen_rows();
  return chosen;
}

// Rows cut into pieces of at most GRAIN elements, so that one long row has work for every thread too.
template <class Body>
void for_each_piece(const Rows& rows, Body body) {
  int64_t pieces = (rows.length + GRAIN - 1) / GRAIN;
  int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(rows.length, 1));
  torch::stable::parallel_for(0, rows.count * pieces, grain, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      int64_t offset = piece % pieces * GRAIN;
      body(piece / pieces, offset, std::min(GRAIN, rows.length - offset));
    }
  });
}

// Calls body with the kernels of x's dtype, and a null pointer of its element type.
template <class Body>
void with_kernels(const Tensor& x, Body body) {
  if (x.scalar_type() == ScalarType::Float) {
    body(instruction_set().float32, static_cast<float*>(nullptr));
  } else {
    body(instruction_set().bfloat16, static_cast<BFloat16*>(nullptr));
  }
}

void rms_norm_into(const Tensor& out, float* rstd, const Tensor& x, const Tensor& weight, double eps) {
  Rows from = as_rows(x), to = as_rows(out), scale = as_rows(weight);
  with_kernels(x, [&](const auto& kernels, auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(from.length, 1));
    torch::stable::parallel_for(0, from.count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        float found = kernels.rms_norm(
            to.row<T>(row), from.row<T>(row), scale.row<T>(0), static_cast<float>(eps), from.length);
        if (rstd) {
          rstd[row] = found;
        }
      }
    });
  });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_norm("rms_norm", x, weight);
  Tensor out = contiguous_like(x);
  rms_norm_into(out, nullptr, x, weight, eps);
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor& x, const Tensor& weight, double eps) {
  check_norm("rms_norm_forward", x, weight);
  Tensor out = contiguous_like(x), rstd = empty_per_row(x);
  rms_norm_into(out, static_cast<float*>(rstd.data_ptr()), x, weight, eps);
  return {out, rstd};
}

// Without rstd, it is found again from x.
std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad_output, const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& rstd) {
  const char* op = "rms_norm_backward";
  check_norm(op, x, weight);
  check_like(op, "grad_output", grad_output, "x", x);
  check(!rstd || (rstd->is_cpu() && rstd->scalar_type() == ScalarType::Float && rstd->is_contiguous() &&
                  rstd->numel() * x.size(x.dim() - 1) == x.numel()),
        op, "rstd must be what rms_norm_forward gave for x");
  Tensor grad_x = contiguous_like(x), grad_weight = contiguous_like(weight);
  Rows from = as_rows(x), incoming = as_rows(grad_output), to = as_rows(grad_x), scale = as_rows(weight);
  const float* known = rstd ? static_cast<const float*>(rstd->data_ptr()) : nullptr;
  int64_t threads = std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), x.numel() / GRAIN));
  std::vector<float> sums(threads * from.length);
  with_kernels(x, [&](const auto& kernels, auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) {
        for (int64_t row = from.count * thread / threads; row < from.count * (thread + 1) / threads; ++row) {
          float found = known ? known[row] : kernels.rstd(from.row<T>(row), static_cast<float>(eps), from.length);
          kernels.rms_norm_backward(
              to.row<T>(row), &sums[thread * from.length], incoming.row<T>(row), from.row<T>(row), scale.row<T>(0),
              found, from.length);
        }
      }
    });
    kernels.sum_rows(static_cast<T*>(grad_weight.data_ptr()), sums.data(), threads, from.length);
  });
  return {grad_x, grad_weight};
}

// Contiguous tensors are one long row.
Rows as_long_rows(const Tensor& tensor, bool one_row) {
  return one_row ? Rows{tensor, tensor.numel() ? 1 : 0, tensor.numel(), tensor.numel()} : as_rows(tensor);
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check_input("swiglu", "gate", gate);
  check_like("swiglu", "up", up, "gate", gate);
  Tensor out = contiguous_like(gate);
  bool one_row = gate.is_contiguous() && up.is_contiguous();
  Rows g = as_long_rows(gate, one_row), u = as_long_rows(up, one_row), to = as_long_rows(out, one_row);
  with_kernels(gate, [&](const auto& kernels, auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    for_each_piece(g, [&](int64_t row, int64_t offset, int64_t count) {
      kernels.swiglu(to.row<T>(row) + offset, g.row<T>(row) + offset, u.row<T>(row) + offset, count);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad_output, const Tensor& gate, const Tensor& up) {
  const char* op = "swiglu_backward";
  check_input(op, "gate", gate);
  check_like(op, "up", up, "gate", gate);
  check_like(op, "grad_output", grad_output, "gate", gate);
  Tensor grad_gate = contiguous_like(gate), grad_up = contiguous_like(gate);
  bool one_row = gate.is_contiguous() && up.is_contiguous() && grad_output.is_contiguous();
  Rows g = as_long_rows(gate, one_row), u = as_long_rows(up, one_row), incoming = as_long_rows(grad_output, one_row);
  Rows to_gate = as_long_rows(grad_gate, one_row), to_up = as_long_rows(grad_up, one_row);
  with_kernels(gate, [&](const auto& kernels, auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    for_each_piece(g, [&](int64_t row, int64_t offset, int64_t count) {
      kernels.swiglu_backward(
          to_gate.row<T>(row) + offset, to_up.row<T>(row) + offset, incoming.row<T>(row) + offset,
          g.row<T>(row) + offset, u.row<T>(row) + offset, count);
    });
  });
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
  check(out.is_cpu() && out.scalar_type() == x.scalar_type(), op, "out must have the device and dtype of x");
  check(std::vector<int64_t>(out.sizes().begin(), out.sizes().end()) == wanted, op, "out is ", shape_of(out),
        ", but must have the shape of x with a last dim of ", half);
  check(out.is_contiguous(), op, "out must be contiguous");
  Rows from = as_rows(x), to = as_rows(out);
  with_kernels(x, [&](const auto& kernels, auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    for_each_piece(to, [&](int64_t row, int64_t offset, int64_t count) {
      const T* gate = from.row<T>(row) + offset;
      kernels.swiglu(to.row<T>(row) + offset, gate, gate + half, count);
    });
  });
}

}  // namespace

// The macros paste their argument before it is expanded, so that OP_NAMESPACE needs one more step.
#define DEFINE_LIBRARY(name, library) STABLE_TORCH_LIBRARY(name, library)
#define IMPLEMENT_LIBRARY(name, library) STABLE_TORCH_LIBRARY_IMPL(name, CPU, library)

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
