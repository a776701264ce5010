"""Embeddings."""

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import TensorProxy, check
from forge.torchlang.core import torchsymbol


def _check_table(op: str, weight: TensorProxy, indices: TensorProxy, sparse: bool) -> None:
    check(
        isinstance(indices, TensorProxy) and indices.dtype in (torch.int64, torch.int32),
        lambda: (
            f"{op}: Expected tensor for argument 'indices' to have one of the scalar types: Long, Int; but got "
            f"{indices!r}"
        ),
        RuntimeError,
    )
    check(weight.ndim == 2, lambda: f"{op}: 'weight' must be 2-D, but it is {weight}", RuntimeError)
    check(
        not sparse,
        lambda: (
            f"{op}: sparse=True is not supported: the gradient would be a sparse tensor "
            "(forge/torchlang/nn/embedding.py)"
        ),
        NotImplementedError,
    )


def _padding_row(weight: TensorProxy, padding_idx: int | None) -> int:
    """padding_idx counted from the front; -1 for none."""
    if padding_idx is None:
        return -1
    rows = weight.shape[0]
    check(
        not prims.known(padding_idx >= rows) and not prims.known(padding_idx < -rows),
        lambda: f"embedding: Padding_idx must be within num_embeddings ({rows}), but it is {padding_idx}",
        AssertionError,
    )
    return padding_idx if padding_idx >= 0 else padding_idx + rows


@torchsymbol(F.embedding)
def embedding(
    input: TensorProxy,
    weight: TensorProxy,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TensorProxy:
    """The rows of `weight` at `input`.

    Shapes: weight is (rows, features); out is input's shape and then features.
    Raises: NotImplementedError for max_norm, which changes weight, and for sparse gradients.
    """
    check(
        max_norm is None,
        lambda: (
            f"embedding: max_norm={max_norm} is not supported: it changes weight in place "
            "(forge/torchlang/nn/embedding.py)"
        ),
        NotImplementedError,
    )
    _check_table("embedding", weight, input, sparse)
    return prims.embedding(weight, input, _padding_row(weight, padding_idx), scale_grad_by_freq)


@torchsymbol(torch.embedding)
def torch_embedding(
    weight: TensorProxy,
    indices: TensorProxy,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TensorProxy:
    """The rows of `weight` at `indices`."""
    _check_table("embedding", weight, indices, sparse)
    return prims.embedding(weight, indices, padding_idx, scale_grad_by_freq)


@torchsymbol(F.one_hot)
def one_hot(tensor: TensorProxy, num_classes: int = -1) -> TensorProxy:
    """1 at each index along a new last dim, else 0. Dtypes: int64."""
    check(
        tensor.dtype == torch.int64,
        lambda: f"one_hot: one_hot is only applicable to index tensor of type LongTensor, but got {tensor}",
        RuntimeError,
    )
    check(
        num_classes != -1,
        lambda: "one_hot: without num_classes the shape depends on data, which is not known while tracing",
        NotImplementedError,
    )
    check(num_classes > 0, lambda: f"one_hot: Class values must be non-negative, got {num_classes}", RuntimeError)
    classes = prims.iota(num_classes, 0, 1, torch.int64, tensor.device)
    return clang.convert(clang.unsqueeze(tensor, -1) == classes, torch.int64)
