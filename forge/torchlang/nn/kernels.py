"""The native operators behind functions of torch.nn.functional: other names with the same meaning."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, Symbol, TensorProxy, get_grad, needs_grad, put_grad, register_grad
from forge.prims import Upsampling
from forge.prims.core import same, torch_check
from forge.torch_internals.dispatch import OpOverload, schema_of
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn.conv import per_dim
from forge.torchlang.nn.resample import Scales, interpolate, resize

aten = torch.ops.aten


# dropout


@torchsymbol(aten.native_dropout_backward.default)
def native_dropout_backward(grad_output: TensorProxy, mask: TensorProxy, scale: float) -> TensorProxy:
    """Return the gradient of the elements that dropout kept, scaled."""
    return grad_output * (clang.convert(mask, grad_output.dtype) * scale)


# pooling


@torchsymbol(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_with_indices_backward(
    grad_output: TensorProxy,
    self: TensorProxy,
    kernel_size: Lengths,
    stride: Lengths,
    padding: Lengths,
    dilation: Lengths,
    ceil_mode: bool,
    indices: TensorProxy,
) -> TensorProxy:
    """Return the gradient of max_pool2d's input: each window's gradient at its maximum."""
    op = "max_pool2d_with_indices_backward"
    for name, tensor in (("gradOutput", grad_output), ("indices", indices)):
        torch_check(
            tensor.ndim == self.ndim and all(map(same, tensor.shape, grad_output.shape)),
            lambda name=name, tensor=tensor: f"{op}: Expected {name} of shape {grad_output.shape}, but got {tensor}",
        )
    kernel = per_dim(op, "kernel_size", kernel_size, 2)
    steps = kernel if isinstance(stride, (tuple, list)) and not stride else per_dim(op, "stride", stride, 2)
    sides = (per_dim(op, "padding", padding, 2), per_dim(op, "dilation", dilation, 2))
    return prims.max_pool_backward(grad_output, self, kernel, steps, *sides, ceil_mode, indices)


@register_grad(max_pool2d_with_indices_backward)
def _max_pool2d_with_indices_backward_grad(
    grad_output: TensorProxy, self: TensorProxy, *how: Any, **kwargs: Any
) -> TensorProxy:
    """Gather from the incoming gradient; the input, whose values are not read, has a gradient of zeros, as in eager."""
    out = max_pool2d_with_indices_backward(grad_output, self, *how, **kwargs)
    indices = kwargs["indices"] if "indices" in kwargs else how[-1]
    g, places = (clang.reshape(each, (*each.shape[:-2], -1)) for each in (get_grad(out), indices))
    put_grad(grad_output, clang.reshape(prims.gather(g, g.ndim - 1, places), indices.shape))
    if needs_grad(self):
        put_grad(self, prims.full(self.shape, 0, self.dtype, self.device))
    return out


# grids


def _grid_sampler_of(rank: int | None, function: Callable) -> Symbol:
    op = function.__name__
    ndim = None if rank is None else rank + 2

    def body(
        input: TensorProxy, grid: TensorProxy, interpolation_mode: int, padding_mode: int, align_corners: bool
    ) -> TensorProxy:
        """Return the input's values at the grid's coordinates, in [-1, 1] from edge to edge.

        interpolation_mode: 0 linear, 1 nearest, 2 cubic. padding_mode: 0 zeros, 1 border, 2 reflection.
        Shapes: input (N, C, *lengths), grid (N, *out lengths, rank); out (N, C, *out lengths).
        """
        torch_check(
            ndim is None or input.ndim == ndim,
            lambda: f"{op}: expected {ndim}D input and grid with same number of dimensions, but got {input}",
        )
        return prims.grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners)

    return torchsymbol(function)(body)


grid_sampler = _grid_sampler_of(None, torch.grid_sampler)
grid_sampler_2d = _grid_sampler_of(2, torch.grid_sampler_2d)
grid_sampler_3d = _grid_sampler_of(3, torch.grid_sampler_3d)


# resampling


@torchsymbol(F.upsample_bilinear)
def upsample_bilinear(
    input: TensorProxy, size: Lengths | None = None, scale_factor: Scales | None = None
) -> TensorProxy:
    """Return the interpolation of images with fixed corners."""
    return interpolate(input, size, scale_factor, "bilinear", True)


def _antialias_of(kind: Upsampling, operator: OpOverload) -> Symbol:
    op = schema_of(operator).name.removeprefix("aten::")

    def body(
        self: TensorProxy,
        output_size: Sequence[Dim],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> TensorProxy:
        """Resize images to `output_size` with antialiasing: the kernel is wider when downsampling."""
        sizes = tuple(output_size)
        torch_check(len(sizes) == 2, lambda: f"{op}: It is expected output_size equals to 2, but got size {len(sizes)}")
        return prims.upsample(self, kind.value, sizes, align_corners, (scales_h, scales_w))

    return torchsymbol(operator)(body)


upsample_bilinear2d_aa = _antialias_of(Upsampling.LINEAR_ANTIALIAS, aten._upsample_bilinear2d_aa.default)
upsample_bicubic2d_aa = _antialias_of(Upsampling.CUBIC_ANTIALIAS, aten._upsample_bicubic2d_aa.default)


def _antialias_scaled_of(kind: Upsampling, operator: OpOverload) -> Symbol:
    op = schema_of(operator).name.removeprefix("aten::")

    def body(
        input: TensorProxy,
        output_size: Sequence[Dim] | None,
        align_corners: bool,
        scale_factors: Sequence[float] | None,
    ) -> TensorProxy:
        """Resize images to `output_size`, or by `scale_factors`, with antialiasing: the kernel is wider when
        downsampling."""
        torch_check(
            (output_size is None) != (scale_factors is None),
            lambda: f"{op}: Must specify exactly one of output_size and scale_factors",
        )
        sizes, scales = resize(input, output_size, scale_factors)
        return prims.upsample(input, kind.value, sizes, align_corners, scales)

    body.__name__ = f"{op}_scaled"
    return torchsymbol(operator)(body)


upsample_bilinear2d_aa_scaled = _antialias_scaled_of(Upsampling.LINEAR_ANTIALIAS, aten._upsample_bilinear2d_aa.vec)
upsample_bicubic2d_aa_scaled = _antialias_scaled_of(Upsampling.CUBIC_ANTIALIAS, aten._upsample_bicubic2d_aa.vec)
