"""The pooling functions, unfold and fold of torch.nn.functional."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, Symbol, TensorProxy, check
from forge.prims.core import same_shape, statically_true, torch_check
from forge.torch_internals.functions import nn_adaptive_avg_pool2d, nn_adaptive_avg_pool3d
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn.conv import per_dim


def _stride(op: str, stride: Lengths | None, kernel_size: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the stride, by default the kernel's size."""
    if stride is None or (isinstance(stride, (tuple, list)) and not stride):
        return kernel_size
    return per_dim(op, "stride", stride, len(kernel_size))


# max


def _max_pool_of(count: int, function: Callable, *others: Callable) -> Symbol:
    op = function.__name__

    def body(
        input: TensorProxy,
        kernel_size: Lengths,
        stride: Lengths | None = None,
        padding: Lengths = 0,
        dilation: Lengths = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
        """Return the largest value of each window and, on request or by the function's name, its index.

        Shapes: input (N, C, *lengths) or (C, *lengths).
        """
        kernel = per_dim(op, "kernel_size", kernel_size, count)
        steps = _stride(op, stride, kernel)
        sides = per_dim(op, "padding", padding, count), per_dim(op, "dilation", dilation, count)
        pooled = prims.max_pool(input, kernel, steps, *sides, ceil_mode)
        return pooled if return_indices or op.endswith("indices") else pooled[0]

    return torchsymbol(function, *others)(body)


max_pool1d = _max_pool_of(1, F.max_pool1d, torch.max_pool1d)
max_pool2d = _max_pool_of(2, F.max_pool2d, torch.max_pool2d)
max_pool3d = _max_pool_of(3, F.max_pool3d, torch.max_pool3d)
max_pool1d_with_indices = _max_pool_of(1, F.max_pool1d_with_indices)
max_pool2d_with_indices = _max_pool_of(2, F.max_pool2d_with_indices, torch.ops.aten.max_pool2d_with_indices.default)
max_pool3d_with_indices = _max_pool_of(3, F.max_pool3d_with_indices, torch.ops.aten.max_pool3d_with_indices.default)


# mean


def _avg_pool_of(count: int, function: Callable) -> Symbol:
    op = function.__name__

    def body(
        input: TensorProxy,
        kernel_size: Lengths,
        stride: Lengths | None = None,
        padding: Lengths = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> TensorProxy:
        """Return the mean of each window, or its sum over divisor_override.

        Shapes: input (N, C, *lengths) or (C, *lengths).
        """
        kernel = per_dim(op, "kernel_size", kernel_size, count)
        steps = _stride(op, stride, kernel)
        padding = per_dim(op, "padding", padding, count)
        return prims.avg_pool(input, kernel, steps, padding, ceil_mode, count_include_pad, divisor_override)

    return torchsymbol(function)(body)


avg_pool1d = _avg_pool_of(1, torch.avg_pool1d)
avg_pool2d = _avg_pool_of(2, F.avg_pool2d)
avg_pool3d = _avg_pool_of(3, F.avg_pool3d)


# adaptive


def _output_size(op: str, input: TensorProxy, output_size: Lengths | None, count: int) -> tuple[Dim, ...]:
    """Return the output's lengths: None keeps the input's."""
    torch_check(
        input.ndim in (count + 1, count + 2),
        lambda: f"{op}: Expected {count + 1}D or {count + 2}D tensor, but got {input}",
    )
    sizes = per_dim(op, "output_size", output_size, count)
    return tuple(input.shape[input.ndim - count + i] if size is None else size for i, size in enumerate(sizes))


def adaptive_mean(op: str, input: TensorProxy, output_size: Lengths | None, count: int) -> TensorProxy:
    """Return the means of windows that make an output of `output_size`; a single window is computed as the mean of all
    elements, as in torch."""
    sizes = _output_size(op, input, output_size, count)
    if all(statically_true(size == 1) for size in sizes):
        return clang.mean(input, tuple(range(input.ndim - count, input.ndim)), True)
    return prims.adaptive_avg_pool(input, sizes)


def _adaptive_avg_pool_of(count: int, function: Callable, *others: Callable) -> Symbol:
    op = function.__name__

    def body(input: TensorProxy, output_size: Lengths | None) -> TensorProxy:
        """Return the means of windows that make an output of `output_size`, where None keeps a length."""
        return adaptive_mean(op, input, output_size, count)

    return torchsymbol(function, *others)(body)


adaptive_avg_pool1d = _adaptive_avg_pool_of(1, torch.adaptive_avg_pool1d)
adaptive_avg_pool2d = _adaptive_avg_pool_of(2, F.adaptive_avg_pool2d, nn_adaptive_avg_pool2d)
adaptive_avg_pool3d = _adaptive_avg_pool_of(3, F.adaptive_avg_pool3d, nn_adaptive_avg_pool3d)


def _adaptive_max_pool_of(count: int, function: Callable) -> Symbol:
    op = function.__name__

    def body(
        input: TensorProxy, output_size: Lengths | None, return_indices: bool = False
    ) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
        """Return the largest values of windows that make an output of `output_size`, and on request their indices."""
        pooled = prims.adaptive_max_pool(input, _output_size(op, input, output_size, count))
        return pooled if return_indices or op.endswith("indices") else pooled[0]

    return torchsymbol(function)(body)


adaptive_max_pool1d = _adaptive_max_pool_of(1, F.adaptive_max_pool1d)
adaptive_max_pool2d = _adaptive_max_pool_of(2, F.adaptive_max_pool2d)
adaptive_max_pool3d = _adaptive_max_pool_of(3, F.adaptive_max_pool3d)
adaptive_max_pool1d_with_indices = _adaptive_max_pool_of(1, F.adaptive_max_pool1d_with_indices)
adaptive_max_pool2d_with_indices = _adaptive_max_pool_of(2, F.adaptive_max_pool2d_with_indices)
adaptive_max_pool3d_with_indices = _adaptive_max_pool_of(3, F.adaptive_max_pool3d_with_indices)


# powers


def _lp_pool_of(count: int, function: Callable) -> Symbol:
    op = function.__name__

    def body(
        input: TensorProxy,
        norm_type: float,
        kernel_size: Lengths,
        stride: Lengths | None = None,
        ceil_mode: bool = False,
    ) -> TensorProxy:
        """Return (the sum of input ** norm_type over each window) ** (1 / norm_type)."""
        check(
            math.isfinite(norm_type),
            lambda: f"{op}: norm_type is {norm_type}, which forge/torchlang/nn/pooling.py lacks",
            NotImplementedError,
        )
        sizes = per_dim(op, "kernel_size", kernel_size, count)
        padding = (0,) * count
        means = prims.avg_pool(input**norm_type, sizes, _stride(op, stride, sizes), padding, ceil_mode, True, None)
        size = clang.abs(means)
        size = clang.where(size <= 0, 0, size)  # as for torch's relu, the gradient is 0 there, whatever arrives
        sums = clang.sign(means) * size * math.prod(sizes)
        return sums ** (1.0 / norm_type)

    return torchsymbol(function)(body)


lp_pool1d = _lp_pool_of(1, F.lp_pool1d)
lp_pool2d = _lp_pool_of(2, F.lp_pool2d)
lp_pool3d = _lp_pool_of(3, F.lp_pool3d)


# windows as columns


@torchsymbol(F.unfold)
def unfold(
    input: TensorProxy, kernel_size: Lengths, dilation: Lengths = 1, padding: Lengths = 0, stride: Lengths = 1
) -> TensorProxy:
    """Return every window as a column.

    Shapes: input (N, C, H, W) or (C, H, W); out (N, C * kernel, windows).
    """
    options = {"kernel_size": kernel_size, "dilation": dilation, "padding": padding, "stride": stride}
    return prims.im2col(input, *[per_dim("unfold", name, value, 2) for name, value in options.items()])


@torchsymbol(F.fold)
def fold(
    input: TensorProxy,
    output_size: Lengths,
    kernel_size: Lengths,
    dilation: Lengths = 1,
    padding: Lengths = 0,
    stride: Lengths = 1,
) -> TensorProxy:
    """Add up columns at the places of their windows.

    Shapes: input (N, C * kernel, windows) or without N; out (N, C, *output_size).
    """
    options = {
        "output_size": output_size,
        "kernel_size": kernel_size,
        "dilation": dilation,
        "padding": padding,
        "stride": stride,
    }
    return prims.col2im(input, *[per_dim("fold", name, value, 2) for name, value in options.items()])


# windows of random lengths


Ratio = float | Sequence[float]


def _sizes(
    op: str, input: TensorProxy, output_size: Lengths | None, output_ratio: Ratio | None, count: int
) -> tuple[Dim, ...]:
    check(
        output_size is not None or output_ratio is not None,
        lambda: f"{op} requires specifying either an output_size or an output_ratio",
    )
    if output_size is not None:
        return per_dim(op, "output_size", output_size, count)
    ratios = per_dim(op, "output_ratio", cast(Lengths, output_ratio), count)  # it copies numbers of any kind
    return tuple(torch.sym_int(n * ratio) for n, ratio in zip(input.shape[-count:], ratios, strict=True))


def _fractional_of(count: int, pool: Symbol, function: Callable) -> Symbol:
    op = function.__name__

    def body(
        input: TensorProxy,
        kernel_size: Lengths,
        output_size: Lengths | None = None,
        output_ratio: Ratio | None = None,
        return_indices: bool = False,
        _random_samples: TensorProxy | None = None,
    ) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
        """Return the largest values of windows that make an output of `output_size`, with random lengths.

        Shapes: input (N, C, *lengths) or (C, *lengths), _random_samples (N, C, rank) in [0, 1).
        """
        torch_check(
            input.ndim in (count + 1, count + 2),
            lambda: f"{op}: Expected {count + 1}D or {count + 2}D tensor, but got {input}",
        )
        kernel = per_dim(op, "kernel_size", kernel_size, count)
        sizes = _sizes(op, input, output_size, output_ratio, count)
        if _random_samples is None:
            batch = 1 if input.ndim == count + 1 else input.shape[0]
            shape = (batch, input.shape[-count - 1], count)
            _random_samples = prims.uniform(shape, 0.0, 1.0, input.dtype, input.device)
        pooled = pool(input, kernel, sizes, _random_samples)
        return pooled if return_indices or op.endswith("indices") else pooled[0]

    return torchsymbol(function)(body)


fractional_max_pool2d = _fractional_of(2, prims.fractional_max_pool2d, F.fractional_max_pool2d)
fractional_max_pool3d = _fractional_of(3, prims.fractional_max_pool3d, F.fractional_max_pool3d)
fractional_max_pool2d_with_indices = _fractional_of(
    2, prims.fractional_max_pool2d, F.fractional_max_pool2d_with_indices
)
fractional_max_pool3d_with_indices = _fractional_of(
    3, prims.fractional_max_pool3d, F.fractional_max_pool3d_with_indices
)


# unpooling: values put back at the indices from max pooling


def _unpool(op: str, input: TensorProxy, indices: TensorProxy, sizes: Sequence[Dim]) -> TensorProxy:
    """Return zeros of (N, C, *sizes) with the input at `indices`, which count through the flattened window dims."""
    count = len(sizes)
    torch_check(
        indices.dtype == torch.int64, lambda: f"{op}: elements in indices should be type int64 but got: {indices.dtype}"
    )
    torch_check(
        input.ndim in (count + 1, count + 2),
        lambda: (
            f"{op}: Input to max_unpooling{count}d should be a {count + 1}d or {count + 2}d Tensor, but got {input}"
        ),
    )
    torch_check(
        same_shape(indices.shape, input.shape),
        lambda: f"{op}: Expected shape of indices to be same as that of the input tensor ({input}) but got {indices}",
    )
    torch_check(
        not any(statically_true(size == 0) for size in input.shape[1:]),
        lambda: f"{op}: Expected input to have non-zero size for non-batch dimensions, but got {input}",
    )
    before = input.shape[:-count]
    if statically_true(input.numel() == 0):
        return prims.clone(clang.reshape(input, (*before, *sizes)))
    zeros = prims.full((*before, math.prod(sizes)), 0, input.dtype, input.device)
    places, values = (clang.reshape(each, (*before, -1)) for each in (indices, input))
    return clang.reshape(prims.scatter(zeros, len(before), places, values), (*before, *sizes))


def _unpooled_size(
    op: str,
    input: TensorProxy,
    kernel: Sequence[Dim],
    stride: Sequence[Dim],
    padding: Sequence[Dim],
    size: Sequence[Dim] | None,
) -> tuple[Dim, ...]:
    """Return the requested lengths, by default the smallest whose pooling has the input's lengths."""
    count = len(kernel)
    sizes = input.shape[-count:]
    usual = [(sizes[i] - 1) * stride[i] + kernel[i] - 2 * padding[i] for i in range(count)]
    if size is None:
        return tuple(usual)
    size = tuple(size)[2:] if len(size) == count + 2 else tuple(size)
    check(
        len(size) == count,
        lambda: (
            f"{op}: output_size should be a sequence containing {count} or {count + 2} elements, but it has a length "
            f"of '{len(size)}'"
        ),
    )
    for dim in range(count):
        low, high = usual[dim] - stride[dim], usual[dim] + stride[dim]
        check(
            not statically_true(size[dim] <= low) and not statically_true(size[dim] >= high),
            lambda dim=dim, low=low, high=high: (
                f'{op}: invalid output_size "{size}" (dim {dim} must be between {low} and {high})'
            ),
        )
    return size


def _max_unpool_of(count: int, function: Callable) -> Symbol:
    op = function.__name__

    def body(
        input: TensorProxy,
        indices: TensorProxy,
        kernel_size: Lengths,
        stride: Lengths | None = None,
        padding: Lengths = 0,
        output_size: Sequence[Dim] | None = None,
    ) -> TensorProxy:
        """Return zeros with the input's values at the `indices` from max_pool.

        Shapes: input and indices (N, C, *lengths) or (C, *lengths).
        """
        kernel = per_dim(op, "kernel_size", kernel_size, count)
        steps = kernel if stride is None else per_dim(op, "stride", stride, count)
        sizes = _unpooled_size(op, input, kernel, steps, per_dim(op, "padding", padding, count), output_size)
        return _unpool(op, input, indices, sizes)

    return torchsymbol(function)(body)


max_unpool1d = _max_unpool_of(1, F.max_unpool1d)
max_unpool2d = _max_unpool_of(2, F.max_unpool2d)
max_unpool3d = _max_unpool_of(3, F.max_unpool3d)
