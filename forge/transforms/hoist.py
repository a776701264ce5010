"""Calls that depend on no input run once: masks, position ids, constants."""

from collections.abc import Callable

import torch

from forge.ir import BoundSymbol, Tag, TensorProxy, Trace
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.pytree import leaves, proxies
from forge.transforms.dce import live_calls

PINNED = frozenset({Tag.RANDOM, Tag.EFFECT, Tag.UNINITIALIZED, Tag.OPAQUE, Tag.SYNCHRONIZING})
BYTE_LIMIT = 64 * 2**20


def hoist(trace: Trace, run: Callable[[Trace], tuple[torch.Tensor, ...]], byte_limit: int = BYTE_LIMIT) -> Trace:
    """The trace with input-independent calls computed now, by `run`, and kept as constants.

    Outputs are never constants (the caller may change them); nor is anything that would take the constants over
    `byte_limit` bytes in all.
    """
    hoisted = independent_calls(trace)
    known = set(map(id, hoisted))
    rest = [bound for bound in trace.bound_symbols if id(bound) not in known]
    read = {name for bound in rest for name in bound.inputs}
    made = {proxy.name: proxy for bound in hoisted for proxy in proxies(bound.output)}
    kept = [proxy for name, proxy in made.items() if name in read and isinstance(proxy, TensorProxy)]
    if not kept or sum(proxy.numel() * proxy.element_size() for proxy in kept) > byte_limit:
        return trace
    program = trace.derive(
        "hoisted", live_calls(hoisted, [proxy.name for proxy in kept]), inputs=[], output=tuple(kept)
    )
    new = trace.derive("hoist", rest)
    new.constants.update(zip([proxy.name for proxy in kept], run(program), strict=True))
    return new


def independent_calls(trace: Trace) -> list[BoundSymbol]:
    """The calls that depend on no input and make no output."""
    outputs = set(trace.output_names)
    fixed = set(trace.constants)
    found: list[BoundSymbol] = []
    for bound in trace.bound_symbols:
        if _independent(bound, fixed) and outputs.isdisjoint(bound.outputs):
            found.append(bound)
            fixed.update(bound.outputs)
    return found


def _independent(bound: BoundSymbol, fixed: set[str]) -> bool:
    if not PINNED.isdisjoint(bound.all_tags) or not all(name in fixed for name in bound.inputs):
        return False
    return not any(isinstance(leaf, SYMBOLIC_TYPES) for leaf in leaves([bound.args, bound.kwargs]))
