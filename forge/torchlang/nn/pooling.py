"""Pooling, unfold and fold."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, Symbol, TensorProxy, check
from forge.prims.core import known, torch_check
from forge.torch_internals.functions import nn_adaptive_avg_pool2d, nn_adaptive_avg_pool3d
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn.conv import per_dim


def _stride(op: str, stride: Lengths | None, kernel_size: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the stride, which is the kernel's size where none is given."""
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
        """Return the largest value of each window, and on request, or where the function's name says so, its place.

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
    """Return the means of windows that make an output of `output_size`; one window is the mean of everything, as in
    torch."""
    sizes = _output_size(op, input, output_size, count)
    if all(known(size == 1) for size in sizes):
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
        """Return the largest values of windows that make an output of `output_size`, and on request their places."""
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
        size = clang.where(size <= 0, 0, size)  # as of torch's relu, its gradient is 0 there, whatever arrives
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
    """Add up columns where their windows were.

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
