"""Reductions over processes in the memory of their input, if nothing reads it again, and only then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge import prims, torchlang
from forge.executors import OperatorExecutor, claim, resolve_executors
from forge.executors.torchex import distributed
from forge.testing.process_group import group_of_one
from forge.transforms import overlap_calls, reduce_in_place

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def _reductions(function: Callable[..., Any]) -> list[str]:
    inputs = [torch.rand(4, 4) for _ in range(2)]
    claimed, _ = claim(forge.trace(function, *inputs), resolve_executors(["torch"]))
    trace = reduce_in_place(overlap_calls(claimed), distributed.REDUCTION)
    given, expected = [each.clone() for each in inputs], [each.clone() for each in inputs]
    ours, theirs = trace.python_callable()(*given), claimed.python_callable()(*expected)
    torch.testing.assert_close([ours, given], [theirs, expected], rtol=0, atol=0)
    return [bound.symbol.name for bound in trace.bound_symbols if "reduce" in bound.symbol.name]


def _reduce(x: Any) -> Any:
    return prims.wait_tensor(prims.all_reduce(x, "sum", group_of_one()))


def _of_an_input(x: Any, y: Any) -> Any:
    return _reduce(x)


def _of_a_result(x: Any, y: Any) -> Any:
    z = prims.exp(x)
    return z, _reduce(z)


def _of_a_value_read_later(x: Any, y: Any) -> Any:
    z = prims.exp(x)
    reduced = _reduce(z)
    return prims.mul(prims.sin(reduced), z)


def _of_a_view_of_an_input(x: Any, y: Any) -> Any:
    return _reduce(prims.permute(x, (1, 0)))


def _of_a_value_whose_view_is_returned(x: Any, y: Any) -> Any:
    z = prims.exp(x)
    return prims.permute(z, (1, 0)), _reduce(z)


def _of_what_is_sent(x: Any, y: Any) -> Any:
    z = prims.exp(x)
    gathered = prims.all_gather_into_tensor(z, 1, group_of_one())
    return _reduce(z), prims.wait_tensor(gathered)


def _of_what_is_waited_for_twice(x: Any, y: Any) -> Any:
    z = prims.all_gather_into_tensor(x, 1, group_of_one())
    first, second = prims.wait_tensor(z), prims.wait_tensor(z)
    return prims.sin(_reduce(first)), prims.sin(second)


def _of_parts_of_complex_numbers(x: Any, y: Any) -> Any:
    z = torch.complex(x, y)
    return torch.sin(_reduce(torch.view_as_real(z))), torch.abs(z)


def _of_what_is_no_conjugate(x: Any, y: Any) -> Any:
    z = prims.exp(x)
    return prims.sin(_reduce(torch.resolve_conj(z))), prims.sin(z)


@pytest.mark.parametrize("function", [
    _of_an_input, _of_a_result, _of_a_value_read_later, _of_a_view_of_an_input, _of_a_value_whose_view_is_returned,
    _of_what_is_sent, _of_what_is_waited_for_twice, _of_parts_of_complex_numbers,
    _of_what_is_no_conjugate,
], ids=lambda each: each.__name__)  # fmt: skip
def test_memory_that_others_read_is_not_written(function: Callable[..., Any]) -> None:
    assert set(_reductions(function)) == {"all_reduce"}


def _of_a_product(x: Any, y: Any) -> Any:
    return prims.sin(_reduce(prims.matmul(x, y)))


def _of_a_value_read_before(x: Any, y: Any) -> Any:
    z = prims.exp(x)
    other = prims.sin(z)
    return _reduce(prims.add(z, other))


def _of_a_view(x: Any, y: Any) -> Any:
    """Reduce a view that is not contiguous: the reduction copies it at run time."""
    return _reduce(prims.permute(prims.exp(x), (1, 0)))


def _of_a_reduced_value(x: Any, y: Any) -> Any:
    return _reduce(prims.neg(_reduce(prims.exp(x))))


@pytest.mark.parametrize("function", [
    _of_a_product, _of_a_value_read_before, _of_a_view, _of_a_reduced_value
], ids=lambda each: each.__name__)  # fmt: skip
def test_memory_that_nobody_reads_again_is_written(function: Callable[..., Any]) -> None:
    assert set(_reductions(function)) == {"all_reduce_"}


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    functional = torch.ops._c10d_functional
    reduced: torch.Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", group))
    return reduced


def test_the_default_configuration_reduces_in_place() -> None:
    group = group_of_one()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _all_reduce(x @ y, group).sin()

    jitted, (x, y) = forge.jit(function), [torch.rand(4, 4) for _ in range(2)]
    torch.testing.assert_close(jitted(x, y), function(x, y))
    assert "all_reduce_(" in str(forge.last_traces(jitted)[-1])


def test_memory_that_a_region_reads_later_is_not_written() -> None:
    """A region reads the result that a kernel laid out in row-major order, which may be the result itself."""
    group = group_of_one()

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = nn.functional.conv1d(x, weight)
        first, second = _all_reduce(z.sin() * 2, group), _all_reduce(z, group)
        return z.cos() * 3 + (second @ second.mT).sum(), first

    jitted, x, weight = forge.jit(function), torch.rand(2, 3, 8), torch.rand(5, 3, 3)
    torch.testing.assert_close(jitted(x, weight), function(x, weight))
    text = str(forge.last_traces(jitted)[-1])
    assert "in_row_major(z)" in text and "all_reduce_(z" not in text


def test_memory_of_an_input_that_is_written_in_place_is_not_written() -> None:
    group = group_of_one()

    def function(totals: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        totals[1:3] = x.sum() * 2
        return _all_reduce(totals, group).sin()

    jitted, totals, x = forge.jit(function), torch.zeros(4), torch.ones(2)
    torch.testing.assert_close(jitted(totals, x), function(torch.zeros(4), x))
    text = str(forge.last_traces(jitted)[-1])
    assert "set_item_(" in text or "slice_scatter_(" in text
    assert "all_reduce_(" not in text


def test_memory_of_a_function_of_the_users_is_not_written() -> None:
    """The function may keep its argument."""
    mine, group, kept = OperatorExecutor("mine"), group_of_one(), []
    mine.register_implementation(torchlang.silu, lambda x: kept.append(x) or nn.functional.silu(x))

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x @ y
        first, second = _all_reduce(z.sin(), group), _all_reduce(nn.functional.silu(z), group)
        return z.cos() * second.sum(), first

    jitted = forge.jit(function, executors=[mine, "torch"])
    jitted(torch.rand(4, 4), torch.rand(4, 4))
    assert str(forge.last_traces(jitted)[-1]).count("all_reduce_(") == 1  # of sin
