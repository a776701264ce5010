"""The elimination of common subexpressions."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge
from forge import clang, prims, torchlang
from forge.ir import Symbol, Tag, TensorProxy, Trace, recording
from forge.prims.core import like
from forge.transforms import cse
from forge.transforms.cse import call_key


def merged(function: Callable, *args: torch.Tensor) -> Trace:
    return cse(forge.trace(function, *args))


def count(trace: Trace) -> int:
    return len(trace.bound_symbols)


def test_equal_calls_are_made_once_and_everything_reads_the_first() -> None:
    trace = merged(lambda x: prims.exp(x) + prims.exp(x), torch.ones(2))
    exp, add = trace.bound_symbols
    assert add.inputs == [exp.output.name]
    assert {proxy.name for sub in add.subsymbols for proxy in sub.args} == {exp.output.name}


def test_merging_is_transitive() -> None:
    trace = merged(lambda x: prims.neg(prims.exp(x)) + prims.neg(prims.exp(x)), torch.ones(2))
    assert [bound.symbol.id for bound in trace.bound_symbols] == ["prims.exp", "prims.neg", "torch.add"]


NUMBERS = [1, 1.0, True, 0.0, -0.0, False, 0, math.nan, math.inf, 1 + 0j]


@pytest.mark.parametrize("other", NUMBERS, ids=repr)
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_numbers_are_equal_when_their_types_and_signs_are(number: Any, other: Any) -> None:
    """1, 1.0 and True are equal in Python, and x + 1 is not x + 1.0 for an integer x."""
    trace = merged(lambda x: prims.exp(x + number) * prims.exp(x + other), torch.ones(2))
    same = type(number) is type(other) and repr(number) == repr(other)
    assert count(trace) == (3 if same else 5)


@pytest.mark.parametrize("tag", [Tag.RANDOM, Tag.EFFECT, Tag.UNINITIALIZED, Tag.OPAQUE, Tag.SYNCHRONIZING])
def test_calls_that_are_more_than_their_value_are_not_merged(tag: Tag) -> None:
    call = Symbol("call", f"test.cse_{tag.name}", meta=lambda x: like(x), tags=frozenset({tag}))
    wrapped = Symbol("wrapped", f"test.cse_wrapped_{tag.name}", body=lambda x: call(x))
    assert count(merged(lambda x: call(x) * call(x), torch.ones(2))) == 3
    assert count(merged(lambda x: wrapped(x) * wrapped(x), torch.ones(2))) == 3


def test_outputs_of_the_trace_keep_memory_of_their_own() -> None:
    """The caller may change one of two equal outputs in place."""
    trace = merged(lambda x: (prims.exp(x), prims.exp(x), prims.neg(prims.exp(x))), torch.ones(2))
    assert [bound.symbol.id for bound in trace.bound_symbols].count("prims.exp") == 3
    assert len(set(trace.output_names)) == 3


def test_a_recomputed_call_is_not_merged_with_one_that_is_saved() -> None:
    trace = Trace()
    x = trace.add_input(TensorProxy("x", (2,), torch.float32, torch.device("cpu")))
    with recording(trace, clang.language):
        kept = prims.exp(x)
        with trace.set_tags({Tag.RECOMPUTE}):
            again = prims.exp(x)
        trace.output = prims.mul(kept, again)
    assert count(cse(trace)) == 3


def test_a_composite_that_only_forwards_has_the_key_of_its_call() -> None:
    trace = forge.trace(lambda x: (torch.exp(x), clang.exp(x), prims.exp(x)), torch.ones(2))
    keys = {call_key(bound) for bound in trace.bound_symbols}
    assert len(keys) == 1


def test_symbols_made_for_one_call_are_different_though_they_have_one_id() -> None:
    """All calls of torch.autograd.Functions, and of transforms of torch.func, have the same id."""
    first, second = [
        Symbol("call", "test.cse_made_for_one_call", body=lambda x, body=body: body(body(x)))
        for body in (prims.exp, prims.sin)
    ]
    assert count(merged(lambda x: first(x) * second(x), torch.ones(2))) == 3
    assert count(merged(lambda x: first(x) * first(x), torch.ones(2))) == 2


def test_keyword_order_and_containers_do_not_matter() -> None:
    call = Symbol("call", "test.cse_kwargs", meta=lambda x, **kwargs: like(x))
    trace = merged(
        lambda x: call(x, dims=[0, 1], key=slice(0, 1)) * call(x, key=slice(0, 1), dims=(0, 1)), torch.ones(2)
    )
    assert count(trace) == 2


def test_unhashable_arguments_are_equal_when_they_are_the_same_object() -> None:
    class Unhashable:
        __hash__ = None

    one, other = Unhashable(), Unhashable()
    call = Symbol("call", "test.cse_unhashable", meta=lambda x, options: like(x))
    assert count(merged(lambda x: call(x, one) * call(x, one), torch.ones(2))) == 2
    assert count(merged(lambda x: call(x, one) * call(x, other), torch.ones(2))) == 3


def test_dtypes_and_arguments_that_differ_keep_calls_apart() -> None:
    assert count(merged(_casts, torch.ones(2))) == 4


def _casts(x: TensorProxy) -> TensorProxy:
    wide, narrow = prims.convert_element_type(x, torch.float64), prims.convert_element_type(x, torch.float16)
    return prims.mul(wide, prims.convert_element_type(narrow, torch.float64))


def test_torchlang_calls_are_merged_by_their_arguments() -> None:
    trace = merged(lambda x, w: torchlang.linear(x, w) + torchlang.linear(x, w), torch.ones(2, 3), torch.ones(4, 3))
    assert count(trace) == 2


@pytest.mark.parametrize("first", [True, False], ids=["no_grad first", "no_grad second"])
def test_a_value_under_no_grad_is_not_the_one_that_has_a_gradient(first: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        factors = []
        for grad in (not first, first):
            with torch.set_grad_enabled(grad):
                factors.append(x * 2)
        return (factors[0] * factors[1]).sum()

    x = torch.randn(3, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x), x)
    (actual,) = torch.autograd.grad(forge.jit(function)(x), x)
    torch.testing.assert_close(actual, expected)
