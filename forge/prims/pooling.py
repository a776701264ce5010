"""The prims over windows of the last dims: pooling, im2col and col2im. Each option has one number for each of those
dims.

The dims before the windows are the batch and the channels; the batch may be missing.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from forge.ir import Dim, Symbol, TensorProxy, get_grad, put_grad, register_grad
from forge.ir.proxies import hint_of
from forge.prims.core import like, primitive, register_vjp, statically_true, torch_check
from forge.prims.creation import full
from forge.prims.indexing import gather, scatter_reduce
from forge.prims.library import make_library_prim
from forge.prims.shape import reshape
from forge.torch_internals.functions import nn_fractional_max_pool2d, nn_fractional_max_pool3d

Lengths = tuple[Dim, ...]


def _check_window(op: str, x: TensorProxy, **lists: Lengths) -> int:
    """Return the number of dims that windows move over."""
    count = len(next(iter(lists.values())))
    _check_rank(op, x, count)
    for name, values in lists.items():
        torch_check(
            len(values) == count,
            lambda name=name, values=values: f"{op}: {name} is {values}, but must have {count} elements",
        )
        torch_check(
            name == "padding" or all(not statically_true(value <= 0) for value in values),
            lambda name=name, values=values: f"{op}: {name} should be greater than zero, but got {values}",
        )
    _check_not_empty(op, x, x.ndim - count - 1)
    return count


def _check_rank(op: str, x: TensorProxy, count: int) -> None:
    """Raise RuntimeError unless x has `count` dims, channels and optionally a batch."""
    torch_check(
        x.ndim in (count + 1, count + 2),
        lambda: f"{op}: Expected {count + 1}D or {count + 2}D (batch mode) tensor for input, but got {x}",
    )


def _check_not_empty(op: str, x: TensorProxy, first: int) -> None:
    """Raise RuntimeError if a dim of x, from the `first` on, is empty."""
    torch_check(
        not any(statically_true(size == 0) for size in x.shape[first:]),
        lambda: f"{op}: Expected input with non-zero sizes from dim {first} on, but got {x}",
    )


def _check_half(op: str, kernel_size: Lengths, padding: Lengths, dilation: Sequence[Dim]) -> None:
    for kernel, pad, step in zip(kernel_size, padding, dilation, strict=True):
        reach = (kernel - 1) * step + 1
        torch_check(
            not statically_true(pad < 0) and not statically_true(pad > reach // 2),
            lambda pad=pad, reach=reach: (
                f"{op}: pad should be at least 0 and at most half of effective kernel size, "
                f"but got pad={pad} and effective kernel size {reach}"
            ),
        )


def window_count(length: Dim, kernel: Dim, stride: Dim, padding: Dim, dilation: Dim, ceil_mode: bool) -> Dim:
    """Return the number of windows that fit; with ceil_mode, also a last one that starts inside the input or its left
    padding."""
    reach = dilation * (kernel - 1) + 1
    spare = length + 2 * padding - reach
    if not ceil_mode:
        return spare // stride + 1
    is_clipped = padding == 0 and hint_of(length) <= hint_of(reach) < hint_of(length + stride)
    if is_clipped and length <= reach < length + stride:  # a guard: EfficientNet pools all of an image by 1280 x 1280
        return 1
    count = (spare + stride - 1) // stride + 1
    if statically_true(stride + padding <= reach):
        return count  # the last window begins inside for every length
    outside = (count - 1) * stride >= length + padding
    if isinstance(outside, bool):
        return count - 1 if outside else count
    windows: Dim = torch.sym_ite(outside, count - 1, count)
    return windows


def _covers(length: Dim, kernel: Dim, stride: Dim, padding: Dim, ceil_mode: bool) -> bool:
    """Return whether a dim has one window that covers it: ceil_mode clips a larger one."""
    is_whole = statically_true(length == kernel)
    if ceil_mode:
        is_whole = is_whole or (statically_true(length <= kernel) and statically_true(kernel < length + stride))
    return is_whole and statically_true(padding == 0)


def _pooled_shape(op: str, x: TensorProxy, lists: Sequence[Lengths], ceil_mode: bool) -> list[Dim]:
    count = len(lists[0])
    kernel, stride, padding, dilation = lists
    sizes = [
        window_count(x.shape[x.ndim - count + i], kernel[i], stride[i], padding[i], dilation[i], ceil_mode)
        for i in range(count)
    ]
    torch_check(
        not any(statically_true(size < 1) for size in sizes),
        lambda: f"{op}: Given input {x}, the calculated output size is {sizes}: Output size is too small",
    )
    return [*x.shape[: x.ndim - count], *sizes]


# pooling


@primitive()
def max_pool(
    x: TensorProxy, kernel_size: Lengths, stride: Lengths, padding: Lengths, dilation: Lengths, ceil_mode: bool
) -> tuple[TensorProxy, TensorProxy]:
    """Return the largest value of each window, nan if there is one, and its index in the input's flattened window dims.

    Source: torch.nn.functional.max_pool2d, return_indices=True.
    """
    op = "prims.max_pool"
    _check_window(op, x, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
    _check_half(op, kernel_size, padding, dilation)
    shape = _pooled_shape(op, x, (kernel_size, stride, padding, dilation), ceil_mode)
    return like(x, shape=shape), like(x, shape=shape, dtype=torch.int64)


@primitive()
def max_pool_backward(
    g: TensorProxy,
    x: TensorProxy,
    kernel_size: Lengths,
    stride: Lengths,
    padding: Lengths,
    dilation: Lengths,
    ceil_mode: bool,
    indices: TensorProxy,
) -> TensorProxy:
    """Return the gradient of max_pool's input. Source: aten.max_pool2d_with_indices_backward."""
    return like(x)


def _take(x: TensorProxy, indices: TensorProxy, count: int) -> TensorProxy:
    """Return the elements of x at indices in its flattened last `count` dims."""
    if statically_true(indices.numel() == 0):
        return full(indices.shape, 0, x.dtype, x.device)
    before = x.shape[: x.ndim - count]
    return reshape(gather(_flat(x, before), len(before), _flat(indices, before)), indices.shape)


def _flat(x: TensorProxy, before: Lengths) -> TensorProxy:
    return reshape(x, (*before, math.prod(x.shape[len(before) :])))


register_vjp(max_pool_backward, g=lambda grad, kernel_size, indices: _take(grad, indices, len(kernel_size)), x=None)
register_vjp(max_pool, x=lambda g, out, x, *how: max_pool_backward(g, x, *how, out[1]))


@primitive()
def avg_pool(
    x: TensorProxy,
    kernel_size: Lengths,
    stride: Lengths,
    padding: Lengths,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> TensorProxy:
    """Return the sum of each window divided by its size (without padding unless count_include_pad), or by
    divisor_override.

    Source: torch.nn.functional.avg_pool2d.
    """
    op = "prims.avg_pool"
    _check_window(op, x, kernel_size=kernel_size, stride=stride, padding=padding)
    one = (1,) * len(kernel_size)
    _check_half(op, kernel_size, padding, one)
    torch_check(divisor_override != 0, lambda: f"{op}: divisor must be not zero")
    return like(x, shape=_pooled_shape(op, x, (kernel_size, stride, padding, one), ceil_mode))


@primitive()
def avg_pool_backward(
    g: TensorProxy,
    x: TensorProxy,
    kernel_size: Lengths,
    stride: Lengths,
    padding: Lengths,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> TensorProxy:
    """Return the gradient of avg_pool's input, of which only the shape is read. Source: aten.avg_pool2d_backward."""
    return like(x)


register_vjp(avg_pool_backward, g=lambda grad, x, *how: avg_pool(grad, *how), x=None)


def covered_dims(x: TensorProxy | torch.Tensor, kernel_size: Lengths, *windows: Any) -> tuple[bool, ...]:
    """Return, for each dim over which windows of `kernel_size` move, whether one window covers it. windows: stride,
    padding, ceil_mode."""
    stride, padding, ceil_mode = windows
    lengths = x.shape[x.ndim - len(kernel_size) :]
    return tuple(_covers(*each, ceil_mode) for each in zip(lengths, kernel_size, stride, padding, strict=True))


def _avg_pool_gradient(g: TensorProxy, x: TensorProxy, kernel_size: Lengths, *how: Any) -> TensorProxy:
    *windows, _, divisor = how
    if not all(covered_dims(x, kernel_size, *windows)):
        return avg_pool_backward(g, x, kernel_size, *how)
    return (g / (divisor or math.prod(x.shape[x.ndim - len(kernel_size) :]))).expand(x.shape)


register_vjp(avg_pool, x=_avg_pool_gradient)


def _adaptive_shape(op: str, x: TensorProxy, output_size: Lengths) -> list[Dim]:
    count = len(output_size)
    _check_rank(op, x, count)
    torch_check(
        not any(statically_true(size < 0) for size in output_size),
        lambda: f"{op}: elements of output_size must be greater than or equal to 0, but got {output_size}",
    )
    return [*x.shape[: x.ndim - count], *output_size]


@primitive()
def adaptive_avg_pool(x: TensorProxy, output_size: Lengths) -> TensorProxy:
    """Return the means of windows that make an output of `output_size`. Source:
    torch.nn.functional.adaptive_avg_pool2d."""
    shape = _adaptive_shape("prims.adaptive_avg_pool", x, output_size)
    count = len(output_size)
    _check_not_empty("prims.adaptive_avg_pool", x, 1 if count == 3 else x.ndim - count)  # as in torch's kernels
    return like(x, shape=shape)


@primitive()
def adaptive_avg_pool_backward(g: TensorProxy, x: TensorProxy, output_size: Lengths) -> TensorProxy:
    """Return the gradient of adaptive_avg_pool's input, of which only the shape is read."""
    return like(x)


register_vjp(adaptive_avg_pool_backward, g=lambda grad, output_size: adaptive_avg_pool(grad, output_size), x=None)
register_vjp(adaptive_avg_pool, x=lambda g, x, output_size: adaptive_avg_pool_backward(g, x, output_size))


@primitive()
def adaptive_max_pool(x: TensorProxy, output_size: Lengths) -> tuple[TensorProxy, TensorProxy]:
    """Return the largest values of windows that make an output of `output_size`, and their indices.

    Source: torch.nn.functional.adaptive_max_pool2d, return_indices=True.
    """
    shape = _adaptive_shape("prims.adaptive_max_pool", x, output_size)
    _check_not_empty("prims.adaptive_max_pool", x, 1)
    return like(x, shape=shape), like(x, shape=shape, dtype=torch.int64)


@primitive()
def adaptive_max_pool_backward(
    g: TensorProxy, x: TensorProxy, output_size: Lengths, indices: TensorProxy
) -> TensorProxy:
    """Return the gradient of adaptive_max_pool's input. Source: aten.adaptive_max_pool2d_backward."""
    return like(x)


register_vjp(
    adaptive_max_pool_backward,
    g=lambda grad, output_size, indices: _take(grad, indices, len(output_size)),
    x=None,
)
register_vjp(adaptive_max_pool, x=lambda g, out, x, output_size: adaptive_max_pool_backward(g, x, output_size, out[1]))


# windows as columns


@primitive()
def im2col(x: TensorProxy, kernel_size: Lengths, dilation: Lengths, padding: Lengths, stride: Lengths) -> TensorProxy:
    """Return every window as a column.

    Shapes: x (N, C, H, W) or without N; out (N, C * window, number of windows). Source: torch.nn.functional.unfold.
    """
    op = "prims.im2col"
    _check_window(op, x, kernel_size=kernel_size, dilation=dilation, padding=padding, stride=stride)
    shape = _pooled_shape(op, x, (kernel_size, stride, padding, dilation), False)
    rows, columns = kernel_size[0] * kernel_size[1], shape[-2] * shape[-1]
    return like(x, shape=[*shape[:-3], shape[-3] * rows, columns])


@primitive()
def col2im(
    x: TensorProxy, output_size: Lengths, kernel_size: Lengths, dilation: Lengths, padding: Lengths, stride: Lengths
) -> TensorProxy:
    """Add up columns at the places of their windows: the transpose of im2col. Source: torch.nn.functional.fold."""
    op = "prims.col2im"
    torch_check(x.ndim in (2, 3), lambda: f"{op}: Expected 2D or 3D (batch mode) tensor for input, but got {x}")
    rows = kernel_size[0] * kernel_size[1]
    torch_check(
        not statically_true(operator.mod(x.shape[-2], rows) != 0),
        lambda: (
            f"{op}: Expected size of input's dimension 1 to be divisible by the product of kernel_size "
            f"{kernel_size}, but got {x}"
        ),
    )
    blocks: Dim = 1
    for i in range(2):
        blocks = blocks * window_count(output_size[i], kernel_size[i], stride[i], padding[i], dilation[i], False)
    torch_check(
        not statically_true(x.shape[-1] != blocks),
        lambda: (
            f"{op}: Given output_size={output_size}, kernel_size={kernel_size}, dilation={dilation}, "
            f"padding={padding} and stride={stride}, expected size of input's dimension 2 to match the calculated "
            f"number of sliding blocks, {blocks}, but got {x}"
        ),
    )
    return like(x, shape=[*x.shape[:-2], x.shape[-2] // rows, *output_size])


register_vjp(
    im2col,
    x=lambda g, x, kernel_size, dilation, padding, stride: col2im(
        g, x.shape[-2:], kernel_size, dilation, padding, stride
    ),
)
register_vjp(
    col2im, x=lambda g, kernel_size, dilation, padding, stride: im2col(g, kernel_size, dilation, padding, stride)
)


# windows of random lengths


fractional_max_pool2d = make_library_prim(
    nn_fractional_max_pool2d, "The largest value of each window, and its place among all of its channel's."
)
fractional_max_pool3d = make_library_prim(
    nn_fractional_max_pool3d, "The largest value of each window, and its place among all of its channel's."
)


def _register_fractional(prim: Symbol, count: int) -> None:
    @register_grad(prim)
    def rule(
        x: TensorProxy, kernel_size: tuple[Dim, ...], output_size: tuple[Dim, ...], samples: TensorProxy
    ) -> tuple[TensorProxy, TensorProxy]:
        """Put each window's gradient at its index."""
        out, indices = prim(x, kernel_size, output_size, samples)
        before = x.shape[:-count]
        zeros = reshape(full(x.shape, 0, x.dtype, x.device), (*before, math.prod(x.shape[-count:])))
        places, g = (reshape(each, (*before, math.prod(out.shape[-count:]))) for each in (indices, get_grad(out)))
        put_grad(x, reshape(scatter_reduce(zeros, len(before), places, g, "sum"), x.shape))
        return out, indices


_register_fractional(fractional_max_pool2d, 2)
_register_fractional(fractional_max_pool3d, 3)
