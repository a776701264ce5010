"""Shape operations with negative dims, lengths of -1 and the rest of torch's conventions."""

from collections.abc import Sequence

import torch

from forge import prims
from forge.clang.core import clangop, expand_to
from forge.ir import Dim, TensorProxy, check
from forge.prims.core import check_dim, check_dims, known, same


@clangop("view")
def reshape(x: TensorProxy, shape: Sequence[Dim]) -> TensorProxy:
    """x's elements with another shape, one length of which may be -1."""
    shape = infer_length("reshape", x, tuple(shape))
    if len(shape) == x.ndim and all(known(a == b) for a, b in zip(shape, x.shape, strict=True)):
        return x
    return prims.reshape(x, shape)


def infer_length(op: str, x: TensorProxy, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """`shape` with a -1 replaced by the length that x's number of elements leaves."""
    unknown = [i for i, length in enumerate(shape) if isinstance(length, int) and length == -1]
    if not unknown:
        return shape
    check(len(unknown) == 1, lambda: f"{op}: only one dimension can be inferred, but shape is {shape}", RuntimeError)
    rest: Dim = 1
    for i, length in enumerate(shape):
        if i != unknown[0]:
            rest = rest * length
    check(
        not known(rest == 0),
        lambda: f"{op}: cannot reshape {x} into shape {list(shape)} because the unspecified dimension size -1 "
        "can be any value and is ambiguous",
        RuntimeError,
    )
    check(
        same(x.numel() % rest, 0),
        lambda: f"{op}: shape '{list(shape)}' is invalid for input of size {x.numel()}",
        RuntimeError,
    )
    return (*shape[: unknown[0]], x.numel() // rest, *shape[unknown[0] + 1 :])


@clangop()
def permute(x: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    """out's dim i is x's dim dims[i]."""
    check(
        len(dims) == x.ndim,
        lambda: f"permute: number of dims don't match: x is {x}, dims are {tuple(dims)}",
        RuntimeError,
    )
    return prims.permute(x, check_dims("permute", dims, x.ndim) if x.ndim else ())


@clangop()
def transpose(x: TensorProxy, dim0: int, dim1: int) -> TensorProxy:
    """x with two dims exchanged."""
    dim0, dim1 = check_dim("transpose", dim0, x.ndim), check_dim("transpose", dim1, x.ndim)
    dims = list(range(x.ndim))
    if x.ndim:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return prims.permute(x, tuple(dims))


@clangop()
def expand(x: TensorProxy, shape: Sequence[Dim]) -> TensorProxy:
    """x broadcast to `shape`, where -1 keeps a length."""
    check(
        len(shape) >= x.ndim,
        lambda: f"expand: the number of sizes provided ({len(shape)}) must be greater or equal to the number of "
        f"dimensions in the tensor ({x.ndim})",
        RuntimeError,
    )
    offset = len(shape) - x.ndim
    lengths = []
    for dim, length in enumerate(shape):
        keep = isinstance(length, int) and length == -1
        check(
            not keep or dim >= offset,
            lambda dim=dim: f"expand: -1 is not allowed in the new, leading dimension {dim} of {tuple(shape)}",
            RuntimeError,
        )
        lengths.append(x.shape[dim - offset] if keep else length)
    for dim, length in enumerate(x.shape):
        check(
            known(length == 1) or same(length, lengths[dim + offset]),
            lambda dim=dim, length=length: (
                f"expand: The expanded size of the tensor ({lengths[dim + offset]}) must match the existing size "
                f"({length}) at non-singleton dimension {dim + offset}.  Target sizes: {list(shape)}.  "
                f"Tensor sizes: {list(x.shape)}"
            ),
            RuntimeError,
        )
    return expand_to(x, lengths)


@clangop()
def unsqueeze(x: TensorProxy, dim: int) -> TensorProxy:
    """x with a dim of length 1 before `dim`."""
    dim = check_dim("unsqueeze", dim, x.ndim + 1)
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    return prims.broadcast_in_dim(x, shape, tuple(d for d in range(len(shape)) if d != dim))


@clangop()
def slice_in_dim(x: TensorProxy, dim: int, start: Dim | None, stop: Dim | None, step: int = 1) -> TensorProxy:
    """x[start:stop:step] along `dim`, with Python's meaning of negative, missing and too large bounds."""
    length = x.shape[dim]
    check(step > 0, lambda: f"getitem: slice step must be positive, but got {step}", ValueError)
    start, stop = clamp_bound(start, length, 0), clamp_bound(stop, length, length)
    if not known(stop >= start):
        stop = torch.sym_max(start, stop)
    if step == 1 and known(start == 0) and known(stop == length):
        return x
    return prims.slice(x, dim, start, stop, step)


def clamp_bound(bound: Dim | None, length: Dim, default: Dim) -> Dim:
    """A slice's bound in [0, length]; arithmetic only, so that symbolic lengths stay symbolic."""
    if bound is None:
        return default
    if isinstance(bound, int) and isinstance(length, int):
        return min(max(bound + length if bound < 0 else bound, 0), length)
    if known(bound < 0):
        bound = bound + length
        return bound if known(bound >= 0) else torch.sym_max(bound, 0)
    if isinstance(bound, int) and bound >= 2**62:
        return length
    if not known(bound >= 0):
        bound = torch.sym_ite(bound < 0, torch.sym_max(bound + length, 0), bound)
    return bound if known(bound <= length) else torch.sym_min(bound, length)
