"""Guards on symbolic sizes that compiling adds to Dynamo's: stored with a program, and installed when it is loaded.

Source: torch._inductor.codecache.FxGraphCache, which stores guards in the same words.
"""

from collections.abc import Sequence
from typing import Any

import torch

from forge.ir.proxies import hint_of


def count(symbols: Sequence[torch.SymInt]) -> int:
    """Return the number of guards."""
    return len(symbols[0].node.shape_env.guards) if symbols else 0


def guards_since(symbols: Sequence[torch.SymInt], before: int) -> str | None:
    """Return the guards added to a graph's symbolic inputs after the first `before`, as text; None if there are
    none."""
    if count(symbols) == before:
        return None
    env = symbols[0].node.shape_env
    return env.produce_guards_expression(list(symbols), guards=env.guards[before:])


def hold(guards: str | None, symbols: Sequence[torch.SymInt]) -> bool:
    """Return whether guards hold for these inputs; if so, they are installed."""
    if guards is None:
        return True
    env: Any = symbols[0].node.shape_env
    hints = list(map(hint_of, symbols))
    return bool(env.evaluate_guards_expression(guards, hints)) and bool(
        env.evaluate_guards_expression(guards, list(symbols))
    )


def equal_lengths(symbols: Sequence[torch.SymInt]) -> dict[Any, Any]:
    """Return the symbols that guards have made equal to a number or to an expression of others, with their
    values."""
    return dict(symbols[0].node.shape_env.replacements) if symbols else {}


def known_of(symbols: Sequence[torch.SymInt]) -> list[str]:
    """Return the facts about symbolic inputs that are known before a graph is compiled: hints, ranges, guards."""
    if not symbols:
        return []
    env: Any = symbols[0].node.shape_env
    hints = [f"{symbol.node.expr} {hint_of(symbol)}" for symbol in symbols]
    about = [f"{symbol} {bounds}" for symbol, bounds in env.var_to_range.items()]
    replaced = [f"{symbol} = {expression}" for symbol, expression in env.replacements.items()]
    return [*hints, *sorted(about), *sorted(replaced), *[str(guard.expr) for guard in env.guards]]
