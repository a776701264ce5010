"""Broadcast addends of a product or a convolution are added in the following region instead.

    baddbmm(input, a, b, beta=beta, alpha=alpha) = beta * input + alpha * bmm(a, b)
    conv2d(input, weight, bias) = conv2d(input, weight) + bias[:, None, None]

For a kernel that adds, torch first copies the input into all of the result, which the product then reads again. The
sum is free in a region that reads the product anyway: attention's softmax after a bias of positions. A vector
added to a matrix stays with addmm, whose kernel reads it unexpanded. torch adds the bias of a convolution in a separate
kernel after cuDNN's, and its gradient is a sum in another one; both then fuse with neighbouring ops: a norm, or relu.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from forge import clang, prims, torchlang
from forge.ir import BoundSymbol, Tag, TensorProxy, Trace
from forge.ir.proxies import Dim, hint_of
from forge.ir.symbol import Symbol
from forge.transforms.dce import live_calls
from forge.transforms.fold_norms import CONVOLUTIONS, TRANSPOSED
from forge.transforms.makers import innermost
from forge.transforms.replacement import rewrite
from forge.transforms.result_strides import Strides

_FACTORS: dict[Symbol, tuple[str, str]] = {
    torchlang.addmm: ("mat1", "mat2"),
    torchlang.baddbmm: ("batch1", "batch2"),
    torchlang.addbmm: ("batch1", "batch2"),
}
_CONVOLUTIONS = CONVOLUTIONS | TRANSPOSED | {torchlang.convolution}
_MAYBE_NOTHING = frozenset({prims.contiguous, prims.reshape})  # for images that have this layout
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGE = 2**16  # elements of a result that is worth writing once
_REPEATED = 8  # the fewest repetitions of an input's elements that pay


class _Sum(NamedTuple):
    """A call with an addend, by its arguments, and the addend."""

    addend: TensorProxy
    arguments: dict[str, Any]


def unfuse_addends(
    trace: Trace,
    is_fused: Callable[[BoundSymbol], bool],
    strides: Callable[[Trace], Strides],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
    device: str = "cuda",
) -> Trace:
    """Return the trace with products and convolutions computed alone, if the addend is broadcast and a fused call
    follows.

    is_fused: whether a call may be in a region. strides: torch's strides of the values of a trace, by name.
    in_torch: whether a call runs as torch runs it.
    """
    candidates = {id(bound): each for bound in trace.bound_symbols if (each := _sum_of(bound, device)) is not None}
    if not candidates:
        return trace
    readers: dict[str, list[BoundSymbol]] = {}
    for bound in trace.bound_symbols:
        for name in bound.inputs:
            readers.setdefault(name, []).append(bound)
    sums = [
        bound
        for bound in trace.bound_symbols
        if id(bound) in candidates and _feeds_region(bound, readers, is_fused) and in_torch(bound)
    ]
    inputs = {each.addend.name: each.addend for each in candidates.values()}
    repeats = {bound.output.name: _repeats(candidates[id(bound)].addend, bound.output) for bound in sums}
    if any(times < _REPEATED for times in repeats.values()):  # it may be expanded
        in_eager = strides(
            trace.derive("addends", live_calls(trace.bound_symbols, inputs), output=tuple(inputs.values()))
        )
        for bound in sums:
            addend = candidates[id(bound)].addend
            repeats[bound.output.name] = _repeats(addend, bound.output, in_eager.get(addend.name))
    sites = {id(bound): candidates[id(bound)] for bound in sums if repeats[bound.output.name] >= _REPEATED}
    return _rewrite(trace, sites) if sites else trace


def _sum_of(bound: BoundSymbol, device: str) -> _Sum | None:
    """Return a call that adds to a product or a convolution, if no kernel reads the addend unexpanded."""
    if bound.symbol not in _FACTORS and bound.symbol not in _CONVOLUTIONS:
        return None
    out: TensorProxy = bound.output
    if Tag.NO_FUSE in bound.all_tags or out.device.type != device or out.dtype not in _DTYPES:
        return None
    if math.prod(map(hint_of, out.shape)) < _LARGE:
        return None
    arguments = bound.symbol.bind(bound.args, bound.kwargs)
    if bound.symbol in _CONVOLUTIONS:
        return None if arguments["bias"] is None else _Sum(arguments["bias"], arguments)
    is_row = bound.symbol is torchlang.addmm and arguments["input"].ndim == 1
    plain_numbers = all(isinstance(arguments[name], (int, float)) for name in ("alpha", "beta"))
    if not plain_numbers or arguments["beta"] == 0 or is_row:
        return None
    # the product alone may be out of float16's range, where torch multiplies by alpha before it rounds
    shrinks = out.dtype is torch.float16 and abs(arguments["alpha"]) < 1 and bound.symbol is not torchlang.addbmm
    return None if shrinks else _Sum(arguments["input"], arguments)


def _feeds_region(
    bound: BoundSymbol, readers: dict[str, list[BoundSymbol]], is_fused: Callable[[BoundSymbol], bool]
) -> bool:
    """Return whether a fused call reads the result, through views and calls that may return their argument."""
    waiting = list(readers.get(bound.output.name, ()))
    while waiting:
        reader = waiting.pop()
        if not all(Tag.VIEW in call.symbol.tags or call.symbol in _MAYBE_NOTHING for call in innermost(reader)):
            if is_fused(reader):
                return True
        else:
            waiting += [each for name in reader.outputs for each in readers.get(name, ())]
    return False


def _repeats(input: TensorProxy, out: TensorProxy, strides: tuple[Dim, ...] | None = None) -> float:
    """Return how often each element of an input is added to the result."""
    expanded = [isinstance(step, int) and step == 0 for step in strides or [1] * input.ndim]
    own = [hint_of(size) for size, skip in zip(input.shape, expanded, strict=True) if not skip]
    return math.prod(map(hint_of, out.shape)) / max(1, math.prod(own))


def _rewrite(trace: Trace, sums: dict[int, _Sum]) -> Trace:
    def add(bound: BoundSymbol) -> TensorProxy | None:
        each = sums.get(id(bound))
        return None if each is None else _add(bound.symbol, each.arguments)

    return rewrite(trace, "unfuse_addends", add, language=clang.language)


def _add(symbol: Symbol, arguments: dict[str, Any]) -> TensorProxy:
    """Record the product or the convolution, and the sum."""
    total: TensorProxy
    if symbol in _CONVOLUTIONS:
        bias, sides = arguments["bias"], arguments["weight"].ndim - 2
        channels = torchlang.reshape(bias, (*bias.shape, *[1] * sides))
        total = torchlang.add(symbol(**{**arguments, "bias": None}), channels)
        return total
    input, alpha, beta = arguments["input"], arguments["alpha"], arguments["beta"]
    a, b = [arguments[name] for name in _FACTORS[symbol]]
    if symbol is torchlang.addbmm:  # beta=0: the input is not read
        product = torchlang.addbmm(input, a, b, beta=0, alpha=alpha)
    else:
        product = torchlang.mm(a, b) if symbol is torchlang.addmm else torchlang.bmm(a, b)
        product = product if alpha == 1 else torchlang.mul(product, alpha)
    total = torchlang.add(product, input if beta == 1 else torchlang.mul(input, beta))
    return total
