"""The calls of a trace that gather parameters, and those that reduce their gradients."""

from typing import Any

from forge import prims, torchlang
from forge.ir import BoundSymbol


def is_unshard(bound: BoundSymbol) -> bool:
    """Return whether a call gathers a parameter."""
    return bound.symbol is prims.unshard or bound.symbol is torchlang.unsharded


def is_reduction(bound: BoundSymbol) -> bool:
    """Return whether a call reduces the gradient of a parameter."""
    return bound.symbol is prims.reduce_to_shard


def reshards(bound: BoundSymbol) -> Any:
    """Return whether a parameter that a call gathers must be gathered again in the backward, None if it may be."""
    return bound.args[6]


def limits(bound: BoundSymbol) -> tuple[int, int] | None:
    """Return the bytes of a bucket, and those that are gathered ahead, of a captured call; None for a rule's call."""
    return (bound.args[7], bound.args[8]) if bound.symbol is torchlang.unsharded else None
