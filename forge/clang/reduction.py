"""The reductions with torch's dims, keepdim and accumulation dtypes."""

import math
from collections.abc import Sequence

import torch

from forge import prims
from forge.clang.core import as_gradient, canonical_dims, clangop, convert
from forge.clang.elementwise import conj, real, squared_size, widen
from forge.clang.promotion import category
from forge.ir import Dim, Real, Symbol, TensorProxy, get_grad, put_grad, register_grad
from forge.prims.core import statically_true, torch_check

Dims = int | Sequence[int] | None


def keep_dims(reduced: TensorProxy, x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """Return a value reduced over `dims` of x, with those dims back at length 1."""
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
    return prims.broadcast_in_dim(reduced, shape, tuple(dim for dim in range(x.ndim) if dim not in dims))


def spread(reduced: TensorProxy, x: TensorProxy, dims: tuple[int, ...], keepdim: bool) -> TensorProxy:
    """Return a value reduced over `dims` of x, with or without those dims, repeated to x's shape."""
    if not dims:
        return reduced
    if keepdim:
        return prims.broadcast_in_dim(reduced, x.shape, tuple(range(x.ndim)))
    return prims.restore_dims(reduced, x, dims)


def count(x: TensorProxy, dims: tuple[int, ...]) -> Dim:
    """Return the number of elements over `dims`."""
    return math.prod(x.shape[dim] for dim in dims)


def _reduce(prim: Symbol[TensorProxy], x: TensorProxy, dims: tuple[int, ...], keepdim: bool) -> TensorProxy:
    out = prim(x, dims)
    return keep_dims(out, x, dims) if keepdim and dims else out


def _summable(x: TensorProxy, dtype: torch.dtype | None) -> TensorProxy:
    return convert(x, dtype or (torch.int64 if category(x.dtype) < 2 else x.dtype))


@clangop()
def sum(x: TensorProxy, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> TensorProxy:
    """Return the sum over `dims` (all by default). Dtypes: integers and bools are summed as int64 by default."""
    dims = canonical_dims("sum", dims, x.ndim)
    return _reduce(prims.sum, _summable(x, dtype), dims, keepdim)


prims.register_vjp(
    sum,
    x=lambda g, x, dims, keepdim: as_gradient(spread(g, x, canonical_dims("sum", dims, x.ndim), keepdim), x.dtype),
)


@clangop()
def prod(x: TensorProxy, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> TensorProxy:
    """Return the product over `dims` (all by default). Dtypes: as sum."""
    dims = canonical_dims("prod", dims, x.ndim)
    return _reduce(prims.prod, _summable(x, dtype), dims, keepdim)


@clangop()
def mean(x: TensorProxy, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> TensorProxy:
    """Return the mean over `dims` (all by default). Dtypes: floating point; half precision is summed in float32."""
    dtype = dtype or x.dtype
    torch_check(
        category(dtype) > 1,
        lambda: (
            f"mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. "
            f"Got: {dtype} (input is {x}); pass dtype= or convert it first"
        ),
    )
    dims = canonical_dims("mean", dims, x.ndim)
    total = sum(widen(convert(x, dtype)), dims, keepdim)
    return convert(total / count(x, dims), dtype)


@register_grad(mean)
def _mean_grad(
    x: TensorProxy, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> TensorProxy:
    out = mean(x, dims, keepdim, dtype)
    dims = canonical_dims("mean", dims, x.ndim)
    share = spread(get_grad(out), x, dims, keepdim)  # before the division: like eager's, a tensor in its own memory
    if not statically_true(x.numel() == 0):  # without elements, 0 / 0 would be nan in the second gradient
        share = share / count(x, dims)
    put_grad(x, as_gradient(share, x.dtype))
    return out


@clangop()
def amax(x: TensorProxy, dims: Dims = None, keepdim: bool = False) -> TensorProxy:
    """Return the maximum over `dims` (all by default)."""
    return _reduce(prims.amax, x, canonical_dims("amax", dims, x.ndim), keepdim)


@clangop()
def amin(x: TensorProxy, dims: Dims = None, keepdim: bool = False) -> TensorProxy:
    """Return the minimum over `dims` (all by default)."""
    return _reduce(prims.amin, x, canonical_dims("amin", dims, x.ndim), keepdim)


@clangop()
def any(x: TensorProxy, dims: Dims = None, keepdim: bool = False) -> TensorProxy:
    """Return whether any element over `dims` (all by default) is not 0. Dtypes: out is bool, uint8 for uint8."""
    out = _reduce(prims.any, x, canonical_dims("any", dims, x.ndim), keepdim)
    return convert(out, torch.uint8) if x.dtype == torch.uint8 else out


@clangop()
def all(x: TensorProxy, dims: Dims = None, keepdim: bool = False) -> TensorProxy:
    """Return whether no element over `dims` (all by default) is 0. Dtypes: as any."""
    out = _reduce(prims.all, x, canonical_dims("all", dims, x.ndim), keepdim)
    return convert(out, torch.uint8) if x.dtype == torch.uint8 else out


@clangop()
def var(x: TensorProxy, dims: Dims = None, *, correction: float = 1, keepdim: bool = False) -> TensorProxy:
    """Return the variance over `dims`: the sum of squared distances to the mean, divided by count - correction.

    Dtypes: out is real.
    """
    dims = canonical_dims("var", dims, x.ndim)
    return convert(_var(widen(x), dims, correction, keepdim), prims.real_dtype(x.dtype))


def _var(x: TensorProxy, dims: tuple[int, ...], correction: float, keepdim: bool) -> TensorProxy:
    distance = x - mean(x, dims, True)
    return sum(squared_size(distance), dims, keepdim) / _freedom(x, dims, correction)


def _freedom(x: TensorProxy, dims: tuple[int, ...], correction: float) -> Dim | float:
    elements: Real = count(x, dims)
    freedom: Dim | float = torch.sym_max(elements - correction, 0)
    return freedom


prims.register_vjp(
    var,
    x=lambda g, x, dims, correction, keepdim: _var_gradient(
        g, x, canonical_dims("var", dims, x.ndim), correction, keepdim
    ),
)


def _var_gradient(
    g: TensorProxy, x: TensorProxy, dims: tuple[int, ...], correction: float, keepdim: bool
) -> TensorProxy:
    """Return the gradient of x from the gradient g of its variance."""
    freedom = _freedom(x, dims, correction)
    known_positive = isinstance(freedom, (int, float)) and freedom > 0
    scaled = g * (2 / freedom) if known_positive else g * 2 / freedom
    return spread(scaled, x, dims, keepdim) * (x - mean(x, dims, True))


@clangop()
def std(x: TensorProxy, dims: Dims = None, *, correction: float = 1, keepdim: bool = False) -> TensorProxy:
    """Return the square root of the variance over `dims`. Dtypes: out is real."""
    dims = canonical_dims("std", dims, x.ndim)
    return convert(_var(widen(x), dims, correction, keepdim).sqrt(), prims.real_dtype(x.dtype))


@register_grad(std)
def _std_grad(x: TensorProxy, dims: Dims = None, *, correction: float = 1, keepdim: bool = False) -> TensorProxy:
    out = std(x, dims, correction=correction, keepdim=keepdim)
    g = get_grad(out)
    g = (out == 0).where(0, g / (out * 2))
    put_grad(x, _var_gradient(g, x, canonical_dims("std", dims, x.ndim), correction, keepdim))
    return out


@clangop()
def logsumexp(x: TensorProxy, dims: Dims, keepdim: bool = False) -> TensorProxy:
    """Return log(sum(e^x)) over `dims`, without overflow. Dtypes: integers become the default float dtype."""
    dims = canonical_dims("logsumexp", dims, x.ndim)
    x = convert(x, torch.get_default_dtype()) if category(x.dtype) < 2 else x
    wide = widen(x)
    if statically_true(count(x, dims) == 0):
        return sum(wide.exp(), dims, keepdim).log().to(x.dtype)
    largest = amax(real(wide), dims, True)
    largest = (largest.abs() == math.inf).where(0, largest)
    out = sum((wide - largest).exp(), dims, keepdim).log()
    shift = largest if keepdim or not dims else prims.squeeze(largest, dims)
    return convert(out + shift, x.dtype)


@register_grad(logsumexp)
def _logsumexp_grad(x: TensorProxy, dims: Dims, keepdim: bool = False) -> TensorProxy:
    out = logsumexp(x, dims, keepdim)
    dims = canonical_dims("logsumexp", dims, x.ndim)
    weights = conj((x - spread(out, x, dims, keepdim)).exp())
    put_grad(x, spread(get_grad(out), x, dims, keepdim) * weights)
    return out


@clangop()
def place_along_dim(g: TensorProxy, indices: TensorProxy, dim: int, shape: Sequence[Dim]) -> TensorProxy:
    """Return zeros of `shape` with g at `indices` along `dim`. Source: aten.value_selecting_reduction_backward."""
    return prims.scatter(prims.full(tuple(shape), 0, g.dtype, g.device), dim, indices, g)
