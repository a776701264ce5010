"""Calls that depend on no input run once: masks, position ids, constants; what depends on weights alone, once for as
long as those stay as they are (forge.jit(freeze=True))."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from forge.ir import BoundSymbol, Dim, Proxy, Tag, TensorProxy, Trace
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.pytree import leaves, names, proxies, tensors
from forge.transforms.dce import live_calls

PINNED = frozenset({Tag.RANDOM, Tag.EFFECT, Tag.UNINITIALIZED, Tag.OPAQUE, Tag.SYNCHRONIZING})
BYTE_LIMIT = 64 * 2**20


class HoistedProgram(NamedTuple):
    """A trace in two: `ahead` is a program of what can be computed before, `rest` are the other calls, which read what
    it gives."""

    ahead: Trace
    rest: list[BoundSymbol]

    @property
    def values(self) -> tuple[TensorProxy, ...]:
        """Return the results of `ahead`, which `rest` reads."""
        values: tuple[TensorProxy, ...] = self.ahead.output
        return values


def hoist(trace: Trace, run: Callable[[Trace], tuple[torch.Tensor, ...]], byte_limit: int = BYTE_LIMIT) -> Trace:
    """Return the trace with input-independent calls computed now, by `run`, and kept as constants.

    Outputs are never constants (the caller may change them); nor is anything that would take the constants over
    `byte_limit` bytes in all.
    """
    hoisted = independent_calls(trace)
    partition = _partition(trace, hoisted, hoisted, [])
    if not partition.values or sum(map(_bytes, partition.values)) > byte_limit:
        return trace
    new = trace.derive("hoist", partition.rest)
    new.constants.update(zip(names(partition.values), run(partition.ahead), strict=True))
    return new


def hoist_weights(trace: Trace, weights: Collection[str], byte_limit: int = BYTE_LIMIT) -> HoistedProgram:
    """Return the trace without the calls that depend on the inputs `weights` alone, and the program of these inputs
    that makes what the rest reads of them.

    A call that makes more than `byte_limit` bytes of less than half as many stays.
    """
    calls = independent_calls(trace, weights, byte_limit)
    constant = set(map(id, independent_calls(trace)))
    moved = [bound for bound in calls if id(bound) not in constant]
    partition = _partition(trace, moved, calls, [proxy for proxy in trace.inputs if proxy.name in weights])
    return partition._replace(rest=live_calls(partition.rest, trace.output_names))


def _partition(trace: Trace, moved: list[BoundSymbol], calls: list[BoundSymbol], inputs: list[Proxy]) -> HoistedProgram:
    """Part a program in two. `moved` are the calls that the rest is without, `calls` all those that may run ahead."""
    known = set(map(id, moved))
    rest = [bound for bound in trace.bound_symbols if id(bound) not in known]
    read = {name for bound in rest for name in bound.inputs}
    made = {proxy.name: proxy for bound in moved for proxy in proxies(bound.output)}
    kept = [proxy for name, proxy in made.items() if name in read and isinstance(proxy, TensorProxy)]
    needed = live_calls(calls, names(kept))
    wanted = {name for bound in needed for name in bound.inputs}
    given = [proxy for proxy in inputs if proxy.name in wanted]
    name = "weights" if given else None
    return HoistedProgram(trace.derive("hoisted", needed, name=name, inputs=given, output=tuple(kept)), rest)


def independent_calls(trace: Trace, weights: Collection[str] = (), byte_limit: int = BYTE_LIMIT) -> list[BoundSymbol]:
    """Return the calls that depend on no input but those of `weights`, and make no output."""
    outputs = set(trace.output_names)
    fixed = {*trace.constants, *weights}
    found: list[BoundSymbol] = []
    for bound in trace.bound_symbols:
        if not (_independent(bound, fixed) and outputs.isdisjoint(bound.outputs)):
            continue
        if weights and _expands(bound, byte_limit):
            continue
        found.append(bound)
        fixed.update(bound.outputs)
    return found


def _independent(bound: BoundSymbol, fixed: set[str]) -> bool:
    if not PINNED.isdisjoint(bound.all_tags) or not all(name in fixed for name in bound.inputs):
        return False
    return not any(isinstance(leaf, SYMBOLIC_TYPES) for leaf in leaves([bound.args, bound.kwargs]))


def _expands(bound: BoundSymbol, byte_limit: int) -> bool:
    """Return whether a call makes much more of its arguments than they are."""
    made = sum(map(_bytes, tensors(bound.output)))
    return made > byte_limit and made > 2 * sum(map(_bytes, tensors([bound.args, bound.kwargs])))


def _bytes(proxy: TensorProxy) -> Dim:
    return proxy.numel() * proxy.element_size()
