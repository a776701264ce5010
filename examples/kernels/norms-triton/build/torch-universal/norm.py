"""RMSNorm: a program keeps whole rows in registers, several where they are short."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from .launch import as_rows, check, check_like, check_tensor, contiguous_like, needs_grad, on_device_of, processors

MAX_HIDDEN = 65536
FORWARD_TILE = 2048  # elements of a program, where a row has no more
BACKWARD_TILE = 16384  # bytes of them


@triton.jit(do_not_specialize=["rows"])
def _forward(out, x, weight, x_stride, rows, hidden, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < hidden)
    scale = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, 1) / hidden + eps)[:, None]
    tl.store(out + row * hidden + column, (value * rstd * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_x,
    sums,
    grad_output,
    x,
    weight,
    grad_stride,
    x_stride,
    rows,
    hidden,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes many tiles, of which the next STAGES - 1 are loaded while it works on one."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < hidden)
        g = tl.load(grad_output + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        scaled = g * scale
        rstd = tl.rsqrt(tl.sum(value * value, 1) / hidden + eps)
        shift = tl.sum(scaled * value, 1) / hidden * rstd * rstd
        grad = (scaled - value * shift[:, None]) * rstd[:, None]
        tl.store(grad_x + row * hidden + column, grad.to(grad_x.dtype.element_ty), mask=inside)
        total += g * value * rstd[:, None]
    tl.store(sums + program * hidden + column, tl.sum(total, 0)[None, :], mask=column < hidden)


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
    grad_x = contiguous_like(x)
    if x.numel() == 0:
        return grad_x, torch.zeros_like(weight)
    x, grad_output, weight = as_rows(x), as_rows(grad_output), weight.contiguous()
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    short = block * x.element_size() <= BACKWARD_TILE
    tile_rows = BACKWARD_TILE // (block * x.element_size()) if short else 1
    programs = min(triton.cdiv(rows, tile_rows), processors(x.device))
    sums = torch.empty((programs, hidden), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _backward[(programs,)](
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
            ROWS=tile_rows,
            BLOCK=block,
            STAGES=3 if short else 1,
            num_warps=8 if block <= 8192 else 16,
        )
    return grad_x, sums.sum(0).to(weight.dtype)


def _check(op: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    check_tensor(op, "x", x)
    check(x.ndim > 0, lambda: f"{op}: x must have at least 1 dim")
    check(
        weight.device == x.device and weight.dtype == x.dtype,
        lambda: f"{op}: weight must have the dtype and the device of x",
    )
    check(
        weight.shape == x.shape[-1:],
        lambda: f"{op}: weight is {list(weight.shape)}, but must be {list(x.shape[-1:])}, the last dim of x",
    )
    check(
        x.shape[-1] <= MAX_HIDDEN,
        lambda: f"{op}: the last dim of x is {x.shape[-1]}, but at most {MAX_HIDDEN} is possible",
    )


def _run_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = contiguous_like(x)
    if x.numel() == 0:
        return out
    x, weight = as_rows(x), weight.contiguous()
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    tile_rows = max(FORWARD_TILE // block, 1)
    with on_device_of(x):
        _forward[(triton.cdiv(rows, tile_rows),)](
            out,
            x,
            weight,
            x.stride(0),
            rows,
            hidden,
            eps,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=min(tile_rows * block // 512, 16),
        )
    return out
