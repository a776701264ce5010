"""Max pooling undone: values put back at the places that they were found at."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, Symbol, TensorProxy, check
from forge.prims.core import known, same_shape, torch_check
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn.conv import per_dim


def _unpool(op: str, input: TensorProxy, indices: TensorProxy, sizes: Sequence[Dim]) -> TensorProxy:
    """Zeros of (N, C, *sizes) with the input at `indices`, which count through the window dims laid out as one."""
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
        not any(known(length == 0) for length in input.shape[1:]),
        lambda: f"{op}: Expected input to have non-zero size for non-batch dimensions, but got {input}",
    )
    before = input.shape[:-count]
    if known(input.numel() == 0):
        return prims.clone(clang.reshape(input, (*before, *sizes)))
    zeros = prims.full((*before, math.prod(sizes)), 0, input.dtype, input.device)
    places, values = (clang.reshape(each, (*before, -1)) for each in (indices, input))
    return clang.reshape(prims.scatter(zeros, len(before), places, values), (*before, *sizes))


def _output_size(
    op: str,
    input: TensorProxy,
    kernel: Sequence[Dim],
    stride: Sequence[Dim],
    padding: Sequence[Dim],
    size: Sequence[Dim] | None,
) -> tuple[Dim, ...]:
    """Return the lengths whose pooling gives the input's, or those that are asked for."""
    count = len(kernel)
    lengths = input.shape[-count:]
    usual = [(lengths[i] - 1) * stride[i] + kernel[i] - 2 * padding[i] for i in range(count)]
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
            not known(size[dim] <= low) and not known(size[dim] >= high),
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
        """Return the input's values where `indices` of max_pool say that they were, zeros elsewhere.

        Shapes: input and indices (N, C, *lengths) or (C, *lengths).
        """
        kernel = per_dim(op, "kernel_size", kernel_size, count)
        steps = kernel if stride is None else per_dim(op, "stride", stride, count)
        sizes = _output_size(op, input, kernel, steps, per_dim(op, "padding", padding, count), output_size)
        return _unpool(op, input, indices, sizes)

    return torchsymbol(function)(body)


max_unpool1d = _max_unpool_of(1, F.max_unpool1d)
max_unpool2d = _max_unpool_of(2, F.max_unpool2d)
max_unpool3d = _max_unpool_of(3, F.max_unpool3d)
