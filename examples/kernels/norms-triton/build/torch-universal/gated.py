"""SwiGLU: one program for each piece of a row."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from .launch import as_rows, check_like, check_tensor, contiguous_like, needs_grad, on_device_of

BLOCK = 1024


@triton.jit
def _piece(length, BLOCK: tl.constexpr):
    """(row, columns, which of them exist) of this program."""
    pieces = tl.cdiv(length, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    column = (program % pieces) * BLOCK + tl.arange(0, BLOCK)
    return program // pieces, column, column < length


@triton.jit
def _forward(out, gate, up, gate_stride, up_stride, length, BLOCK: tl.constexpr):
    row, column, inside = _piece(length, BLOCK)
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = value * tl.sigmoid(value) * factor
    tl.store(out + row * length + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_gate, grad_up, grad_output, gate, up, grad_stride, gate_stride, up_stride, length, BLOCK: tl.constexpr
):
    row, column, inside = _piece(length, BLOCK)
    g = tl.load(grad_output + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(value)
    of_gate = g * factor * sigmoid * (1.0 + value * (1.0 - sigmoid))
    of_up = g * value * sigmoid
    tl.store(grad_gate + row * length + column, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + row * length + column, of_up.to(grad_up.dtype.element_ty), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _run_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return swiglu_backward(grad_output, *ctx.saved_tensors)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded once.

    Shapes: gate and up have one shape.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    _check("swiglu", gate, up)
    return _SwiGLU.apply(gate, up) if needs_grad(gate, up) else _run_forward(gate, up)


def swiglu_backward(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad_gate, grad_up) of swiglu."""
    _check("swiglu_backward", gate, up)
    check_like("swiglu_backward", "grad_output", grad_output, "gate", gate)
    grad_gate, grad_up = contiguous_like(gate), contiguous_like(gate)
    if gate.numel() == 0:
        return grad_gate, grad_up
    gate, up, grad_output = _rows(gate, up, grad_output)
    with on_device_of(gate):
        _backward[_grid(gate)](
            grad_gate,
            grad_up,
            grad_output,
            gate,
            up,
            grad_output.stride(0),
            gate.stride(0),
            up.stride(0),
            gate.shape[1],
            BLOCK=BLOCK,
        )
    return grad_gate, grad_up


def _check(op: str, gate: torch.Tensor, up: torch.Tensor) -> None:
    check_tensor(op, "gate", gate)
    check_like(op, "up", up, "gate", gate)


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """As rows; as one long row where all are contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]
    return [as_rows(tensor) for tensor in tensors]


def _grid(rows: torch.Tensor) -> tuple[int]:
    return (rows.shape[0] * triton.cdiv(rows.shape[1], BLOCK),)


def _run_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out = contiguous_like(gate)
    if gate.numel() == 0:
        return out
    gate, up = _rows(gate, up)
    with on_device_of(gate):
        _forward[_grid(gate)](out, gate, up, gate.stride(0), up.stride(0), gate.shape[1], BLOCK=BLOCK)
    return out
