"""Rotary embedding of halves: one program for some rows of x, whatever their strides."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from .launch import check, check_tensor, launch, needs_grad, unit_stride

ELEMENTS = 512  # of one half, in one program
WARPS = 2


@triton.jit(do_not_specialize=["outer", "inner"])
def _rotate(
    out,
    x,
    cos,
    sin,
    outer,
    inner,
    half,
    out_0,
    out_1,
    out_2,
    x_0,
    x_1,
    x_2,
    cos_0,
    cos_1,
    cos_2,
    sin_0,
    sin_1,
    sin_2,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rows [i, j, k] of x, k < inner and j < outer; a program takes ROWS of them that differ in k."""
    pieces = tl.cdiv(inner, ROWS)
    place = tl.program_id(0) // pieces
    i = (place // outer).to(tl.int64)
    j = (place % outer).to(tl.int64)
    k = (tl.program_id(0) % pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (k < inner) & (column < half)
    x_at = x + (i * x_0 + j * x_1) + k * x_2 + column
    cos_at = cos + (i * cos_0 + j * cos_1) + k * cos_2 + column
    sin_at = sin + (i * sin_0 + j * sin_1) + k * sin_2 + column
    out_at = out + (i * out_0 + j * out_1) + k * out_2 + column
    first = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_at + half, mask=inside, other=0.0).to(tl.float32)
    first_cos = tl.load(cos_at, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos_at + half, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin_at, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin_at + half, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:  # the rotation's transpose
        first_out = first * first_cos + second * second_sin
        second_out = second * second_cos - first * first_sin
    else:
        first_out = first * first_cos - second * first_sin
        second_out = second * second_cos + first * second_sin
    tl.store(out_at, first_out.to(out.dtype.element_ty), mask=inside)
    tl.store(out_at + half, second_out.to(out.dtype.element_ty), mask=inside)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin, x if cos.requires_grad or sin.requires_grad else None)
        return _run(x, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, x = ctx.saved_tensors
        of_x, of_cos, of_sin = ctx.needs_input_grad
        grad_x = rotary_backward(grad_output, cos, sin) if of_x else None
        grad_cos = _summed(grad_output, x, cos) if of_cos else None
        grad_sin = _summed(grad_output, _turned(x), sin) if of_sin else None
        return grad_x, grad_cos, grad_sin


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin, rounded once, in x's dtype.

    Shapes: x is [..., D] with D even; cos and sin are [..., D] and broadcast to x.
    Dtypes: any mixture of float32, bfloat16 and float16.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    _check("rotary", "x", x, cos, sin)
    return _Rotary.apply(x, cos, sin) if needs_grad(x, cos, sin) else _run(x, cos, sin, backward=False)


def rotary_backward(grad_output: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """grad_x of rotary."""
    _check("rotary_backward", "grad_output", grad_output, cos, sin)
    return _run(grad_output, cos, sin, backward=True)


def _check(op: str, name: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    check_tensor(op, name, x)
    check(
        x.ndim > 0 and x.shape[-1] % 2 == 0,
        lambda: f"{op}: {name} is {list(x.shape)}, but its last dim must be even",
    )
    _check_table(op, "cos", cos, name, x)
    _check_table(op, "sin", sin, name, x)


def _check_table(op: str, table_name: str, table: torch.Tensor, name: str, x: torch.Tensor) -> None:
    check_tensor(op, table_name, table)
    check(table.device == x.device, lambda: f"{op}: {table_name} is on {table.device}, {name} on {x.device}")
    shape = (1,) * (x.ndim - table.ndim) + tuple(table.shape)
    check(
        len(shape) == x.ndim
        and shape[-1] == x.shape[-1]
        and all(length in (1, wanted) for length, wanted in zip(shape, x.shape, strict=True)),
        lambda: f"{op}: {table_name} is {list(table.shape)}, which does not broadcast to {name}, {list(x.shape)}",
    )


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _summed(grad_output: torch.Tensor, factor: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The gradient of cos or sin, which models seldom want: in plain torch."""
    return (grad_output.float() * factor.float()).sum_to_size(table.shape).to(table.dtype)


def _four_dims(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[i, j, k, D] of a tensor that broadcasts to `shape`; a view where the strides allow it."""
    return unit_stride(tensor if len(shape) <= 4 else tensor.expand(shape).flatten(0, -4))


def _strides(tensor: torch.Tensor) -> list[int]:
    """Of i, j and k; 0 where the tensor repeats itself."""
    strides = [0 if length == 1 else stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [0] * (4 - tensor.ndim) + strides[:-1]


def _run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backward: bool) -> torch.Tensor:
    shape = x.shape
    x, cos, sin = (_four_dims(tensor, shape) for tensor in (x, cos, sin))
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out.view(shape)
    outer, inner, width = (1, 1, *x.shape)[-3:]
    strides = [_strides(tensor) for tensor in (out, x, cos, sin)]
    if 0 < strides[1][1] < strides[1][2]:  # rows that a program takes should be neighbours in memory
        outer, inner = inner, outer
        strides = [[i, k, j] for i, j, k in strides]
    half = width // 2
    block = triton.next_power_of_2(half)
    block_rows = min(max(ELEMENTS // block, 1), triton.next_power_of_2(inner))
    programs = x.numel() // (inner * width) * triton.cdiv(inner, block_rows)
    launch(
        _rotate,
        programs,
        out,
        x,
        cos,
        sin,
        outer,
        inner,
        half,
        *(stride for each in strides for stride in each),
        BACKWARD=backward,
        ROWS=block_rows,
        HALF=block,
        warps=WARPS,
    )
    return out.view(shape)
