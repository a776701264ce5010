"""Cross entropy of integer targets: one program for each row of logits, read once forward and once backward."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from .launch import check, check_tensor, contiguous_like, launch, needs_grad, unit_stride

REDUCTIONS = ("none", "mean", "sum")
FORWARD_BLOCK, FORWARD_WARPS = 4096, 4
BACKWARD_BLOCK, BACKWARD_WARPS = 8192, 16
REDUCED_BLOCK = 1024


@triton.jit(do_not_specialize=["target_stride", "ignore_index"])
def _forward(losses, lse, logits, target, logits_stride, target_stride, classes, ignore_index, BLOCK: tl.constexpr):
    """log(sum(exp(row))) with a running maximum, and the loss."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    label = tl.load(target + row * target_stride)
    high = -float("inf")
    total = 0.0
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < classes, other=-float("inf")).to(tl.float32)
        new_high = tl.maximum(high, tl.max(value, 0))
        shift = tl.where(new_high == -float("inf"), 0.0, new_high)  # a block of -inf alone adds nothing
        total = total * tl.exp(high - shift) + tl.sum(tl.exp(value - shift), 0)
        high = new_high
    row_lse = high + tl.log(total)
    exists = (label >= 0) & (label < classes)
    label_logit = tl.load(logits + label, mask=exists, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(label == ignore_index, 0.0, row_lse - label_logit))
    tl.store(lse + row, row_lse)


@triton.jit(do_not_specialize=["target_stride", "rows", "ignore_index"])
def _reduce(out, count, losses, target, target_stride, rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum or the mean of the losses, and how many targets are not ignored: in one program, always in one order."""
    total = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(losses + row, mask=row < rows, other=0.0)
        label = tl.load(target + row.to(tl.int64) * target_stride, mask=row < rows, other=ignore_index)
        counts += tl.where(label == ignore_index, 0.0, 1.0)
    result, size = tl.sum(total, 0), tl.sum(counts, 0)
    tl.store(out, (result / size if MEAN else result).to(out.dtype.element_ty))
    tl.store(count, size)


@triton.jit(do_not_specialize=["grad_stride", "target_stride", "ignore_index"])
def _backward(
    grad_logits,
    grad_losses,
    count,
    lse,
    logits,
    target,
    grad_stride,
    logits_stride,
    target_stride,
    classes,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    label = tl.load(target + row * target_stride)
    g = tl.load(grad_losses + row * grad_stride).to(tl.float32)
    if MEAN:
        g /= tl.load(count)
    row_lse = tl.load(lse + row)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < classes
        value = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        grad = (tl.exp(value - row_lse) - tl.where(column == label, 1.0, 0.0)) * g
        grad = tl.where(label == ignore_index, 0.0, grad)
        tl.store(grad_logits + row * classes + column, grad.to(grad_logits.dtype.element_ty), mask=inside)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, input: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str
    ) -> torch.Tensor:
        losses, lse = _run_forward(input, target, ignore_index)
        loss, count = _reduced(losses, input, target, ignore_index, reduction)
        ctx.save_for_backward(input, target, lse, count)
        ctx.options = ignore_index, reduction
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        input, target, lse, count = ctx.saved_tensors
        grad = cross_entropy_backward(grad_output, input, target, *ctx.options, lse=lse, count=count)
        return grad, None, None, None


def cross_entropy(
    input: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """log(sum(exp(input[n]))) - input[n, target[n]], and 0 where target[n] is ignore_index.

    A target out of range gives NaN.
    Shapes: input is [N, V], target is [N]; out is [N] for reduction="none", else [].
    Dtypes: target is int64; out has input's dtype.
    Raises: RuntimeError when a shape, dtype or device does not fit; ValueError for an unknown reduction.
    """
    _check("cross_entropy", input, target, reduction)
    if needs_grad(input):
        return _CrossEntropy.apply(input, target, ignore_index, reduction)
    losses, _ = _run_forward(input, target, ignore_index)
    return _reduced(losses, input, target, ignore_index, reduction)[0]


def cross_entropy_forward(
    input: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross_entropy, log(sum(exp(input))) of each row in float32, which its backward reads)."""
    _check("cross_entropy_forward", input, target, reduction)
    losses, lse = _run_forward(input, target, ignore_index)
    return _reduced(losses, input, target, ignore_index, reduction)[0], lse


def cross_entropy_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    lse: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """grad_input of cross_entropy.

    lse: log(sum(exp(input))) of each row; None finds it again. count: how many targets are not ignored, likewise.
    """
    op = "cross_entropy_backward"
    _check(op, input, target, reduction)
    shape = target.shape if reduction == "none" else torch.Size(())
    check(
        grad_output.shape == shape and grad_output.device == input.device,
        lambda: (
            f"{op}: grad_output is {list(grad_output.shape)} on {grad_output.device}, "
            f"but must be {list(shape)} on {input.device}"
        ),
    )
    grad_input = contiguous_like(input)
    if input.numel() == 0:
        return grad_input
    if lse is None:
        _, lse = _run_forward(input, target, ignore_index)
    if count is None and reduction == "mean":
        count = (target != ignore_index).sum(dtype=torch.float32)
    rows, classes = input.shape
    logits = unit_stride(input)
    launch(
        _backward,
        rows,
        grad_input,
        grad_output,
        count,
        lse,
        logits,
        target,
        grad_output.stride(0) if reduction == "none" else 0,
        logits.stride(0),
        target.stride(0),
        classes,
        ignore_index,
        MEAN=reduction == "mean",
        BLOCK=BACKWARD_BLOCK,
        warps=BACKWARD_WARPS,
    )
    return grad_input


def _check(op: str, input: torch.Tensor, target: torch.Tensor, reduction: str) -> None:
    check_tensor(op, "input", input)
    check(target.device == input.device, lambda: f"{op}: target is on {target.device}, input on {input.device}")
    check(target.dtype == torch.int64, lambda: f"{op}: target is {target.dtype}, but must be torch.int64")
    check(
        input.ndim == 2 and target.shape == input.shape[:1],
        lambda: f"{op}: input is {list(input.shape)} and target {list(target.shape)}, but they must be [N, V] and [N]",
    )
    check(
        reduction in REDUCTIONS,
        lambda: f"{op}: reduction is {reduction!r}, but must be {' or '.join(map(repr, REDUCTIONS))}",
        ValueError,
    )


def _run_forward(input: torch.Tensor, target: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, log(sum(exp(input)))) of the rows, in float32."""
    rows, classes = input.shape
    losses = torch.empty(rows, dtype=torch.float32, device=input.device)
    lse = torch.empty_like(losses)
    if rows == 0:
        return losses, lse
    check(classes > 0, lambda: "cross_entropy: input has no classes")
    logits = unit_stride(input)
    strides = logits.stride(0), target.stride(0)
    read = losses, lse, logits, target
    launch(_forward, rows, *read, *strides, classes, ignore_index, BLOCK=FORWARD_BLOCK, warps=FORWARD_WARPS)
    return losses, lse


def _reduced(
    losses: torch.Tensor, input: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the loss in input's dtype, how many targets are not ignored, where that was counted)."""
    if reduction == "none":
        return losses.to(input.dtype), None
    loss = torch.empty((), dtype=input.dtype, device=input.device)
    count = torch.empty((), dtype=torch.float32, device=input.device)
    args = loss, count, losses, target, target.stride(0), len(losses), ignore_index
    launch(_reduce, 1, *args, MEAN=reduction == "mean", BLOCK=REDUCED_BLOCK)
    return loss, count
