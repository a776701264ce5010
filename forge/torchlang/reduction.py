"""The reductions and scans of torch, sorting and selection.

Results are named tuples where torch's are.
"""

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import Number, Symbol, Tag, TensorProxy, check, get_grad, outside_regions, put_grad, register_grad
from forge.prims.core import torch_check
from forge.torchlang.aliases import Lengths, aliases, results, torchaliases
from forge.torchlang.core import torchsymbol

Dims = int | Sequence[int] | None


def _make_sum(name: str) -> Symbol:
    """Return the symbol of sum, mean, nansum or nanmean: over some dims or all, in a dtype."""
    targets: dict[str, Callable[..., TensorProxy]] = {"sum": clang.sum, "mean": clang.mean}
    target = (targets | {"nansum": _nansum, "nanmean": _nanmean})[name]

    def body(
        input: TensorProxy, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> TensorProxy:
        return target(input, dim, keepdim, dtype)

    body.__name__, body.__doc__ = name, target.__doc__
    return torchaliases(name)(body)


def _nansum(x: TensorProxy, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> TensorProxy:
    """Return the sum of elements that are not nan over `dims` (all by default). Dtypes: real."""
    prims.check_dtype("nansum", x, prims.REAL)
    return clang.sum(clang.where(clang.isnan(x), 0, x), dims, keepdim, dtype)


def _nanmean(x: TensorProxy, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> TensorProxy:
    """Return the mean of elements that are not nan over `dims` (all by default). Dtypes: floating point."""
    prims.check_dtype("nanmean", x, prims.FLOAT)
    prims.check_dtype("nanmean", x, prims.REAL)
    numbers = clang.sum(clang.logical_not(clang.isnan(x)), dims, keepdim)
    return clang.div(_nansum(x, dims, keepdim, dtype), numbers)


sum = _make_sum("sum")
mean = _make_sum("mean")
nansum = _make_sum("nansum")
nanmean = _make_sum("nanmean")


def _register_without_nan(symbol: Symbol) -> None:
    """Multiply the gradient by 0 where the input is nan, as torch does; an infinite gradient becomes nan."""

    @register_grad(symbol)
    def rule(
        input: TensorProxy, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> TensorProxy:
        out = symbol(input, dim, keepdim, dtype=dtype)
        dims = clang.canonical_dims(symbol.name, dim, input.ndim)
        is_number = clang.logical_not(clang.isnan(input))
        g = get_grad(out)
        if symbol is nanmean:
            g = g / clang.sum(is_number, dims, keepdim)
        put_grad(input, clang.spread(clang.convert(g, input.dtype), input, dims, keepdim) * is_number)
        return out


_register_without_nan(nansum)
_register_without_nan(nanmean)


@torchaliases("prod")
def prod(
    input: TensorProxy, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorProxy:
    """Return the product over one dim or all. Dtypes: integers and bools are multiplied as int64 by default."""
    return clang.prod(input, dim, keepdim, dtype)


@torchsymbol(Tensor.sum_to_size)
def sum_to_size(self: TensorProxy, *size: Lengths) -> TensorProxy:
    """Return self summed over the dims that broadcasting to its shape would expand."""
    shape = clang.lengths(size)
    offset = self.ndim - len(shape)
    torch_check(
        offset >= 0
        and builtins.all(
            prims.statically_true(target == 1) or prims.same(length, target)
            for length, target in zip(self.shape[offset:], shape, strict=True)
        ),
        lambda: f"sum_to_size: size {list(shape)} is not expandable to size {list(self.shape)} of {self}",
    )
    shrinks = [
        d
        for d, n in enumerate(shape, offset)
        if prims.statically_true(n == 1) and not prims.statically_true(self.shape[d] == 1)
    ]
    dims = (*range(offset), *shrinks)
    if not dims and shape:
        return self
    return clang.reshape(clang.sum(self, dims, dtype=self.dtype), shape)


def _extremes(name: str) -> Symbol:
    target = getattr(clang, name)

    def body(input: TensorProxy, dim: Dims = (), keepdim: bool = False) -> TensorProxy:
        return target(input, dim, keepdim)

    body.__name__, body.__doc__ = name, target.__doc__
    return torchaliases(name)(body)


amax = _extremes("amax")
amin = _extremes("amin")


def _quantifier(name: str) -> Symbol:
    target = getattr(clang, name)

    def body(input: TensorProxy, dim: Dims = None, keepdim: bool = False) -> TensorProxy:
        if isinstance(dim, (tuple, list)) and not dim:  # over no dim, while other reductions interpret () as all
            out = clang.ne(input, 0)
            return clang.convert(out, torch.uint8) if input.dtype == torch.uint8 else out
        return target(input, dim, keepdim)

    body.__name__, body.__doc__ = name, target.__doc__
    return torchaliases(name)(body)


any = _quantifier("any")
all = _quantifier("all")


@torchaliases("count_nonzero")
def count_nonzero(input: TensorProxy, dim: Dims = None) -> TensorProxy:
    """Return the number of elements that are not 0."""
    return clang.sum(clang.as_bool(input), dim)


@torchaliases("logsumexp")
def logsumexp(input: TensorProxy, dim: Dims = None, keepdim: bool = False) -> TensorProxy:
    """Return log(sum(e^input)) over dim, without overflow."""
    return clang.logsumexp(input, dim, keepdim)


# variance


def _spread_arguments(dim: Any, unbiased: bool | None, correction: Number | None) -> tuple[Dims, Number]:
    """Return (dims, correction) from var(unbiased), var(dim, unbiased, keepdim) or var(dim, correction=…)."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    return dim, correction


def _check_floating(op: str, input: TensorProxy) -> None:
    torch_check(
        clang.category(input.dtype) > 1,
        lambda: f"{op}: std and var only support floating point and complex dtypes, but input is {input}",
    )


def _variance(name: str, spread: Symbol, with_mean: bool = False) -> Symbol:
    def body(
        input: TensorProxy,
        dim: Any = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: Number | None = None,
    ) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
        _check_floating(name, input)
        dims, correction = _spread_arguments(dim, unbiased, correction)
        out = spread(input, dims, correction=correction, keepdim=keepdim)
        return (out, clang.mean(input, dims, keepdim)) if with_mean else out

    body.__name__ = name
    body.__doc__ = f"Return ({spread.name}, mean) over dim." if with_mean else spread.__doc__
    return torchaliases(name)(body)


var, std = _variance("var", clang.var), _variance("std", clang.std)
var_mean, std_mean = _variance("var_mean", clang.var, True), _variance("std_mean", clang.std, True)


# extremes with their indices


def _keep_dim(pair: tuple, input: TensorProxy, dim: int, keepdim: bool) -> list[TensorProxy]:
    """Return the outputs of a reduction over one dim, with that dim restored at length 1 if keepdim."""
    if not keepdim or input.ndim == 0:
        return list(pair)
    return [clang.keep_dims(each, input, (prims.check_dim("keepdim", dim, input.ndim),)) for each in pair]


def _extremum(name: str, prim: Symbol, over_all: Symbol, of_two: Symbol) -> Symbol:
    result = getattr(torch.return_types, name)

    def body(
        input: TensorProxy,
        dim: int | TensorProxy | None = None,
        keepdim: bool = False,
        *,
        other: TensorProxy | None = None,
    ) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
        dim, other = (None, dim) if isinstance(dim, TensorProxy) else (dim, other)
        if other is not None:
            prims.check_dtype(f"{name}imum", input, prims.REAL)
            return of_two(input, other)
        if dim is None:
            torch_check(
                not prims.statically_true(input.numel() == 0),
                lambda: (
                    f"{name}(): Expected reduction dim to be specified for input.numel() == 0: {input}. "
                    "Specify the reduction dim with the 'dim' argument."
                ),
            )
            return over_all(input)
        return result(_keep_dim(prim(input, prims.check_dim(name, dim, input.ndim)), input, dim, keepdim))

    body.__name__ = name
    body.__doc__ = f"The {name}imum of all; (values, indices) along a dim; the larger or smaller of two tensors."
    return torchaliases(name)(body)


max = _extremum("max", prims.max_dim, clang.amax, clang.maximum)
min = _extremum("min", prims.min_dim, clang.amin, clang.minimum)


def _chosen_of_all(symbol: Symbol, x: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Return the element that a symbol selects of all, and the mask of x equal to it; nan equals a selected nan."""
    with outside_regions():
        out = symbol(x)
        return out, (x == out) | (clang.isnan(x) & clang.isnan(out))


def _register_over_all(symbol: Symbol) -> None:
    """Share the gradient among the elements that equal the extremum; nan equals nan."""

    @register_grad(symbol)
    def rule(input: TensorProxy, *others: Any, **options: Any) -> TensorProxy:
        if others or options:
            return NotImplemented
        out, winners = _chosen_of_all(symbol, input)
        put_grad(input, clang.where(winners, get_grad(out) / clang.sum(winners), 0))
        return out


_register_over_all(max)
_register_over_all(min)


@torchaliases("aminmax")
def aminmax(input: TensorProxy, *, dim: int | None = None, keepdim: bool = False) -> tuple[TensorProxy, TensorProxy]:
    """Return (the minimum, the maximum) over a dim or all."""
    prims.check_dtype("aminmax", input, prims.REAL)
    return results.aminmax((clang.amin(input, dim, keepdim), clang.amax(input, dim, keepdim)))


def _arg_extremum(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(input: TensorProxy, dim: int | None = None, keepdim: bool = False) -> TensorProxy:
        if dim is not None:
            dim = prims.check_dim(name, dim, input.ndim)
            return _keep_dim((prim(input, dim),), input, dim, keepdim)[0]
        check(
            not prims.statically_true(input.numel() == 0),
            lambda: f"{name}(): Expected reduction dim to be specified for input.numel() == 0: {input}",
            IndexError,
        )
        out = prim(clang.reshape(input, (-1,)), 0)
        return clang.reshape(out, (1,) * input.ndim) if keepdim else out

    body.__name__, body.__doc__ = name, f"The index of the {name[3:]}imum along dim, or in the flattened input."
    return torchaliases(name)(body)


argmax = _arg_extremum("argmax")
argmin = _arg_extremum("argmin")


def _middle(name: str) -> Symbol:
    prim, result = getattr(prims, name), getattr(torch.return_types, name)

    def body(
        input: TensorProxy, dim: int | None = None, keepdim: bool = False
    ) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
        if dim is None:
            return prim(clang.reshape(input, (-1,)), 0)[0]
        return result(_keep_dim(prim(input, prims.check_dim(name, dim, input.ndim)), input, dim, keepdim))

    body.__name__, body.__doc__ = name, f"The {name} of all, or (values, indices) along a dim."
    symbol = torchaliases(name)(body)

    @register_grad(symbol)
    def rule(
        input: TensorProxy, dim: int | None = None, keepdim: bool = False
    ) -> TensorProxy | tuple[TensorProxy, TensorProxy]:
        if dim is not None:
            out = symbol(input, dim, keepdim)
            indices = out[1] if keepdim or input.ndim == 0 else clang.unsqueeze(out[1], dim)
            g = get_grad(out[0])
            g = g if keepdim or input.ndim == 0 else clang.unsqueeze(g, dim)
            put_grad(input, clang.place_along_dim(g, indices, dim, input.shape))
            return out
        out, winners = _chosen_of_all(symbol, input)  # ties share the gradient, as in torch
        put_grad(input, clang.where(winners, get_grad(out) / clang.sum(winners), 0))
        return out

    return symbol


median = _middle("median")
nanmedian = _middle("nanmedian")


@torchaliases("mode")
def mode(input: TensorProxy, dim: int = -1, keepdim: bool = False) -> tuple[TensorProxy, TensorProxy]:
    """Return (the most frequent values, their indices) along dim."""
    dim = prims.check_dim("mode", dim, input.ndim)
    return results.mode(_keep_dim(prims.mode(input, dim), input, dim, keepdim))


@torchaliases("kthvalue")
def kthvalue(input: TensorProxy, k: int, dim: int = -1, keepdim: bool = False) -> tuple[TensorProxy, TensorProxy]:
    """Return (the k-th smallest values, their indices) along dim."""
    dim = prims.check_dim("kthvalue", dim, input.ndim)
    return results.kthvalue(_keep_dim(prims.kthvalue(input, k, dim), input, dim, keepdim))


# sorting


@torchaliases("topk")
def topk(
    input: TensorProxy, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TensorProxy, TensorProxy]:
    """Return (the k largest or smallest values, their indices) along dim."""
    dim = prims.check_dim("topk", dim, input.ndim)
    return results.topk(prims.topk(input, k, dim, largest, sorted))


@torchaliases("sort")
def sort(
    input: TensorProxy, dim: Any = -1, descending: bool = False, *, stable: bool = False
) -> tuple[TensorProxy, TensorProxy]:
    """Return (the values in order, their indices) along dim."""
    dim = prims.check_dim("sort", dim, input.ndim)
    return results.sort(prims.sort(input, dim, descending, bool(stable)))


@torchaliases("argsort")
def argsort(input: TensorProxy, dim: int = -1, descending: bool = False, *, stable: bool = False) -> TensorProxy:
    """Return the indices that sort input along dim."""
    dim = prims.check_dim("argsort", dim, input.ndim)
    return prims.sort(input, dim, descending, stable)[1]


@torchaliases("msort")
def msort(input: TensorProxy) -> TensorProxy:
    """Return the values in order along the first dim."""
    return prims.sort(input, prims.check_dim("msort", 0, input.ndim))[0]


# scans


def _make_cumulative(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(input: TensorProxy, dim: int, *, dtype: torch.dtype | None = None) -> TensorProxy:
        dim = prims.check_dim(name, dim, input.ndim)
        default = torch.int64 if clang.category(input.dtype) < 2 else input.dtype
        return prim(clang.convert(input, dtype or default), dim)

    body.__name__, body.__doc__ = name, prim.__doc__
    return torchaliases(name)(body)


cumsum = _make_cumulative("cumsum")
cumprod = _make_cumulative("cumprod")


@torchaliases("logcumsumexp")
def logcumsumexp(input: TensorProxy, dim: int) -> TensorProxy:
    """Return the logarithm of the running sum of e^input along dim. Dtypes: floating point."""
    return prims.logcumsumexp(input, prims.check_dim("logcumsumexp", dim, input.ndim))


def _running_extremum(name: str) -> Symbol:
    prim, result = getattr(prims, name), getattr(torch.return_types, name)

    def body(input: TensorProxy, dim: int) -> tuple[TensorProxy, TensorProxy]:
        return result(prim(input, prims.check_dim(name, dim, input.ndim)))

    body.__name__, body.__doc__ = name, prim.__doc__
    return torchaliases(name)(body)


cummax = _running_extremum("cummax")
cummin = _running_extremum("cummin")


@torchsymbol(*aliases("histc"), tags=[Tag.NOT_DIFFERENTIABLE])
def histc(input: TensorProxy, bins: int = 100, min: Number = 0, max: Number = 0) -> TensorProxy:
    """Return the number of elements in each of `bins` equal parts of [min, max], or of the elements' range if min
    equals max."""
    prims.check_dtype("aminmax" if min == max else "histc", input, prims.REAL)
    return prims.histc(input, bins, min, max)


@torchsymbol(torch.diff, Tensor.diff)
def diff(
    input: TensorProxy, n: int = 1, dim: int = -1, prepend: TensorProxy | None = None, append: TensorProxy | None = None
) -> TensorProxy:
    """Return the differences of neighbours along `dim`, n times. Dtypes: bools are compared (xor)."""
    torch_check(input.ndim > 0, lambda: f"diff: expects input to be at least one-dimensional, but it is {input}")
    torch_check(n >= 0, lambda: f"diff: order must be non-negative but got {n}")
    dim = prims.check_dim("diff", dim, input.ndim)
    parts = [part for part in (prepend, input, append) if part is not None]
    out = clang.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(n):
        size = out.shape[dim]
        later, earlier = clang.slice_in_dim(out, dim, 1, None), clang.slice_in_dim(out, dim, 0, size - 1)
        out = clang.bitwise_xor(later, earlier) if out.dtype == torch.bool else clang.sub(later, earlier)
    return prims.clone(out) if out is input else out
