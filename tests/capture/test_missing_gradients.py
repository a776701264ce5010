"""Missing gradients are missing in a compiled program, as in eager: operators without autograd, backwards that return
None, functions that end the history of their inputs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import forge

pytestmark = pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
Tensor = torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    with torch.library._scoped_library("missing", "FRAGMENT") as lib:
        for name, kernel in {
            "plain": lambda x: x.detach() * 2,
            "inside": lambda x: x * 2,
            "pair": lambda x: (x.detach() * 2, x.detach().argmax()),
        }.items():
            results = "(Tensor, Tensor)" if name == "pair" else "Tensor"
            lib.define(f"{name}(Tensor x) -> {results}")
            lib.impl(name, kernel, "CPU")
        torch.library.register_fake("missing::plain", torch.empty_like, lib=lib)
        torch.library.register_fake("missing::inside", torch.empty_like, lib=lib)
        index = lambda x: (torch.empty_like(x), torch.empty((), dtype=torch.int64))
        torch.library.register_fake("missing::pair", index, lib=lib)
        yield


@torch.library.custom_op("missing_python::first", mutates_args=())
def first(x: Tensor, w: Tensor) -> Tensor:
    """Compute a product whose gradient is of x alone."""
    return x * w


first.register_fake(lambda x, w: torch.empty_like(x))
first.register_autograd(lambda ctx, g: (g * 3, None))


@torch.library.custom_op("missing_python::raises", mutates_args=())
def raises(x: Tensor) -> Tensor:
    """Return a result without autograd support, whose backward raises."""
    return x * 2


raises.register_fake(torch.empty_like)


@torch.compiler.allow_in_graph
def ended(x: Tensor) -> Tensor:
    """Return a result without a history."""
    with torch.no_grad():
        return x * 2


def outcome(function: Callable, *, steps: int = 1) -> list[Any]:
    """Return the results and gradients of a function, or the error of its backward."""
    torch.manual_seed(0)
    x, w = (torch.randn(4, requires_grad=True) for _ in range(2))
    found: list[Any] = []
    for _ in range(steps):
        result = function(x, w)
        results = result if isinstance(result, tuple) else (result,)
        found += [(each.requires_grad, each.grad_fn is not None) for each in results]
        found += [each.detach().clone() for each in results]
        try:
            sum(each.sum() for each in results).backward()
        except Exception as error:
            return [*found, f"{type(error).__name__}: {error}"]
        found += [None if each.grad is None else each.grad.clone() for each in (x, w)]
    return found


def same(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours == theirs


CASES = {
    "alone": lambda x, w: torch.ops.missing.plain(x),
    "beside another": lambda x, w: torch.ops.missing.plain(x) * w,
    "behind others": lambda x, w: torch.ops.missing.plain(torch.sin(x) * w),
    "one of two ways": lambda x, w: torch.ops.missing.plain(torch.sin(x)) * w + w + x * 2,
    "two results": lambda x, w: torch.ops.missing.pair(x)[0] * w,
    "a result of its own": lambda x, w: (torch.ops.missing.plain(x), w * 2),
    "operations of torch inside": lambda x, w: torch.ops.missing.inside(x) * w,
    "None of a formula": lambda x, w: first(x, w),
    "None on the way": lambda x, w: first(x, torch.cos(w) * 2),
    "None twice": lambda x, w: first(first(w, x), w),
    "before one that has none": lambda x, w: torch.ops.missing.plain(first(x, w)) * x,
    "an error": lambda x, w: raises(x) * w,
    "no history": lambda x, w: ended(x) * w,
    "no history at all": lambda x, w: ended(x),
}


@pytest.mark.parametrize("name", CASES)
def test_a_missing_gradient_is_missing_as_in_eager(name: str) -> None:
    same(outcome(forge.jit(CASES[name])), outcome(CASES[name]))


def test_it_is_missing_in_every_step() -> None:
    function = CASES["None on the way"]
    same(outcome(forge.jit(function), steps=3), outcome(function, steps=3))


def test_it_is_missing_where_a_graph_is_kept() -> None:
    x, w = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    loss = forge.jit(CASES["None of a formula"])(x, w).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert w.grad is None and x.grad.tolist() == [6.0] * 4


def test_a_parameter_that_no_gradient_reaches_is_left_alone_by_an_optimizer() -> None:
    """Weight decay changes a parameter whose gradient is zero, but not one whose gradient is None."""
    layer = torch.nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    w = torch.ones(4, requires_grad=True)
    jitted = forge.jit(lambda x: torch.ops.missing.plain(layer(x)) * w)
    jitted(torch.ones(4)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, before)


OTHERS = ("an error", "no history at all", "two results", "a result of its own")
TWICE = [name for name in CASES if name not in OTHERS]


def twice(function: Callable) -> list[Any]:
    """Return gradients with a history, and the gradients of those that have one, zeros for missing ones."""
    torch.manual_seed(0)
    x, w = (torch.randn(4, requires_grad=True) for _ in range(2))
    first = torch.autograd.grad(function(x, w).sum(), (x, w), create_graph=True, allow_unused=True)
    found = [each.detach() if each is not None else None for each in first]
    total = sum((each**2).sum() for each in first if each is not None)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        second = torch.autograd.grad(total, (x, w), allow_unused=True, materialize_grads=True)
    else:
        second = (torch.zeros(4), torch.zeros(4))
    return [*found, *second]


@pytest.mark.parametrize("name", TWICE)
def test_it_is_missing_where_gradients_have_a_history(name: str) -> None:
    same(twice(forge.jit(CASES[name])), twice(CASES[name]))


def test_a_program_whose_gradients_have_a_history_and_end_elsewhere_is_as_in_eager() -> None:
    function = lambda x, w: first(torch.sin(x) * w, w) * w * x
    same(twice(forge.jit(function)), twice(function))


def test_an_error_stays_one_where_gradients_have_a_history() -> None:
    with pytest.raises(RuntimeError, match=r"missing_python\.raises"):
        twice(forge.jit(CASES["an error"]))
