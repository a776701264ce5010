"""Triton kernels on rows of logits. This module imports Triton."""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8


@triton.jit
def _tanh(x):
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy(
    losses,
    gradient,
    logits,
    target,
    counts,
    gradient_stride,
    logits_stride,
    target_stride,
    classes,
    ignore_index,
    before,
    after,
    smoothing,
    HAS_TANH: tl.constexpr,
    IS_SMOOTHED: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its loss, and the gradient of its logits, which may take their memory. The running maximum and sum are
    those of each lane, and are joined at the end of the row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    gradient += row * gradient_stride
    label = tl.load(target + row * target_stride).to(tl.int64)
    count = tl.load(counts + row)
    lanes = tl.arange(0, BLOCK)
    high = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, classes, BLOCK):
        inside = start + lanes < classes
        x = tl.load(logits + start + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        if HAS_TANH:
            x = tl.where(inside, after * _tanh(before * x), -float("inf"))
        else:
            x = tl.where(inside, after * x, -float("inf"))
        new = tl.maximum(high, x)
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(high - shift) + tl.exp(x - shift)
        high = new
        if IS_SMOOTHED:
            plain += tl.where(inside, x, 0.0)
    top = tl.max(high, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    lse = top + tl.log(tl.sum(total * tl.exp(high - shift), 0))
    is_used = label != ignore_index
    exists = (label >= 0) & (label < classes)
    chosen = tl.load(logits + label, mask=exists, other=float("nan")).to(tl.float32)
    chosen = after * (_tanh(before * chosen) if HAS_TANH else chosen)
    loss = lse - chosen
    if IS_SMOOTHED:
        loss = (1 - smoothing) * loss + smoothing * (lse - tl.sum(plain, 0) / classes)
    tl.store(losses + row, tl.where(is_used, loss, 0.0))
    if HAS_GRADIENT:
        tl.debug_barrier()  # the label's logit is read before its gradient takes its place
        for start in range(0, classes, BLOCK):
            column = start + lanes
            inside = column < classes
            x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
            slope = after
            if HAS_TANH:
                t = _tanh(before * x)
                slope = after * before * (1 - t * t)
                x = after * t
            else:
                x = after * x
            g = tl.exp(x - lse) - tl.where(column == label, 1.0, 0.0)
            if IS_SMOOTHED:
                g += smoothing * (tl.where(column == label, 1.0, 0.0) - 1.0 / classes)
            g = tl.where(is_used, g * slope * count, 0.0)
            tl.store(gradient + column, g.to(gradient.dtype.element_ty), mask=inside)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor | None,
    formula: tuple[float, bool, float],
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Return the cross entropy of each row, and write the gradient of the logits times
    `counts` to `out`.

    The scores are after * x or, with a tanh, after * tanh(before * x). A target out of range gives NaN.

    Args:
        logits: (N, V), of float32, bfloat16 or float16.
        target: (N,), of integers.
        counts: (N,), of float32: the factor of each row's gradient.
        out: (N, V), of the dtype of logits; it may be logits itself. None: only losses are wanted.
        formula: (before, whether there is a tanh, after).
        ignore_index: The target of rows whose loss and gradient are 0.
        label_smoothing: The part of the loss that is spread over all classes.

    Returns:
        (N,), of float32.
    """
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return losses
    x = logits if logits.stride(1) == 1 or classes == 1 else logits.contiguous()
    before, has_tanh, after = formula
    gradient = x if out is None else out
    tensors = losses, gradient, x, target, counts.contiguous()
    strides = gradient.stride(0), x.stride(0), target.stride(0)
    constants = {"HAS_TANH": has_tanh, "IS_SMOOTHED": bool(label_smoothing), "HAS_GRADIENT": out is not None}
    with torch.cuda.device_of(logits):
        _cross_entropy[(rows,)](
            *(*tensors, *strides, classes, ignore_index, before, after, label_smoothing),
            **constants,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses
