"""Gated units, SwiGLU and GeGLU: one program for each piece of a row."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from .launch import as_rows, check_like, check_tensor, contiguous_like, launch, needs_grad

BLOCK = 1024
SILU, GELU_TANH, GELU = 0, 1, 2


@triton.jit
def _activation(value, KIND: tl.constexpr):
    """(the activation, its derivative)."""
    if KIND == 0:
        share = tl.sigmoid(value)
        slope = share * (1.0 + value * (1.0 - share))
    elif KIND == 1:
        inner = 0.7978845608028654 * value * (1.0 + 0.044715 * value * value)
        share = tl.sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
        of_inner = 0.7978845608028654 * (1.0 + 3 * 0.044715 * value * value)
        slope = share + 2.0 * value * share * (1.0 - share) * of_inner
    else:
        share = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
        slope = share + value * 0.3989422804014327 * tl.exp(-0.5 * value * value)
    return value * share, slope


@triton.jit
def _piece(length, BLOCK: tl.constexpr):
    """(row, columns, which of them exist) of this program."""
    pieces = tl.cdiv(length, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    column = (program % pieces) * BLOCK + tl.arange(0, BLOCK)
    return program // pieces, column, column < length


@triton.jit
def _forward(out, gate, up, gate_stride, up_stride, length, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row, column, inside = _piece(length, BLOCK)
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    activation, _ = _activation(value, KIND)
    tl.store(out + row * length + column, (activation * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_gate,
    grad_up,
    grad_output,
    gate,
    up,
    grad_stride,
    gate_stride,
    up_stride,
    length,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = _piece(length, BLOCK)
    g = tl.load(grad_output + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    activation, slope = _activation(value, KIND)
    tl.store(grad_gate + row * length + column, (g * factor * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + row * length + column, (g * activation).to(grad_up.dtype.element_ty), mask=inside)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _run_forward(gate, up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *_run_backward(grad_output, *ctx.saved_tensors, ctx.kind), None


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded once.

    Shapes: gate and up have one shape.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    return _run("swiglu", gate, up, SILU)


def swiglu_backward(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad_gate, grad_up) of swiglu."""
    return _run_checked_backward("swiglu_backward", grad_output, gate, up, SILU)


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """gelu(gate) * up, rounded once; approximate: "tanh" or "none".

    Shapes: gate and up have one shape.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    return _run("geglu", gate, up, GELU if approximate == "none" else GELU_TANH)


def geglu_backward(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad_gate, grad_up) of geglu."""
    kind = GELU if approximate == "none" else GELU_TANH
    return _run_checked_backward("geglu_backward", grad_output, gate, up, kind)


def _run(op: str, gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    _check(op, gate, up)
    return _Gated.apply(gate, up, kind) if needs_grad(gate, up) else _run_forward(gate, up, kind)


def _run_checked_backward(
    op: str, grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(op, gate, up)
    check_like(op, "grad_output", grad_output, "gate", gate)
    return _run_backward(grad_output, gate, up, kind)


def _check(op: str, gate: torch.Tensor, up: torch.Tensor) -> None:
    check_tensor(op, "gate", gate)
    check_like(op, "up", up, "gate", gate)


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """As rows; as one long row where all are contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]
    return [as_rows(tensor) for tensor in tensors]


def _programs(rows: torch.Tensor) -> int:
    return rows.shape[0] * triton.cdiv(rows.shape[1], BLOCK)


def _run_forward(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    out = contiguous_like(gate)
    if gate.numel() == 0:
        return out
    gate, up = _rows(gate, up)
    strides = gate.stride(0), up.stride(0)
    launch(_forward, _programs(gate), out, gate, up, *strides, gate.shape[1], KIND=kind, BLOCK=BLOCK)
    return out


def _run_backward(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: int
) -> tuple[torch.Tensor, torch.Tensor]:
    gradients = contiguous_like(gate), contiguous_like(gate)
    if gate.numel() == 0:
        return gradients
    read = _rows(grad_output, gate, up)
    strides = [each.stride(0) for each in read]
    length = read[0].shape[1]
    launch(_backward, _programs(read[0]), *gradients, *read, *strides, length, KIND=kind, BLOCK=BLOCK)
    return gradients
