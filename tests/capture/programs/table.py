"""The table of programs, and the comparison of their runs with eager."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

import forge


@dataclass(frozen=True)
class Program:
    """A program. `run(jit)` makes its own inputs, applies `jit` to its functions and modules, calls them, and returns
    everything that a user can observe. With `eager`, forge may run graphs of it in eager, with a matching warning."""

    run: Callable[[Callable], Any]
    eager: str | None = None


PROGRAMS: dict[str, Program] = {}


def program(function: Callable | None = None, *, eager: str | None = None) -> Callable:
    """Add a program to the table, under its function's name."""

    def add(function: Callable) -> Callable:
        assert function.__name__ not in PROGRAMS, f"two programs are called {function.__name__}"
        PROGRAMS[function.__name__] = Program(function, eager)
        return function

    return add if function is None else add(function)


class Jit:
    """A forge.jit that remembers the objects it made; with keyword arguments, with those options."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, target: Any = None, **options: Any) -> Any:
        if target is None:
            return lambda target: self(target, **options)
        jitted = forge.jit(target, **options)
        self.made.append(jitted)
        return jitted

    @property
    def eager(self) -> list[str]:
        """The reasons why graphs ran in eager."""
        return [reason for jitted in self.made for reason in forge.explain(jitted).eager]


def no_jit(target: Any = None, **options: Any) -> Any:
    """Stand in for forge.jit in eager: return the target."""
    return (lambda target: target) if target is None else target


def observed(run: Callable[[Callable], Any], jit: Callable) -> dict[str, Any]:
    """Return everything observable of a run: result or exception, shared memory, RNG and grad mode afterwards."""
    torch.manual_seed(0)
    try:
        result, error = run(jit), None
    except Exception as raised:
        result, error = None, raised
    seen = {
        "error": None if error is None else type(error).__name__,
        "RNG": torch.rand(4),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "result": _described(result),
    }
    torch.set_grad_enabled(True)
    return seen


def _described(result: Any) -> Any:
    places: dict[int, int] = {}
    objects: dict[int, int] = {}

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, (bool, int, float, complex, str, type(None))) else type(leaf).__name__
        with torch.no_grad():
            return {
                "value": copy.copy(leaf).detach().clone(),
                "stride": leaf.stride(),
                "offset": leaf.storage_offset(),
                "memory": places.setdefault(leaf.untyped_storage()._cdata, len(places)) if leaf.numel() else None,
                "object": objects.setdefault(id(leaf), len(objects)),
                "requires_grad": leaf.requires_grad,
                "is_leaf": leaf.is_leaf,
                "is_inference": leaf.is_inference(),
                "grad": None if not leaf.is_leaf or leaf.grad is None else leaf.grad.clone(),
            }

    leaves, spec = _pytree.tree_flatten(result)
    return str(spec), [describe(leaf) for leaf in leaves]


def differences(actual: Any, expected: Any, path: str = "") -> list[str]:
    """Return the differences between two observations, one per line."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        return [line for key in expected for line in differences(actual[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)) and len(actual) == len(expected):
        return [
            line
            for i, (one, other) in enumerate(zip(actual, expected, strict=True))
            for line in differences(one, other, f"{path}[{i}]")
        ]
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        try:
            torch.testing.assert_close(actual, expected, equal_nan=True)
        except AssertionError as error:
            return [f"{path}: {str(error).splitlines()[0]} got {actual}, wanted {expected}"]
        return []
    if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
        return [f"{path}: got {actual}, wanted {expected}"]
    return [] if actual == expected or actual != actual else [f"{path}: got {actual!r}, wanted {expected!r}"]
