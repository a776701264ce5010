"""The calls of a trace that gather parameters, and those that reduce their gradients."""

from typing import Any

from forge import prims, torchlang
from forge.ir import BoundSymbol


def is_unshard(bound: BoundSymbol) -> bool:
    """Return whether a call gathers a parameter."""
    return bound.symbol is prims.unshard or bound.symbol is torchlang.unsharded


def reshards(bound: BoundSymbol) -> Any:
    """Return whether a parameter that a call gathers is to be gathered again in the backward, None where it may."""
    return bound.args[6]
