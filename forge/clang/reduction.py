"""Reductions with torch's dims, keepdim and accumulation dtypes."""

from collections.abc import Sequence

import torch

from forge import prims
from forge.clang.core import canonical_dims, clangop, convert
from forge.clang.promotion import category
from forge.ir import Symbol, TensorProxy, check


def keep_dims(reduced: TensorProxy, x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """A value reduced over `dims` of x, with those dims back at length 1."""
    shape = tuple(1 if dim in dims else length for dim, length in enumerate(x.shape))
    return prims.broadcast_in_dim(reduced, shape, tuple(dim for dim in range(x.ndim) if dim not in dims))


def _reduce(prim: Symbol, x: TensorProxy, dims: tuple[int, ...], keepdim: bool) -> TensorProxy:
    out = prim(x, dims)
    return keep_dims(out, x, dims) if keepdim and dims else out


@clangop()
def sum(
    x: TensorProxy, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> TensorProxy:
    """The sum over `dims` (all by default). Dtypes: integers and bools are summed as int64 unless `dtype` is given."""
    dims = canonical_dims("sum", dims, x.ndim)
    x = convert(x, dtype or (torch.int64 if category(x.dtype) < 2 else x.dtype))
    return _reduce(prims.sum, x, dims, keepdim)


@clangop()
def prod(
    x: TensorProxy, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> TensorProxy:
    """The product over `dims` (all by default). Dtypes: as sum."""
    dims = canonical_dims("prod", dims, x.ndim)
    x = convert(x, dtype or (torch.int64 if category(x.dtype) < 2 else x.dtype))
    return _reduce(prims.prod, x, dims, keepdim)


@clangop()
def mean(
    x: TensorProxy, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> TensorProxy:
    """The mean over `dims` (all by default). Dtypes: floating point; half precision is summed in float32."""
    dtype = dtype or x.dtype
    check(
        category(dtype) > 1,
        lambda: f"mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. "
        f"Got: {dtype} (input is {x}); pass dtype= or convert it first",
        RuntimeError,
    )
    dims = canonical_dims("mean", dims, x.ndim)
    count = 1
    for dim in dims:
        count = count * x.shape[dim]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = sum(convert(x, wide), dims, keepdim)
    return convert(total / count, dtype)


@clangop()
def amax(x: TensorProxy, dims: int | Sequence[int] | None = None, keepdim: bool = False) -> TensorProxy:
    """The maximum over `dims` (all by default)."""
    return _reduce(prims.amax, x, canonical_dims("amax", dims, x.ndim), keepdim)


@clangop()
def amin(x: TensorProxy, dims: int | Sequence[int] | None = None, keepdim: bool = False) -> TensorProxy:
    """The minimum over `dims` (all by default)."""
    return _reduce(prims.amin, x, canonical_dims("amin", dims, x.ndim), keepdim)


@clangop()
def any(x: TensorProxy, dims: int | Sequence[int] | None = None, keepdim: bool = False) -> TensorProxy:
    """Whether any element over `dims` (all by default) is not 0. Dtypes: out is bool, uint8 of uint8."""
    return _reduce(prims.any, x, canonical_dims("any", dims, x.ndim), keepdim)


@clangop()
def all(x: TensorProxy, dims: int | Sequence[int] | None = None, keepdim: bool = False) -> TensorProxy:
    """Whether no element over `dims` (all by default) is 0. Dtypes: as any."""
    return _reduce(prims.all, x, canonical_dims("all", dims, x.ndim), keepdim)


@clangop()
def var(
    x: TensorProxy, dims: int | Sequence[int] | None = None, *, correction: float = 1, keepdim: bool = False
) -> TensorProxy:
    """The variance over `dims`: the sum of squared distances to the mean over count - correction."""
    dims = canonical_dims("var", dims, x.ndim)
    count = 1
    for dim in dims:
        count = count * x.shape[dim]
    distance = x - mean(x, dims, True)
    return sum(distance * distance, dims, keepdim) / torch.sym_max(count - correction, 0)
