"""The entry point of torch calls: registration, in-place forms, `out=`, views."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import torchlang
from forge.api.functional import Direct
from forge.torchlang import torchsymbol
from tests.unknown_operator import rounded


def body(input: Any) -> Any:
    return input


def test_a_symbol_is_defined_once() -> None:
    with pytest.raises(ValueError, match=r"torchsymbol: torch\.exp2 is defined twice"):
        torchsymbol(torch.exp2)(body)
    with pytest.raises(TypeError, match=r"torch.ops.aten.add.Tensor: its body does not take .*\bother"):
        torchsymbol(torch.ops.aten.add.Tensor)(body)


def test_a_function_has_one_meaning() -> None:
    before = torchlang.all_symbols()
    with pytest.raises(ValueError, match=r"is torch\.exp2 already, and cannot be test\.other too"):
        torchsymbol(torch.exp2, id="test.other")(body)
    torchlang.core._symbols.pop("test.other")
    torchlang.core._functions.pop("test.other")
    assert torchlang.all_symbols() == before and torchlang.find(torch.exp2) is torchlang.exp2


def test_find_knows_functions_methods_operators_and_inplace_forms() -> None:
    assert torchlang.find(torch.add) is torchlang.add
    assert torchlang.find(torch.Tensor.add) is torchlang.add
    assert torchlang.find(operator.add) is torchlang.add
    assert torchlang.find("add") is torchlang.add
    assert torchlang.find(torch.Tensor.add_) is torchlang.add
    assert torchlang.find("add_") is torchlang.add
    assert torchlang.find(operator.iadd) is torchlang.add
    assert torchlang.find(torch.manual_seed) is None and torchlang.find("no_such_method") is None


@pytest.mark.parametrize("name", ["__abs__", "__neg__", "__pos__", "__pow__", "__ipow__", "__itruediv__"])
def test_a_method_is_found_under_each_of_its_names(name: str) -> None:
    """torch 2.11's Dynamo passes abs(x) as the method __abs__, whose own name is abs."""
    assert getattr(torch.Tensor, name).__name__ != name
    assert torchlang.find(name) is torchlang.find(getattr(torch.Tensor, name)) is not None


def test_a_function_that_torchlang_does_not_have_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"torchlang does not have torch\.ops\.forge_test\.rounded"):
        forge.trace(rounded, torch.eye(2))
    with pytest.raises((AttributeError, NotImplementedError), match="nothing_like_it"):
        forge.trace(lambda x: x.nothing_like_it(), torch.eye(2))


def both(function: Callable, *inputs: torch.Tensor) -> None:
    """Check that forge and eager return the same result and change their inputs in the same way."""
    ours, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    expected = function(*theirs)
    actual = Direct(function, ["torch"])(*ours)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(ours, theirs)


def test_inplace_forms_write_their_first_argument() -> None:
    def function(x: Any, y: Any) -> Any:
        z = x.add_(y)
        x *= 2
        torch.relu_(x)
        F.relu(x, inplace=True)
        return z + x

    both(function, torch.randn(3), torch.randn(3))


def test_an_inplace_form_returns_its_argument() -> None:
    def function(x: Any) -> Any:
        assert x.mul_(2) is x
        return x

    both(function, torch.randn(3))


def test_out_is_written_and_returned() -> None:
    def function(x: Any, out: Any) -> Any:
        result = torch.mul(x, 2, out=out)
        assert result is out
        return out + 1

    both(function, torch.randn(3), torch.zeros(3))


def test_out_of_another_shape_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"mul: output with shape \[2\] doesn't match the broadcast shape \[3\]"):
        forge.trace(lambda x, out: torch.mul(x, 2, out=out), torch.ones(3), torch.ones(2))


def test_an_inplace_change_of_shape_or_category_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match=r"doesn't match the broadcast shape \[2, 3\]"):
        forge.trace(lambda x, y: x.add_(y), torch.ones(3), torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="result type f32 can't be cast to the desired output type i64"):
        forge.trace(lambda x, y: x.add_(y), torch.ones(3, dtype=torch.int64), torch.ones(3))


def test_an_inplace_result_is_converted_to_the_dtype_of_its_target() -> None:
    both(lambda x, y: x.add_(y), torch.ones(3, dtype=torch.float16), torch.randn(3))


def test_keyword_arguments_reach_the_symbol() -> None:
    both(lambda x, y: torch.add(input=x, other=y, alpha=3), torch.randn(3), torch.randn(3))


def test_every_symbol_speaks_clang_inside() -> None:
    """Operators in a body record clang's symbols, not torchlang's."""
    trace = forge.trace(F.silu, torch.ones(2))
    assert all(not sub.symbol.id.startswith("torch") for sub in trace.bound_symbols[0].subsymbols)


VALUES = (0.0, 1.0, 2.0, float("nan"))
EXTREMA = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "clamp_min": lambda x, low: torch.clamp(x, low),
    "clamp_max": lambda x, high: torch.clamp(x, max=high),
    "clamp": torch.clamp,
    "clamp by numbers": lambda x: torch.clamp(x, 1.0, 2.0) + torch.clamp(x, min=1.0) + torch.clamp(x, max=1.0),
}


@pytest.mark.parametrize("function", EXTREMA.values(), ids=EXTREMA)
def test_gradients_where_values_are_equal_or_nan_are_eagers(function: Callable) -> None:
    """Versions of torch differ in the gradients of equal operands."""
    count = 3 if function is torch.clamp else 1 if function is EXTREMA["clamp by numbers"] else 2
    rows = torch.tensor(list(itertools.product(VALUES, repeat=count))).unbind(1)
    operands = [row.clone().requires_grad_() for row in rows]
    g = torch.arange(1.0, 1 + len(rows[0]))
    ours, theirs = (torch.autograd.grad(f(*operands), operands, g) for f in (forge.jit(function), function))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


NUMPYS_NAMES: dict[str, Callable] = {
    "axis": lambda x, y: torch.cat([x, y], axis=1),
    "axis of a method": lambda x, y: x.unsqueeze(axis=0) + y.softmax(axis=0),
    "keepdims": lambda x, y: x / torch.linalg.vector_norm(y, keepdims=True),
    "x1 and x2": lambda x, y: torch.maximum(x1=x, x2=y),
    "x": lambda x, y: torch.exp(x=x) + y,
    "x1 where torch says so": lambda x, y: torch.cdist(x1=x, x2=y),
}


@pytest.mark.parametrize("name", NUMPYS_NAMES)
def test_arguments_have_numpys_names_too(name: str) -> None:
    x, y = torch.randn(2, 3, 4).unbind()
    both(NUMPYS_NAMES[name], x, y)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tensor_split(x, indices=(1, 3), dim=1),
        lambda x: x.tensor_split(dim=1, sections=2),
        lambda x: torch.hsplit(input=x, sections=2),
        lambda x: x.vsplit(indices=[1]),
        lambda x: torch.isin(elements=x, test_element=1, invert=True),
        lambda x: torch.isin(element=1, test_elements=x),
    ],
)
def test_arguments_by_the_names_of_overloads(function: Callable) -> None:
    jitted = forge.jit(function, executors=["torch"], fullgraph=True)
    x = torch.arange(8.0).reshape(2, 4)
    torch.testing.assert_close(jitted(x), function(x))
