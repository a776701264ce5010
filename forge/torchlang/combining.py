"""The functions of torch that lay out tensors in one: blocks, products, padding, chunks; and unsafe splits."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import Dim, Number, Symbol, TensorProxy
from forge.prims.core import check_dim, same, torch_check
from forge.torch_internals.functions import torch_chunk_cat, vf_block_diag, vf_cartesian_prod
from forge.torchlang import joining
from forge.torchlang.core import View, check_tensor, torchsymbol
from forge.torchlang.nn import resample
from forge.torchlang.shape import meshgrid, varargs

Tensors = Sequence[TensorProxy]
Parts = tuple[TensorProxy, ...]


@torchsymbol(torch.functional.block_diag, vf_block_diag)
def block_diag(*tensors: Any) -> TensorProxy:
    """Return a matrix with the tensors, of at most 2 dims, one after another along its diagonal, promoted to one
    dtype."""
    tensors = varargs(tensors[0], tensors[1:]) if tensors else ()
    for i, tensor in enumerate(tensors):
        check_tensor("block_diag", tensors=tensor)
        torch_check(
            tensor.ndim <= 2,
            lambda i=i, tensor=tensor: (
                f"torch.block_diag: Input tensors must have 2 or fewer dimensions. Input {i} is {tensor}"
            ),
        )
    if not tensors:
        return prims.full((1, 0), 0, torch.get_default_dtype(), clang.canonical_device())
    dtype = clang.compute_dtype(*tensors)  # by the original ranks: a 0-d tensor does not widen others
    blocks = [clang.convert(clang.reshape(t, (1, t.numel())) if t.ndim < 2 else t, dtype) for t in tensors]
    width: Dim = sum(block.shape[1] for block in blocks)
    before: Dim = 0
    rows = []
    for block in blocks:
        after = width - before - block.shape[1]
        rows.append(prims.pad(block, ((0, 0), (before, after)), 0))
        before = before + block.shape[1]
    return clang.cat(rows, 0)


@torchsymbol(torch.functional.cartesian_prod, vf_cartesian_prod)
def cartesian_prod(*tensors: Any) -> TensorProxy:
    """Return every combination of one element of each vector as a row; a single vector is returned itself. Dtypes: the
    same for all."""
    tensors = varargs(tensors[0], tensors[1:])
    for tensor in tensors:
        check_tensor("cartesian_prod", tensors=tensor)
        torch_check(tensor.ndim == 1, lambda tensor=tensor: f"cartesian_prod: Expect a 1D vector, but got {tensor}")
    if len(tensors) == 1:
        return tensors[0]
    return clang.stack([clang.reshape(grid, (grid.numel(),)) for grid in meshgrid(*tensors, indexing="ij")], 1)


@torchsymbol(torch.diagflat, Tensor.diagflat)
def diagflat(input: TensorProxy, offset: int = 0) -> TensorProxy:
    """Return a matrix with all elements on a diagonal, zeros elsewhere."""
    side = input.numel() + abs(offset)
    return prims.diagonal_backward(clang.reshape(input, (input.numel(),)), (side, side), offset, 0, 1)


@torchsymbol(torch.constant_pad_nd)
def constant_pad_nd(input: TensorProxy, pad: Sequence[Dim], value: Number = 0) -> TensorProxy:
    """Return the input padded with `value`, or cropped, at the ends of its last dims: (before, after) of the last, …"""
    return resample.pad(input, pad, "constant", value)


def _as_chunks(tensor: TensorProxy, dim: int, chunks: int) -> TensorProxy:
    """Return one tensor's chunks along `dim`, the last padded with zeros, each as a row."""
    size = tensor.shape[dim]
    missing = -size % chunks
    padded = prims.pad(tensor, tuple((0, missing if i == dim else 0) for i in range(tensor.ndim)), 0)
    return clang.reshape(
        padded, (*tensor.shape[:dim], chunks, padded.numel() // math.prod(tensor.shape[:dim]) // chunks)
    )


@torchsymbol(torch_chunk_cat)
def _chunk_cat(tensors: Tensors, dim: int, num_chunks: int) -> TensorProxy:
    """Return each tensor in `num_chunks` chunks along `dim`, the last padded with zeros; the k-th chunks of all tensors
    are concatenated.

    Shapes: the tensors' dims before `dim` agree; out has these, num_chunks, and the elements of a chunk of each.
    """
    torch_check(len(tensors) > 0, lambda: "_chunk_cat expects a non-empty input tensor list")
    torch_check(num_chunks >= 1, lambda: f"_chunk_cat expects positive num_chunks, but got {num_chunks}")
    first = tensors[0]
    dim = check_dim("_chunk_cat", dim, first.ndim)
    for tensor in tensors:
        torch_check(
            not prims.statically_true(tensor.numel() == 0) and tensor.ndim > dim,
            lambda tensor=tensor: f"_chunk_cat expects non-empty tensor with more than {dim} dims, but got {tensor}",
        )
        torch_check(
            tensor.dtype == first.dtype,
            lambda tensor=tensor: f"_chunk_cat expects all input tensors with the same dtype: {first} and {tensor}",
        )
        torch_check(
            all(map(same, tensor.shape[:dim], first.shape[:dim])),
            lambda tensor=tensor: (
                "_chunk_cat expects same sizes of 0,...,dim-1 dimensions for all tensors, "
                f"but dim is {dim}, and they are {first} and {tensor}"
            ),
        )
    return clang.cat([_as_chunks(tensor, dim, num_chunks) for tensor in tensors], dim + 1)


# parts that share memory without autograd's knowledge


def _unsafe(name: str, parts: Symbol) -> Symbol:
    def body(*args: Any, **kwargs: Any) -> Parts:
        return parts.definition(*args, **kwargs)

    body.__name__, body.__doc__ = name, f"{parts.__doc__} Each part may be changed where nothing else is read again."
    return torchsymbol(getattr(torch, name), getattr(Tensor, name), view=View.ALWAYS)(body)


unsafe_chunk = _unsafe("unsafe_chunk", joining.chunk)
unsafe_split = _unsafe("unsafe_split", joining.tensor_split_method)
unsafe_split_with_sizes = _unsafe("unsafe_split_with_sizes", joining.split_with_sizes)
