"""Collectives that start early and are awaited late: what they move over, and what they do not."""

from typing import Any

import pytest
import torch

import forge
from forge import prims
from forge.executors import claim, resolve_executors
from forge.ir import Trace
from forge.testing.process_group import group_of_one
from forge.torch_internals.versions import TORCH
from forge.transforms.collective_overlap import delay_products, overlap_calls

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
    """The second one's input is there first."""
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


def _delayed(function: Any, *inputs: torch.Tensor) -> list[str]:
    before = forge.trace(function, *inputs)
    after = delay_products(before)
    results = []
    for trace in (before, after):
        claimed, _ = claim(trace, resolve_executors(["torch"]))
        results.append(claimed.python_callable()(*[each.clone() for each in inputs]))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    return [bound.symbol.name for bound in after.bound_symbols]


def test_products_that_a_collective_does_not_wait_for_run_after_its_start() -> None:
    """As in the backward of layers whose products are cut: the sum of their inputs' gradients is reduced."""
    group = group_of_one()

    def function(x: Any, y: Any) -> Any:
        first = prims.matmul(x, y)
        weight = prims.matmul(y, x)
        second = prims.matmul(x, x)
        turned = prims.neg(weight)
        total = prims.add(first, second)
        return prims.sin(prims.wait_tensor(prims.all_reduce(total, "sum", group))), turned

    names = _delayed(function, *_inputs())
    assert names == ["matmul", "matmul", "add", "all_reduce", "matmul", "neg", "wait_tensor", "sin"]


def test_as_many_products_run_meanwhile_as_take_the_time_of_a_collective() -> None:
    """Later ones first: what they read stays in memory until then."""
    group = group_of_one()
    wide, x = torch.ones(256, 4096), torch.ones(4, 4)

    def function(wide: Any, x: Any) -> Any:
        early = prims.matmul(wide, prims.permute(wide, (1, 0)))
        late = prims.matmul(prims.permute(wide, (1, 0)), wide)
        reduced = prims.wait_tensor(prims.all_reduce(prims.sin(x), "sum", group))
        return early, late, reduced

    names = _delayed(function, wide, x)
    assert names.index("matmul") < names.index("all_reduce")
    assert names[-3:] == ["all_reduce", "matmul", "wait_tensor"]


def test_no_product_moves_over_a_call_that_may_write() -> None:
    group = group_of_one()

    def function(x: Any, y: Any) -> Any:
        product = prims.matmul(x, y)
        prims.copy_(x, y)
        return product, prims.wait_tensor(prims.all_reduce(y, "sum", group))

    assert _delayed(function, *_inputs()) == ["matmul", "copy_", "all_reduce", "wait_tensor"]


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
