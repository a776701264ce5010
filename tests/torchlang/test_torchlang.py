"""The door through which torch calls enter: registration, in-place forms, `out=`, views."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import torchlang
from forge.functional import Direct
from forge.torchlang import torchsymbol


def body(input: Any) -> Any:
    return input


def test_a_symbol_is_defined_once() -> None:
    with pytest.raises(ValueError, match=r"torchsymbol: torch\.exp2 is defined twice"):
        torchsymbol(torch.exp2)(body)


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


def test_a_function_that_torchlang_does_not_have_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"torchlang does not have torch\..*matrix_exp"):
        forge.trace(lambda x: torch.linalg.matrix_exp(x), torch.eye(2))
    with pytest.raises((AttributeError, NotImplementedError), match="nothing_like_it"):
        forge.trace(lambda x: x.nothing_like_it(), torch.eye(2))


def both(function: Callable, *inputs: torch.Tensor) -> None:
    """Forge and eager give the same result and change their inputs in the same way."""
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
