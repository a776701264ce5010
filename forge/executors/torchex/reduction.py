"""The torch executor's implementations of the reduction family."""

import torch

from forge import clang, prims, torchlang
from forge.executors.torchex.core import (
    composites,
    run_clang,
    run_prim,
    run_prims,
    torch_prims,
    torchex,
)
from forge.ir import TensorProxy

aten = torch.ops.aten
Dims = int | list[int] | tuple[int, ...] | None

run_prims(
    {
        prims.argmax: torch.argmax,
        prims.argmin: torch.argmin,
        prims.cummax: torch.cummax,
        prims.cummin: torch.cummin,
        prims.cumprod: torch.cumprod,
        prims.cumprod_backward: aten.cumprod_backward.default,
        prims.histc: torch.histc,
        prims.kthvalue: torch.kthvalue,
        prims.logcumsumexp: torch.logcumsumexp,
        prims.max_dim: torch.max,
        prims.min_dim: torch.min,
        prims.mode: torch.mode,
        prims.topk: torch.topk,
    }
)


@run_prim(prims.cumsum)
def cumsum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Accumulate in x's dtype; torch.cumsum promotes integers to int64."""
    return torch.cumsum(x, dim, dtype=x.dtype)


@run_prim(prims.median)
def median(x: torch.Tensor, dim: int) -> tuple:
    """Call torch.median on a contiguous tensor: along a dim of an expanded tensor it reads uninitialized memory."""
    return torch.median(x.contiguous(), dim)


@run_prim(prims.nanmedian)
def nanmedian(x: torch.Tensor, dim: int) -> tuple:
    """Call torch.nanmedian on a contiguous tensor, for the same reason as `median`."""
    return torch.nanmedian(x.contiguous(), dim)


composites.update((torchlang.median, torchlang.nanmedian))


@run_prim(prims.sort)
def sort(x: torch.Tensor, dim: int, descending: bool = False, stable: bool = False) -> tuple:
    """Call torch.sort, whose options are keywords."""
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


def place_along_dim(g: torch.Tensor, indices: torch.Tensor, dim: int, shape: tuple) -> torch.Tensor:
    """Scatter the gradient to its indices, as eager's autograd does for max, sort, topk and the like."""
    return aten.value_selecting_reduction_backward(g, dim, indices, shape, True)


torchex.register_implementation(clang.place_along_dim, place_along_dim)


def sum_keeping_dtype(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """Sum over `dims`. Empty dims mean none, but all for torch.sum; the dtype is kept, but torch.sum promotes
    integers."""
    return torch.sum(x, dims, dtype=x.dtype) if dims else x.clone()


torch_prims.register_implementation(prims.sum, sum_keeping_dtype)
_sum_any = torchex.register_operator("sum_keeping_dtype", like=prims.sum, fn=sum_keeping_dtype)
_sum = torchex.register_operator("sum", like=prims.sum, fn=torch.sum)
_sum_dim = torchex.register_operator("sum_dim", meta=lambda x, dim: prims.sum.definition(x, (dim,)), fn=torch.sum)


def _sum_of(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """Record torch.sum, with an integer dim for a single one, unless it would change the dtype."""
    if not dims or not (x.dtype.is_floating_point or x.dtype.is_complex):
        return _sum_any(x, dims)
    return _sum_dim(x, dims[0]) if len(dims) == 1 else _sum(x, dims)


torchex.register_implementation(prims.sum, execution_transform=_sum_of)


@run_prim(prims.prod)
def prod(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """Call torch.prod for one dim at a time, since it takes only one."""
    for dim in sorted(dims, reverse=True):
        x = torch.prod(x, dim, dtype=x.dtype)
    return x if dims else x.clone()


@run_prim(prims.amax)
def amax(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """Call torch.amax. Empty dims mean none, but all for torch.amax."""
    return torch.amax(x, dims) if dims else x.clone()


@run_prim(prims.amin)
def amin(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """Call torch.amin. Empty dims mean none, but all for torch.amin."""
    return torch.amin(x, dims) if dims else x.clone()


# clang's reductions, which can keep dims and take None for all dims


def sum_over(
    x: torch.Tensor, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Call torch.sum."""
    return torch.sum(x, dims, keepdim, dtype=dtype)


def mean_over(
    x: torch.Tensor, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Call torch.mean."""
    return torch.mean(x, dims, keepdim, dtype=dtype)


def amax_over(x: torch.Tensor, dims: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Call torch.amax."""
    return torch.amax(x, () if dims is None else dims, keepdim)


def amin_over(x: torch.Tensor, dims: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Call torch.amin."""
    return torch.amin(x, () if dims is None else dims, keepdim)


run_clang({clang.sum: sum_over, clang.mean: mean_over, clang.amax: amax_over, clang.amin: amin_over})
run_clang({clang.var: torch.var, clang.std: torch.std})


@run_prim(prims.any)
def any(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """Return bool; torch.any returns uint8 for uint8."""
    return torch.any(x != 0 if x.dtype != torch.bool else x, dims) if dims else x != 0


@run_prim(prims.all)
def all(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """Return bool; torch.all returns uint8 for uint8."""
    return torch.all(x != 0 if x.dtype != torch.bool else x, dims) if dims else x != 0
