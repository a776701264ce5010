"""Programs with symbolic sizes: a program from disk puts the guards that compiling it would put."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cache.support import from_disk, is_cached

import forge
from forge import prims, torchlang
from forge.executors import OperatorExecutor, decline

Given = tuple[torch.Tensor, ...]


def inputs(length: int) -> Given:
    return (torch.linspace(-1, 1, 4 * length).view(length, 4).requires_grad_(), torch.ones(4))


def softmaxed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * y, -1).sum(0) * x.shape[0] + x.reshape(-1, 2).shape[0]


def branched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.relu() @ y if x.shape[0] % 3 == 0 else x.sin() @ y


def masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[0], x.shape[0]).tril() == 0
    return ((x * y) @ x.T).masked_fill(mask, 0.0).sum()


@pytest.fixture(autouse=True)
def _nothing_learnt_before() -> None:
    torch._dynamo.reset()


def as_eager(jitted: Any, function: Callable, length: int) -> None:
    given, expected = inputs(length), inputs(length)
    result, wanted = jitted(*given), function(*expected)
    torch.testing.assert_close(result, wanted)
    result.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(given[0].grad, expected[0].grad)


@pytest.mark.parametrize("function", [softmaxed, branched, masked])
def test_it_is_found_and_right_at_other_sizes(function: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (6, 9, 7, 8)
    for last in (False, True):
        torch._dynamo.reset()
        jitted = forge.jit(function, dynamic=True)
        for length in lengths:
            as_eager(jitted, function, length)
        assert is_cached(jitted) == last
        from_disk(monkeypatch)
    assert forge.explain(jitted).graphs == (2 if function is branched else 1)


def test_a_change_of_shape_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for last in (False, True):
        torch._dynamo.reset()
        jitted = forge.jit(softmaxed)
        for length in (6, 9, 7):
            as_eager(jitted, softmaxed, length)
        assert (is_cached(jitted), forge.explain(jitted).graphs) == (last, 2)
        from_disk(monkeypatch)


def eights() -> OperatorExecutor:
    """Return an executor whose results are wrong for calls that its checker declines."""
    mine = OperatorExecutor("eights")

    def run(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        assert input.shape[0] % 8 == 0
        return input.clamp(min=0) + 1

    def takes(input: Any, inplace: bool = False) -> Any:
        return True if input.shape[0] % 8 == 0 else decline("its length is no multiple of 8")

    mine.register_implementation(torchlang.relu, run, checker=takes)
    return mine


def test_what_a_checker_asked_is_guarded_where_the_program_is_found() -> None:
    x = torch.randn
    for last in (False, True):
        torch._dynamo.reset()
        jitted = forge.jit(lambda x: F.relu(x) * 2, executors=[eights(), "torch"], dynamic=True)
        for length in (16, 24, 9, 32):
            given = x(length, 4)
            extra = 1 if length % 8 == 0 else 0
            torch.testing.assert_close(jitted(given), (given.relu() + extra) * 2)
        assert (is_cached(jitted), forge.explain(jitted).graphs) == (last, 2)


def fives() -> OperatorExecutor:
    """Return an executor whose checker makes an integer of a length when the backward of a product is claimed."""
    mine = OperatorExecutor("fives")
    mine.register_implementation(
        prims.cumprod,
        torch.cumprod,
        checker=lambda x, dim: x.shape[dim] == 5 or decline("its length is not 5"),
    )
    return mine


def test_a_backward_compiled_later_knows_the_lengths_that_a_checker_asked_for() -> None:
    """It is compiled when the length is known to be 5: the forward saves the same values as then."""
    for last in (False, True):
        torch._dynamo.reset()
        jitted = forge.jit(
            lambda x, y: (F.pad(x, (1, 1)), y.prod(0)), executors=[fives(), "inductor", "torch"], dynamic=True
        )
        x, y = (torch.rand(5, 3, requires_grad=True) for _ in range(2))
        results = jitted(x, y)
        assert is_cached(jitted) == last
        results[0].sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(5, 3))
        assert y.grad is None


def test_another_length_at_first_is_another_key() -> None:
    """Decisions by bytes use the lengths of the first call."""
    for length, found in ((6, False), (9, False), (6, True)):
        torch._dynamo.reset()
        jitted = forge.jit(softmaxed, dynamic=True)
        as_eager(jitted, softmaxed, length)
        assert is_cached(jitted) == found


def test_gradients_of_gradients_are_compiled_from_the_graph() -> None:
    for found in (False, True):
        torch._dynamo.reset()
        jitted = forge.jit(softmaxed, dynamic=True)
        for length in (6, 9):
            results = []
            for function in (jitted, softmaxed):
                x, y = (each.detach().double() for each in inputs(length))
                x.requires_grad_()
                (g,) = torch.autograd.grad(function(x, y).square().sum(), x, create_graph=True)
                g.square().sum().backward()
                results.append((g, x.grad))
            torch.testing.assert_close(*results)
        assert is_cached(jitted) == found


def test_lengths_that_depend_on_values_are_not_kept() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        jitted = forge.jit(lambda x: x * x.sum().item())
        jitted(torch.ones(3))
        assert forge.explain(jitted).uncached == ["a length of it depends on values"]
