"""Numbers that are symbols: lengths, dims and floats given to a function that is compiled with dynamic=True."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge
from forge.executors import FusionExecutor, claim, resolve_executors
from forge.ir import BoundSymbol, Trace
from forge.jit import record_of

PROGRAMS: dict[str, tuple[Callable, list[tuple]]] = {
    "a float": (lambda x, weight: torch.lerp(x, x * x, weight), [(0.25,), (0.75,)]),
    "a float of which the forward has no use": (lambda x, slope: torch.where(x > 0, x, x * slope), [(0.5,), (-2.0,)]),
    "a dim": (lambda x, dim: torch.softmax(x, dim), [(0,), (1,), (-1,)]),
    "a reduction's dim": (lambda x, dim: torch.logsumexp(x, dim), [(0,), (1,)]),
    "two dims": (lambda x, a, b: x.transpose(a, b) * 2, [(0, 1), (1, 0)]),
    "lengths": (lambda x, rows: x.view(rows, -1) * 2, [(3,), (4,), (6,)]),
    "a length to expand to": (lambda x, rows: x.expand(rows, -1, -1) * 2, [(2,), (5,)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_eagers_for_every_number(name: str) -> None:
    function, calls = PROGRAMS[name]
    jitted = forge.jit(function, dynamic=True, strict=True, fullgraph=True)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for numbers in calls:
        actual, expected = jitted(x, *numbers), function(x, *numbers)
        torch.testing.assert_close(actual, expected)
        _assert_same_gradient(actual, expected, x)
    assert not record_of(jitted).eager


class Whole(FusionExecutor):
    """Takes every call."""

    def can_fuse(self, bound: BoundSymbol) -> bool:
        return True

    def fuse(self, region: Trace) -> Callable:
        return claim(region, resolve_executors(["torch"]))[0].python_callable()


@pytest.mark.parametrize("executors", [["torch"], [Whole("whole"), "torch"]], ids=["torch", "a fuser"])
def test_a_length_that_only_the_inside_of_a_call_reads_is_there(executors: list) -> None:
    """The gradient of linear flattens what it is given; no argument of a call says to what length."""
    linear = torch.nn.Linear(4, 3)
    jitted = forge.jit(lambda x: torch.sin(linear(x)), dynamic=True, fullgraph=True, executors=executors)
    for length in (5, 7):
        x = torch.randn(2, length, 4, requires_grad=True)
        actual, expected = jitted(x), torch.sin(linear(x))
        for ours, theirs in zip(
            torch.autograd.grad(actual.sum(), [x, linear.weight]),
            torch.autograd.grad(expected.sum(), [x, linear.weight]),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
    assert forge.explain(jitted).graphs == 1


def _assert_same_gradient(actual: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> None:
    def gradient(out: torch.Tensor) -> Any:
        return torch.autograd.grad((out * out).sum(), x)[0]

    torch.testing.assert_close(gradient(actual), gradient(expected))


def test_a_tensors_value_has_no_symbol_in_forge_trace() -> None:
    with pytest.raises((NotImplementedError, AttributeError), match="item"):
        forge.trace(lambda x: x * x.sum().item(), torch.ones(2))
