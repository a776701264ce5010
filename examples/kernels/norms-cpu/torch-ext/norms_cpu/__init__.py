"""RMSNorm and SwiGLU in C++ for CPUs: float32 and bfloat16, accumulated in float32, each with its gradient.

Any hidden size, any alignment; strided rows are read where they lie, any other layout is copied first.
"""

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from ._ops import add_op_namespace_prefix, ops

__all__ = ["rms_norm", "rms_norm_backward", "rms_norm_forward", "silu_and_mul", "swiglu", "swiglu_backward"]

# bound once: ops.rms_norm would be looked up, and its overload chosen, in every call
_rms_norm = ops.rms_norm.default
_rms_norm_forward = ops.rms_norm_forward.default
_rms_norm_backward = ops.rms_norm_backward.default
_swiglu = ops.swiglu.default
_swiglu_backward = ops.swiglu_backward.default
_silu_and_mul = ops.silu_and_mul.default


def _needs_grad(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (one.requires_grad or other.requires_grad)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, rstd = _rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        return *_rms_norm_backward(grad_output, x, weight, ctx.eps, rstd), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _swiglu_backward(grad_output, *ctx.saved_tensors)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, rounded once.

    Shapes: x is [..., H], weight is [H].
    Dtypes: float32 or bfloat16, the same for both.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    if _needs_grad(x, weight):
        return _RMSNorm.apply(x, weight, eps)
    return _rms_norm(x, weight, eps)


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x, weight, eps), rstd), where rstd = 1 / sqrt(mean(x^2) + eps) is what the backward saves.

    Shapes: rstd has x's shape without its last dim.
    Dtypes: rstd is float32.
    """
    return _rms_norm_forward(x, weight, eps)


def rms_norm_backward(
    grad_output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, rstd: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad_x, grad_weight) of rms_norm. rstd: what rms_norm_forward gave; None finds it again."""
    return _rms_norm_backward(grad_output, x, weight, eps, rstd)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded once.

    Shapes: gate and up have one shape.
    Dtypes: float32 or bfloat16, the same for both.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    if _needs_grad(gate, up):
        return _SwiGLU.apply(gate, up)
    return _swiglu(gate, up)


def swiglu_backward(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad_gate, grad_up) of swiglu."""
    return _swiglu_backward(grad_output, gate, up)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Writes silu(x[..., :d]) * x[..., d:] to out, and gives out.

    Shapes: x is [..., 2 * d], out is [..., d] and contiguous.
    Dtypes: float32 or bfloat16, the same for both.
    Raises: RuntimeError when a shape, dtype or device does not fit, or when a gradient is needed.
    """
    if _needs_grad(out, x):
        raise RuntimeError("norms_cpu.silu_and_mul: writes to out, so it has no gradient; use swiglu")
    _silu_and_mul(out, x)
    return out


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_forward"))
def _rms_norm_forward_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_backward"))
def _rms_norm_backward_fake(
    grad_output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, rstd: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@torch.library.register_fake(add_op_namespace_prefix("swiglu"))
def _swiglu_fake(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@torch.library.register_fake(add_op_namespace_prefix("swiglu_backward"))
def _swiglu_backward_fake(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@torch.library.register_fake(add_op_namespace_prefix("silu_and_mul"))
def _silu_and_mul_fake(out: torch.Tensor, x: torch.Tensor) -> None:
    return None
