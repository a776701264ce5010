"""Backwards that are compiled on demand, after Dynamo has collected its guards: they are correct for every size with
which the graph runs."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import forge
from forge import clang, prims
from forge.executors import FusionExecutor, OperatorExecutor, claim, decline, resolve_executors
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace

QUESTIONS: dict[str, Callable] = {
    "a remainder": lambda n: n % 8 == 0,
    "equal to a number": lambda n: n == 8,
    "unequal": lambda n: n != 9,
    "less": lambda n: n < 9,
    "a branch": lambda n: False if n > 8 else True,  # noqa: SIM211
    "the smaller": lambda n: min(n, 9) == n and min(n, 9) != 9,
    "the larger": lambda n: max(n, 8) == 8,
    "the number itself": lambda n: int(n) == 8,
    "truth": lambda n: not bool(n - 8),
    "a range": lambda n: len(range(n)) == 8,
    "in a list": lambda n: n in (8, 16),
    "an expression": lambda n: (n + 3) // 2 == 5,
    "torch.sym_max": lambda n: torch.sym_max(n, 8) == 8,
}


@pytest.fixture(autouse=True)
def _nothing_learnt_before() -> Iterator[None]:
    """Forget the sizes that Dynamo marked as dynamic, by source."""
    torch._dynamo.reset()
    yield


def eights(question: Callable, prim: Symbol = prims.cosh) -> tuple[OperatorExecutor, list[int]]:
    """Return an executor that runs a prim if the answer to a question about its rows is yes, and the list of the rows
    of its runs."""
    seen: list[int] = []

    def eight(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return getattr(torch, prim.name)(x)

    mine = OperatorExecutor("eights")
    mine.register_implementation(prim, eight, checker=lambda x: question(x.shape[0]))
    return mine, seen


def loss_and_more(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss, whose backward is compiled with the forward, and sinh, whose derivative is cosh."""
    return x.sum(), x.sinh()


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_checker_that_asks_what_is_not_known_declines(name: str) -> None:
    mine, seen = eights(QUESTIONS[name])
    jitted = forge.jit(loss_and_more, executors=[mine, "torch"], dynamic=True)
    for size in (8, 9, 16):
        check_gradient(jitted, size, pick=1)
    assert seen == []
    (row,) = [row for row in forge.explain(jitted).rows if row.operation == "prims.cosh"]
    assert row.executor == "torch" and "cannot be decided" in dict(row.declined)["eights"]
    assert forge.explain(jitted).graphs == 1


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_checker_that_asks_while_guards_are_taken_decides(name: str) -> None:
    """The usual backward: a size with another answer takes another graph."""
    mine, seen = eights(QUESTIONS[name])
    jitted = forge.jit(lambda x: x.sinh(), executors=[mine, "torch"], dynamic=True)
    for size in (8, 9):
        check_gradient(jitted, size)
    assert seen == [8]


def test_what_is_known_already_is_decided_later_too() -> None:
    """The program itself asked whether there are 8 rows."""
    mine, seen = eights(QUESTIONS["a remainder"])

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return loss_and_more(x if x.shape[0] % 8 == 0 else x * 2)

    jitted = forge.jit(function, executors=[mine, "torch"], dynamic=True)
    for size in (8, 16, 9):
        check_gradient(jitted, size, pick=1, function=function)
    assert seen == [8, 16]


@pytest.mark.parametrize("name", ["a remainder", "less", "the number itself"])
def test_a_double_backward_asks_as_late(name: str) -> None:
    """The derivative of sin is cos; that of cos has a minus."""
    mine, seen = eights(QUESTIONS[name], prims.neg)
    jitted = forge.jit(lambda x: x.sin(), executors=[mine, "torch"], dynamic=True)
    for size in (8, 9):
        x = torch.randn(size, requires_grad=True)
        (slope,) = torch.autograd.grad(jitted(x).sum(), x, create_graph=True)
        torch.testing.assert_close(slope, x.cos())
        torch.testing.assert_close(torch.autograd.grad(slope.square().sum(), x)[0], -2 * x.cos() * x.sin())
    assert seen == [] and forge.explain(jitted).graphs == 1


# programs whose gradient rules ask questions that the program has not: the first size's answers are wrong for another
RULES: dict[str, tuple[Callable, list]] = {
    "an exponent": (lambda x, number: x**number, [3.0, 4.0, 2.0, 0.0, 3.0, 5.5]),
    "halves": (lambda x, number: torch.nn.functional.glu(x.repeat(number), 0), [2, 4, 6]),
}


@pytest.mark.parametrize("name", RULES)
def test_a_gradient_rule_that_asks_what_is_not_known_is_answered_for_each_size(name: str) -> None:
    function, numbers = RULES[name]
    jitted = forge.jit(function, executors=["torch"], dynamic=True)
    for number in numbers:
        x = torch.arange(6, dtype=torch.float64, requires_grad=True)
        ours, theirs = (slopes(run, x, number) for run in (jitted, function))
        torch.testing.assert_close(ours, theirs)
    assert forge.explain(jitted).graphs <= 2


def slopes(function: Callable, x: torch.Tensor, number: float) -> tuple[torch.Tensor, ...]:
    """Return the first derivative and the second."""
    (first,) = torch.autograd.grad(function(x, number).sum(), x, create_graph=True)
    if not first.requires_grad:  # the zeros of eager for x**0
        return first, torch.zeros_like(x)
    return first, torch.autograd.grad(first.square().sum(), x)[0]


class Asking(FusionExecutor):
    """An executor that fuses the derivatives of sinh and of sin, and asks about their rows at the time `when`."""

    def __init__(self, question: Callable, when: str) -> None:
        super().__init__("asking")
        self.question, self.when, self.rows = question, when, []

    def can_fuse(self, bound: BoundSymbol) -> bool:
        return bound.symbol in (prims.cosh, prims.cos, clang.mul) and self._says("can_fuse", bound.args)

    def is_profitable(self, calls: list[BoundSymbol]) -> bool:
        return self._says("pays", [arg for bound in calls for arg in bound.args])

    def fuse(self, region: Trace) -> Callable:
        said = self._says("fuse", region.inputs)
        run = claim(region, resolve_executors(["torch"]))[0].python_callable()

        def fused(*inputs: Any) -> tuple:
            self.rows += [x.shape[0] for x in inputs if isinstance(x, torch.Tensor)]
            return run(*inputs)

        return fused if said else decline("no")

    def _says(self, when: str, args: Iterable[Any]) -> bool:
        return self.when != when or all(self.question(x.shape[0]) for x in args if isinstance(x, TensorProxy))


@pytest.mark.parametrize("when", ["can_fuse", "pays", "fuse"])
@pytest.mark.parametrize("name", ["a remainder", "less", "the number itself"])
def test_a_fusion_executor_that_asks_what_is_not_known_declines(name: str, when: str) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(), x.sinh().sin()

    asking = Asking(QUESTIONS[name], when)
    jitted = forge.jit(function, executors=[asking, "torch"], dynamic=True)
    for size in (8, 9):
        check_gradient(jitted, size, pick=1, function=function)
    assert asking.rows == []
    (row,) = [row for row in forge.explain(jitted).rows if row.operation == "prims.cosh"]
    assert "cannot be decided" in dict(row.declined)["asking"]


def check_gradient(jitted: Callable, size: int, *, pick: int | None = None, function: Callable | None = None) -> None:
    """Check that the gradient through one output is eager's."""
    eager = function or (loss_and_more if pick is not None else (lambda x: x.sinh()))
    x = torch.randn(size, requires_grad=True)
    found = [run(x) if pick is None else run(x)[pick] for run in (jitted, eager)]
    ours, theirs = (torch.autograd.grad(each.sum(), x)[0] for each in found)
    torch.testing.assert_close(ours, theirs)
