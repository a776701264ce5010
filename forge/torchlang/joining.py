"""The functions of torch that join tensors, split them, and repeat their elements."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import INT_TYPES, Dim, Symbol, TensorProxy, check
from forge.prims.core import check_dim, same, statically_true, torch_check
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import View, torchsymbol
from forge.torchlang.shape import atleast_1d, atleast_2d, atleast_3d, varargs

Tensors = Sequence[TensorProxy]
Parts = tuple[TensorProxy, ...]


@torchsymbol(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Tensors, dim: int = 0) -> TensorProxy:
    """Return the concatenation of the tensors along `dim`, promoted to one dtype; empty 1-d tensors are skipped."""
    return clang.cat(tensors, dim)


@torchsymbol(torch.stack)
def stack(tensors: Tensors, dim: int = 0) -> TensorProxy:
    """Return the tensors stacked along a new dim."""
    return clang.stack(tensors, dim)


@torchsymbol(torch.hstack)
def hstack(tensors: Tensors) -> TensorProxy:
    """Return the concatenation of the tensors along dim 1; for vectors, along dim 0."""
    torch_check(len(tensors) > 0, lambda: "hstack expects a non-empty TensorList")
    tensors = [atleast_1d(tensor) for tensor in tensors]
    return clang.cat(tensors, 0 if tensors[0].ndim == 1 else 1)


@torchsymbol(torch.vstack, torch.row_stack)
def vstack(tensors: Tensors) -> TensorProxy:
    """Return the concatenation of the tensors along dim 0; vectors are rows."""
    torch_check(len(tensors) > 0, lambda: "vstack expects a non-empty TensorList")
    return clang.cat([atleast_2d(tensor) for tensor in tensors], 0)


@torchsymbol(torch.dstack)
def dstack(tensors: Tensors) -> TensorProxy:
    """Return the concatenation of the tensors along dim 2."""
    torch_check(len(tensors) > 0, lambda: "dstack expects a non-empty TensorList")
    return clang.cat([atleast_3d(tensor) for tensor in tensors], 2)


@torchsymbol(torch.column_stack)
def column_stack(tensors: Tensors) -> TensorProxy:
    """Return the concatenation of the tensors along dim 1; vectors and numbers are columns."""
    torch_check(len(tensors) > 0, lambda: "column_stack expects a non-empty TensorList")
    columns = [clang.reshape(t, (t.numel(), 1)) if t.ndim <= 1 else t for t in tensors]
    return hstack(columns)


# parts


def _split(op: str, x: TensorProxy, size: Dim | Sequence[Dim], dim: int) -> Parts:
    torch_check(x.ndim > 0, lambda: f"{op} expects at least a 1-dimensional tensor, but got {x}")
    dim = check_dim(op, dim, x.ndim)
    length = x.shape[dim]
    if not isinstance(size, Sequence):
        return clang.split_sizes(x, _even_sizes(op, length, size), dim)
    total: Dim = 0
    for part in size:
        torch_check(
            not statically_true(part < 0),
            lambda: f"{op}: split_sizes must have only non-negative entries, but got {list(size)}",
        )
        total = total + part
    torch_check(
        same(total, length),
        lambda: (
            f"{op} expects split_sizes to sum exactly to {length} (input tensor's size at dimension {dim}), "
            f"but got split_sizes={list(size)}"
        ),
    )
    return clang.split_sizes(x, size, dim)


def _even_sizes(op: str, length: Dim, size: Dim) -> list[Dim]:
    """Return lengths of `size`, the last one shorter if necessary. Their number is guarded on."""
    torch_check(
        not statically_true(size < 0), lambda: f"{op} expects split_size be non-negative, but got split_size={size}"
    )
    if statically_true(size == 0):
        torch_check(
            same(length, 0),
            lambda: f"{op}: split_size can only be 0 if dimension size is 0, but got dimension size of {length}",
        )
        return [0]
    count = max(int((length + size - 1) // size), 1)
    return [size] * (count - 1) + [length - size * (count - 1)]


@torchsymbol(torch.functional.split, view=View.ALWAYS)
def split(tensor: TensorProxy, split_size_or_sections: Dim | Sequence[Dim], dim: int = 0) -> Parts:
    """Return consecutive parts along `dim`: of one length (the last may be shorter), or of given lengths."""
    return _split("split", tensor, split_size_or_sections, dim)


@torchsymbol(Tensor.split, torch.ops.aten.split.Tensor, view=View.ALWAYS)
def tensor_split_method(self: TensorProxy, split_size: Dim | Sequence[Dim], dim: int = 0) -> Parts:
    """Return consecutive parts along `dim`: of one length (the last may be shorter), or of given lengths."""
    return _split("split", self, split_size, dim)


@torchsymbol(torch.split_with_sizes, Tensor.split_with_sizes, view=View.ALWAYS)
def split_with_sizes(input: TensorProxy, split_sizes: Sequence[Dim], dim: int = 0) -> Parts:
    """Return consecutive parts of given lengths along `dim`."""
    return _split("split_with_sizes", input, tuple(split_sizes), dim)


@torchsymbol(torch.chunk, Tensor.chunk, view=View.ALWAYS)
def chunk(input: TensorProxy, chunks: int, dim: int = 0) -> Parts:
    """Return at most `chunks` parts of one length along `dim`; the last may be shorter."""
    torch_check(input.ndim > 0, lambda: f"chunk expects at least a 1-dimensional tensor, but got {input}")
    torch_check(chunks > 0, lambda: f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    size = input.shape[check_dim("chunk", dim, input.ndim)]
    if statically_true(size == 0):
        return _split("chunk", input, [0] * chunks, dim)
    return _split("chunk", input, (size + chunks - 1) // chunks, dim)


def _tensor_split(op: str, x: TensorProxy, where: Any, dim: int) -> Parts:
    torch_check(x.ndim > 0, lambda: f"{op} expected at least a 1-dimensional tensor, but got {x}")
    check(
        not isinstance(where, TensorProxy),
        lambda: f"{op} at the places that a tensor holds depends on data; see forge/torchlang/joining.py",
        NotImplementedError,
    )
    dim = check_dim(op, dim, x.ndim)
    length = x.shape[dim]
    if isinstance(where, (tuple, list)):
        bounds = list(zip([None, *where], [*where, None], strict=True))
        return tuple(clang.slice_in_dim(x, dim, start, stop) for start, stop in bounds)
    torch_check(where > 0, lambda: f"{op}: number of sections must be larger than 0, got {where}")
    longer, size = length % where, length // where
    return clang.split_sizes(x, [size + (1 if i < longer else 0) for i in range(where)], dim)


@torchsymbol(torch.tensor_split, Tensor.tensor_split, view=View.ALWAYS)
def tensor_split(input: TensorProxy, indices_or_sections: Any, dim: int = 0) -> Parts:
    """Return `n` parts along `dim` whose lengths differ by at most one, or the parts between given indices."""
    return _tensor_split("tensor_split", input, indices_or_sections, dim)


def _split_along(name: str, dim: int) -> Symbol:
    """Return the symbol of torch.hsplit or its kin."""

    def body(input: TensorProxy, indices_or_sections: int | Sequence[int]) -> Parts:
        along = 0 if name == "hsplit" and input.ndim == 1 else dim
        torch_check(
            input.ndim > (0 if name == "hsplit" else dim),
            lambda: (
                f"torch.{name} requires a tensor with at least {max(dim + (name != 'hsplit'), 1)} dimension, "
                f"but got {input}"
            ),
        )
        if not isinstance(indices_or_sections, (tuple, list)):
            torch_check(
                same(operator.mod(input.shape[along], indices_or_sections), 0),
                lambda: (
                    f"torch.{name} attempted to split along dimension {along}, but the size of the dimension "
                    f"{input.shape[along]} is not divisible by the split_size {indices_or_sections}!"
                ),
            )
        return _tensor_split(name, input, indices_or_sections, along)

    body.__name__, body.__doc__ = name, f"Parts along dim {dim}: of one length, or between given indices."
    return torchsymbol(getattr(torch, name), getattr(Tensor, name), view=View.ALWAYS)(body)


hsplit, vsplit, dsplit = _split_along("hsplit", 1), _split_along("vsplit", 0), _split_along("dsplit", 2)


@torchsymbol(torch.unbind, Tensor.unbind, view=View.ALWAYS)
def unbind(input: TensorProxy, dim: int = 0) -> Parts:
    """Return the slices along `dim`, without that dim."""
    check(input.ndim > 0, lambda: "unbind: Dimension specified as 0 but tensor has no dimensions", IndexError)
    dim = check_dim("unbind", dim, input.ndim)
    return tuple(clang.select(input, dim, i) for i in range(int(input.shape[dim])))


# repetition


def _repeat(op: str, x: TensorProxy, repeats: Sequence[Dim]) -> TensorProxy:
    torch_check(
        len(repeats) >= x.ndim,
        lambda: (
            f"{op}: Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor: "
            f"{tuple(repeats)} for {x}"
        ),
    )
    for count in repeats:
        torch_check(
            not statically_true(count < 0),
            lambda: f"{op}: Trying to create tensor with negative dimension: repeats are {tuple(repeats)}",
        )
    lengths = [1] * (len(repeats) - x.ndim) + list(x.shape)
    if all(statically_true(count == 1) for count in repeats):
        return prims.clone(clang.reshape(x, lengths))
    shape = [part for pair in zip(repeats, lengths, strict=True) for part in pair]
    offset = len(repeats) - x.ndim
    spread = prims.broadcast_in_dim(x, tuple(shape), tuple(2 * (offset + dim) + 1 for dim in range(x.ndim)))
    lengths = [count * size for count, size in zip(repeats, lengths, strict=True)]
    return clang.reshape(prims.clone(spread), lengths)  # without the copy, the result may be a view of x


@torchsymbol(Tensor.repeat)
def repeat(self: TensorProxy, *args: Lengths, repeats: Sequence[Dim] | None = None) -> TensorProxy:
    """Return the tensor repeated: repeats[i] copies along dim i; new dims come first."""
    return _repeat("repeat", self, varargs(args[0], args[1:]) if args else tuple(repeats or ()))


@torchsymbol(Tensor.tile)
def tensor_tile(self: TensorProxy, *args: Lengths, dims: Sequence[Dim] | None = None) -> TensorProxy:
    """Repeat like `repeat`, with 1 for missing leading dims."""
    return tile(self, varargs(args[0], args[1:]) if args else tuple(dims or ()))


@torchsymbol(torch.tile)
def tile(input: TensorProxy, dims: Sequence[Dim]) -> TensorProxy:
    """Repeat like `repeat`, with 1 for missing leading dims."""
    return _repeat("tile", input, [1] * (input.ndim - len(dims)) + list(dims))


@torchsymbol(torch.repeat_interleave, Tensor.repeat_interleave)
def repeat_interleave(
    input: TensorProxy,
    repeats: Dim | TensorProxy | None = None,
    dim: int | None = None,
    *,
    output_size: Dim | None = None,
) -> TensorProxy:
    """Return each element (or slice along `dim`) repeated; flattened without `dim`."""
    if not isinstance(repeats, INT_TYPES):
        return _repeated_by(input, repeats, dim, output_size)
    torch_check(
        not statically_true(repeats < 0), lambda: f"repeat_interleave: Repeats must be non-negative, got {repeats}"
    )
    if dim is None:
        input, dim = clang.reshape(input, (-1,)) if input.ndim != 1 else input, 0
    dim = check_dim("repeat_interleave", dim, input.ndim)
    if input.ndim == 0:
        input = clang.reshape(input, (1,))
    shape = list(input.shape)
    spread = clang.expand(clang.unsqueeze(input, dim + 1), (*shape[: dim + 1], repeats, *shape[dim + 1 :]))
    shape[dim] = shape[dim] * repeats
    return clang.reshape(prims.clone(spread), shape)


def _repeated_by(input: TensorProxy, repeats: TensorProxy | None, dim: int | None, size: Dim | None) -> TensorProxy:
    """Return each slice repeated by the counts in a tensor, with total length `size`; without repeats, return indices
    from counts in input."""
    if size is None:
        raise NotImplementedError(
            "repeat_interleave by a tensor without output_size depends on data; see forge/torchlang/joining.py"
        )
    counts = input if repeats is None else repeats
    torch_check(
        counts.ndim < 2 and counts.dtype in (torch.int32, torch.int64),
        lambda: f"repeat_interleave: repeats must be 0-dim or 1-dim tensor of integers, but is {counts}",
    )
    if repeats is None:
        return clang.convert(_repeated_indices(counts, size), counts.dtype)
    if dim is None:
        input, dim = clang.reshape(input, (input.numel(),)), 0
    dim = check_dim("repeat_interleave", dim, input.ndim)
    input = clang.reshape(input, (1,)) if input.ndim == 0 else input
    length = input.shape[dim]
    torch_check(
        statically_true(counts.numel() == 1) or same(counts.numel(), length),
        lambda: (
            "repeat_interleave: repeats must have the same size as input along dim, "
            f"but got {counts} for {input} and dim {dim}"
        ),
    )
    return clang.index_select(input, dim, _repeated_indices(clang.expand(counts, (length,)), size))


def _repeated_indices(counts: TensorProxy, size: Dim) -> TensorProxy:
    """Return 0 repeated by the first count, then 1 by the second, …; `size` of them."""
    ends = prims.cumsum(clang.convert(counts, torch.int64), 0)
    return prims.searchsorted(ends, prims.iota(size, 0, 1, torch.int64, counts.device), True, torch.int64)
