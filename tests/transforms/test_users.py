"""Users' transforms that return a trace that cannot run, or raise: errors name the transform and the call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge
from forge import torchlang
from forge.ir import Trace, recording


def program(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x)
    return y.sin() * 2


def drops_a_call(trace: Trace) -> Trace:
    return trace.derive("dropped", [bound for bound in trace.bound_symbols if bound.symbol.name != "relu"])


def drops_the_result(trace: Trace) -> Trace:
    return trace.derive("dropped", trace.bound_symbols[:-1])


def swaps_calls(trace: Trace) -> Trace:
    return trace.derive("swapped", trace.bound_symbols[::-1])


def repeats_calls(trace: Trace) -> Trace:
    return trace.derive("repeated", [bound for bound in trace.bound_symbols for _ in range(2)])


def loses_inputs(trace: Trace) -> Trace:
    return trace.derive("lost", trace.bound_symbols, inputs=[])


def loses_outputs(trace: Trace) -> Trace:
    return trace.derive("lost", trace.bound_symbols, output=())


def raises(trace: Trace) -> Trace:
    raise KeyError("inside")


def raises_an_index_error(trace: Trace) -> Trace:
    raise IndexError("inside")  # which Dynamo treats as the program's own


def another_call(arguments: Callable) -> Callable[[Trace], Trace]:
    def changes_a_call(trace: Trace) -> Trace:
        calls = [arguments(bound) if bound.symbol.name == "relu" else bound for bound in trace.bound_symbols]
        return trace.derive("changed", calls)

    return changes_a_call


no_argument = another_call(lambda bound: bound.replace(args=()))
out_of_range = another_call(lambda bound: bound.replace(symbol=torchlang.find(torch.cumsum), args=(*bound.args, 7)))

of_a_function = another_call(lambda bound: bound.replace(symbol=torch.sin))


def gives_nothing(trace: Trace) -> None:
    return None


def adds_no_call(trace: Trace) -> Trace:
    return trace.derive("adds_no_call", [*trace.bound_symbols, None])


def edits_its_trace(trace: Trace) -> Trace:
    trace.bound_symbols.pop()
    return trace


def edits_a_call(trace: Trace) -> Trace:
    trace.bound_symbols[0].symbol = torchlang.find(torch.tanh)
    return trace.derive("edits_a_call", trace.bound_symbols)


WRONG: dict[Callable[[Trace], Any], tuple[type[Exception], str]] = {
    drops_a_call: (
        ValueError,
        r"sin.* reads y, which no call before it makes; before the .* torch\.relu\(x\) made it \(",
    ),
    drops_the_result: (ValueError, r"the program returns t\d+, which no call .* torch\.mul\(.*\) made it"),
    swaps_calls: (ValueError, "which no call before it makes"),
    repeats_calls: (ValueError, r"torch\.relu\(x\) makes y, which the program has already"),
    loses_inputs: (ValueError, r"whose inputs are \(\), but they must be \(x: f32\[2, 3\]\)"),
    loses_outputs: (ValueError, r"whose outputs are \(\), but they must be \(t\d+: f32\[2, 3\]\)"),
    raises: (KeyError, "inside"),
    raises_an_index_error: (IndexError, "inside"),
    no_argument: (TypeError, "missing 1 required positional argument"),
    out_of_range: (IndexError, "out of range"),
    edits_its_trace: (
        ValueError,
        r"changed the trace that it was given, but must .* another one: trace\.derive",
    ),
    edits_a_call: (ValueError, r"changed the trace that it was given"),
    of_a_function: (
        TypeError,
        r"call 0 is of <built-in .*>, but must be of a Symbol: .*find\(torch\.sin\)",
    ),
    adds_no_call: (TypeError, r"call \d+ is None, a NoneType, but must be a BoundSymbol"),
    gives_nothing: (TypeError, "returned NoneType, but must return a Trace"),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transform", WRONG, ids=lambda transform: transform.__name__)
def test_a_wrong_transform_is_an_error_with_its_name(transform: Callable, grad: bool) -> None:
    error, match = WRONG[transform]
    with pytest.raises(error, match=match) as raised:
        forge.jit(program, transforms=[lambda trace: trace, transform])(torch.ones(2, 3, requires_grad=grad))
    assert f"transform {transform.__name__}" in "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


def returns_the_input(trace: Trace) -> Trace:
    return trace.derive("returns_the_input", [], output=(trace.inputs[0],) * len(trace.output))


def returns_a_view(trace: Trace) -> Trace:
    new = trace.derive("returns_a_view")
    with recording(new, torchlang.language):
        new.output = tuple(torchlang.find(torch.t)(torchlang.find(torch.t)(new.inputs[0])) for _ in trace.output)
    return new


@pytest.mark.parametrize("transform", [returns_the_input, returns_a_view])
def test_results_that_a_transform_makes_inputs_are_values_of_their_own(transform: Callable) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    jitted = forge.jit(lambda x: (x * 1, x + 0), transforms=[transform])
    first, second = jitted(x)
    torch.testing.assert_close(torch.autograd.grad(first.sum() + second.sum(), x)[0], torch.full((2, 3), 2.0))
    with torch.no_grad():
        for one, other in (jitted(x), (first, second)):
            one.zero_()
            assert x.sum() == other.sum() == 6
