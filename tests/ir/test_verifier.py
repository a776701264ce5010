"""The verifier of traces: names are defined once, before their uses, and not used after their deletion."""

import pytest
import torch

import forge
from forge.ir import BoundSymbol, Trace
from forge.ir.verifier import verify
from forge.transforms.lifetimes import delete_last_used


@pytest.fixture
def trace() -> Trace:
    return forge.trace(lambda x: (x.sin() + 1).cos(), torch.ones(2))


def test_a_program_has_no_fault(trace: Trace) -> None:
    verify(trace)
    verify(delete_last_used(trace, own_inputs=True))


def test_a_name_that_no_call_defines(trace: Trace) -> None:
    del trace.bound_symbols[0]
    with pytest.raises(AssertionError, match=r"computation, after with epilogue: .* reads t0, which no call before it"):
        verify(trace)


def test_a_name_that_is_defined_later(trace: Trace) -> None:
    trace.bound_symbols.reverse()
    with pytest.raises(AssertionError, match="reads t1, which no call before it defines"):
        verify(trace)


def test_an_output_that_no_call_defines(trace: Trace) -> None:
    trace.bound_symbols.pop()
    with pytest.raises(AssertionError, match="the output reads t2"):
        verify(trace)


def test_a_name_with_two_definitions(trace: Trace) -> None:
    trace.bound_symbols.append(trace.bound_symbols[0])
    with pytest.raises(AssertionError, match="defines t0, which is defined before"):
        verify(trace)


def test_a_result_with_the_name_of_a_constant(trace: Trace) -> None:
    trace.constants["t0"] = torch.ones(2)
    with pytest.raises(AssertionError, match="defines t0, which is defined before"):
        verify(trace)


def test_a_name_that_is_read_after_its_deletion(trace: Trace) -> None:
    ends = delete_last_used(trace)
    last: BoundSymbol = ends.bound_symbols[0]
    ends.bound_symbols.append(
        last.replace(args=(last.output,), output=ends.tensor((2,), torch.float32, torch.device("cpu")))
    )
    with pytest.raises(AssertionError, match="reads t0, which no call before it defines, or one deletes"):
        verify(ends)
