// Tensors as the kernels need them: checked, allocated, seen as rows.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
void check(bool holds, const char* op, const Parts&... parts) {
  if (!holds) {
    std::ostringstream text;
    text << "norms_cuda." << op << ": ";
    (text << ... << parts);
    throw std::runtime_error(text.str());
  }
}

// A shape in an error's text; a call that is right does not pay for writing it.
struct Shape {
  const Tensor& of;
};

Shape shape_of(const Tensor& tensor) {
  return {tensor};
}

std::ostream& operator<<(std::ostream& text, const Shape& shape) {
  text << "[";
  for (int64_t dim = 0; dim < shape.of.dim(); ++dim) {
    text << (dim ? ", " : "") << shape.of.size(dim);
  }
  return text << "]";
}

bool same_shape(const Tensor& one, const Tensor& other) {
  auto a = one.sizes(), b = other.sizes();
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

void check_input(const char* op, const char* name, const Tensor& tensor) {
  check(tensor.is_cuda(), op, name, " must be on a CUDA device");
  ScalarType dtype = tensor.scalar_type();
  check(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, op, name,
        " must be float32, bfloat16 or float16");
}

bool same_device(const Tensor& one, const Tensor& other) {
  return one.is_cuda() && other.is_cuda() && one.get_device_index() == other.get_device_index();
}

void check_like(const char* op, const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  check(same_device(tensor, other), op, name, " must be on the device of ", other_name);
  check(tensor.scalar_type() == other.scalar_type(), op, name, " must have the dtype of ", other_name);
  check(same_shape(tensor, other), op, name, " is ", shape_of(tensor), ", but must have the shape of ", other_name,
        ", ", shape_of(other));
}

void check_norm(const char* op, const Tensor& x, const Tensor& weight) {
  check_input(op, "x", x);
  check(x.dim() > 0, op, "x must have at least 1 dim");
  check(same_device(weight, x), op, "weight must be on the device of x");
  check(weight.scalar_type() == x.scalar_type(), op, "weight must have the dtype of x");
  check(weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1), op, "weight is ", shape_of(weight),
        ", but must be [", x.size(x.dim() - 1), "], the last dim of x");
}

Tensor make_contiguous(const Tensor& like, const int64_t* sizes, int64_t ndim, int32_t dtype) {
  std::vector<int64_t> strides(ndim);
  int64_t stride = 1;
  for (int64_t dim = ndim - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      ndim, sizes, strides.data(), dtype, aoti_torch_device_type_cuda(), like.get_device_index(), &made));
  return Tensor(made);
}

// A contiguous tensor of the same shape.
Tensor contiguous_like(const Tensor& like) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return make_contiguous(like, like.sizes().data(), like.dim(), dtype);
}

// One float32 for each row of x.
Tensor empty_per_row(const Tensor& x) {
  return make_contiguous(x, x.sizes().data(), x.dim() - 1, aoti_torch_dtype_float32());
}

// A tensor as `count` rows of `length` elements side by side, `stride` elements apart.
struct Rows {
  Tensor tensor;
  int64_t count, length, stride;

  template <class T>
  T* data() const {
    return static_cast<T*>(tensor.data_ptr());
  }

  // Whether every row begins and ends at a multiple of 16 bytes.
  bool aligned() const {
    int64_t size = tensor.element_size();
    return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 && stride * size % 16 == 0 &&
           length * size % 16 == 0;
  }
};

// Whether the dims before the last are one dim in memory; sets its stride.
bool collapses(const Tensor& tensor, int64_t* stride) {
  auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = -1;
  for (int64_t dim = tensor.dim() - 2; dim >= 0; --dim) {
    if (sizes[dim] == 1) {
      continue;
    }
    if (expected < 0) {
      *stride = strides[dim];
    } else if (strides[dim] != expected) {
      return false;
    }
    expected = strides[dim] * sizes[dim];
  }
  return true;
}

// Strided rows are used where they lie; any other layout (x[:, ::2], an expanded gradient) is copied.
Rows as_rows(const Tensor& tensor) {
  int64_t last = tensor.dim() - 1;
  int64_t length = last < 0 ? 1 : tensor.size(last);
  int64_t count = length ? tensor.numel() / length : 0;
  int64_t stride = length;
  if (length <= 1 ? tensor.is_contiguous() : tensor.stride(last) == 1 && collapses(tensor, &stride)) {
    return {tensor, count, length, stride};
  }
  return {torch::stable::contiguous(tensor), count, length, length};
}

}  // namespace
