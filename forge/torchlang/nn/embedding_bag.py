"""Embeddings summed up over bags of indices."""

import math

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, TensorProxy, check
from forge.prims.core import known, same_shape
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn.embedding import check_table, handle_max_norm, padding_row

Optional = TensorProxy | None


def _bags(input: TensorProxy, offsets: TensorProxy | None, count: Dim) -> TensorProxy:
    """Return the number of the bag that each index is in: bags of one length, or such that begin at `offsets`."""
    length = input.numel()
    places = prims.iota(length, 0, 1, torch.int64, input.device)
    if known(length == 0):
        return places
    if offsets is None:
        return clang.floor_divide(places, length // count)
    starts = clang.slice_in_dim(clang.convert(offsets, torch.int64), 0, 0, count)
    return prims.searchsorted(starts, places, True, torch.int64) - 1


def _check_bags(
    input: TensorProxy, weight: TensorProxy, offsets: Optional, mode: str, scaled: bool, per_sample_weights: Optional
) -> None:
    op = "embedding_bag"
    check(
        per_sample_weights is None or same_shape(per_sample_weights.shape, input.shape),
        lambda: (
            f"{op}: If per_sample_weights ({per_sample_weights}) is not None, then it must have the same shape as the "
            f"input ({input})"
        ),
    )
    check(weight.ndim == 2, lambda: f"{op}: weight has to be a 2D Tensor, but got {weight}")
    check(input.ndim in (1, 2), lambda: f"{op}: input has to be 1D or 2D Tensor, but got {input}")
    check(
        (input.ndim == 2) == (offsets is None) and (offsets is None or offsets.ndim == 1),
        lambda: f"{op}: offsets has to be a 1D Tensor where input is 1D, and None where it is 2D, but is {offsets}",
    )
    check(mode in ("sum", "mean", "max"), lambda: f"{op}: mode has to be one of sum, mean or max, but is {mode!r}")
    check(mode != "max" or not scaled, lambda: f"{op}: max mode does not support scaling the gradient by the frequency")
    check(
        mode == "sum" or per_sample_weights is None,
        lambda: f"{op}: per_sample_weights is only supported for mode='sum', but mode is {mode!r}",
        NotImplementedError,
    )


@torchsymbol(F.embedding_bag, handler=handle_max_norm)
def embedding_bag(
    input: TensorProxy,
    weight: TensorProxy,
    offsets: Optional = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Optional = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> TensorProxy:
    """Return the sum, mean or maximum of the rows of `weight` that each bag of indices names; zeros for an empty bag.

    Shapes: input (bags, length), or (indices,) with the bags' first places in offsets, which has the number of indices
    as its last element where include_last_offset; weight (rows, features); out (bags, features).
    max_norm: no row that is read is longer; its handler writes to weight, so that here it is None.
    Raises: NotImplementedError for sparse gradients.
    """
    _check_bags(input, weight, offsets, mode, scale_grad_by_freq, per_sample_weights)
    check_table("embedding_bag", weight, input, sparse)
    count = input.shape[0] if offsets is None else offsets.shape[0] - int(include_last_offset)
    shape = (count, weight.shape[1])
    indices, padding = clang.reshape(input, (input.numel(),)), padding_row(weight, padding_idx)
    rows = prims.embedding(weight, indices, padding, scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * clang.reshape(per_sample_weights, (input.numel(), 1))
    bags, used = _bags(input, offsets, count), indices != padding
    zeros = prims.full(shape, 0, rows.dtype, rows.device)
    counts = clang.index_add(clang.select(zeros, 1, 0), 0, bags, clang.convert(used, rows.dtype))
    used, counts = clang.unsqueeze(used, 1), clang.unsqueeze(counts, 1)
    if mode == "max":
        places = clang.expand_to(clang.unsqueeze(bags, 1), rows.shape)
        largest = prims.scatter_reduce(zeros, 0, places, clang.where(used, rows, -math.inf), "amax", False)
        return clang.where(counts == 0, 0, largest)
    total = clang.index_add(zeros, 0, bags, clang.where(used, rows, 0))
    return total if mode == "sum" else total / clang.maximum(counts, 1)
