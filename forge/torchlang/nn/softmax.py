"""The functions softmax, log_softmax and softmin."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from forge import clang, prims
from forge.ir import TensorProxy
from forge.torchlang.core import torchsymbol

aten = torch.ops.aten


def _prepare(
    op: str, input: TensorProxy, dim: int | None, dtype: torch.dtype | None
) -> tuple[TensorProxy, tuple[int, ...]]:
    if dim is None:  # canonical_dims takes it for all of them
        raise TypeError(f'{op}() missing 1 required positional arguments: "dim"')
    x = clang.convert(input, dtype or input.dtype)
    prims.check_dtype(op, x, prims.FLOAT)
    return clang.widen(x), clang.canonical_dims(op, dim, x.ndim)


def _shift(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """Return x minus its maximum, which leaves the result unchanged and avoids overflow."""
    if prims.statically_true(x.numel() == 0):
        return x
    return x - clang.amax(x, dims, True)


@torchsymbol(torch.softmax, Tensor.softmax, torch.special.softmax)
def softmax(input: TensorProxy, dim: int | None = None, dtype: torch.dtype | None = None) -> TensorProxy:
    """Return e^input divided by its sum along dim, computed in `dtype` if given."""
    x, dims = _prepare("softmax", input, dim, dtype)
    power = clang.exp(_shift(x, dims))
    return clang.convert(power / clang.sum(power, dims, True), dtype or input.dtype)


@torchsymbol(aten._safe_softmax.default)
def safe_softmax(self: TensorProxy, dim: int, dtype: torch.dtype | None = None) -> TensorProxy:
    """Return softmax, but zeros where all elements along dim are -inf."""
    x, dims = _prepare("_safe_softmax", self, dim, dtype)
    if prims.statically_true(x.numel() == 0):
        return softmax(self, dim, dtype)
    largest = clang.amax(x, dims, True)
    hidden = clang.eq(largest, -math.inf)
    power = clang.exp(x - clang.where(hidden, 0, largest))
    return clang.convert(power / clang.where(hidden, 1, clang.sum(power, dims, True)), dtype or self.dtype)


@torchsymbol(aten._softmax_backward_data.default)
def softmax_backward(grad_output: TensorProxy, output: TensorProxy, dim: int, input_dtype: torch.dtype) -> TensorProxy:
    """Return the gradient of softmax from its result."""
    prims.check_dtype("_softmax_backward_data", output, prims.REAL)
    g, out = clang.widen(grad_output), clang.widen(output)
    weighted = g * out
    total = clang.sum(weighted, (dim,), True)
    return clang.convert(weighted - out * total, input_dtype)


@torchsymbol(torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax)
def log_softmax(input: TensorProxy, dim: int | None = None, dtype: torch.dtype | None = None) -> TensorProxy:
    """Return the logarithm of softmax, computed in `dtype` if given."""
    x, dims = _prepare("log_softmax", input, dim, dtype)
    shifted = _shift(x, dims)
    return clang.convert(shifted - clang.log(clang.sum(clang.exp(shifted), dims, True)), dtype or input.dtype)


@torchsymbol(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    grad_output: TensorProxy, output: TensorProxy, dim: int, input_dtype: torch.dtype
) -> TensorProxy:
    """Return the gradient of log_softmax from its result."""
    prims.check_dtype("_log_softmax_backward_data", output, prims.REAL)
    g, out = clang.widen(grad_output), clang.widen(output)
    return clang.convert(g - clang.exp(out) * clang.sum(g, (dim,), True), input_dtype)


prims.register_vjp(softmax, input=lambda g, out, dim: softmax_backward(g, out, dim, out.dtype))
prims.register_vjp(safe_softmax, self=lambda g, out, dim: softmax_backward(g, out, dim, out.dtype))
prims.register_vjp(log_softmax, input=lambda g, out, dim: log_softmax_backward(g, out, dim, out.dtype))


# torch.nn.functional's forms guess a missing dim and have an additional argument; they run as the functions above


def _implicit_dim(ndim: int) -> int:
    return 0 if ndim in (0, 1, 3) else 1


@torchsymbol(F.softmax)
def functional_softmax(
    input: TensorProxy, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> TensorProxy:
    """Return torch.softmax, with a missing dim guessed from the rank."""
    return softmax(input, _implicit_dim(input.ndim) if dim is None else dim, dtype=dtype)


@torchsymbol(F.log_softmax)
def functional_log_softmax(
    input: TensorProxy, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> TensorProxy:
    """Return torch.log_softmax, with a missing dim guessed from the rank."""
    return log_softmax(input, _implicit_dim(input.ndim) if dim is None else dim, dtype=dtype)


@torchsymbol(F.softmin)
def softmin(
    input: TensorProxy, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> TensorProxy:
    """Return torch.softmax of -input."""
    return softmax(clang.neg(input), _implicit_dim(input.ndim) if dim is None else dim, dtype=dtype)
