"""Splitting a joint program into forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from forge.compile import Compiled
from forge.functional import Direct
from forge.ir import Trace


def trained(function: Callable, *inputs: torch.Tensor) -> tuple[Compiled, tuple]:
    """The function compiled for training, and the gradients of its inputs."""
    direct = Direct(function, ["torch"])
    leaves = [value.detach().requires_grad_() if value.is_floating_point() else value for value in inputs]
    out = direct(*leaves)
    gradients = torch.autograd.grad(out.sum(), [leaf for leaf in leaves if leaf.requires_grad])
    (compiled,) = direct.compiled.values()
    return compiled, gradients


def stage(compiled: Compiled, name: str) -> Trace:
    (found,) = [trace for trace in compiled.traces if trace.stage == name]
    return found


def saved(compiled: Compiled) -> list[str]:
    """The names of the tensors that the forward saves."""
    return [proxy.name for proxy in stage(compiled, "forward, split").output[1]]


def test_nothing_is_saved_where_the_backward_reads_nothing() -> None:
    compiled, _ = trained(lambda x, y: x + y, torch.ones(2), torch.ones(2))
    assert saved(compiled) == []


def test_what_the_backward_reads_is_saved_once_and_nothing_else() -> None:
    compiled, _ = trained(lambda x, y: torch.exp(x) * y * 2, torch.ones(2), torch.ones(2))
    exp = stage(compiled, "forward, split").bound_symbols[0].output.name
    assert sorted(saved(compiled)) == sorted([exp, "y"])


def test_an_operand_is_saved_only_for_an_operand_that_needs_a_gradient() -> None:
    direct = Direct(lambda x, y: x * y, ["torch"])
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    direct(x, y)
    (compiled,) = direct.compiled.values()
    assert saved(compiled) == ["y"]


def test_a_composite_stays_whole_where_the_backward_reads_nothing_inside() -> None:
    compiled, _ = trained(lambda x: F.silu(x), torch.ones(2))
    assert [bound.symbol.id for bound in stage(compiled, "forward, split").bound_symbols] == [
        "torch.nn.functional.silu"
    ]
    assert saved(compiled) == ["input"] or saved(compiled) == ["x"]


def test_a_composite_opens_where_the_backward_reads_a_value_inside() -> None:
    direct = Direct(F.silu, ["torch-prims"])  # its decomposition's rules read sigmoid(x)
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out = direct(x)
    (compiled,) = direct.compiled.values()
    forward = stage(compiled, "forward, split")
    assert "torch.nn.functional.silu" not in [bound.symbol.id for bound in forward.bound_symbols]
    (gradient,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(F.silu(x).sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_the_backward_does_not_repeat_what_the_forward_saved() -> None:
    compiled, _ = trained(lambda x: torch.sin(x) * torch.sin(x), torch.ones(2))
    names = [bound.symbol.name for bound in compiled.backward_traces[0].bound_symbols]
    assert "sin" not in names


def test_calls_that_only_dead_values_need_are_dropped() -> None:
    def function(x: Any) -> Any:
        torch.exp(x * 3)
        return x * 2

    compiled, _ = trained(function, torch.ones(2))
    assert [bound.symbol.name for bound in stage(compiled, "forward, split").bound_symbols] == ["mul"]
