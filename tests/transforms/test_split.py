"""The split of a joint program into forward and backward."""

import sys
from collections.abc import Callable
from typing import Any

import torch

import forge
from forge import clang
from forge.api.functional import Direct
from forge.compiler.report import CompileReport
from forge.ir import Symbol, Tag, Trace
from forge.transforms.split import recompute


def trained(function: Callable, *inputs: torch.Tensor) -> tuple[CompileReport, tuple]:
    """Return the function compiled for training, and the gradients of its inputs."""
    direct = Direct(function, ["torch"])
    leaves = [value.detach().requires_grad_() if value.is_floating_point() else value for value in inputs]
    out = direct(*leaves)
    gradients = torch.autograd.grad(out.sum(), [leaf for leaf in leaves if leaf.requires_grad])
    ((_, compiled),) = direct.compiled.values()
    return compiled, gradients


def stage(compiled: CompileReport, name: str) -> Trace:
    (found,) = [trace for trace in compiled.traces if trace.stage == name]
    return found


def saved(compiled: CompileReport) -> list[str]:
    """Return the names of the tensors that the forward saves."""
    return [proxy.name for proxy in stage(compiled, "split").output[1]]


def test_nothing_is_saved_where_the_backward_reads_nothing() -> None:
    compiled, _ = trained(lambda x, y: x + y, torch.ones(2), torch.ones(2))
    assert saved(compiled) == []


def test_what_the_backward_reads_is_saved_once_and_nothing_else() -> None:
    compiled, _ = trained(lambda x, y: torch.exp(x) * y * 2, torch.ones(2), torch.ones(2))
    exp = stage(compiled, "split").bound_symbols[0].output.name
    assert sorted(saved(compiled)) == sorted([exp, "y"])


def test_an_operand_is_saved_only_for_an_operand_that_needs_a_gradient() -> None:
    direct = Direct(lambda x, y: x * y, ["torch"])
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    direct(x, y)
    ((_, compiled),) = direct.compiled.values()
    assert saved(compiled) == ["y"]


opens = Symbol("opens", "test.split_opens", body=lambda x: clang.mul(x, clang.sigmoid(x)))
doubled = Symbol("doubled", "test.split_doubled", body=lambda x: clang.mul(clang.neg(x), 2))


def test_a_composite_stays_one_call_where_the_backward_reads_nothing_inside() -> None:
    compiled, _ = trained(lambda x: doubled(x), torch.ones(2))
    assert [bound.symbol for bound in stage(compiled, "split").bound_symbols] == [doubled]
    assert saved(compiled) == []


def test_a_composite_opens_where_the_backward_reads_a_value_inside() -> None:
    x = torch.randn(4, dtype=torch.float64)
    compiled, (gradient,) = trained(lambda x: opens(x), x)
    calls = stage(compiled, "split").bound_symbols
    assert [bound.symbol.id for bound in calls] == ["clang.sigmoid", "clang.mul"]
    assert sorted(saved(compiled)) == sorted([calls[0].output.name, "x"])
    x.requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad((x * torch.sigmoid(x)).sum(), x)[0])


def test_the_backward_does_not_repeat_what_the_forward_saved() -> None:
    compiled, _ = trained(lambda x: torch.sin(x) * torch.sin(x), torch.ones(2))
    names = [bound.symbol.name for bound in compiled.backward_traces[0].bound_symbols]
    assert "sin" not in names


def test_calls_that_only_dead_values_need_are_dropped() -> None:
    def function(x: Any) -> Any:
        torch.exp(x * 3)
        return x * 2

    compiled, _ = trained(function, torch.ones(2))
    assert [bound.symbol.name for bound in stage(compiled, "split").bound_symbols] == ["mul"]


def test_a_long_chain_is_computed_again_in_order() -> None:
    length = sys.getrecursionlimit() * 2

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = torch.sin(x)
        return x

    trace = forge.trace(chain, torch.ones(2))
    calls = [bound.replace(tags=frozenset({Tag.RECOMPUTE})) for bound in trace.bound_symbols]
    backward = trace.derive("backward", [])
    found = recompute(calls, backward)
    assert [bound.output.name for bound in found.bound_symbols] == [bound.output.name for bound in calls]
