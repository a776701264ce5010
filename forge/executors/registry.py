"""The executors that forge.jit knows by name, in order of priority."""

import difflib
import importlib
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

from forge.executors.executor import Executor, FusionExecutor, OperatorExecutor
from forge.ir import check
from forge.ir.checks import check_list

_executors: dict[str, Executor] = {}
_default_order = ["hub", "inductor", "cuda", "torch"]  # nvFuser and Triton products run on request
E = TypeVar("E", bound=Executor)


def register_executor(executor: E, *, default: bool = False, first: bool = False) -> E:
    """Register an executor by its name and return it.

    Args:
        executor: The executor.
        default: Use it in forge.jit by default.
        first: Put it before the other default executors.

    Raises:
        ValueError: If the name is taken.
    """
    check(executor.name not in _executors, lambda: f"an executor named {executor.name!r} is registered already")
    _executors[executor.name] = executor
    if default:
        _default_order.insert(0 if first else len(_default_order), executor.name)
    return executor


def known_executors() -> dict[str, Executor]:
    """Return every registered executor by name."""
    importlib.import_module("forge.executors.hubex")  # which registers itself: executors do not import kernels
    return dict(_executors)


def resolve_executors(executors: Sequence[str | Executor] | None) -> list[Executor]:
    """Return executors, in order.

    Args:
        executors: Names or executors; None is the available ones of the default order, or of those in the environment
            variable FORGE_EXECUTORS ("hub,torch").

    Raises:
        ValueError: The sequence is empty, or has an unknown name or two executors of one name.
        TypeError: An element is neither a name nor an executor.
    """
    if executors is None:
        setting = os.environ.get("FORGE_EXECUTORS")
        known_executors()  # registers the default ones
        order = [name.strip() for name in setting.split(",")] if setting else _default_order
        return [executor for executor in map(registered_executor, order) if executor.is_available()]
    check_list(executors, "forge.jit: executors", "names or executors")
    check(bool(executors), lambda: 'forge.jit: executors is empty; executors=["torch"] runs all by torch alone')
    resolved = [_resolve(executor) for executor in executors]
    by_name: dict[str, Executor] = {}
    for executor in resolved:
        check(
            by_name.setdefault(executor.name, executor) is executor,
            lambda name=executor.name: f"forge.jit: two executors are named {name!r}; rename one of them",
        )
    return resolved


def registered_executor(name: str) -> Executor:
    """Return the executor of a name. Raises ValueError, naming near ones, if there is none."""
    executors = known_executors()
    check(name in executors, lambda: f"forge.jit: {unknown('executor', name, executors)}")
    return executors[name]


def _resolve(executor: str | Executor) -> Executor:
    if isinstance(executor, str):
        executor = registered_executor(executor)
    check(
        isinstance(executor, (OperatorExecutor, FusionExecutor)),
        lambda: (
            f"forge.jit: an executor is {executor!r}, but must be a name, an OperatorExecutor or a FusionExecutor "
            "(forge.executors); give kernels as kernels=[…]"
        ),
        TypeError,
    )
    available = executor.is_available()
    check(
        bool(available),
        lambda: (
            f"forge.jit: executor {executor.name!r} is not available: {getattr(available, 'reason', 'no reason given')}"
        ),
        RuntimeError,
    )
    return executor


_LISTED = 100  # the most known names in a message


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return "unknown executor 'trch'; did you mean 'torch'? known: …", without the choices if those are many."""
    names = sorted(choices)
    near = difflib.get_close_matches(name, names, n=3)
    hint = f" did you mean {' or '.join(map(repr, near))}?" if near else ""
    listing = f" known: {', '.join(names)}" if len(names) <= _LISTED else ""
    return f"unknown {kind} {name!r};{hint}{listing}".rstrip(";")
