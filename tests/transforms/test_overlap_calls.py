"""Collectives that start early and are awaited late: the calls that they move across, and those that they do not."""

from typing import Any

import pytest
import torch

import forge
from forge import prims
from forge.compiler.passes import MESSAGES
from forge.executors import claim, resolve_executors
from forge.ir import Trace
from forge.testing.process_group import group_of_one
from forge.torch_internals.versions import TORCH
from forge.transforms import bucket_collectives, overlap_collectives
from forge.transforms.collective_schedule import find_parameters
from forge.transforms.overlap_calls import overlap_calls

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def _overlapped(function: Any, *inputs: torch.Tensor) -> tuple[list[str], Trace]:
    claimed, _ = claim(forge.trace(function, *inputs), resolve_executors(["torch"]))
    trace = overlap_calls(claimed)
    given, expected = [each.clone() for each in inputs], [each.clone() for each in inputs]
    ours, theirs = trace.python_callable()(*given), claimed.python_callable()(*expected)
    torch.testing.assert_close([ours, given], [theirs, expected], rtol=0, atol=0)
    return [bound.symbol.name.rpartition(".")[2] for bound in trace.bound_symbols], trace


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 3, generator=generator) for _ in range(2)]


def test_independent_calls_run_while_a_collective_is_on_its_way() -> None:
    group = group_of_one()

    def function(x: Any, y: Any) -> Any:
        a = prims.exp(x)
        b = prims.sin(y)
        reduced = prims.wait_tensor(prims.all_reduce(a, "sum", group))
        c = prims.cos(b)
        return prims.add(reduced, c), c

    names, _ = _overlapped(function, *_inputs())
    assert names == ["exp", "all_reduce", "sin", "cos", "wait_tensor", "add"]


def test_a_result_that_is_returned_is_awaited_last() -> None:
    group = group_of_one()

    def function(x: Any, y: Any) -> Any:
        reduced = prims.wait_tensor(prims.all_reduce(x, "sum", group))
        return reduced, prims.sin(y)

    assert _overlapped(function, *_inputs())[0] == ["all_reduce", "sin", "wait_tensor"]


def test_collectives_start_in_their_order() -> None:
    """The second one's input is ready first."""
    group = group_of_one()

    def function(x: Any, y: Any) -> Any:
        first = prims.wait_tensor(prims.all_reduce(prims.exp(prims.sin(x)), "sum", group))
        second = prims.wait_tensor(prims.all_reduce(y, "avg", group))
        return prims.add(first, second)

    names, trace = _overlapped(function, *_inputs())
    assert names == ["sin", "exp", "all_reduce", "all_reduce", "wait_tensor", "wait_tensor", "add"]
    reduced = [bound.args[1] for bound in trace.bound_symbols if bound.symbol.name.endswith("all_reduce")]
    assert reduced == ["sum", "avg"]


def test_nothing_that_is_sent_is_written_to_meanwhile() -> None:
    group = group_of_one()

    def function(x: Any, y: Any) -> Any:
        gathered = prims.wait_tensor(prims.all_gather_into_tensor(x, 1, group))
        prims.copy_(x, y)
        z = prims.sin(y)
        later = prims.wait_tensor(prims.all_gather_into_tensor(x, 1, group))
        return prims.add(prims.add(gathered, later), z)

    names, _ = _overlapped(function, *_inputs())
    assert names.index("wait_tensor") < names.index("copy_") < names.index("all_gather_into_tensor", 1)


@pytest.mark.parametrize("sent_first", [True, False])
def test_parameters_are_gathered_beside_other_collectives(sent_first: bool) -> None:
    """A wait may run between the two calls of a message, another collective does not start there."""
    group = group_of_one()

    def function(part: Any, x: Any) -> Any:
        if sent_first:
            x = prims.exp(prims.wait_tensor(prims.all_reduce(x, "sum", group)))
        whole = prims.unshard(part, 3, torch.float32, part.device, None, (1, group, None), None)
        y = prims.cos(x)
        z = prims.mul(y, whole)
        return z if sent_first else (z, prims.wait_tensor(prims.all_reduce(y, "sum", group)))

    program = forge.trace(function, *_inputs())
    parameters = find_parameters(program)
    claimed, _ = claim(bucket_collectives(program, parameters, MESSAGES), resolve_executors(["torch"]))
    trace = overlap_collectives(overlap_calls(claimed), parameters, MESSAGES)
    names = [bound.symbol.name.rpartition(".")[2] for bound in trace.bound_symbols]
    assert names == (
        ["all_reduce", "start_unshard", "wait_tensor", "exp", "cos", "finish_unshard", "mul"]
        if sent_first
        else ["start_unshard", "cos", "finish_unshard", "all_reduce", "mul", "wait_tensor"]
    )


@pytest.mark.skipif(TORCH < (2, 13), reason="before torch 2.13 its group of one process writes no results")
def test_a_compiled_program_overlaps_them() -> None:
    group = group_of_one()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = x @ x, y @ y
        reduced = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(a, "sum", group))
        return reduced + b

    jitted, given = forge.jit(function), _inputs()
    torch.testing.assert_close(jitted(*given), function(*given))
    assert [row.overlap for row in forge.explain(jitted).collectives] == [("matmul",)]
