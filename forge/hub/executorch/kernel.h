// What a kernel of ExecuTorch includes, where its tensors are torch's own: the part that kernels use, over ATen.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace executorch {
namespace runtime {

enum class Error : uint32_t {
  Ok = 0x00,
  Internal = 0x01,
  InvalidState = 0x2,
  EndOfMethod = 0x03,
  NotSupported = 0x10,
  NotImplemented = 0x11,
  InvalidArgument = 0x12,
  InvalidType = 0x13,
  OperatorMissing = 0x14,
  NotFound = 0x20,
  MemoryAllocationFailed = 0x21,
};

inline const char* to_string(Error error) {
  switch (error) {
    case Error::Ok: return "Ok";
    case Error::Internal: return "Internal";
    case Error::InvalidState: return "InvalidState";
    case Error::EndOfMethod: return "EndOfMethod";
    case Error::NotSupported: return "NotSupported";
    case Error::NotImplemented: return "NotImplemented";
    case Error::InvalidArgument: return "InvalidArgument";
    case Error::InvalidType: return "InvalidType";
    case Error::OperatorMissing: return "OperatorMissing";
    case Error::NotFound: return "NotFound";
    case Error::MemoryAllocationFailed: return "MemoryAllocationFailed";
  }
  return "an unknown error";
}

template <typename T>
class Result {
 public:
  Result(Error error) : error_(error) {}
  Result(T value) : value_(std::move(value)), error_(Error::Ok) {}
  bool ok() const { return error_ == Error::Ok; }
  Error error() const { return error_; }
  T& get() {
    TORCH_CHECK(ok(), "a result that is an error was read: ", to_string(error_));
    return *value_;
  }
  T& operator*() { return get(); }
  T* operator->() { return &get(); }

 private:
  std::optional<T> value_;
  Error error_;
};

template <typename T>
class Span {
 public:
  Span() : data_(nullptr), size_(0) {}
  Span(T* data, size_t size) : data_(data), size_(size) {}
  T* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  T& operator[](size_t index) const { return data_[index]; }

 private:
  T* data_;
  size_t size_;
};

// What a kernel reports to, and has its temporary memory from; both live as long as one call.
class KernelRuntimeContext {
 public:
  void fail(Error error) { error_ = error; }
  Error failure_state() const { return error_; }
  Result<void*> allocate_temp(size_t size, size_t alignment = alignof(std::max_align_t)) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) return Error::InvalidArgument;
    memory_.emplace_back(new char[size + alignment]);
    auto address = reinterpret_cast<uintptr_t>(memory_.back().get());
    return reinterpret_cast<void*>((address + alignment - 1) & ~(static_cast<uintptr_t>(alignment) - 1));
  }

 private:
  Error error_ = Error::Ok;
  std::vector<std::unique_ptr<char[]>> memory_;
};

inline std::string& last_message() {
  static thread_local std::string text;
  return text;
}

inline void say(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  last_message() = text;
}

}  // namespace runtime

namespace aten {
using at::ArrayRef;
using at::IntArrayRef;
using at::OptionalIntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;
using at::TensorList;
using c10::MemoryFormat;
using std::nullopt;
using std::optional;
using std::string_view;
using SizesType = int64_t;
using StridesType = int64_t;
using DimOrderType = uint8_t;
template <typename T>
using OptionalArrayRef = c10::OptionalArrayRef<T>;
}  // namespace aten

namespace runtime {
inline Error resize_tensor(at::Tensor& tensor, at::IntArrayRef sizes) {
  if (tensor.sizes() != sizes) tensor.resize_(sizes);
  return Error::Ok;
}
}  // namespace runtime
}  // namespace executorch

namespace exec_aten = executorch::aten;

namespace torch {
namespace executor {
using executorch::aten::ArrayRef;
using executorch::aten::IntArrayRef;
using executorch::aten::OptionalArrayRef;
using executorch::aten::Scalar;
using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::aten::TensorList;
using executorch::aten::nullopt;
using executorch::aten::optional;
using executorch::aten::string_view;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Result;
using executorch::runtime::Span;
using executorch::runtime::resize_tensor;
using RuntimeContext = KernelRuntimeContext;
}  // namespace executor
}  // namespace torch

#define ET_UNUSED [[maybe_unused]]
#define ET_LOG(level, format, ...) ::executorch::runtime::say(format, ##__VA_ARGS__)
#define ET_CHECK(condition) TORCH_CHECK(condition, "ET_CHECK: " #condition)
#define ET_CHECK_MSG(condition, format, ...)                              \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ::executorch::runtime::say(format, ##__VA_ARGS__);                  \
      TORCH_CHECK(false, #condition ": ", ::executorch::runtime::last_message()); \
    }                                                                     \
  } while (false)
#define ET_KERNEL_CHECK_MSG(context, condition, error, result, format, ...) \
  do {                                                                      \
    if (!(condition)) {                                                     \
      ::executorch::runtime::say(format, ##__VA_ARGS__);                    \
      (context).fail(::executorch::runtime::Error::error);                  \
      return result;                                                        \
    }                                                                       \
  } while (false)
#define ET_KERNEL_CHECK(context, condition, error, result) \
  ET_KERNEL_CHECK_MSG(context, condition, error, result, "%s", #condition)
#define ET_LOG_AND_RETURN_IF_FALSE(condition)            \
  do {                                                   \
    if (!(condition)) {                                  \
      ::executorch::runtime::say("%s", #condition);      \
      return false;                                      \
    }                                                    \
  } while (false)
