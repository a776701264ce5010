"""The multi-class margin losses: each row's target against all other classes."""

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import TensorProxy, check
from forge.prims.core import same, same_shape, statically_true, torch_check
from forge.torchlang.nn.loss import loss_symbol, reduce_loss


def _check_rows(op: str, input: TensorProxy, least: int) -> None:
    """Check that the input is a matrix of rows, a vector that is one row, or one number."""
    torch_check(
        input.ndim <= 2 and not any(statically_true(size == 0) for size in input.shape[least:]),
        lambda: f"{op}: Expected non-empty vector or matrix with optional 0-dim batch size, but got: {input}",
    )


def _matrix(x: TensorProxy) -> TensorProxy:
    """Return x as a matrix of one row unless it is a matrix."""
    return x if x.ndim == 2 else clang.reshape(x, (1, x.numel()))


@loss_symbol(F.multi_margin_loss)
def multi_margin_loss(
    input: TensorProxy,
    target: TensorProxy,
    p: int = 1,
    margin: float = 1.0,
    weight: TensorProxy | None = None,
    reduction: str = "mean",
) -> TensorProxy:
    """Return the sum over the other classes of max(0, margin - input[target] + input) ** p * weight[target], over C.

    Shapes: input (N, C) or (C,), target (N,) or (), weight (C,).
    """
    op = "multi_margin_loss"
    check(p in (1, 2), lambda: f"{op}: only p == 1 and p == 2 supported, but p is {p}", ValueError)
    check(
        weight is None or weight.ndim == 1, lambda: f"{op}: weight must be one-dimensional, but is {weight}", ValueError
    )
    prims.check_dtype(op, input, prims.REAL)
    _check_rows(op, input, input.ndim - 1 if input.ndim else 0)
    rows = _matrix(input)
    count, width = rows.shape
    torch_check(
        target.ndim <= 1 and same(target.numel(), count),
        lambda: f"{op}: inconsistent target size, expected {count} but got {target}",
    )
    torch_check(
        weight is None or same(weight.shape[0], width),
        lambda: f"{op}: inconsistent weight size, expected {width} but got {weight}",
    )
    classes = clang.reshape(target, (count, 1))
    short = margin - prims.gather(rows, 1, classes) + rows
    others = prims.iota(width, 0, 1, torch.int64, input.device) != classes
    loss = clang.where(others & (short > 0), short if p == 1 else short * short, 0)
    if weight is not None:
        loss = loss * clang.reshape(prims.gather(weight, 0, clang.reshape(target, (count,))), (count, 1))
    loss = clang.sum(loss, 1) / width
    return reduce_loss(loss if target.ndim or reduction != "none" else clang.reshape(loss, ()), reduction)


@loss_symbol(F.multilabel_margin_loss)
def multilabel_margin_loss(input: TensorProxy, target: TensorProxy, reduction: str = "mean") -> TensorProxy:
    """Return the sum over the targets and all other classes of max(0, 1 - input[target] + input), over C.

    Shapes: input (N, C) or (C,), target the same: the classes of a row, up to its first negative number.
    """
    op = "multilabel_margin_loss"
    prims.check_dtype(op, input, prims.REAL)
    _check_rows(op, input, input.ndim - 1 if input.ndim else 0)
    torch_check(
        same_shape(target.shape, input.shape),
        lambda: f"{op}: inconsistent target size: {target} for input of size: {input}",
    )
    rows, classes = _matrix(input), _matrix(target)
    width = rows.shape[1]
    valid = clang.eq(prims.cumsum(clang.convert(classes < 0, torch.int64), 1), 0)
    indices = clang.where(valid, classes, 0)
    hits = clang.unsqueeze(indices, 2) == prims.iota(width, 0, 1, torch.int64, input.device)
    is_target = clang.any(hits & clang.unsqueeze(valid, 2), 1)
    short = 1 - clang.unsqueeze(prims.gather(rows, 1, indices), 2) + clang.unsqueeze(rows, 1)
    counts = clang.unsqueeze(valid, 2) & clang.logical_not(clang.unsqueeze(is_target, 1)) & (short > 0)
    loss = clang.sum(clang.where(counts, short, 0), (1, 2)) / width
    return reduce_loss(loss if target.ndim == 2 or reduction != "none" else clang.reshape(loss, ()), reduction)
