"""Conditions on symbolic sizes that Dynamo's guards do not resolve. A program that is compiled after the guards
were taken, a backward above all, holds for every size that they allow, or is cached for the sizes that it was
compiled for."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from forge.torch_internals.sympy import evaluate_static

T = TypeVar("T")


class UnresolvedSymInt(RuntimeError):
    """A condition on symbolic sizes whose value differs from run to run."""


class Sizes:
    """The values of symbols in one run; `used`: whether they resolved a condition."""

    def __init__(self, values: dict[sympy.Symbol, Any]) -> None:
        self.values = values
        self.used = False


class _State(threading.local):
    sizes: Sizes | None = None


_state = _State()


@contextmanager
def specialize_sizes(symbolic: Sequence[Any], values: Sequence[Any]) -> Iterator[Sizes]:
    """Compile after Dynamo has taken its guards, at first with these values of the symbolic numbers.

    torch would resolve a condition by the sizes of the first call, and add no guard.
    """
    for number in symbolic:
        if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            _take_no_more_guards(number.node.shape_env)
    pairs = zip(symbolic, values, strict=True)
    sizes = {number.node.expr: value for number, value in pairs if isinstance(number, (torch.SymInt, torch.SymFloat))}
    before, _state.sizes = _state.sizes, Sizes(sizes)
    try:
        yield _state.sizes
    finally:
        _state.sizes = before


def without_specialization(question: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function whose result must hold for every size. Raises UnresolvedSymInt if it depends on one."""
    before = _state.sizes
    if before is None:
        return question(*args, **kwargs)
    _state.sizes = None
    try:
        return question(*args, **kwargs)
    finally:
        _state.sizes = before


def decide(condition: bool | torch.SymBool) -> bool:
    """Return the value of a condition on sizes if it is the same in every run, without a guard. Raises UnresolvedSymInt
    otherwise."""
    if isinstance(condition, bool):
        return condition
    if statically_known_true(condition):
        return True
    if statically_known_true(torch.sym_not(condition)):
        return False
    raise UnresolvedSymInt(f"{condition} differs from size to size")


@contextmanager
def refuse_guards(symbolic: Iterable[Any]) -> Iterator[None]:
    """Compile for every value of symbolic numbers: a condition whose value varies raises UnresolvedSymInt."""
    with refuse_guards_in({id(number.node.shape_env): number.node.shape_env for number in symbolic}.values()):
        yield


@contextmanager
def refuse_guards_in(environments: Iterable[ShapeEnv]) -> Iterator[None]:
    """As `refuse_guards`, for all numbers of these environments."""
    open_to_guards = [each for each in environments if _GUARDING[0] not in vars(each)]
    for each in open_to_guards:
        _take_no_more_guards(each)
    try:
        yield
    finally:
        for each in open_to_guards:
            for name in _GUARDING:
                del vars(each)[name]


_GUARDING = ("evaluate_expr", "guard_or_defer_runtime_assert")


def _take_no_more_guards(environment: ShapeEnv) -> None:
    if _GUARDING[0] in vars(environment):
        return

    def answer(question: Any) -> Any:
        if not isinstance(question, sympy.Basic) or question.is_number:
            return question
        result = evaluate_static(environment, question)
        return _in_this_run(question) if result is None else result

    # nor is a `fallback_value` used: its result need not be torch's for a given size
    vars(environment).update(
        evaluate_expr=lambda question, *args, **kwargs: answer(question),
        guard_or_defer_runtime_assert=lambda question, *args, **kwargs: bool(answer(question)),
    )


def _in_this_run(question: sympy.Basic) -> Any:
    sizes = _state.sizes
    result = question if sizes is None else question.xreplace(sizes.values)
    if result.free_symbols:
        raise UnresolvedSymInt(f"it asks for {question}, which cannot be decided: it differs from size to size")
    if sizes is not None:
        sizes.used = True
    return result
