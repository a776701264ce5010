"""The reduction and scan prims. Dims are counted from the front and removed, unless the name says otherwise."""

import math
from collections.abc import Sequence

import torch

from forge.ir import Dim, Symbol, Tag, TensorProxy, check, get_grad, outside_regions, put_grad, register_grad
from forge.prims.core import (
    check_dim,
    check_dims,
    like,
    make_prim,
    primitive,
    register_vjp,
    statically_true,
    torch_check,
)
from forge.prims.creation import full, iota
from forge.prims.elementwise import ANY, COUNTING, FLOAT, NUMERIC, REAL, Accepts, check_dtype, conjugate
from forge.prims.indexing import scatter_reduce
from forge.prims.shape import broadcast_in_dim, flip, pad, reshape, slice


def _reduced_shape(x: TensorProxy, dims: tuple[int, ...]) -> list[Dim]:
    return [size for dim, size in enumerate(x.shape) if dim not in dims]


def check_not_empty(op: str, x: TensorProxy, dims: tuple[int, ...]) -> None:
    """Raise IndexError, as torch does, if a reduction without an identity has no elements to reduce."""
    for dim in dims:
        check(
            x.ndim == 0 or not statically_true(x.shape[dim] == 0),
            lambda dim=dim: f"{op}: Expected reduction dim {dim} to have non-zero size, but x is {x}",
            IndexError,
        )


def _reduction(
    name: str, meaning: str, *, accepts: Accepts, result: torch.dtype | None = None, identity: bool = True
) -> Symbol[TensorProxy]:
    op = f"prims.{name}"

    def meta(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
        check_dtype(op, x, accepts)
        dims = check_dims(op, dims, x.ndim)
        if not identity:
            check_not_empty(op, x, dims)
        return like(x, shape=_reduced_shape(x, dims), dtype=result)

    meta.__doc__ = f"{meaning} over `dims`.\n\nDtypes: {accepts.value}; out has {result or 'the same'}."
    return make_prim(name, name, meta=meta)


sum = _reduction("sum", "the sum", accepts=NUMERIC)
prod = _reduction("prod", "the product", accepts=NUMERIC)
amax = _reduction("amax", "the maximum, nan if there is one", accepts=REAL, identity=False)
amin = _reduction("amin", "the minimum, nan if there is one", accepts=REAL, identity=False)
any = _reduction("any", "whether an element is not 0", accepts=ANY, result=torch.bool)
all = _reduction("all", "whether no element is 0", accepts=ANY, result=torch.bool)


def _arg_extremum(name: str, meaning: str) -> Symbol[TensorProxy]:
    op = f"prims.{name}"

    def meta(x: TensorProxy, dim: int) -> TensorProxy:
        check_dtype(op, x, COUNTING)
        dim = check_dim(op, dim, x.ndim)
        check_not_empty(op, x, (dim,))
        return like(x, shape=_reduced_shape(x, (dim,)), dtype=torch.int64)

    meta.__doc__ = f"the index of {meaning} along `dim`.\n\nDtypes: x is real, not bool; out is int64."
    return make_prim(name, name, meta=meta)


argmax = _arg_extremum("argmax", "a maximum")
argmin = _arg_extremum("argmin", "a minimum")


def _scan(name: str, meaning: str, accepts: Accepts) -> Symbol[TensorProxy]:
    op = f"prims.{name}"

    def meta(x: TensorProxy, dim: int) -> TensorProxy:
        check_dtype(op, x, accepts)
        check_dim(op, dim, x.ndim)
        return like(x)

    meta.__doc__ = f"the {meaning} of the elements so far along `dim`.\n\nDtypes: {accepts.value}; out has the same."
    return make_prim(name, name, meta=meta)


cumsum = _scan("cumsum", "sum", NUMERIC)
cumprod = _scan("cumprod", "product", NUMERIC)
logcumsumexp = _scan("logcumsumexp", "logarithm of the sum of the exponentials", FLOAT)


@primitive()
def cumprod_backward(g: TensorProxy, x: TensorProxy, dim: int, out: TensorProxy) -> TensorProxy:
    """Return the gradient of cumprod. Source: aten.cumprod_backward."""
    return like(x)


# values with their indices


def _pair(x: TensorProxy, shape: Sequence[Dim]) -> tuple[TensorProxy, TensorProxy]:
    return like(x, shape=shape), like(x, shape=shape, dtype=torch.int64)


def _selection(name: str, meaning: str, accepts: Accepts = REAL) -> Symbol[tuple[TensorProxy, TensorProxy]]:
    op = f"prims.{name}"

    def meta(x: TensorProxy, dim: int) -> tuple[TensorProxy, TensorProxy]:
        check_dtype(op, x, accepts)
        dim = check_dim(op, dim, x.ndim)
        check_not_empty(op, x, (dim,))
        return _pair(x, _reduced_shape(x, (dim,)))

    meta.__doc__ = f"{meaning} along `dim` and its index.\n\nDtypes: {accepts.value}; indices are int64."
    return make_prim(name, name, meta=meta)


max_dim = _selection("max_dim", "the maximum, nan if there is one,")
min_dim = _selection("min_dim", "the minimum, nan if there is one,")
median = _selection("median", "the lower median, nan if there is one,", COUNTING)
nanmedian = _selection("nanmedian", "the lower median of what is not nan", COUNTING)
mode = _selection("mode", "the most frequent value")


@primitive()
def kthvalue(x: TensorProxy, k: int, dim: int) -> tuple[TensorProxy, TensorProxy]:
    """Return the k-th smallest element (from 1) along `dim` and its index. Source: torch.kthvalue."""
    dim = check_dim("prims.kthvalue", dim, x.ndim)
    size = x.shape[dim] if x.ndim else 1
    torch_check(
        statically_true(k >= 1) and not statically_true(k > size),
        lambda: f"kthvalue: selected number k out of range for dimension {dim}: k is {k}, x is {x}",
    )
    return _pair(x, _reduced_shape(x, (dim,)))


@primitive()
def topk(
    x: TensorProxy, k: int, dim: int, largest: bool = True, sorted: bool = True
) -> tuple[TensorProxy, TensorProxy]:
    """Return the k largest (or smallest) elements along `dim` and their indices. Source: torch.topk."""
    check_dtype("prims.topk", x, COUNTING)
    dim = check_dim("prims.topk", dim, x.ndim)
    size = x.shape[dim] if x.ndim else 1
    torch_check(
        not statically_true(k < 0) and not statically_true(k > size),
        lambda: f"topk: selected index k out of range: k is {k}, dimension {dim} of {x} has length {size}",
    )
    return _pair(x, [k if i == dim else size for i, size in enumerate(x.shape)])


@primitive()
def sort(x: TensorProxy, dim: int, descending: bool = False, stable: bool = False) -> tuple[TensorProxy, TensorProxy]:
    """Return the elements in order along `dim` and their indices. Source: torch.sort."""
    check_dtype("prims.sort", x, REAL)
    check_dim("prims.sort", dim, x.ndim)
    return _pair(x, x.shape)


def _extremum_scan(name: str, meaning: str) -> Symbol[tuple[TensorProxy, TensorProxy]]:
    op = f"prims.{name}"

    def meta(x: TensorProxy, dim: int) -> tuple[TensorProxy, TensorProxy]:
        check_dtype(op, x, REAL)
        check_dim(op, dim, x.ndim)
        return _pair(x, x.shape)

    meta.__doc__ = (
        f"the {meaning} of the elements so far along `dim` and its index.\n\nDtypes: real; indices are int64."
    )
    return make_prim(name, name, meta=meta)


cummax = _extremum_scan("cummax", "maximum")
cummin = _extremum_scan("cummin", "minimum")


@primitive(tags=[Tag.NOT_DIFFERENTIABLE])
def histc(x: TensorProxy, bins: int, min: float, max: float) -> TensorProxy:
    """Return the number of elements in each of `bins` equal parts of [min, max]. Source: torch.histc.

    Dtypes: x is floating point; out has the same.
    """
    torch_check(bins > 0, lambda: f"histc: bins must be > 0, but is {bins}")
    torch_check(min <= max, lambda: f"histc: max must be larger than min, but they are {min} and {max}")
    return like(x, shape=(bins,))


# gradient rules


def restore_dims(reduced: TensorProxy, x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """Return a value reduced over `dims` of x, repeated along them to x's shape."""
    rest = tuple(dim for dim in range(x.ndim) if dim not in dims)
    return broadcast_in_dim(reduced, x.shape, rest) if x.ndim else reduced


register_vjp(sum, x=lambda g, x, dims: restore_dims(g, x, dims))


def _product_before(x: TensorProxy, backwards: bool) -> TensorProxy:
    """Return the product of the elements before (or after) each one along the last dim."""
    x = flip(x, (x.ndim - 1,)) if backwards else x
    edge = ((0, 0),) * (x.ndim - 1)
    shifted = pad(slice(x, x.ndim - 1, 0, x.shape[-1] - 1), (*edge, (1, 0)), 1)
    product = cumprod(shifted, x.ndim - 1)
    return flip(product, (x.ndim - 1,)) if backwards else product


@register_grad(prod)
def _prod_grad(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """Divide the product by each element, as torch does; if there is a zero anywhere, multiply the other elements."""
    out = prod(x, dims)
    g = get_grad(out)
    if not dims:
        put_grad(x, g)
        return out
    g = restore_dims(g, x, dims)
    if statically_true(x.numel() == 0):
        put_grad(x, g)
        return out
    everything, zero = tuple(range(x.ndim)), x == 0
    has_zero = restore_dims(any(zero, everything), x, everything)
    quotient = restore_dims(out, x, dims) / has_zero.where(1, x)
    others = _products_of_others(has_zero.where(x, 1), dims)
    gradient = conjugate(has_zero.where(others, quotient)) * g
    if len(dims) == x.ndim:  # with two zeros, all slopes are 0, whatever the other elements are
        zeros = sum(zero.to(torch.int64), everything)
        gradient = restore_dims(zeros > 1, x, everything).where(0, gradient)
    put_grad(x, gradient)
    return out


def _products_of_others(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """Return, for each element, the product of the others over `dims`, without division."""
    rest = [dim for dim in range(x.ndim) if dim not in dims]
    rows = x.permute((*rest, *dims))
    count = math.prod(x.shape[dim] for dim in dims)
    flat = reshape(rows, (*[x.shape[dim] for dim in rest], count)) if len(dims) > 1 else rows
    others = reshape(_product_before(flat, False) * _product_before(flat, True), rows.shape)
    return others.permute(sorted(range(x.ndim), key=[*rest, *dims].__getitem__))


def _register_extremum(prim: Symbol[TensorProxy]) -> None:
    """Register the rule of an extremum: ties share the gradient evenly, as in torch.amax."""

    @register_grad(prim)
    def rule(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
        with outside_regions():
            out = prim(x, dims)
            winners = x == restore_dims(out, x, dims)
        winners = winners.to(x.dtype)
        share = get_grad(out) / (sum(winners, dims) if x.ndim else winners)
        put_grad(x, winners * restore_dims(share, x, dims))
        return out


_register_extremum(amax)
_register_extremum(amin)


def _register_selection(prim: Symbol, *, reduces: bool) -> None:
    """Register the rule that puts the gradient at the index of the selected value."""

    @register_grad(prim)
    def rule(x: TensorProxy, *options: object) -> tuple[TensorProxy, TensorProxy]:
        values, indices = prim(x, *options)
        g = get_grad(values)
        dim = options[1] if prim in (kthvalue, topk) else options[0]
        if reduces and x.ndim:
            g, indices_of = g.unsqueeze(dim), indices.unsqueeze(dim)
        else:
            indices_of = indices
        put_grad(x, g.place_along_dim(indices_of, dim, x.shape))
        return values, indices


for _prim in (max_dim, min_dim, median, nanmedian, mode, kthvalue):
    _register_selection(_prim, reduces=True)
for _prim in (topk, sort):
    _register_selection(_prim, reduces=False)


for _prim in (cummax, cummin):
    register_vjp(
        _prim, x=lambda g, out, x, dim: scatter_reduce(full(x.shape, 0, g.dtype, g.device), dim, out[1], g, "sum")
    )


def _reversed_scan(prim: Symbol[TensorProxy], g: TensorProxy, dim: int) -> TensorProxy:
    return flip(prim(flip(g, (dim,)), dim), (dim,)) if g.ndim else prim(g, dim)


register_vjp(cumsum, x=lambda g, dim: _reversed_scan(cumsum, g, dim))
register_vjp(cumprod, x=lambda g, out, x, dim: cumprod_backward(g, x, dim, out))


@register_grad(cumprod_backward)
def _cumprod_backward_grad(g: TensorProxy, x: TensorProxy, dim: int, out: TensorProxy) -> TensorProxy:
    """Differentiate the products without each element in turn, in as many rows as elements and without division."""
    result = cumprod_backward(g, x, dim, out)
    h = get_grad(result)
    put_grad(out, None)  # a function of x, whose gradient has that part
    if not x.ndim:  # the gradient is g itself
        put_grad(g, h)
        return result
    size, last = x.shape[dim], x.ndim
    shape = (*[n for i, n in enumerate(x.shape) if i != dim], size, size)
    ends, rows = (*range(last - 1), last), tuple(range(last))

    def to_last(value: TensorProxy) -> TensorProxy:
        return value.permute([*[i for i in range(last) if i != dim], dim])

    def from_last(value: TensorProxy) -> TensorProxy:
        return value.permute([*range(dim), last - 1, *range(dim, last - 1)])

    # row i is x with 1 in place of element i, which is a factor of out's elements from i on
    position = iota(size, 0, 1, torch.int64, x.device)
    row = broadcast_in_dim(position, shape, (last - 1,))
    column = broadcast_in_dim(position, shape, (last,))
    others = (row == column).where(1, broadcast_in_dim(to_last(x), shape, ends))
    products = cumprod(others, last)
    along = (column >= row).where(broadcast_in_dim(to_last(h), shape, rows), 0)
    put_grad(g, from_last(sum(along * products, (last - 1,))))
    slopes = cumprod_backward(conjugate(along) * broadcast_in_dim(to_last(g), shape, ends), others, last, products)
    put_grad(x, from_last(sum((row == column).where(0, slopes), (last - 1,))))
    return result


@register_grad(logcumsumexp)
def _logcumsumexp_grad(x: TensorProxy, dim: int) -> TensorProxy:
    """Compute in logarithms, separately for positive and negative gradients if they are real."""
    out = logcumsumexp(x, dim)
    g = get_grad(out)
    if not x.ndim:
        put_grad(x, g)
        return out
    if x.dtype.is_complex:
        put_grad(x, conjugate((_reversed_scan(logcumsumexp, conjugate(g).log() - out, dim) + x).exp()))
        return out
    log_of_size = g.abs().log()
    lowest = torch.finfo(x.dtype).min  # as in torch: infinity would be nan in the second gradient

    def part(mask: TensorProxy) -> TensorProxy:
        return (_reversed_scan(logcumsumexp, mask.where(log_of_size, lowest) - out, dim) + x).exp()

    put_grad(x, part(g > 0) - part(g < 0))
    return out
