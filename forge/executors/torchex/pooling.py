"""How torch runs the pooling and resampling families: one aten operator for each rank; a pool over one dim is one over
two, the first of length 1."""

from collections.abc import Callable
from typing import Any

import torch

from forge import prims
from forge.executors.torchex.core import run_prim, run_prims
from forge.prims import Upsampling

aten = torch.ops.aten

run_prims({prims.im2col: aten.im2col.default, prims.col2im: aten.col2im.default})

_MAX_POOL = {2: aten.max_pool2d_with_indices, 3: aten.max_pool3d_with_indices}
_MAX_POOL_BACKWARD = {2: aten.max_pool2d_with_indices_backward, 3: aten.max_pool3d_with_indices_backward}
_AVG_POOL = {2: aten.avg_pool2d, 3: aten.avg_pool3d}
_AVG_POOL_BACKWARD = {2: aten.avg_pool2d_backward, 3: aten.avg_pool3d_backward}
_ADAPTIVE_AVG_POOL = {2: aten._adaptive_avg_pool2d, 3: aten._adaptive_avg_pool3d}
_ADAPTIVE_AVG_POOL_BACKWARD = {2: aten._adaptive_avg_pool2d_backward, 3: aten._adaptive_avg_pool3d_backward}
_ADAPTIVE_MAX_POOL = {2: aten.adaptive_max_pool2d, 3: aten.adaptive_max_pool3d}
_ADAPTIVE_MAX_POOL_BACKWARD = {2: aten.adaptive_max_pool2d_backward, 3: aten.adaptive_max_pool3d_backward}


def _with_height(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(-2)


@run_prim(prims.max_pool)
def max_pool(
    x: torch.Tensor, kernel: tuple, stride: tuple, padding: tuple, dilation: tuple, ceil_mode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices)."""
    if len(kernel) > 1:
        return _MAX_POOL[len(kernel)](x, kernel, stride, padding, dilation, ceil_mode)
    wide = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
    out, indices = aten.max_pool2d_with_indices(_with_height(x), *wide, ceil_mode)
    return out.squeeze(-2), indices.squeeze(-2)


@run_prim(prims.max_pool_backward)
def max_pool_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    kernel: tuple,
    stride: tuple,
    padding: tuple,
    dilation: tuple,
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    """Give the gradient to the places that won."""
    if len(kernel) > 1:
        return _MAX_POOL_BACKWARD[len(kernel)](g, x, kernel, stride, padding, dilation, ceil_mode, indices)
    wide = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
    g, x, indices = _with_height(g), _with_height(x), _with_height(indices)
    return aten.max_pool2d_with_indices_backward(g, x, *wide, ceil_mode, indices).squeeze(-2)


@run_prim(prims.avg_pool)
def avg_pool(x: torch.Tensor, kernel: tuple, stride: tuple, padding: tuple, *how: object) -> torch.Tensor:
    """By rank."""
    if len(kernel) > 1:
        return _AVG_POOL[len(kernel)](x, kernel, stride, padding, *how)
    return aten.avg_pool2d(_with_height(x), (1, *kernel), (1, *stride), (0, *padding), *how).squeeze(-2)


@run_prim(prims.avg_pool_backward)
def avg_pool_backward(
    g: torch.Tensor, x: torch.Tensor, kernel: tuple, stride: tuple, padding: tuple, *how: object
) -> torch.Tensor:
    """By rank."""
    if len(kernel) > 1:
        return _AVG_POOL_BACKWARD[len(kernel)](g, x, kernel, stride, padding, *how)
    wide = (1, *kernel), (1, *stride), (0, *padding)
    return aten.avg_pool2d_backward(_with_height(g), _with_height(x), *wide, *how).squeeze(-2)


@run_prim(prims.adaptive_avg_pool)
def adaptive_avg_pool(x: torch.Tensor, output_size: tuple) -> torch.Tensor:
    """By rank."""
    if len(output_size) > 1:
        return _ADAPTIVE_AVG_POOL[len(output_size)](x, output_size)
    return aten._adaptive_avg_pool2d(_with_height(x), (1, *output_size)).squeeze(-2)


@run_prim(prims.adaptive_avg_pool_backward)
def adaptive_avg_pool_backward(g: torch.Tensor, x: torch.Tensor, output_size: tuple) -> torch.Tensor:
    """By rank."""
    if len(output_size) > 1:
        return _ADAPTIVE_AVG_POOL_BACKWARD[len(output_size)](g, x)
    return aten._adaptive_avg_pool2d_backward(_with_height(g), _with_height(x)).squeeze(-2)


@run_prim(prims.adaptive_max_pool)
def adaptive_max_pool(x: torch.Tensor, output_size: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices)."""
    if len(output_size) > 1:
        return _ADAPTIVE_MAX_POOL[len(output_size)](x, output_size)
    out, indices = aten.adaptive_max_pool2d(_with_height(x), (1, *output_size))
    return out.squeeze(-2), indices.squeeze(-2)


@run_prim(prims.adaptive_max_pool_backward)
def adaptive_max_pool_backward(
    g: torch.Tensor, x: torch.Tensor, output_size: tuple, indices: torch.Tensor
) -> torch.Tensor:
    """Give the gradient to the places that won."""
    if len(output_size) > 1:
        return _ADAPTIVE_MAX_POOL_BACKWARD[len(output_size)](g, x, indices)
    return aten.adaptive_max_pool2d_backward(_with_height(g), _with_height(x), _with_height(indices)).squeeze(-2)


# resampling

_UPSAMPLE = {
    (Upsampling.NEAREST.value, 1): "upsample_nearest1d",
    (Upsampling.NEAREST.value, 2): "upsample_nearest2d",
    (Upsampling.NEAREST.value, 3): "upsample_nearest3d",
    (Upsampling.NEAREST_EXACT.value, 1): "_upsample_nearest_exact1d",
    (Upsampling.NEAREST_EXACT.value, 2): "_upsample_nearest_exact2d",
    (Upsampling.NEAREST_EXACT.value, 3): "_upsample_nearest_exact3d",
    (Upsampling.LINEAR.value, 1): "upsample_linear1d",
    (Upsampling.LINEAR.value, 2): "upsample_bilinear2d",
    (Upsampling.LINEAR.value, 3): "upsample_trilinear3d",
    (Upsampling.CUBIC.value, 2): "upsample_bicubic2d",
    (Upsampling.LINEAR_ANTIALIAS.value, 2): "_upsample_bilinear2d_aa",
    (Upsampling.CUBIC_ANTIALIAS.value, 2): "_upsample_bicubic2d_aa",
}


def _corners(mode: str, align_corners: bool) -> tuple[bool, ...]:
    """Return the options of an operator: those of the nearest modes know no align_corners."""
    return () if mode.startswith("nearest") else (align_corners,)


@run_prim(prims.upsample)
def upsample(x: torch.Tensor, mode: str, output_size: tuple, align_corners: bool, scales: tuple) -> torch.Tensor:
    """By mode and rank."""
    operator = getattr(aten, _UPSAMPLE[mode, len(output_size)]).default
    return operator(x, output_size, *_corners(mode, align_corners), *scales)


@run_prim(prims.upsample_backward)
def upsample_backward(
    g: torch.Tensor, mode: str, input_size: tuple, align_corners: bool, scales: tuple
) -> torch.Tensor:
    """By mode and rank."""
    operator = getattr(aten, _UPSAMPLE[mode, len(scales)] + "_backward").default
    return operator(g, g.shape[2:], input_size, *_corners(mode, align_corners), *scales)


_PAD_EDGES = {"reflect": "reflection_pad{}d", "replicate": "replication_pad{}d"}


def _pad_operator(padding: tuple, mode: str, suffix: str = "") -> Callable:
    return getattr(aten, _PAD_EDGES[mode].format(len(padding) // 2) + suffix).default


@run_prim(prims.pad_edges)
def pad_edges(x: torch.Tensor, padding: tuple, mode: str) -> torch.Tensor:
    """By mode and rank."""
    return _pad_operator(padding, mode)(x, padding)


@run_prim(prims.pad_edges_backward)
def pad_edges_backward(g: torch.Tensor, x: torch.Tensor, padding: tuple, mode: str) -> torch.Tensor:
    """By mode and rank."""
    return _pad_operator(padding, mode, "_backward")(g, x, padding)


@run_prim(prims.grid_sampler_backward)
def grid_sampler_backward(g: torch.Tensor, x: torch.Tensor, *how: object) -> tuple[torch.Tensor | None, torch.Tensor]:
    """By rank."""
    operator = aten.grid_sampler_2d_backward if x.ndim == 4 else aten.grid_sampler_3d_backward
    return operator(g, x, *how)


@run_prim(prims.grid_sampler_double_backward)
def grid_sampler_double_backward(
    of_x: torch.Tensor | None, of_grid: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By torch's autograd, of its own operator."""
    tensors, how = given[:3], given[3:]

    def backward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each for each in grid_sampler_backward(*tensors, *how) if each is not None)

    incoming = tuple(each for each in (of_x, of_grid) if each is not None)
    return torch.autograd.functional.vjp(backward, tensors, incoming)[1]


run_prims(
    {
        prims.grid_sampler: torch.grid_sampler,
        prims.affine_grid: torch.affine_grid_generator,
        prims.affine_grid_backward: aten.affine_grid_generator_backward.default,
    }
)
