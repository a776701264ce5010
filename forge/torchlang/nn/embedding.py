"""The embeddings of torch.nn.functional."""

import math

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, Symbol, Tag, TensorProxy, check, current_trace
from forge.ir.memory import Memory
from forge.prims.core import same_shape, statically_true, torch_check
from forge.torchlang.core import torchsymbol, write


def check_table(op: str, weight: TensorProxy, indices: TensorProxy, sparse: bool) -> None:
    """Raise for a table or indices of a wrong shape or dtype, or if gradients would be sparse."""
    torch_check(
        isinstance(indices, TensorProxy) and indices.dtype in (torch.int64, torch.int32),
        lambda: (
            f"{op}: Expected tensor for argument 'indices' to have one of the scalar types: Long, Int; but got "
            f"{indices!r}"
        ),
    )
    torch_check(weight.ndim == 2, lambda: f"{op}: 'weight' must be 2-D, but it is {weight}")
    check(
        not sparse,
        lambda: (
            f"{op}: sparse=True is not supported: the gradient would be a sparse tensor "
            "(forge/torchlang/nn/embedding.py)"
        ),
        NotImplementedError,
    )


def padding_row(weight: TensorProxy, padding_idx: int | None) -> Dim:
    """Return padding_idx counted from the front; -1 for None."""
    if padding_idx is None:
        return -1
    rows = weight.shape[0]
    check(
        not prims.statically_true(padding_idx >= rows) and not prims.statically_true(padding_idx < -rows),
        lambda: f"embedding: Padding_idx must be within num_embeddings ({rows}), but it is {padding_idx}",
        AssertionError,
    )
    return padding_idx if padding_idx >= 0 else padding_idx + rows


def shorten(weight: TensorProxy, indices: TensorProxy, max_norm: float, norm_type: float, memory: Memory) -> None:
    """Shorten the rows that are read to at most max_norm, in place and without a gradient."""
    trace = current_trace()
    with trace.set_tags(trace.tags | {Tag.NO_GRAD}):
        new = prims.embedding_renorm(*memory.read_all((weight, indices)), max_norm, norm_type)
        write(weight, new, memory, "embedding")


def handle_max_norm(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> TensorProxy:
    """Shorten the rows that are read to max_norm, and make the call without max_norm."""
    arguments = symbol.bind(args, kwargs)
    if arguments["max_norm"] is not None:
        shorten(arguments["weight"], arguments["input"], arguments["max_norm"], arguments["norm_type"], memory)
        args, kwargs = (), {**arguments, "max_norm": None}
    return symbol(*memory.read_all(args), **memory.read_all(kwargs))


@torchsymbol(torch.ops.aten.embedding_renorm.default, inplace=torch.embedding_renorm_)
def embedding_renorm(self: TensorProxy, indices: TensorProxy, max_norm: float, norm_type: float) -> TensorProxy:
    """Return the table with the rows at `indices` scaled down to max_norm, if their norm is larger."""
    check_table("embedding_renorm", self, indices, False)
    return prims.embedding_renorm(self, indices, max_norm, norm_type)


@torchsymbol(F.embedding, handler=handle_max_norm)
def embedding(
    input: TensorProxy,
    weight: TensorProxy,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TensorProxy:
    """Return the rows of `weight` at `input`.

    Shapes: weight is (rows, features); out is input's shape and then features.
    max_norm: the maximum norm of the rows that are read; the handler shortens them in weight, so it is None here.
    Raises: NotImplementedError for sparse gradients.
    """
    check_table("embedding", weight, input, sparse)
    return prims.embedding(weight, input, padding_row(weight, padding_idx), scale_grad_by_freq)


@torchsymbol(torch.embedding)
def torch_embedding(
    weight: TensorProxy,
    indices: TensorProxy,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TensorProxy:
    """Return the rows of `weight` at `indices`."""
    check_table("embedding", weight, indices, sparse)
    return prims.embedding(weight, indices, padding_idx, scale_grad_by_freq)


@torchsymbol(F.one_hot)
def one_hot(tensor: TensorProxy, num_classes: int = -1) -> TensorProxy:
    """Return 1 at each index along a new last dim, else 0. Dtypes: int64."""
    torch_check(
        tensor.dtype == torch.int64,
        lambda: f"one_hot: one_hot is only applicable to index tensor of type LongTensor, but got {tensor}",
    )
    check(
        num_classes != -1,
        lambda: "one_hot: without num_classes the shape depends on data, which is not known while tracing",
        NotImplementedError,
    )
    torch_check(num_classes > 0, lambda: f"one_hot: Class values must be non-negative, got {num_classes}")
    if tensor.device.type == "cpu":  # no synchronization with a GPU, as in torch
        prims.require(clang.all(tensor >= 0), "Class values must be non-negative.", "RuntimeError")
        prims.require(clang.all(tensor < num_classes), "Class values must be smaller than num_classes.", "RuntimeError")
    classes = prims.iota(num_classes, 0, 1, torch.int64, tensor.device)
    return clang.convert(clang.unsqueeze(tensor, -1) == classes, torch.int64)


# embeddings reduced over bags of indices


Optional = TensorProxy | None


def _bags(input: TensorProxy, offsets: TensorProxy | None, count: Dim) -> TensorProxy:
    """Return the number of each index's bag: bags of one length, or bags that begin at `offsets`."""
    size = input.numel()
    places = prims.iota(size, 0, 1, torch.int64, input.device)
    if statically_true(size == 0):
        return places
    if offsets is None:
        return clang.floor_divide(places, size // count)
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
    """Return the sum, mean or maximum of the rows of `weight` at each bag of indices; zeros for an empty bag.

    Shapes: input (bags, length), or (indices,) with the bags' first positions in offsets, whose last element is the
    number of indices if include_last_offset; weight (rows, features); out (bags, features).
    max_norm: the maximum norm of the rows that are read; the handler shortens them in weight, so it is None here.
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
