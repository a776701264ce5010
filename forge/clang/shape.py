"""The shape operations with negative dims, lengths of -1 and the rest of torch's conventions."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from forge import prims
from forge.clang.core import clangop, convert, expand_to
from forge.ir import Dim, TensorProxy, check, get_grad, put_grad, register_grad
from forge.prims.core import check_dim, check_dims, same, same_shape, statically_true, torch_check


@clangop("view")
def reshape(x: TensorProxy, shape: Sequence[Dim]) -> TensorProxy:
    """Return x's elements with another shape, one length of which may be -1."""
    shape = infer_length("reshape", x, tuple(shape))
    if len(shape) == x.ndim and all(statically_true(a == b) for a, b in zip(shape, x.shape, strict=True)):
        return x
    return prims.reshape(x, shape)


def infer_length(op: str, x: TensorProxy, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return `shape` with a -1 replaced by the length that x's number of elements implies."""
    unknown = [i for i, size in enumerate(shape) if statically_true(size == -1)]
    if not unknown:
        return shape
    torch_check(len(unknown) == 1, lambda: f"{op}: only one dimension can be inferred, but shape is {shape}")
    rest = math.prod(size for i, size in enumerate(shape) if i != unknown[0])
    torch_check(
        not statically_true(rest == 0),
        lambda: (
            f"{op}: cannot reshape {x} into shape {list(shape)} because the unspecified dimension size -1 "
            "can be any value and is ambiguous"
        ),
    )
    torch_check(
        same(operator.mod(x.numel(), rest), 0),
        lambda: f"{op}: shape '{list(shape)}' is invalid for input of size {x.numel()}",
    )
    return (*shape[: unknown[0]], x.numel() // rest, *shape[unknown[0] + 1 :])


@clangop()
def permute(x: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    """Permute x's dims: out's dim i is x's dim dims[i]."""
    torch_check(len(dims) == x.ndim, lambda: f"permute: number of dims don't match: x is {x}, dims are {tuple(dims)}")
    dims = check_dims("permute", dims, x.ndim) if x.ndim else ()
    return x if dims == tuple(range(x.ndim)) else prims.permute(x, dims)


@clangop()
def transpose(x: TensorProxy, dim0: int, dim1: int) -> TensorProxy:
    """Return x with two dims exchanged."""
    dim0, dim1 = check_dim("transpose", dim0, x.ndim), check_dim("transpose", dim1, x.ndim)
    if dim0 == dim1:
        return x
    dims = list(range(x.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return prims.permute(x, tuple(dims))


@clangop("T")
def reverse_dims(x: TensorProxy) -> TensorProxy:
    """Return x with its dims in reverse order."""
    return permute(x, tuple(reversed(range(x.ndim))))


@clangop("mT")
def transpose_matrices(x: TensorProxy) -> TensorProxy:
    """Return x with its last two dims exchanged."""
    torch_check(x.ndim >= 2, lambda: f"tensor.mT is only supported on matrices or batches of matrices. Got {x}")
    return transpose(x, -2, -1)


@clangop()
def movedim(x: TensorProxy, source: int | Sequence[int], destination: int | Sequence[int]) -> TensorProxy:
    """Return x with the dims `source` at `destination`, the others in order."""
    source, destination = as_tuple(source), as_tuple(destination)
    torch_check(
        len(source) == len(destination),
        lambda: (
            f"movedim: Invalid source or destination dims: source ({source} dims) should contain the same number "
            f"of dims as destination ({destination} dims)"
        ),
    )
    source, destination = check_dims("movedim", source, x.ndim), check_dims("movedim", destination, x.ndim)
    if x.ndim == 0:
        return x
    placed = dict(zip(destination, source, strict=True))
    rest = iter([dim for dim in range(x.ndim) if dim not in source])
    return permute(x, tuple(placed[dim] if dim in placed else next(rest) for dim in range(x.ndim)))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a sequence as a tuple, anything else as a tuple of one element."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@clangop()
def expand(x: TensorProxy, shape: Sequence[Dim]) -> TensorProxy:
    """Return x broadcast to `shape`, where -1 keeps a length."""
    torch_check(
        len(shape) >= x.ndim,
        lambda: (
            f"expand: the number of sizes provided ({len(shape)}) must be greater or equal to the number of "
            f"dimensions in the tensor ({x.ndim})"
        ),
    )
    offset = len(shape) - x.ndim
    sizes = []
    for dim, size in enumerate(shape):
        keep = statically_true(size == -1)
        torch_check(
            not keep or dim >= offset,
            lambda dim=dim: f"expand: -1 is not allowed in the new, leading dimension {dim} of {tuple(shape)}",
        )
        sizes.append(x.shape[dim - offset] if keep else size)
    for dim, size in enumerate(x.shape):
        torch_check(
            statically_true(size == 1) or same(size, sizes[dim + offset]),
            lambda dim=dim, size=size: (
                f"expand: The expanded size of the tensor ({sizes[dim + offset]}) must match the existing size "
                f"({size}) at non-singleton dimension {dim + offset}.  Target sizes: {list(shape)}.  "
                f"Tensor sizes: {list(x.shape)}"
            ),
        )
    return expand_to(x, sizes)


@clangop()
def unsqueeze(x: TensorProxy, dim: int) -> TensorProxy:
    """Return x with a dim of length 1 before `dim`."""
    dim = check_dim("unsqueeze", dim, x.ndim + 1)
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    return prims.broadcast_in_dim(x, shape, tuple(d for d in range(len(shape)) if d != dim))


@clangop()
def squeeze(x: TensorProxy, dims: Iterable[int] | None = None) -> TensorProxy:
    """Return x without those of `dims` (all by default) whose length is 1."""
    dims = range(x.ndim) if dims is None else check_dims("squeeze", tuple(dims), x.ndim)
    single = tuple(dim for dim in dims if x.ndim and same(x.shape[dim], 1))
    return prims.squeeze(x, single) if single else x


@clangop()
def flatten(x: TensorProxy, start_dim: int = 0, end_dim: int = -1) -> TensorProxy:
    """Return x with the dims from start_dim to end_dim merged; a 0-d tensor becomes 1-d."""
    start, end = check_dim("flatten", start_dim, x.ndim), check_dim("flatten", end_dim, x.ndim)
    torch_check(
        start <= end,
        lambda: f"flatten() has invalid args: start_dim {start_dim} cannot come after end_dim {end_dim} of {x}",
    )
    if x.ndim == 0:
        return reshape(x, (1,))
    return reshape(x, (*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


@clangop()
def unflatten(x: TensorProxy, dim: int, sizes: Sequence[Dim]) -> TensorProxy:
    """Return x with `dim` split into dims of lengths `sizes`, one of which may be -1."""
    dim = check_dim("unflatten", dim, x.ndim)
    torch_check(len(sizes) > 0, lambda: "unflatten: sizes must be non-empty")
    sizes = split_length("unflatten", x.shape[dim], tuple(sizes))
    return reshape(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


def split_length(op: str, length: Dim, sizes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return `sizes` with a -1 replaced so that their product is `length`. Raises RuntimeError if that is
    impossible."""
    unknown = [i for i, size in enumerate(sizes) if statically_true(size == -1)]
    rest = math.prod(1 if i in unknown else size for i, size in enumerate(sizes))
    valid = len(unknown) < 2 and (
        same(rest, length) if not unknown else not statically_true(rest == 0) and same(operator.mod(length, rest), 0)
    )
    torch_check(
        valid, lambda: f"{op}: Provided sizes {list(sizes)} don't multiply up to the size of the dim, which is {length}"
    )
    return tuple(length // rest if i in unknown else size for i, size in enumerate(sizes))


@clangop()
def select(x: TensorProxy, dim: int, index: Dim) -> TensorProxy:
    """Return x[index] along `dim`, without that dim."""
    check(x.ndim > 0, lambda: "select() cannot be applied to a 0-dim tensor", IndexError)
    dim = check_dim("select", dim, x.ndim)
    start = position("select", index, x.shape[dim], dim)
    return prims.squeeze(prims.slice(x, dim, start, start + 1), (dim,))


def position(op: str, index: Dim, length: Dim, dim: int) -> Dim:
    """Return an index counted from the front. Raises IndexError if it is known to be out of range."""
    check(
        not statically_true(index >= length) and not statically_true(index < -length),
        lambda: f"{op}: index {index} is out of bounds for dimension {dim} with size {length}",
        IndexError,
    )
    if statically_true(index >= 0):
        return index
    return index + length if statically_true(index < 0) else torch.sym_ite(index < 0, index + length, index)


def narrow_in_dim(x: TensorProxy, dim: int, start: Dim, length: Dim) -> TensorProxy:
    """Return `length` elements from `start` along `dim`; x itself if these are all."""
    if statically_true(start == 0) and statically_true(length == x.shape[dim]):
        return x
    return prims.slice(x, dim, start, start + length)


@clangop()
def cat(tensors: Sequence[TensorProxy], dim: int = 0) -> TensorProxy:
    """Return the concatenation of the tensors along `dim`, promoted to one dtype. Empty 1-d tensors are skipped."""
    torch_check(len(tensors) > 0, lambda: "cat(): expected a non-empty list of Tensors")
    for tensor in tensors:
        torch_check(
            tensor.ndim > 0, lambda tensor=tensor: f"cat: zero-dimensional tensor {tensor} cannot be concatenated"
        )
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    parts = _without_empty(tensors)
    dim = check_dim("cat", dim, parts[0].ndim)
    return prims.cat([convert(tensor, dtype) for tensor in parts], dim)


def _without_empty(tensors: Sequence[TensorProxy]) -> list[TensorProxy]:
    """Return the tensors that cat joins: empty 1-d tensors are compatible with any rank."""
    if len({tensor.ndim for tensor in tensors}) == 1:
        return list(tensors)
    return [tensor for tensor in tensors if tensor.ndim != 1 or not statically_true(tensor.shape[0] == 0)]


@register_grad(cat)
def _cat_grad(tensors: Sequence[TensorProxy], dim: int = 0) -> TensorProxy:
    out = cat(tensors, dim)
    g, dim = get_grad(out), check_dim("cat", dim, out.ndim)
    start: Dim = 0
    parts = _without_empty(tensors)
    for tensor in tensors:
        if not any(tensor is each for each in parts):
            put_grad(tensor, prims.full(tensor.shape, 0, g.dtype, g.device))
            continue
        stop = start + tensor.shape[dim]
        put_grad(tensor, prims.slice(g, dim, start, stop))
        start = stop
    return out


@clangop()
def stack(tensors: Sequence[TensorProxy], dim: int = 0) -> TensorProxy:
    """Return the tensors stacked along a new dim, promoted to one dtype. Shapes: the same for all."""
    torch_check(len(tensors) > 0, lambda: "stack expects a non-empty TensorList")
    first = tensors[0]
    for tensor in tensors[1:]:
        torch_check(
            same_shape(tensor.shape, first.shape),
            lambda tensor=tensor: f"stack expects each tensor to be equal size, but got {first} and {tensor}",
        )
    dim = check_dim("stack", dim, first.ndim + 1)
    return cat([unsqueeze(tensor, dim) for tensor in tensors], dim)


@register_grad(stack)
def _stack_grad(tensors: Sequence[TensorProxy], dim: int = 0) -> TensorProxy:
    out = stack(tensors, dim)
    g = get_grad(out)
    for i, tensor in enumerate(tensors):
        put_grad(tensor, select(g, dim, i))
    return out


def split_sizes(x: TensorProxy, sizes: Sequence[Dim], dim: int) -> tuple[TensorProxy, ...]:
    """Return consecutive parts of x along `dim`, of the lengths `sizes`."""
    parts = []
    start: Dim = 0
    for size in sizes:
        parts.append(narrow_in_dim(x, dim, start, size))
        start = start + size
    return tuple(parts)


@clangop()
def flip(x: TensorProxy, dims: int | Sequence[int]) -> TensorProxy:
    """Return x with the order of the elements along `dims` reversed."""
    dims = check_dims("flip", as_tuple(dims), x.ndim)
    return prims.flip(x, dims) if x.ndim else prims.clone(x)


@clangop()
def roll(x: TensorProxy, shift: Dim, dim: int) -> TensorProxy:
    """Return x with the elements shifted by `shift` along `dim`; those shifted past the end reappear at the front."""
    dim = check_dim("roll", dim, x.ndim)
    size = x.shape[dim]
    if statically_true(size == 0):
        return prims.clone(x)
    start = operator.mod(size - shift, size)
    return prims.cat([prims.slice(x, dim, start, size), prims.slice(x, dim, 0, start)], dim)


@clangop()
def diagonal(x: TensorProxy, offset: Dim = 0, dim1: int = 0, dim2: int = 1) -> TensorProxy:
    """Return the elements of x whose index along dim2 is the one along dim1 plus `offset`, as the last dim."""
    dim1, dim2 = check_dim("diagonal", dim1, x.ndim), check_dim("diagonal", dim2, x.ndim)
    torch_check(dim1 != dim2, lambda: f"diagonal: diagonal dimensions cannot be identical {dim1}, {dim2} ({x})")
    return prims.diagonal(x, offset, dim1, dim2)


def triangle_mask(rows: Dim, columns: Dim, diagonal: Dim, device: torch.device) -> TensorProxy:
    """Return a (rows, columns) matrix that is true on and below a diagonal."""
    row = prims.iota(rows, diagonal, 1, torch.int64, device)
    column = prims.iota(columns, 0, 1, torch.int64, device)
    return unsqueeze(row, 1) >= unsqueeze(column, 0)


def _zero(x: TensorProxy) -> bool | int:
    """Return a zero whose promotion with x has x's dtype."""
    return False if x.dtype == torch.bool else 0


@clangop()
def tril(x: TensorProxy, diagonal: Dim = 0) -> TensorProxy:
    """Return x with zeros above a diagonal of its last two dims."""
    _check_matrices("tril", x)
    rows, columns = x.shape[-2:]
    return triangle_mask(rows, columns, diagonal, x.device).where(x, _zero(x))


@clangop()
def triu(x: TensorProxy, diagonal: Dim = 0) -> TensorProxy:
    """Return x with zeros below a diagonal of its last two dims."""
    _check_matrices("triu", x)
    rows, columns = x.shape[-2:]
    return triangle_mask(rows, columns, diagonal - 1, x.device).where(_zero(x), x)


def _check_matrices(op: str, x: TensorProxy) -> None:
    torch_check(x.ndim >= 2, lambda: f"{op}: input tensor must have at least 2 dimensions, but it is {x}")


prims.register_vjp(tril, x=lambda g, diagonal: tril(g, diagonal))
prims.register_vjp(triu, x=lambda g, diagonal: triu(g, diagonal))


@clangop()
def slice_in_dim(x: TensorProxy, dim: int, start: Dim | None, stop: Dim | None, step: int | None = 1) -> TensorProxy:
    """Return x[start:stop:step] along `dim`, with Python's semantics of negative, missing and too large bounds."""
    bounds = slice_bounds(x.shape[dim], start, stop, step)
    return x if is_whole(x.shape[dim], bounds) else prims.slice(x, dim, *bounds)


Bounds = tuple[Dim, Dim, int]


def slice_bounds(length: Dim, start: Dim | None, stop: Dim | None, step: int | None = 1) -> Bounds:
    """Return a slice's bounds with 0 <= start <= stop <= length."""
    step = 1 if step is None else step
    check(step > 0, lambda: f"getitem: slice step must be positive, but got {step}", ValueError)
    start, stop = clamp_bound(start, length, 0), clamp_bound(stop, length, length)
    return start, stop if statically_true(stop >= start) else torch.sym_max(start, stop), step


def is_whole(length: Dim, bounds: Bounds) -> bool:
    """Return whether a slice covers all elements."""
    start, stop, step = bounds
    return step == 1 and statically_true(start == 0) and statically_true(stop == length)


def clamp_bound(bound: Dim | None, length: Dim, default: Dim) -> Dim:
    """Return a slice's bound in [0, length], by arithmetic only, so that symbolic sizes stay symbolic."""
    if bound is None:
        return default
    if isinstance(bound, int) and isinstance(length, int):
        return min(max(bound + length if bound < 0 else bound, 0), length)
    if statically_true(bound < 0):
        bound = bound + length
        return bound if statically_true(bound >= 0) else torch.sym_max(bound, 0)
    if isinstance(bound, int) and bound >= 2**62:
        return length
    if not statically_true(bound >= 0):
        bound = torch.sym_ite(bound < 0, torch.sym_max(bound + length, 0), bound)
    return bound if statically_true(bound <= length) else torch.sym_min(bound, length)
