"""Rotary embedding of halves, of one tensor or of queries and keys in one launch: one program for some rows, whatever
their strides."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from .launch import check, check_tensor, launch, needs_grad, unit_stride

ELEMENTS = 512  # of one half, in one program
WARPS = 2


@triton.jit
def _rows(
    program,
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
    place = program // pieces
    i = (place // outer).to(tl.int64)
    j = (place % outer).to(tl.int64)
    k = (program % pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
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


@triton.jit(do_not_specialize=["outer", "inner", "other_outer", "other_inner", "programs"])
def _rotate(
    out,
    x,
    cos,
    sin,
    outer,
    inner,
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
    other_out,
    other_x,
    other_cos,
    other_sin,
    other_outer,
    other_inner,
    other_out_0,
    other_out_1,
    other_out_2,
    other_x_0,
    other_x_1,
    other_x_2,
    other_cos_0,
    other_cos_1,
    other_cos_2,
    other_sin_0,
    other_sin_1,
    other_sin_2,
    half,
    programs,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """The first `programs` take the rows of x, the rest those of the other tensor, where there is one."""
    program = tl.program_id(0)
    if other_x is None or program < programs:
        _rows(
            program,
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
            BACKWARD,
            ROWS,
            HALF,
        )
    else:
        _rows(
            program - programs,
            other_out,
            other_x,
            other_cos,
            other_sin,
            other_outer,
            other_inner,
            half,
            other_out_0,
            other_out_1,
            other_out_2,
            other_x_0,
            other_x_1,
            other_x_2,
            other_cos_0,
            other_cos_1,
            other_cos_2,
            other_sin_0,
            other_sin_1,
            other_sin_2,
            BACKWARD,
            ROWS,
            HALF,
        )


class _Rotary(torch.autograd.Function):
    """rotary of each of several tensors."""

    @staticmethod
    def forward(ctx: FunctionCtx, cos: torch.Tensor, sin: torch.Tensor, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin, *(xs if cos.requires_grad or sin.requires_grad else ()))
        return _run(xs, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin, *xs = ctx.saved_tensors
        of_cos, of_sin, *of_xs = ctx.needs_input_grad
        gradients = iter(
            _run([g for g, requires_grad in zip(grads, of_xs, strict=True) if requires_grad], cos, sin, backward=True)
        )
        grad_cos = _summed(grads, xs, cos) if of_cos else None
        grad_sin = _summed(grads, [_turned(x) for x in xs], sin) if of_sin else None
        return grad_cos, grad_sin, *[next(gradients) if requires_grad else None for requires_grad in of_xs]


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin, rounded once, in x's dtype.

    Shapes: x is [..., D] with D even; cos and sin are [..., D] and broadcast to x.
    Dtypes: any mixture of float32, bfloat16 and float16.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    _check("rotary", "x", x, cos, sin)
    return _differentiable((x,), cos, sin)[0]


def rotary_backward(grad_output: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """grad_x of rotary."""
    _check("rotary_backward", "grad_output", grad_output, cos, sin)
    return _run((grad_output,), cos, sin, backward=True)[0]


def rotary_pair(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rotary of q, rotary of k) in one launch.

    Shapes: q and k are [..., D] with D even, of any numbers of heads; cos and sin are [..., D] and broadcast to each.
    Dtypes: any mixture of float32, bfloat16 and float16.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    _check("rotary_pair", "q", q, cos, sin)
    _check("rotary_pair", "k", k, cos, sin)
    return _differentiable((q, k), cos, sin)


def rotary_pair_backward(
    grad_q: torch.Tensor, grad_k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of rotary_pair's q and k from those of its results, in one launch."""
    _check("rotary_pair_backward", "grad_q", grad_q, cos, sin)
    _check("rotary_pair_backward", "grad_k", grad_k, cos, sin)
    return _run((grad_q, grad_k), cos, sin, backward=True)


def _differentiable(xs: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _Rotary.apply(cos, sin, *xs) if needs_grad(cos, sin, *xs) else _run(xs, cos, sin, backward=False)


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
        and all(length in (1, size) for length, size in zip(shape, x.shape, strict=True)),
        lambda: f"{op}: {table_name} is {list(table.shape)}, which does not broadcast to {name}, {list(x.shape)}",
    )


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _summed(grads: Sequence[torch.Tensor], factors: Sequence[torch.Tensor], table: torch.Tensor) -> torch.Tensor:
    """The gradient of cos or sin, which models seldom want: in plain torch."""
    parts = [(g.float() * x.float()).sum_to_size(table.shape) for g, x in zip(grads, factors, strict=True)]
    return sum(parts[1:], parts[0]).to(table.dtype)


def _four_dims(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[i, j, k, D] of a tensor that broadcasts to `shape`; a view where the strides allow it."""
    return unit_stride(tensor if len(shape) <= 4 else tensor.expand(shape).flatten(0, -4))


def _strides(tensor: torch.Tensor) -> list[int]:
    """Of i, j and k; 0 where the tensor repeats itself."""
    strides = [0 if length == 1 else stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [0] * (4 - tensor.ndim) + strides[:-1]


@dataclass(frozen=True)
class _Part:
    """One tensor's share of a launch. tensors: out, x, cos and sin; strides: of each the three of i, j and k."""

    tensors: tuple[torch.Tensor, ...]
    outer: int
    inner: int
    strides: tuple[int, ...]

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        return *self.tensors, self.outer, self.inner, *self.strides

    def programs(self, block_rows: int) -> int:
        x = self.tensors[1]
        return x.numel() // (self.inner * x.shape[-1]) * triton.cdiv(self.inner, block_rows)


_NOTHING = (None,) * 18  # the arguments of the second part of a launch that has one


def _part(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> _Part:
    shape = x.shape
    x, cos, sin = (_four_dims(tensor, shape) for tensor in (x, cos, sin))
    tensors = torch.empty_like(x), x, cos, sin
    outer, inner = (1, 1, *x.shape)[-3:-1]
    strides = [_strides(tensor) for tensor in tensors]
    if 0 < strides[1][1] < strides[1][2]:  # rows that a program takes should be neighbours in memory
        outer, inner = inner, outer
        strides = [[i, k, j] for i, j, k in strides]
    return _Part(tensors, outer, inner, tuple(stride for each in strides for stride in each))


def _run(
    xs: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, *, backward: bool
) -> tuple[torch.Tensor, ...]:
    """Each of one or two tensors rotated, in one launch."""
    parts = [_part(x, cos, sin) for x in xs]
    outs = tuple(part.tensors[0].view(x.shape) for part, x in zip(parts, xs, strict=True))
    parts = [part for part in parts if part.tensors[0].numel()]
    if not parts:
        return outs
    half = cos.shape[-1] // 2
    block = triton.next_power_of_2(half)
    block_rows = min(max(ELEMENTS // block, 1), triton.next_power_of_2(max(part.inner for part in parts)))
    programs = [part.programs(block_rows) for part in parts]
    launch(
        _rotate,
        sum(programs),
        *parts[0].arguments,
        *(parts[1].arguments if len(parts) > 1 else _NOTHING),
        half,
        programs[0],
        BACKWARD=backward,
        ROWS=block_rows,
        HALF=block,
        warps=WARPS,
    )
    return outs
