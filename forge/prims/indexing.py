"""The indexing prims: reading and writing at places given by tensors. Dims are counted from the front.

An index tensor holds integers; negative ones count from the end only if the docstring says so.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from forge.ir import Dim, Number, TensorProxy, check, get_grad, needs_grad, outside_regions, put_grad, register_grad
from forge.prims.core import (
    check_dim,
    check_same_device,
    check_tensor,
    like,
    primitive,
    register_vjp,
    same,
    statically_true,
    torch_check,
)
from forge.prims.creation import full
from forge.prims.elementwise import refuse_gradient
from forge.prims.library import make_library_prim
from forge.prims.shape import pad

Indices = Sequence[TensorProxy | None]
INDEX_DTYPES = (torch.int64, torch.int32)


def check_index(op: str, index: TensorProxy) -> None:
    """Raise IndexError unless `index` is an integer tensor that torch accepts as an index."""
    check_tensor(op, index=index)
    check(
        index.dtype in INDEX_DTYPES,
        lambda: f"{op}: tensors used as indices must be long, int, byte or bool tensors, but index is {index}",
        IndexError,
    )


def _zeros(shape: Sequence[Dim], like: TensorProxy) -> TensorProxy:
    return full(tuple(shape), 0, like.dtype, like.device)


def indexed_shape(op: str, x: TensorProxy, indices: Indices) -> list[Dim]:
    """Return the shape of x[indices]: the indices' common shape in place of the indexed dims, or in front if these are
    not adjacent.

    Source: numpy's advanced indexing.
    """
    places = [dim for dim, index in enumerate(indices) if index is not None]
    check(bool(places), lambda: f"{op}: at least one index must be a tensor")
    check(
        len(indices) <= x.ndim,
        lambda: f"{op}: too many indices for tensor of dimension {x.ndim} (got {len(indices)}): {x}",
        IndexError,
    )
    common = _broadcast(op, [index.shape for index in indices if index is not None])
    rest = [size for dim, size in enumerate(x.shape) if dim not in places]
    adjacent = places == list(range(places[0], places[-1] + 1))
    before = places[0] if adjacent else 0
    return [*rest[:before], *common, *rest[before:]]


def _broadcast(op: str, shapes: Sequence[Sequence[Dim]]) -> list[Dim]:
    result: list[Dim] = [1] * max(map(len, shapes))
    for shape in shapes:
        for dim, size in enumerate(shape, len(result) - len(shape)):
            if statically_true(result[dim] == 1):
                result[dim] = size
            check(
                statically_true(size == 1) or same(result[dim], size),
                lambda: (
                    f"{op}: shape mismatch: indexing tensors could not be broadcast together with shapes "
                    + " ".join(str(list(shape)) for shape in shapes)
                ),
                IndexError,
            )
    return result


@primitive()
def index(x: TensorProxy, indices: Indices) -> TensorProxy:
    """Return x[indices], where None selects a whole dim. Negative indices count from the end.

    Shapes: numpy's rule. Raises: IndexError. Source: aten.index.
    """
    for index in indices:
        if index is not None:
            check_index("prims.index", index)
    return like(x, shape=indexed_shape("prims.index", x, indices))


def has_mask(indices: Indices) -> bool:
    """Return whether one of the indices is a mask, which selects an unknown number of elements."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


@primitive()
def index_put(x: TensorProxy, indices: Indices, values: TensorProxy, accumulate: bool = False) -> TensorProxy:
    """Return x with x[indices] replaced by (with `accumulate`, increased by) values.

    Shapes: values broadcast to x[indices]'s. Masks may be among the indices, each for as many dims as its rank.
    Dtypes: values have x's. Source: aten.index_put.
    """
    op = "prims.index_put"
    torch_check(
        values.dtype == x.dtype,
        lambda: f"{op}: Index put requires the source and destination dtypes match, but x is {x} and values {values}",
    )
    if not has_mask(indices):
        for index in indices:
            if index is not None:
                check_index(op, index)
        _check_expands(op, values, indexed_shape(op, x, indices))
    return like(x)


def _check_expands(op: str, values: TensorProxy, shape: Sequence[Dim]) -> None:
    extra = values.ndim - len(shape)
    fits = all(statically_true(size == 1) for size in values.shape[: max(extra, 0)]) and all(
        statically_true(size == 1) or same(size, target)
        for size, target in zip(reversed(values.shape), reversed(shape), strict=False)
    )
    torch_check(
        fits,
        lambda: (
            f"{op}: shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to "
            f"indexing result of shape {list(shape)}"
        ),
    )


@primitive()
def index_sum(g: TensorProxy, indices: Indices, shape: tuple[Dim, ...]) -> TensorProxy:
    """Return g[indices], where masks may be among the indices, summed to `shape`: the gradient of index_put's
    values."""
    return like(g, shape=shape)


def _check_along(op: str, x: TensorProxy, dim: int, index: TensorProxy, src: TensorProxy | None = None) -> None:
    """Check that an index has x's rank, and is not longer than x in any dim but `dim`, nor than `src` in any."""
    check_dim(op, dim, x.ndim)
    if statically_true(index.numel() == 0):  # of any dtype, as in torch
        return
    torch_check(
        index.dtype in INDEX_DTYPES, lambda: f"{op}: Expected dtype int32/int64 for index, but index is {index}"
    )
    for name, tensor in (("input", x), ("src", src)):
        if tensor is None:
            continue
        torch_check(
            max(index.ndim, 1) == max(tensor.ndim, 1),
            lambda name=name, tensor=tensor: (
                f"{op}: Index tensor must have the same number of dimensions as {name} tensor, "
                f"but index is {index} and {name} {tensor}"
            ),
        )
        for i, (ours, theirs) in enumerate(zip(index.shape, tensor.shape, strict=False)):
            torch_check(
                (i == dim and tensor is x) or not statically_true(ours > theirs),
                lambda name=name, tensor=tensor, i=i: (
                    f"{op}: Expected index {index} to be no larger than {name} {tensor} apart from dimension {dim}; "
                    f"dimension {i} is"
                ),
            )
    check_same_device(op, *[tensor for tensor in (x, index, src) if tensor is not None])


@primitive()
def gather(x: TensorProxy, dim: int, index: TensorProxy) -> TensorProxy:
    """Return out with out[i][j][k] = x[i][index[i][j][k]][k] for dim=1.

    Shapes: one rank; index is not longer than x in any dim but `dim`; out has index's. Source: torch.gather.
    """
    _check_along("prims.gather", x, dim, index)
    return like(x, shape=index.shape)


@primitive()
def scatter(x: TensorProxy, dim: int, index: TensorProxy, src: TensorProxy | Number) -> TensorProxy:
    """Return x with out[i][index[i][j][k]][k] = src[i][j][k] for dim=1; src may be a number for all elements.

    Shapes: one rank; index is not longer than src in any dim, nor than x in any dim but `dim`. Dtypes: the same for
    both.
    Source: torch.scatter.
    """
    tensor = src if isinstance(src, TensorProxy) else None
    _check_along("prims.scatter", x, dim, index, tensor)
    _check_one_dtype("prims.scatter", x, tensor)
    return like(x)


def _check_one_dtype(op: str, x: TensorProxy, src: TensorProxy | None) -> None:
    torch_check(
        src is None or src.dtype == x.dtype,
        lambda: f"{op}: Expected self.dtype to be equal to src.dtype, but they are {x} and {src}",
    )


REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


@primitive()
def scatter_reduce(
    x: TensorProxy, dim: int, index: TensorProxy, src: TensorProxy, reduce: str, include_self: bool = True
) -> TensorProxy:
    """Return x with the elements of src that scatter writes to one place reduced together, including x's if
    include_self.

    Shapes, Dtypes: as scatter. Source: torch.scatter_reduce.
    """
    op = "prims.scatter_reduce"
    torch_check(
        reduce in REDUCTIONS,
        lambda: f"{op}: reduce argument must be either sum, prod, mean, amax or amin, got {reduce}",
    )
    _check_along(op, x, dim, index, src)
    _check_one_dtype(op, x, src)
    return like(x)


@primitive()
def masked_scatter(x: TensorProxy, mask: TensorProxy, source: TensorProxy) -> TensorProxy:
    """Return x with the elements where mask is true replaced by source's, in order.

    Shapes: mask has x's. Dtypes: mask is bool; source has x's. Source: torch.masked_scatter.
    """
    op = "prims.masked_scatter"
    torch_check(mask.dtype == torch.bool, lambda: f"{op}: expected mask dtype to be Bool but mask is {mask}")
    torch_check(
        x.dtype == source.dtype,
        lambda: f"{op}: expected self and source to have same dtypes but they are {x} and {source}",
    )
    return like(x)


@primitive()
def masked_scatter_backward(g: TensorProxy, mask: TensorProxy, shape: tuple[Dim, ...]) -> TensorProxy:
    """Return the elements of g where mask is true, in order, then zeros, as `shape`. Source:
    aten.masked_scatter_backward."""
    return like(g, shape=shape)


@primitive()
def embedding(weight: TensorProxy, indices: TensorProxy, padding_idx: int, scale_by_frequency: bool) -> TensorProxy:
    """Return the rows of a table at `indices`; the other arguments are used by its gradient, embedding_backward.

    Shapes: weight is (rows, features); out is indices' shape and then features. Source: torch.embedding.
    """
    check_index("prims.embedding", indices)
    torch_check(weight.ndim == 2, lambda: f"prims.embedding: 'weight' must be 2-D, but it is {weight}")
    return like(weight, shape=(*indices.shape, weight.shape[1]))


@primitive()
def embedding_backward(
    g: TensorProxy, indices: TensorProxy, rows: Dim, padding_idx: int, scale_by_frequency: bool
) -> TensorProxy:
    """Return the gradient of a table of `rows` rows from g, the gradient of its rows at `indices`.

    padding_idx's row has none (-1 is no row); scale_by_frequency divides each row's gradient by its number of
    occurrences.
    Source: aten.embedding_dense_backward.
    """
    check_index("prims.embedding_backward", indices)
    return like(g, shape=(rows, g.shape[-1]))


@primitive()
def searchsorted(sorted: TensorProxy, values: TensorProxy, right: bool, dtype: torch.dtype) -> TensorProxy:
    """Return the index at which each value would be inserted in its ascending row of `sorted`: before equal elements,
    after them if `right`.

    Shapes: sorted is 1-d or has the dims of values except the last; out has values'. Dtypes: out has `dtype`.
    Source: torch.searchsorted.
    """
    torch_check(
        sorted.ndim == 1 or (sorted.ndim == values.ndim and all(map(same, sorted.shape[:-1], values.shape[:-1]))),
        lambda: (
            "prims.searchsorted: boundaries tensor should be 1 dimension or the first N-1 dimensions of boundaries "
            f"tensor and input value tensor must match, but we got boundaries {sorted} and input value {values}"
        ),
    )
    return like(values, dtype=dtype)


# gradient rules


register_vjp(index, x=lambda g, x, indices: index_put(_zeros(x.shape, g), indices, g, True))
register_vjp(
    index_put,
    x=lambda g, indices, accumulate: g if accumulate else index_put(g, indices, _zeros((), g)),
    values=lambda g, indices, values: index_sum(g, indices, values.shape) if has_mask(indices) else index(g, indices),
)
register_vjp(index_sum, g=lambda grad, g, indices: index_put(_zeros(g.shape, g), indices, grad, True))


def scatter_add(x: TensorProxy, dim: int, index: TensorProxy, src: TensorProxy) -> TensorProxy:
    """Return x with src added at the places to which scatter would write it."""
    return scatter_reduce(x, dim, index, src, "sum")


register_vjp(gather, x=lambda g, x, dim, index: scatter_add(_zeros(x.shape, g), dim, index, g))
register_vjp(
    scatter,
    x=lambda g, dim, index: scatter(g, dim, index, 0),
    src=lambda g, dim, index, src: _fit(gather(g, dim, index), src),
)


def _fit(x: TensorProxy, of: TensorProxy) -> TensorProxy:
    """Return x with the lengths of `of`: the part of src that a smaller index reads, or that gradient padded with
    zeros."""
    if x.ndim != of.ndim:  # an index without elements may have any rank
        return full(of.shape, 0, x.dtype, x.device)
    if all(map(same, x.shape, of.shape)):
        return x
    return pad(x, tuple([(0, theirs - ours) for ours, theirs in zip(x.shape, of.shape, strict=True)]), 0)


class _ScatterReduce(NamedTuple):
    """A call of scatter_reduce, and the gradient of its result."""

    g: TensorProxy
    x: TensorProxy
    dim: int
    indices: TensorProxy  # tuples have a method `index`
    src: TensorProxy
    out: TensorProxy
    include_self: bool


@register_grad(scatter_reduce)
def _scatter_reduce_grad(
    x: TensorProxy, dim: int, index: TensorProxy, src: TensorProxy, reduce: str, include_self: bool = True
) -> TensorProxy:
    with outside_regions(reduce in ("amax", "amin")):
        out = scatter_reduce(x, dim, index, src, reduce, include_self)
    read = _fit(src, index)
    of_x, of_src = _REDUCE_GRADS[reduce](_ScatterReduce(get_grad(out), x, dim, index, read, out, include_self))
    if needs_grad(x):
        put_grad(x, of_x() if include_self else scatter(of_x(), dim, index, 0))
    if needs_grad(src):
        put_grad(src, _fit(of_src(), src))
    return out


Thunks = tuple[Callable[[], TensorProxy], Callable[[], TensorProxy]]


def _sum_grads(call: _ScatterReduce) -> Thunks:
    return lambda: call.g, lambda: gather(call.g, call.dim, call.indices)


def _mean_grads(call: _ScatterReduce) -> Thunks:
    g, x, dim, index, src, _, include_self = call
    count = full(x.shape, 1 if include_self else 0, x.dtype, x.device)
    count = scatter_add(count, dim, index, full(src.shape, 1, x.dtype, x.device))
    share = g / (count == 0).where(1, count)
    return lambda: share, lambda: gather(share, dim, index)


def _extremum_grads(call: _ScatterReduce) -> Thunks:
    """Return the gradients of an extremum: ties share it; x counts where it equals the result, included or not, as in
    torch."""
    g, x, dim, index, src, out, _ = call
    with outside_regions():
        x_wins, src_wins = x == out, src == gather(out, dim, index)
    from_x, from_src = x_wins.to(x.dtype), src_wins.to(x.dtype)
    share = g / scatter_add(from_x, dim, index, from_src)
    return lambda: from_x * share, lambda: from_src * gather(share, dim, index)


def _prod_grads(call: _ScatterReduce) -> Thunks:
    """Return the gradients of a product: a zero in src has the product of the others; with two zeros, all gradients are
    0."""
    g, x, dim, index, src, out, include_self = call
    zero = src == 0

    def of_x() -> TensorProxy:
        return g * scatter_reduce(full(x.shape, 1, x.dtype, x.device), dim, index, src, "prod")

    def of_src() -> TensorProxy:
        zeros = gather(scatter_add(_zeros(x.shape, x), dim, index, zero.to(x.dtype)), dim, index)
        only = zero & (zeros == 1)
        others = scatter_reduce(x, dim, index, only.where(1, src), "prod", include_self)
        return only.where(gather(g * others, dim, index), gather(g * out, dim, index) / zero.where(1, src))

    return of_x, of_src


_REDUCE_GRADS: dict[str, Callable[[_ScatterReduce], Thunks]] = {
    "sum": _sum_grads,
    "mean": _mean_grads,
    "prod": _prod_grads,
    "amax": _extremum_grads,
    "amin": _extremum_grads,
}


register_vjp(
    masked_scatter,
    x=lambda g, mask: mask.where(0, g),
    source=lambda g, mask, source: masked_scatter_backward(g, mask, source.shape),
)
register_vjp(masked_scatter_backward, g=lambda grad, g, mask: masked_scatter(_zeros(g.shape, g), mask, grad))
register_vjp(
    embedding,
    weight=lambda g, weight, indices, padding_idx, scale_by_frequency: embedding_backward(
        g, indices, weight.shape[0], padding_idx, scale_by_frequency
    ),
)


@register_grad(embedding_backward)
def _embedding_backward_grad(
    g: TensorProxy, indices: TensorProxy, rows: Dim, padding_idx: int, scale_by_frequency: bool
) -> TensorProxy:
    out = embedding_backward(g, indices, rows, padding_idx, scale_by_frequency)
    check(
        not scale_by_frequency,
        lambda: "embedding_backward: no second gradient with scale_grad_by_freq",
        NotImplementedError,
    )
    again = index(get_grad(out), (indices,))
    put_grad(g, again if padding_idx < 0 else (indices == padding_idx).unsqueeze(-1).where(0, again))
    return out


# rows with a limited norm


embedding_renorm = make_library_prim(
    torch.ops.aten.embedding_renorm.default,
    "The table with the rows that indices name scaled down to max_norm, where their norm is larger.",
    name="embedding_renorm",
)
refuse_gradient(embedding_renorm)
