"""The limits of values: clamp, and the maximum and minimum of two numbers with support for nan."""

from collections.abc import Callable

from forge import clang, prims
from forge.ir import Symbol, TensorProxy, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import torch_check
from forge.torch_internals.versions import TORCH
from forge.torchlang.aliases import TensorOrNumber, torchaliases


@torchaliases("clamp", "clip")
def clamp(input: TensorProxy, min: TensorOrNumber | None = None, max: TensorOrNumber | None = None) -> TensorProxy:
    """Return input limited to [min, max]; max where min > max."""
    torch_check(min is not None or max is not None, lambda: "clamp: At least one of 'min' or 'max' must not be None")
    dtype = clang.compute_dtype(*[operand for operand in (input, min, max) if operand is not None])
    out = clang.convert(input, dtype)
    if min is not None:
        out = clang.maximum(out, clang.convert(min, dtype))
    return out if max is None else clang.minimum(out, clang.convert(max, dtype))


@register_grad(clamp)
def _clamp_grad(
    input: TensorProxy, min: TensorOrNumber | None = None, max: TensorOrNumber | None = None
) -> TensorProxy:
    out = clamp(input, min, max)
    g = get_grad(out)
    if TORCH >= (2, 14):
        _put_shared_clamp_grads(input, min, max, g)
        return out
    above = None if min is None else input >= min
    below = None if max is None else input <= max
    if needs_grad(input):
        inside = above if below is None else below if above is None else above & below
        put_grad(input, clang.where(inside, g, 0))
    if needs_grad(min):
        mask = input < min if max is None else (input < min) & (min < max)
        put_grad(min, clang.where(mask, g, 0))
    if needs_grad(max):
        mask = input > max if min is None else (input > max) | (min > max)
        put_grad(max, clang.where(mask, g, 0))
    return out


def _put_shared_clamp_grads(
    input: TensorProxy, min: TensorOrNumber | None, max: TensorOrNumber | None, g: TensorProxy
) -> None:
    """Put the gradients as torch 2.14 does: an input that equals a number bound has no gradient, one that equals a
    tensor shares it."""
    if min is None or max is None:
        limit, worse, better = (min, clang.lt, clang.gt) if max is None else (max, clang.gt, clang.lt)
        if isinstance(limit, TensorProxy):
            _put_shared_grads(input, limit, g, worse)
        else:
            put_grad(input, clang.where(better(input, limit), g, 0))
        return
    if not isinstance(min, TensorProxy) and not isinstance(max, TensorProxy):
        put_grad(input, clang.where((input > min) & (input < max), g, 0))
        return
    ordered, proper = clang.le(min, max), clang.lt(min, max)
    at_min, at_max = clang.eq(input, min) & proper, clang.eq(input, max) & proper
    if needs_grad(input):
        shared = clang.where(at_min | at_max, g / 2, g)
        put_grad(input, clang.where((input < min) | (input > max), 0, shared))
    for limit, mask, tied in (
        (min, (input < min) & ordered, at_min),
        (max, ((input > max) & ordered) | clang.gt(min, max), at_max),
    ):
        if needs_grad(limit):
            put_grad(limit, clang.where(mask, g, clang.where(tied, g / 2, 0)))


def _put_shared_grads(a: TensorProxy, b: TensorProxy, g: TensorProxy, worse: Callable) -> None:
    """Put the gradient of the better of two: half to each where they are equal, and in full to both where one is
    nan."""
    shared = clang.where(clang.eq(a, b), g / 2, g)
    put_grad(a, clang.where(worse(a, b), 0, shared))
    put_grad(b, clang.where(worse(b, a), 0, shared))


@torchaliases("clamp_min")
def clamp_min(input: TensorProxy, min: TensorOrNumber) -> TensorProxy:
    """Return max(input, min)."""
    return clamp(input, min)


@torchaliases("clamp_max")
def clamp_max(input: TensorProxy, max: TensorOrNumber) -> TensorProxy:
    """Return min(input, max)."""
    return clamp(input, None, max)


def _number_over_nan(name: str, better: Callable, worse: Callable) -> Symbol:
    def body(input: TensorProxy, other: TensorProxy) -> TensorProxy:
        input, other = clang.prepare(name, input, other)
        prims.check_dtype(name, input, prims.REAL, RuntimeError)
        return clang.where(better(input, other) | clang.isnan(other), input, other)

    body.__name__, body.__doc__ = name, "The better of two numbers; the other one where one is nan."
    symbol = torchaliases(name)(body)

    @register_grad(symbol)
    def rule(input: TensorProxy, other: TensorProxy) -> TensorProxy:
        out = symbol(input, other)
        g = get_grad(out)
        if TORCH == (2, 14):
            _put_shared_grads(input, other, g, worse)
            return out
        first = better(input, other) | clang.isnan(other)
        alone = first
        if TORCH >= (2, 15):
            g = clang.where(clang.eq(input, other), g / 2, g)
            alone = worse(other, input) | clang.isnan(other)
        put_grad(input, clang.where(first, g, 0))
        put_grad(other, clang.where(alone, 0, g))
        return out

    return symbol


fmax = _number_over_nan("fmax", lambda a, b: a >= b, lambda a, b: a < b)
fmin = _number_over_nan("fmin", lambda a, b: a <= b, lambda a, b: a > b)
