"""Hoisting of computations that depend on no input: they run once."""

from typing import Any

import pytest
import torch

import forge
from forge import prims
from forge.executors import claim, resolve_executors
from forge.ir import Proxy, Symbol, Tag, TensorProxy, Trace
from forge.ir.pytree import leaves, tensors
from forge.prims.core import like
from forge.transforms import fold_constants

CPU = torch.device("cpu")


def run(program: Trace) -> tuple[torch.Tensor, ...]:
    claimed, _ = claim(program, resolve_executors(["torch"]))
    return claimed.python_callable()()


def ramp() -> TensorProxy:
    return prims.iota(4, 0, 1, torch.float32, CPU)


def ids(trace: Trace) -> list[str]:
    return [bound.symbol.id for bound in trace.bound_symbols]


def test_calls_that_depend_on_no_input_become_constants() -> None:
    trace = fold_constants(forge.trace(lambda x: prims.mul(x, prims.exp(ramp())), torch.ones(4)), run)
    assert ids(trace) == ["prims.mul"]
    (constant,) = trace.constants.values()
    assert torch.equal(constant, torch.arange(4.0).exp())
    claimed, _ = claim(trace, resolve_executors(["torch"]))
    assert torch.equal(claimed.python_callable()(torch.full((4,), 2.0)), torch.arange(4.0).exp() * 2)


def test_only_what_the_rest_reads_is_kept() -> None:
    """The exponent's argument is computed on the way, and not kept."""
    trace = fold_constants(forge.trace(lambda x: prims.mul(x, prims.exp(ramp())), torch.ones(4)), run)
    assert len(trace.constants) == 1


def test_outputs_are_never_constants() -> None:
    """The caller may change an output in place."""

    def function(x: TensorProxy) -> Any:
        made = ramp()
        return made, prims.mul(x, made)

    trace = fold_constants(forge.trace(function, torch.ones(4)), run)
    assert ids(trace) == ["prims.iota", "prims.mul"] and not trace.constants


@pytest.mark.parametrize(("limit", "hoisted"), [(16, True), (15, False)])
def test_more_bytes_than_the_limit_stay(limit: int, hoisted: bool) -> None:
    trace = forge.trace(lambda x: prims.mul(x, ramp()), torch.ones(4))  # 4 floats of 4 bytes
    assert (ids(fold_constants(trace, run, byte_limit=limit)) == ["prims.mul"]) is hoisted


def test_the_largest_values_stay_where_all_are_too_many() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * torch.arange(4.0).exp(), y * torch.ones(4, 4).exp()

    trace = fold_constants(forge.trace(function, torch.ones(4), torch.ones(4, 4)), run, byte_limit=64)
    assert [bound.symbol.name for bound in trace.bound_symbols] == ["mul", "ones", "exp", "mul"]
    assert [tuple(each.shape) for each in trace.constants.values()] == [(4,)]


def test_a_view_that_only_expands_a_constant_stays() -> None:
    """An index that is the same for each head is such a view: it shares the constant's memory."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.gather(2, torch.arange(4).flip(0)[None, None].expand(64, 4, 4)[:, :2])

    x = torch.rand(64, 4, 4)
    trace = fold_constants(forge.trace(function, x), run, byte_limit=64)
    assert [bound.symbol.name for bound in trace.bound_symbols] == ["expand", "getitem", "gather"]
    assert [each.numel() for each in trace.constants.values()] == [4]
    claimed, _ = claim(trace, resolve_executors(["torch"]))
    assert torch.equal(claimed.python_callable()(x), function(x))


def scalars(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return calls with tensors of one element on the CPU."""
    scale = torch.full((), 64.0).sqrt()
    double, integer = torch.full((), 0.1, dtype=torch.float64), torch.full((), 3)
    positive = x > 0
    return (
        x / scale, x * double, torch.where(positive, scale, x), x.masked_fill(positive, scale), x + integer,
        x**integer, x.clamp(min=scale), x < double,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_constant_of_one_element_meets_another_device_as_a_number(dtype: torch.dtype) -> None:
    trace = forge.trace(scalars, torch.ones(4, device="meta", dtype=dtype))
    new = fold_constants(trace, run)
    assert not new.constants
    names = ["gt", "div", "mul", "where", "masked_fill", "add", "pow", "clamp", "lt"]
    assert [bound.symbol.name for bound in new.bound_symbols] == names
    found = leaves([(bound.args, bound.kwargs) for bound in new.bound_symbols])
    assert {leaf for leaf in found if not isinstance(leaf, Proxy)} == {0, 8.0, 0.1, 3}
    assert [x.dtype for x in tensors(new.output)] == [x.dtype for x in tensors(trace.output)]


def test_a_constant_stays_a_tensor_where_a_number_would_give_another_dtype() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((), 0.5, dtype=torch.float64)

    new = fold_constants(forge.trace(function, torch.ones(4, device="meta", dtype=torch.int32)), run)
    assert new.output.dtype == torch.float64 and len(new.constants) == 1


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, -1e9), (torch.uint8, 300), (torch.int32, 2**40)])
def test_a_constant_out_of_the_range_of_a_dtype_stays_a_tensor(dtype: torch.dtype, bound: float) -> None:
    """clamp refuses such a number."""
    trace = forge.trace(lambda x: x.clamp(min=torch.tensor(bound)), torch.ones(4, device="meta", dtype=dtype))
    assert len(fold_constants(trace, run).constants) == 1


def test_a_constant_beside_tensors_of_its_device_stays() -> None:
    assert len(fold_constants(forge.trace(lambda x: x * torch.full((), 0.5).exp(), torch.ones(4)), run).constants) == 1


@pytest.mark.parametrize("tag", [Tag.RANDOM, Tag.EFFECT, Tag.UNINITIALIZED, Tag.OPAQUE, Tag.SYNCHRONIZING])
def test_calls_that_are_more_than_their_value_stay(tag: Tag) -> None:
    call = Symbol("call", f"test.hoist_{tag.name}", meta=lambda x: like(x), tags=frozenset({tag}))
    trace = forge.trace(lambda x: prims.mul(x, call(ramp())), torch.ones(4))
    assert ids(fold_constants(trace, lambda program: (torch.arange(4.0),))) == [call.id, "prims.mul"]


def test_a_trace_with_nothing_to_hoist_is_returned_as_it_is() -> None:
    trace = forge.trace(lambda x: prims.exp(x), torch.ones(4))
    assert fold_constants(trace, run) is trace


def test_a_mask_is_made_once_for_all_calls() -> None:
    runs = []

    def counting(program: Trace) -> tuple[torch.Tensor, ...]:
        runs.append(program)
        return run(program)

    trace = fold_constants(
        forge.trace(lambda x: prims.mul(prims.mul(x, ramp()), prims.exp(ramp())), torch.ones(4)), counting
    )
    assert len(runs) == 1 and len(trace.constants) == 2
