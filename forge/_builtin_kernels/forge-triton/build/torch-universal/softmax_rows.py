"""softmax over the last dim: a program keeps whole rows in registers, several where they are short."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from .launch import as_rows, check, check_like, check_tensor, contiguous_like, launch, needs_grad

MAX_LENGTH = 65536
TILE = 2048  # elements of a program, where a row has no more


@triton.jit(do_not_specialize=["rows"])
def _forward(out, x, x_stride, length, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < length)
    value = tl.load(x + row * x_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    high = tl.max(tl.where(row < rows, value, 0.0), 1)[:, None]
    power = tl.exp(value - high)
    result = power / tl.sum(power, 1)[:, None]
    tl.store(out + row * length + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_x,
    grad_output,
    output,
    grad_stride,
    output_stride,
    length,
    rows,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < length)
    g = tl.load(grad_output + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(output + row * output_stride + column, mask=inside, other=0.0).to(tl.float32)
    grad = y * (g - tl.sum(g * y, 1)[:, None])
    tl.store(grad_x + row * length + column, grad.to(grad_x.dtype.element_ty), mask=inside)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        out = _run(_forward, x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> torch.Tensor:
        return _run(_backward, grad_output, *ctx.saved_tensors)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum(exp(x)) over the last dim, rounded once; NaN in a row of -inf alone, as torch's.

    Shapes: x is [..., L], L <= 65536.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    _check("softmax", "x", x)
    return _Softmax.apply(x) if needs_grad(x) else _run(_forward, x)


def softmax_backward(grad_output: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """grad_x of softmax, from its result."""
    _check("softmax_backward", "output", output)
    check_like("softmax_backward", "grad_output", grad_output, "output", output)
    return _run(_backward, grad_output, output)


def _check(op: str, name: str, x: torch.Tensor) -> None:
    check_tensor(op, name, x)
    check(x.ndim > 0, lambda: f"{op}: {name} must have at least 1 dim")
    check(
        x.shape[-1] <= MAX_LENGTH,
        lambda: f"{op}: the last dim of {name} is {x.shape[-1]}, but at most {MAX_LENGTH} is possible",
    )


def _run(kernel: triton.runtime.JITFunction, *tensors: torch.Tensor) -> torch.Tensor:
    out = contiguous_like(tensors[0])
    if out.numel() == 0:
        return out
    read = [as_rows(each) for each in tensors]
    rows, length = read[0].shape
    block = triton.next_power_of_2(length)
    tile_rows = max(TILE // block, 1)
    strides = [each.stride(0) for each in read]
    warps = min(tile_rows * block // 512, 16) or 1
    programs = triton.cdiv(rows, tile_rows)
    launch(kernel, programs, out, *read, *strides, length, rows, ROWS=tile_rows, BLOCK=block, warps=warps)
    return out
