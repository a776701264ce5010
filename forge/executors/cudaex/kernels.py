"""Triton kernels on rows of logits. This module imports Triton."""

import torch
import triton
import triton.language as tl

from forge.torch_internals.fake_tensors import FakeTensor

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
    logits_width,
    gradient_width,
    classes,
    ignore_index,
    before,
    after,
    smoothing,
    HAS_TANH: tl.constexpr,
    IS_SMOOTHED: tl.constexpr,
    IS_SCORED: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a row's loss, and the gradient of its logits, which may take their memory. The running maximum and sum
    are those of each lane, and are joined at the end of the row."""
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
        x = tl.load(logits + start + lanes, mask=start + lanes < logits_width, other=0.0).to(tl.float32)
        if HAS_TANH and not IS_SCORED:
            x = _tanh(before * x)
        if not IS_SCORED:
            x *= after
        x = tl.where(inside, x, -float("inf"))
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
    label_logit = tl.load(logits + label, mask=exists, other=float("nan")).to(tl.float32)
    if HAS_TANH and not IS_SCORED:
        label_logit = _tanh(before * label_logit)
    if not IS_SCORED:
        label_logit *= after
    loss = lse - label_logit
    if IS_SMOOTHED:
        loss = (1 - smoothing) * loss + smoothing * (lse - tl.sum(plain, 0) / classes)
    tl.store(losses + row, tl.where(is_used, loss, 0.0))
    if HAS_GRADIENT:
        tl.debug_barrier()  # the label's logit is read before its gradient takes its place
        for start in range(0, gradient_width, BLOCK):
            column = start + lanes
            x = tl.load(logits + column, mask=column < logits_width, other=0.0).to(tl.float32)
            slope = after
            if HAS_TANH:
                t = x / after if IS_SCORED else _tanh(before * x)
                slope = after * before * (1 - t * t)
                x = after * t
            elif not IS_SCORED:
                x *= after
            of_label = tl.where(column == label, 1.0, 0.0)
            g = tl.exp(x - lse) - of_label
            if IS_SMOOTHED:
                g += smoothing * (of_label - 1.0 / classes)
            g = tl.where(is_used & (column < classes), g * slope * count, 0.0)
            tl.store(gradient + column, g.to(gradient.dtype.element_ty), mask=column < gradient_width)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor | None,
    classes: int,
    formula: tuple[float, bool, float],
    is_scored: bool,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Return the cross entropy of each row, and write the gradient of the logits times
    `counts` to `out`.

    The scores are after * x or, with a tanh, after * tanh(before * x). A target out of range gives NaN.

    Args:
        logits: (N, V) or wider, of float32, bfloat16 or float16.
        target: (N,), of integers.
        counts: (N,), of float32: the factor of each row's gradient.
        out: (N, V) or wider, of the dtype of logits; it may be logits itself. What is no class gets 0. None: only
            losses are wanted.
        classes: V, the number of classes.
        formula: (before, whether there is a tanh, after).
        is_scored: Whether the logits are scores already.
        ignore_index: The target of rows whose loss and gradient are 0.
        label_smoothing: The part of the loss that is spread over all classes.

    Returns:
        (N,), of float32.
    """
    rows = logits.shape[0]
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if isinstance(logits, FakeTensor) or rows == 0:
        return losses
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    before, has_tanh, after = formula
    gradient = x if out is None else out
    tensors = losses, gradient, x, target, counts.contiguous()
    strides = gradient.stride(0), x.stride(0), target.stride(0)
    widths = x.shape[1], gradient.shape[1]
    constants = {
        "HAS_TANH": has_tanh,
        "IS_SMOOTHED": bool(label_smoothing),
        "IS_SCORED": is_scored,
        "HAS_GRADIENT": out is not None,
    }
    with torch.cuda.device_of(logits):
        _cross_entropy[(rows,)](
            *(*tensors, *strides, *widths, classes, ignore_index, before, after, label_smoothing),
            **constants,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses


@triton.jit
def _scale(x, factor, count, BLOCK: tl.constexpr):
    """Multiply in place; where the factor is 1, nothing is read or written."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + index, mask=index < count).to(tl.float32)
        tl.store(x + index, (value * by).to(x.dtype.element_ty), mask=index < count)


def scale_(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply a contiguous tensor in place by a factor of one element, which is 1 where a loss is differentiated, and
    return it."""
    if not isinstance(x, FakeTensor) and x.numel():
        with torch.cuda.device_of(x):
            _scale[(triton.cdiv(x.numel(), BLOCK),)](x, factor, x.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return x
