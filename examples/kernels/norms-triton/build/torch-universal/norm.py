"""RMSNorm: one program for each row, which it keeps in registers."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from .launch import as_rows, check, check_like, check_tensor, needs_grad, on_device_of, programs, warps

MAX_HIDDEN = 65536


@triton.jit
def _forward(out, x, weight, x_stride, hidden, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, 0) / hidden + eps)
    tl.store(out + row * hidden + column, (value * rstd * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad_x, sums, grad_output, x, weight, grad_stride, x_stride, rows, hidden, eps, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        g = tl.load(grad_output + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(value * value, 0) / hidden + eps)
        normed = value * rstd
        scaled = g * scale
        grad = (scaled - normed * (tl.sum(scaled * normed, 0) / hidden)) * rstd
        tl.store(grad_x + row * hidden + column, grad.to(grad_x.dtype.element_ty), mask=inside)
        total += g * normed
    tl.store(sums + program * hidden + column, total, mask=inside)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _run_forward(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *rms_norm_backward(grad_output, *ctx.saved_tensors, ctx.eps), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, rounded once.

    Shapes: x is [..., H], weight is [H], H <= 65536.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    _check("rms_norm", x, weight)
    return _RMSNorm.apply(x, weight, eps) if needs_grad(x, weight) else _run_forward(x, weight, eps)


def rms_norm_backward(
    grad_output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad_x, grad_weight) of rms_norm."""
    _check("rms_norm_backward", x, weight)
    check_like("rms_norm_backward", "grad_output", grad_output, "x", x)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return grad_x, torch.zeros_like(weight)
    x, grad_output, weight = as_rows(x), as_rows(grad_output), weight.contiguous()
    rows, hidden = x.shape
    sums = torch.empty((programs(rows, x.device), hidden), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(hidden)
    with on_device_of(x):
        _backward[(len(sums),)](
            grad_x,
            sums,
            grad_output,
            x,
            weight,
            grad_output.stride(0),
            x.stride(0),
            rows,
            hidden,
            eps,
            BLOCK=block,
            num_warps=warps(block),
        )
    return grad_x, sums.sum(0).to(weight.dtype)


def _check(op: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    check_tensor(op, "x", x)
    check(x.ndim > 0, f"{op}: x must have at least 1 dim")
    check(
        weight.device == x.device and weight.dtype == x.dtype, f"{op}: weight must have the dtype and the device of x"
    )
    check(
        weight.shape == x.shape[-1:],
        f"{op}: weight is {list(weight.shape)}, but must be {list(x.shape[-1:])}, the last dim of x",
    )
    check(x.shape[-1] <= MAX_HIDDEN, f"{op}: the last dim of x is {x.shape[-1]}, but at most {MAX_HIDDEN} is possible")


def _run_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    x, weight = as_rows(x), weight.contiguous()
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    with on_device_of(x):
        _forward[(rows,)](out, x, weight, x.stride(0), hidden, eps, BLOCK=block, num_warps=warps(block))
    return out
