"""Hoisting: what depends on no input runs once."""

from typing import Any

import pytest
import torch

import forge
from forge import prims
from forge.executors import claim, resolve_executors
from forge.ir import Symbol, Tag, TensorProxy, Trace
from forge.prims.core import like
from forge.transforms import hoist

CPU = torch.device("cpu")


def run(program: Trace) -> tuple[torch.Tensor, ...]:
    claimed, _ = claim(program, resolve_executors(["torch"]))
    return claimed.python_callable()()


def ramp() -> TensorProxy:
    return prims.iota(4, 0, 1, torch.float32, CPU)


def ids(trace: Trace) -> list[str]:
    return [bound.symbol.id for bound in trace.bound_symbols]


def test_calls_that_depend_on_no_input_become_constants() -> None:
    trace = hoist(forge.trace(lambda x: prims.mul(x, prims.exp(ramp())), torch.ones(4)), run)
    assert ids(trace) == ["prims.mul"]
    (constant,) = trace.constants.values()
    assert torch.equal(constant, torch.arange(4.0).exp())
    claimed, _ = claim(trace, resolve_executors(["torch"]))
    assert torch.equal(claimed.python_callable()(torch.full((4,), 2.0)), torch.arange(4.0).exp() * 2)


def test_only_what_the_rest_reads_is_kept() -> None:
    """The exponent's argument is computed on the way, and not kept."""
    trace = hoist(forge.trace(lambda x: prims.mul(x, prims.exp(ramp())), torch.ones(4)), run)
    assert len(trace.constants) == 1


def test_outputs_are_never_constants() -> None:
    """The caller may change an output in place."""

    def function(x: TensorProxy) -> Any:
        made = ramp()
        return made, prims.mul(x, made)

    trace = hoist(forge.trace(function, torch.ones(4)), run)
    assert ids(trace) == ["prims.iota", "prims.mul"] and not trace.constants


@pytest.mark.parametrize(("limit", "hoisted"), [(16, True), (15, False)])
def test_more_bytes_than_the_limit_stay(limit: int, hoisted: bool) -> None:
    trace = forge.trace(lambda x: prims.mul(x, ramp()), torch.ones(4))  # 4 floats of 4 bytes
    assert (ids(hoist(trace, run, byte_limit=limit)) == ["prims.mul"]) is hoisted


@pytest.mark.parametrize("tag", [Tag.RANDOM, Tag.EFFECT, Tag.UNINITIALIZED, Tag.OPAQUE, Tag.SYNCHRONIZING])
def test_calls_that_are_more_than_their_value_stay(tag: Tag) -> None:
    call = Symbol("call", f"test.hoist_{tag.name}", meta=lambda x: like(x), tags=frozenset({tag}))
    trace = forge.trace(lambda x: prims.mul(x, call(ramp())), torch.ones(4))
    assert ids(hoist(trace, lambda program: (torch.arange(4.0),))) == [call.id, "prims.mul"]


def test_a_trace_with_nothing_to_hoist_is_returned_as_it_is() -> None:
    trace = forge.trace(lambda x: prims.exp(x), torch.ones(4))
    assert hoist(trace, run) is trace


def test_a_mask_is_made_once_for_all_calls() -> None:
    runs = []

    def counting(program: Trace) -> tuple[torch.Tensor, ...]:
        runs.append(program)
        return run(program)

    trace = hoist(forge.trace(lambda x: prims.mul(prims.mul(x, ramp()), prims.exp(ramp())), torch.ones(4)), counting)
    assert len(runs) == 1 and len(trace.constants) == 2
