"""The torch executor's pooling and resampling families: one aten operator per rank; a pool over one dim runs as a pool
over two, the first of size 1."""

from collections.abc import Callable
from typing import Any

import torch

from forge import prims
from forge.executors.torchex.core import run_prim, run_prims
from forge.ir import Symbol
from forge.prims import Upsampling

aten = torch.ops.aten

run_prims({prims.im2col: aten.im2col.default, prims.col2im: aten.col2im.default})

_FILLS = (1, 1, 0, 1)  # for the first dim, of size 1: the size of kernel or output; stride, padding, dilation


def _run_pool(prim: Symbol, name: str, tensors: int) -> Callable:
    """Run a pool by the operator for its rank, and return the function, which the caller names like the prim: programs
    refer to it by that name. tensors: the number of tensors before the tuples of sizes."""
    by_rank = {rank: getattr(aten, name.format(rank)) for rank in (2, 3)}

    def pool(*args: Any) -> Any:
        rank = len(args[tensors])
        if rank > 1:
            return by_rank[rank](*args)
        fills = iter(_FILLS)
        wide = [
            arg.unsqueeze(-2) if isinstance(arg, torch.Tensor) else (next(fills), *arg) if type(arg) is tuple else arg
            for arg in args
        ]
        result = by_rank[2](*wide)
        return result.squeeze(-2) if isinstance(result, torch.Tensor) else tuple(each.squeeze(-2) for each in result)

    pool.__name__ = pool.__qualname__ = prim.name
    return run_prim(prim)(pool)


max_pool = _run_pool(prims.max_pool, "max_pool{}d_with_indices", 1)
max_pool_backward = _run_pool(prims.max_pool_backward, "max_pool{}d_with_indices_backward", 2)
avg_pool = _run_pool(prims.avg_pool, "avg_pool{}d", 1)
avg_pool_backward = _run_pool(prims.avg_pool_backward, "avg_pool{}d_backward", 2)
adaptive_avg_pool = _run_pool(prims.adaptive_avg_pool, "_adaptive_avg_pool{}d", 1)
adaptive_max_pool = _run_pool(prims.adaptive_max_pool, "adaptive_max_pool{}d", 1)

_ADAPTIVE_AVG_POOL_BACKWARD = {2: aten._adaptive_avg_pool2d_backward, 3: aten._adaptive_avg_pool3d_backward}
_ADAPTIVE_MAX_POOL_BACKWARD = {2: aten.adaptive_max_pool2d_backward, 3: aten.adaptive_max_pool3d_backward}


@run_prim(prims.adaptive_avg_pool_backward)
def adaptive_avg_pool_backward(g: torch.Tensor, x: torch.Tensor, output_size: tuple) -> torch.Tensor:
    """Call the operator for the rank."""
    if len(output_size) > 1:
        return _ADAPTIVE_AVG_POOL_BACKWARD[len(output_size)](g, x)
    return aten._adaptive_avg_pool2d_backward(g.unsqueeze(-2), x.unsqueeze(-2)).squeeze(-2)


@run_prim(prims.adaptive_max_pool_backward)
def adaptive_max_pool_backward(
    g: torch.Tensor, x: torch.Tensor, output_size: tuple, indices: torch.Tensor
) -> torch.Tensor:
    """Call the operator for the rank."""
    if len(output_size) > 1:
        return _ADAPTIVE_MAX_POOL_BACKWARD[len(output_size)](g, x, indices)
    wide = g.unsqueeze(-2), x.unsqueeze(-2), indices.unsqueeze(-2)
    return aten.adaptive_max_pool2d_backward(*wide).squeeze(-2)


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
    """Return the options of an operator: those for the nearest modes take no align_corners."""
    return () if mode.startswith("nearest") else (align_corners,)


@run_prim(prims.upsample)
def upsample(x: torch.Tensor, mode: str, output_size: tuple, align_corners: bool, scales: tuple) -> torch.Tensor:
    """Call the operator for the mode and rank."""
    operator = getattr(aten, _UPSAMPLE[mode, len(output_size)]).default
    return operator(x, output_size, *_corners(mode, align_corners), *scales)


@run_prim(prims.upsample_backward)
def upsample_backward(
    g: torch.Tensor, mode: str, input_size: tuple, align_corners: bool, scales: tuple
) -> torch.Tensor:
    """Call the operator for the mode and rank."""
    operator = getattr(aten, _UPSAMPLE[mode, len(scales)] + "_backward").default
    return operator(g, g.shape[2:], input_size, *_corners(mode, align_corners), *scales)


_PAD_EDGES = {"reflect": "reflection_pad{}d", "replicate": "replication_pad{}d"}


def _pad_operator(padding: tuple, mode: str, suffix: str = "") -> Callable:
    return getattr(aten, _PAD_EDGES[mode].format(len(padding) // 2) + suffix).default


@run_prim(prims.pad_edges)
def pad_edges(x: torch.Tensor, padding: tuple, mode: str) -> torch.Tensor:
    """Call the operator for the mode and rank."""
    return _pad_operator(padding, mode)(x, padding)


@run_prim(prims.pad_edges_backward)
def pad_edges_backward(g: torch.Tensor, x: torch.Tensor, padding: tuple, mode: str) -> torch.Tensor:
    """Call the operator for the mode and rank."""
    return _pad_operator(padding, mode, "_backward")(g, x, padding)


@run_prim(prims.grid_sampler_backward)
def grid_sampler_backward(g: torch.Tensor, x: torch.Tensor, *how: object) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Call the operator for the rank."""
    operator = aten.grid_sampler_2d_backward if x.ndim == 4 else aten.grid_sampler_3d_backward
    return operator(g, x, *how)


@run_prim(prims.grid_sampler_double_backward)
def grid_sampler_double_backward(
    of_x: torch.Tensor | None, of_grid: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients by torch's autograd of its operator."""
    tensors, how = args[:3], args[3:]

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
