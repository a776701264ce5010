"""The table of prims that nvFuser computes: their translation to its operators, and the calls that are declined."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from forge.executors.executor import Decision
from forge.executors.nvfuserex.writer import Ref, Writer
from forge.ir import Symbol, check


class Rule(NamedTuple):
    """The rule of a prim: `write` expresses a call in nvFuser's operators, given its arguments; `checker` declines
    calls by their arguments."""

    write: Callable[..., Ref]
    checker: Callable[..., Decision] | None


RULES: dict[str, Rule] = {}


def add_rule(prim: Symbol, write: Callable[..., Ref], checker: Callable[..., Decision] | None = None) -> None:
    """Register the translation of a prim. Raises ValueError for a second one."""
    check(prim.id not in RULES, lambda: f"nvfuserex: {prim.id} has a rule already")
    RULES[prim.id] = Rule(write, checker)


def rule(
    prim: Symbol, checker: Callable[..., Decision] | None = None
) -> Callable[[Callable[..., Ref]], Callable[..., Ref]]:
    """Make the decorated function the rule of a prim."""

    def register(write: Callable[..., Ref]) -> Callable[..., Ref]:
        add_rule(prim, write, checker)
        return write

    return register


def same_names(prims: Iterable[Symbol], checker: Callable[..., Decision] | None = None) -> None:
    """Register the rules of prims that are operators of nvFuser with the same names and arguments."""
    for prim in prims:
        add_rule(prim, _same_name(prim.name), checker)


def _same_name(name: str) -> Callable[..., Ref]:
    def write(writer: Writer, *operands: object) -> Ref:
        return writer.op(name, *operands)

    return write
