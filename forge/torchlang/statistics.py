"""The statistics of torch: quantiles, histograms, segment reductions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import Number, Symbol, TensorProxy
from forge.ir.pytree import tensors
from forge.prims.core import check_dim, same, statically_true, torch_check
from forge.torchlang.aliases import results
from forge.torchlang.core import torchsymbol
from forge.torchlang.special import lerp

TensorOrNumber = TensorProxy | Number


# quantiles

_INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")


def _check_quantile(op: str, input: TensorProxy, q: TensorProxy | float, interpolation: str) -> None:
    torch_check(
        not statically_true(input.numel() == 0), lambda: f"{op}() input tensor must be non-empty, but it is {input}"
    )
    torch_check(
        input.dtype in (torch.float32, torch.float64),
        lambda: f"{op}() input tensor must be either float or double dtype, but it is {input}",
    )
    torch_check(
        interpolation in _INTERPOLATIONS,
        lambda: f"{op}() interpolation must be one of {', '.join(_INTERPOLATIONS)}, but got {interpolation}",
    )
    if isinstance(q, TensorProxy):
        torch_check(q.ndim < 2, lambda: f"{op}() q must be a scalar or 1D tensor, but it is {q}")
        torch_check(
            q.dtype == input.dtype,
            lambda: f"{op}() q tensor must be same dtype as the input tensor, but they are {q} and {input}",
        )
    else:
        torch_check(
            not statically_true(q < 0) and not statically_true(q > 1),
            lambda: f"{op}() q must be in the range [0, 1] but got {q}",
        )


def _ranks(ordered: TensorProxy, q: TensorProxy, ignore_nan: bool) -> TensorProxy:
    """Return the ranks of the quantiles in each ascending row, whose nans are last; the rank of a nan if one determines
    the result."""
    last = ordered.shape[-1] - 1
    nans = clang.isnan(ordered)
    if ignore_nan:
        numbers = clang.convert(clang.sum(clang.logical_not(nans), -1, True), q.dtype)
        return clang.maximum(q * (numbers - 1), 0)
    return clang.where(clang.any(nans, -1, True), last, q * last)


def _at_ranks(ordered: TensorProxy, ranks: TensorProxy, interpolation: str) -> TensorProxy:
    def value(places: TensorProxy) -> TensorProxy:
        return clang.gather(ordered, ordered.ndim - 1, clang.convert(places, torch.int64))

    rounding = {"lower": clang.floor, "higher": clang.ceil, "nearest": clang.round}.get(interpolation)
    if rounding is not None:
        return value(rounding(ranks))
    below = clang.floor(ranks)
    weight = ranks - below if interpolation == "linear" else prims.full((), 0.5, ranks.dtype, ranks.device)
    return lerp(value(below), value(clang.ceil(ranks)), weight)


def _quantile(name: str, ignore_nan: bool) -> Symbol:
    def body(
        input: TensorProxy,
        q: TensorProxy | float,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> TensorProxy:
        _check_quantile(name, input, q, interpolation)
        dim = None if dim is None else check_dim(name, dim, input.ndim)
        flat = dim is None or input.ndim == 0
        rows = clang.reshape(input, (input.numel(),)) if flat else clang.movedim(input, dim, -1)
        ordered = prims.sort(rows, rows.ndim - 1)[0]
        several = isinstance(q, TensorProxy) and q.ndim == 1
        quantiles = q if isinstance(q, TensorProxy) else prims.full((), q, input.dtype, input.device)
        quantiles = quantiles if several else clang.reshape(quantiles, (1,))
        result = clang.movedim(_at_ranks(ordered, _ranks(ordered, quantiles, ignore_nan), interpolation), -1, 0)
        if keepdim:
            shape = [1 if flat or i == dim else size for i, size in enumerate(input.shape)]
            result = clang.reshape(result, (quantiles.shape[0], *shape))
        return result if several else clang.select(result, 0, 0)

    ignoring = ", of what is not nan" if ignore_nan else "; nan where one is among them"
    body.__name__ = name
    body.__doc__ = f"The values below which the parts q lie, along `dim` or of all{ignoring}; q's dim is the first."
    return torchsymbol(getattr(torch, name), getattr(Tensor, name))(body)


quantile, nanquantile = _quantile("quantile", False), _quantile("nanquantile", True)


# histograms


@torchsymbol(torch.histogram, Tensor.histogram)
def histogram(
    input: TensorProxy,
    bins: int | TensorProxy,
    *,
    range: Sequence[float] | None = None,
    weight: TensorProxy | None = None,
    density: bool = False,
) -> tuple[TensorProxy, TensorProxy]:
    """Return (the number of elements, or the sum of their weights, in each bin; the bins' edges).

    bins: their number in `range`, by default that of the elements, or their edges. density: normalize to an integral of
    1.
    """
    options = {} if range is None else {"range": tuple(range)}
    return results.histogram(prims.histogram(input, bins, **options, weight=weight, density=density))


@torchsymbol(torch.histogramdd)
def histogramdd(
    input: TensorProxy,
    bins: int | Sequence[int] | Sequence[TensorProxy],
    range: Sequence[float] | None = None,
    weight: TensorProxy | None = None,
    density: bool = False,
) -> tuple[TensorProxy, tuple[TensorProxy, ...]]:
    """Return (the number of points, or the sum of their weights, in each bin of a grid; the edges along each dim).

    Shapes: input's last dim has a point's coordinates.
    """
    range = None if range is None else tuple(range)
    counts, edges = prims.histogramdd(input, bins, range, weight, density)
    bin_edges = tuple(bins) if isinstance(bins, Sequence) else ()
    return results.histogramdd((counts, bin_edges if tensors(bin_edges) else edges))


# segments

_START = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


def _check_segments(
    data: TensorProxy, reduce: str, lengths: TensorProxy | None, offsets: TensorProxy | None, axis: int
) -> None:
    op = "segment_reduce()"
    torch_check(
        reduce in _START or reduce in ("amax", "amin"),
        lambda: f"{op}: reduce argument must be either sum, prod, mean, amax or amin, got {reduce}",
    )
    segments = lengths if offsets is None else offsets
    if segments is None:
        raise RuntimeError(f"{op}: Either lengths or offsets must be defined.")
    torch_check(
        segments.ndim == axis + 1 and all(map(same, segments.shape[:-1], data.shape[:axis])),
        lambda: f"{op}: Expected axis to be the last dimension of lengths or offsets, but got {axis} and {segments}",
    )


def _segments(
    data: TensorProxy, lengths: TensorProxy | None, offsets: TensorProxy | None, axis: int
) -> tuple[TensorProxy, TensorProxy]:
    """Return the segment of each index along `axis` (past the last for none), and the segments' lengths."""
    begin: TensorProxy | int
    if offsets is None:
        assert lengths is not None, "_check_segments takes one of the two"
        ends, begin = prims.cumsum(clang.convert(lengths, torch.int64), axis), 0
    else:
        starts, ends = clang.slice_in_dim(offsets, axis, 0, -1), clang.slice_in_dim(offsets, axis, 1, None)
        lengths, begin = ends - starts, clang.slice_in_dim(offsets, axis, 0, 1)
    place = prims.iota(data.shape[axis], 0, 1, ends.dtype, data.device)
    place = clang.expand(place, data.shape[: axis + 1])
    segment = prims.searchsorted(prims.contiguous(ends), prims.contiguous(place), True, torch.int64)
    return clang.where(place < begin, ends.shape[-1], segment), lengths


@torchsymbol(torch.segment_reduce)
def segment_reduce(
    data: TensorProxy,
    reduce: str,
    *,
    lengths: TensorProxy | None = None,
    indices: TensorProxy | None = None,
    offsets: TensorProxy | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Number | None = None,
) -> TensorProxy:
    """Reduce consecutive parts of data along `axis`: "sum", "mean", "prod", "max" or "min", starting from `initial`.

    Shapes: lengths has data's dims before `axis` and one for the segments; offsets has one more element, the end.
    """
    torch_check(indices is None, lambda: "segment_reduce(): indices based reduction is not supported yet.")
    axis = check_dim("segment_reduce", axis, data.ndim)
    _check_segments(data, reduce, lengths, offsets, axis)
    segment, sizes = _segments(data, lengths, offsets, axis)
    count = sizes.shape[-1]
    tail = (1,) * (data.ndim - axis - 1)
    segment = clang.expand(clang.reshape(segment, (*segment.shape, *tail)), data.shape)
    shape = (*data.shape[:axis], count + 1, *data.shape[axis + 1 :])
    kind = reduce.removeprefix("a") if reduce in ("amax", "amin") else reduce
    start = _START[kind] if initial is None or kind in ("max", "min") else initial
    base = prims.full(shape, start, data.dtype, data.device)
    how = {"max": "amax", "min": "amin", "mean": "sum"}.get(kind, kind)
    out = clang.slice_in_dim(prims.scatter_reduce(base, axis, segment, data, how), axis, 0, count)
    if kind == "mean":
        return _mean(out, clang.reshape(sizes, (*sizes.shape, *tail)), initial)
    if initial is None or kind not in ("max", "min"):
        return out
    return clang.where(out < initial if kind == "max" else out > initial, initial, out)


def _mean(total: TensorProxy, lengths: TensorProxy, initial: Number | None) -> TensorProxy:
    """Return the total divided by the lengths; for an empty segment, `initial` or nan."""
    mean = clang.div(total, clang.convert(clang.maximum(lengths, 1), total.dtype))
    return clang.where(lengths == 0, math.nan, mean) if initial is None else mean
