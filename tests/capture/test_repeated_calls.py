"""Calls that are repeated without Dynamo's guards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from forge.runtime.repeated_calls import CallRecorder, RepeatedCall

X, W = torch.ones(3), torch.full((3,), 2.0)


def _double(*inputs: Any) -> tuple[torch.Tensor, ...]:
    return (inputs[0] * W,)


def _calls_of_python(
    program: Callable[..., tuple[torch.Tensor, ...]], inputs: Callable[[torch.Tensor, int], tuple[Any, ...]]
) -> int:
    """Return the number of calls, out of six, that ran the function and not only the program."""
    recorder, calls = CallRecorder(), 0
    recorded = recorder.wrap(program)

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return recorded(*inputs(x, calls))[0]

    repeated = RepeatedCall(function, recorder)
    for i in range(6):
        x = X + i
        torch.testing.assert_close(repeated(x), program(*inputs(x, i))[0])
    return calls


def test_a_call_that_ran_one_program_twice_is_repeated() -> None:
    assert _calls_of_python(_double, lambda x, i: (x, W, 3)) == 2


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x, i: (x, W, i),  # a number that increases
        lambda x, i: (x, W.clone()),  # a weight that is replaced
        lambda x, i: (x, x),
        lambda x, i: (x.clone(), W),
    ],
)
def test_a_call_whose_inputs_are_others_is_not(inputs: Callable[[torch.Tensor, int], tuple[Any, ...]]) -> None:
    assert _calls_of_python(_double, inputs) == 6


def test_a_call_of_a_program_with_more_results_is_not() -> None:
    assert _calls_of_python(lambda *inputs: (*_double(*inputs), W), lambda x, i: (x, W)) == 6


def test_a_call_of_two_programs_is_not() -> None:
    recorder, calls = CallRecorder(), 0
    recorded = recorder.wrap(_double)

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return recorded(recorded(x, W)[0], W)[0]

    repeated = RepeatedCall(function, recorder)
    for _ in range(4):
        torch.testing.assert_close(repeated(X), X * 4)
    assert calls == 4


def test_a_call_of_another_program_begins_again() -> None:
    recorder, calls = CallRecorder(), 0
    programs = [recorder.wrap(_double), recorder.wrap(lambda *inputs: _double(*inputs))]

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return programs[calls > 1](x, W)[0]

    repeated = RepeatedCall(function, recorder)
    for _ in range(5):
        repeated(X)
    assert calls == 3
