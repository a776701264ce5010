"""What is not known of symbolic lengths once Dynamo has taken its guards: a program that is compiled later, a backward
above all, holds for every length with which the guards do, or is kept for the lengths that it was compiled for."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true


class Undecided(RuntimeError):
    """A question about symbolic lengths whose answer differs from run to run."""


class Sizes:
    """What symbols stand for in one run; `used`: whether a question was answered by it."""

    def __init__(self, values: dict[sympy.Symbol, Any]) -> None:
        self.values = values
        self.used = False


class _State(threading.local):
    sizes: Sizes | None = None


_state = _State()


@contextmanager
def for_sizes(symbolic: Sequence[Any], values: Sequence[Any]) -> Iterator[Sizes]:
    """What is compiled inside runs after Dynamo has taken its guards, first with these values of the symbolic numbers.

    torch would answer a question for the lengths that it saw first, and guard nothing.
    """
    for number in symbolic:
        if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            _take_no_more_guards(number.node.shape_env)
    pairs = zip(symbolic, values, strict=True)
    known = {number.node.expr: value for number, value in pairs if isinstance(number, (torch.SymInt, torch.SymFloat))}
    before, _state.sizes = _state.sizes, Sizes(known)
    try:
        yield _state.sizes
    finally:
        _state.sizes = before


def for_all_sizes(question: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, whose answer holds for every run. Raises Undecided where it asks what differs."""
    before = _state.sizes
    if before is None:
        return question(*args, **kwargs)
    _state.sizes = None
    try:
        return question(*args, **kwargs)
    finally:
        _state.sizes = before


def decided(condition: bool | torch.SymBool) -> bool:
    """Return the truth of a condition on lengths where every run has the same, without a guard. Raises Undecided."""
    if isinstance(condition, bool):
        return condition
    if statically_known_true(condition):
        return True
    if statically_known_true(torch.sym_not(condition)):
        return False
    raise Undecided(f"{condition} differs from size to size")


def _take_no_more_guards(environment: ShapeEnv) -> None:
    if "evaluate_expr" in vars(environment):
        return

    def answer(question: Any) -> Any:
        if not isinstance(question, sympy.Basic) or question.is_number:
            return question
        known = environment._maybe_evaluate_static(question)
        return _in_this_run(question) if known is None else known

    # a `fallback_value` is no answer either: what is made by it need not be what torch does for a given length
    vars(environment).update(
        evaluate_expr=lambda question, *args, **kwargs: answer(question),
        guard_or_defer_runtime_assert=lambda question, *args, **kwargs: bool(answer(question)),
    )


def _in_this_run(question: sympy.Basic) -> Any:
    sizes = _state.sizes
    found = question if sizes is None else question.xreplace(sizes.values)
    if found.free_symbols:
        raise Undecided(f"it asks for {question}, which cannot be decided: it differs from size to size")
    if sizes is not None:
        sizes.used = True
    return found
