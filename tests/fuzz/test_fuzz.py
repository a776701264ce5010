"""A short run of the fuzzer with fixed programs, and tests of its comparison."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge
from tests.fuzz.compare import Difference, check
from tests.fuzz.operations import operations
from tests.fuzz.programs import Input, Line, Program
from tests.fuzz.worker import run

EXAMPLES = 60


def test_random_programs_agree_with_eager() -> None:
    went = run(0, EXAMPLES)
    assert went["agrees"] > EXAMPLES // 2


def test_programs_have_most_of_the_opinfos_operations() -> None:
    assert len({each.function for each in operations()}) > 250


def program(*lines: Line, after: tuple[str, ...] = ()) -> Program:
    inputs = (Input("x0", "torch.randn(B, L)", True), Input("x1", "torch.randn(B, L)", False))
    return Program(inputs, lines, ("v0",), ((2, 3), (4, 5)), (0,), after)


SINE = Line("v0 = torch.sin(x0)", target="v0")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x, y: [torch.sin(x) * 1.001], "result 0: forge"),
        (lambda x, y: [torch.sin(x).double()], "result 0: torch.float64"),
        (lambda x, y: [torch.sin(x).t().contiguous().t()], "strides"),
        (lambda x, y: [torch.sin(x).detach()], "requires_grad"),
        (lambda x, y: [torch.sin(x.detach()) + 0 * x], "gradient of input 0: forge"),
        (lambda x, y: [torch.sin(x) + 0 * y.mul_(2)], "input 1 after the call"),
        (lambda x, y: [x], "aliases"),
        (lambda x, y: [torch.sin(x.view(-1, 7))], "forge raises RuntimeError"),
    ],
)
def test_a_difference_is_found(wrong: Callable, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forge, "jit", lambda f: wrong)
    with pytest.raises(Difference, match=message):
        check(program(SINE))


def test_what_eager_alone_refuses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forge, "jit", lambda f: lambda x, y: [x.detach()])
    with pytest.raises(Difference, match="eager raises"):
        check(program(Line("v0 = x0.view(-1, 7)", target="v0")))


@pytest.mark.parametrize(("results", "verdict"), [(("v0",), "raises in dead code"), (("v1",), "raises")])
def test_an_error_in_dead_code_is_told_from_others(results: tuple[str, ...], verdict: str) -> None:
    inputs = (Input("x0", "torch.randn((B, L))", True), Input("x1", "torch.tensor([5, 3])", False))
    lines = (Line("v0 = x0 + x0", "v0"), Line("v1 = v0[x1]", "v1"))
    assert check(Program(inputs, lines, results, ((2, 3),), (0,))) == verdict


@pytest.mark.parametrize("read", ["x1.narrow(1, 0, 1)", "x1[:, :1].expand_as(x1)", "x1.unsqueeze(2).select(1, 0)"])
def test_a_write_to_memory_that_it_reads_is_undefined(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forge, "jit", lambda f: lambda x, y: [torch.sin(x) + 0 * y.zero_()])
    assert check(program(Line(f"x1.add_({read})", writes="x1"), SINE)) == "undefined"
    with pytest.raises(Difference, match="input 1 after the call"):
        check(program(Line("x1.add_(x1)", writes="x1"), SINE))


def test_a_gradient_of_half_precision_through_a_write_may_be_off_by_its_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here forge's gradient is the one in bfloat16, whose roundings happen to cancel in eager."""
    lines = Line("v0 = x1.to(torch.bfloat16)", target="v0"), Line("v0.add_(x0)", writes="v0")

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * (1 + factor * 2**-8)

    monkeypatch.setattr(forge, "jit", lambda f: lambda x, y: [y.to(torch.bfloat16).add_(Rounded.apply(x))])
    factor = 1
    assert check(program(*lines)) == "agrees"
    factor = 50
    with pytest.raises(Difference, match="gradient of input 0"):
        check(program(*lines))


def test_a_result_that_a_rounding_changes_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the sign of a sum that is zero up to rounding."""
    lines = Line("v1 = x0 * 3 - x0 - x0 - x0", target="v1"), Line("v0 = torch.sign(v1)", target="v0")
    monkeypatch.setattr(forge, "jit", lambda f: lambda x, y: [torch.sign(x - x) + 0 * x])
    check(program(*lines))
