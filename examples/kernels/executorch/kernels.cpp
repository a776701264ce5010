#include <executorch/runtime/kernel/kernel_includes.h>

namespace custom {
namespace native {

using executorch::aten::Tensor;
using executorch::runtime::KernelRuntimeContext;

Tensor& mul3_out_impl(KernelRuntimeContext& context, const Tensor& input, Tensor& output) {
  ET_KERNEL_CHECK_MSG(context, output.dim() == input.dim(), InvalidArgument, output, "output has %d dims, input %d",
                      (int)output.dim(), (int)input.dim());
  const float* from = input.const_data_ptr<float>();
  float* to = output.mutable_data_ptr<float>();
  for (int64_t i = 0; i < input.numel(); ++i) to[i] = 3 * from[i];
  return output;
}

}  // namespace native
}  // namespace custom

namespace torch {
namespace executor {
namespace native {

Tensor& add_out(KernelRuntimeContext& context, const Tensor& a, const Tensor& b, const Scalar& alpha, Tensor& out) {
  (void)context;
  return at::add_out(out, a, b, alpha);
}

Tensor& add_channels_last_out(KernelRuntimeContext& context, const Tensor& a, const Tensor& b, const Scalar& alpha,
                              Tensor& out) {
  ET_KERNEL_CHECK(context, out.is_contiguous(at::MemoryFormat::ChannelsLast), InvalidArgument, out);
  return at::add_out(out, a, b, alpha);
}

}  // namespace native
}  // namespace executor
}  // namespace torch
