"""Symbolic numbers: lengths, dims and floats as arguments of a function that is compiled with dynamic=True."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge
from forge.capture.handles import handle_of
from forge.executors import FusionExecutor, claim, resolve_executors
from forge.ir import BoundSymbol, Trace

PROGRAMS: dict[str, tuple[Callable, list[tuple]]] = {
    "a float": (lambda x, weight: torch.lerp(x, x * x, weight), [(0.25,), (0.75,)]),
    "a float of which the forward has no use": (lambda x, slope: torch.where(x > 0, x, x * slope), [(0.5,), (-2.0,)]),
    "a dim": (lambda x, dim: torch.softmax(x, dim), [(0,), (1,), (-1,)]),
    "a reduction's dim": (lambda x, dim: torch.logsumexp(x, dim), [(0,), (1,)]),
    "two dims": (lambda x, a, b: x.transpose(a, b) * 2, [(0, 1), (1, 0)]),
    "how many dims": (lambda x, dims: torch.tensordot(x, x, dims) * 2, [(0,), (2,)]),
    "lengths": (lambda x, rows: x.view(rows, -1) * 2, [(3,), (4,), (6,)]),
    "a length to expand to": (lambda x, rows: x.expand(rows, -1, -1) * 2, [(2,), (5,)]),
    "how many dims are summed": (lambda x, dims: torch.tensordot(x, x * 2, dims), [(2,)]),
    "lists of dims that are summed": (lambda x, a, b: torch.tensordot(x, x * 2, ([a], [b])), [(0, 0), (1, 1)]),
    "a norm's dim": (lambda x, dim: torch.linalg.norm(x.unsqueeze(0), dim=dim), [(2,), (1,)]),
    "a tensor of numbers": (lambda x, a, b: x * torch.tensor([a, b, 1, a + b]), [(2, 3), (5, 7)]),
    "a tensor of a number, like another": (lambda x, a: x * x.new_tensor(a), [(2,), (5,)]),
    "a diagonal": (lambda x, offset: torch.diag(x, offset), [(2,), (-2,)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(4)
def test_results_and_gradients_are_eagers_for_every_number(name: str) -> None:
    function, calls = PROGRAMS[name]
    jitted = forge.jit(function, dynamic=True, strict=True, fullgraph=True)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for numbers in calls:
        actual, expected = jitted(x, *numbers), function(x, *numbers)
        torch.testing.assert_close(actual, expected)
        _assert_same_gradient(actual, expected, x)
    assert not handle_of(jitted).eager


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_diagonal_that_torch_copies_is_no_view_of_the_matrix(requires_grad: bool) -> None:
    jitted = forge.jit(torch.diag, dynamic=True, fullgraph=True)
    x = torch.randn(4, 5, requires_grad=requires_grad)
    for offset in (2, 3):
        ours, eager = jitted(x, offset), torch.diag(x, offset)
        assert ours.stride() == eager.stride()
        assert ours.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


LENGTHS = {
    "math.ceil": lambda x: x[: math.ceil(x.shape[0] / 2)] * 2,
    "math.floor": lambda x: x[: math.floor(x.shape[0] * 0.4)] * 2,
    "int": lambda x: x[: int(x.shape[0] * 0.5)] * 2,
    "math.trunc": lambda x: x[: math.trunc(x.shape[0] * 0.6)] * 2,
    "round": lambda x: x[: round(x.shape[0] * 0.3)] * 2,
    "max": lambda x: x[: max(2, x.shape[0] // 2)] * 2,
    "math.sqrt": lambda x: x / math.sqrt(x.shape[0]),
    "math.log2": lambda x: x * math.log2(x.shape[0]),
    "math.sin": lambda x: x * math.sin(x.shape[0]),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_what_is_computed_from_a_length_is_eagers_and_prints_as_python(name: str) -> None:
    jitted = forge.jit(LENGTHS[name], dynamic=True, strict=True, fullgraph=True)
    for length in (5, 7, 12):
        x = torch.randn(length, 3)
        torch.testing.assert_close(jitted(x), LENGTHS[name](x))
    (compiled,) = handle_of(jitted).reports
    printed, scope = compiled.traces[-1], {}
    exec(str(printed), scope)
    (actual,) = scope[printed.name](*x.shape, x)
    torch.testing.assert_close(actual, LENGTHS[name](x))


@pytest.mark.parametrize("name", ["math", "max"])
def test_a_users_name_hides_no_function_that_is_computed_with(name: str) -> None:
    text = f"lambda x, {name}: x[: ceil(larger(3, x.shape[0]) / 2)] * {name}"
    function = eval(text, {"ceil": math.ceil, "larger": max})
    x, factor = torch.randn(5, 3), torch.randn(3)
    torch.testing.assert_close(forge.jit(function, dynamic=True, fullgraph=True)(x, factor), function(x, factor))


MEMBERS = {
    "a shape": lambda x: x + (10 if 3 in x.shape else 1),
    "not in a list": lambda x: x + (10 if 5 not in list(x.shape) else 1),
    "a dict's values": lambda x: x + (10 if 3 in {"rows": x.shape[0]}.values() else 1),
    "a number that is no integer": lambda x: x + (10 if 3.0 in x.shape else 1),
    "a shape among shapes": lambda x: x + (10 if (3, 5) in [tuple(x.shape)] else 1),
    "a shape in a nest": lambda x: x + (10 if (1, (3, 5)) in [(1, tuple(x.shape))] else 1),
    "a tuple and a list": lambda x: x + (10 if [3, 5] in [tuple(x.shape)] else 1),
    "a length among numbers": lambda x: x + (10 if x.shape[0] in (3, 4) else 1),
    "a range": lambda x: x + (10 if x.shape[0] in range(2, 4) else 1),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_a_length_is_found_among_numbers_where_it_is_one_of_them(name: str, dynamic: bool | None) -> None:
    jitted = forge.jit(MEMBERS[name], dynamic=dynamic)
    for shape in ((3, 5), (4, 5), (6, 3), (3, 3), (6, 7), (3, 5)):
        torch.testing.assert_close(jitted(torch.zeros(shape)), MEMBERS[name](torch.zeros(shape)))


def test_a_number_is_found_among_numbers_of_a_closure() -> None:
    dims = (1, 2)
    jitted = forge.jit(lambda x: [x + 1 if i in dims else x for i in range(4)], dynamic=True)
    assert [each.tolist() for each in jitted(torch.zeros(1))] == [[0.0], [1.0], [1.0], [0.0]]


class Whole(FusionExecutor):
    """An executor that takes every call."""

    def can_fuse(self, bound: BoundSymbol) -> bool:
        return True

    def fuse(self, region: Trace) -> Callable:
        return claim(region, resolve_executors(["torch"]))[0].python_callable()


@pytest.mark.parametrize("executors", [["torch"], [Whole("whole"), "torch"]], ids=["torch", "a fuser"])
def test_a_length_that_only_the_inside_of_a_call_reads_is_there(executors: list) -> None:
    """The gradient of linear flattens its input; no argument of a call has the flattened length."""
    linear = torch.nn.Linear(4, 3)
    jitted = forge.jit(lambda x: torch.sin(linear(x)), dynamic=True, fullgraph=True, executors=executors)
    for length in (5, 7):
        x = torch.randn(2, length, 4, requires_grad=True)
        actual, expected = jitted(x), torch.sin(linear(x))
        for ours, theirs in zip(
            torch.autograd.grad(actual.sum(), [x, linear.weight]),
            torch.autograd.grad(expected.sum(), [x, linear.weight]),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
    assert forge.explain(jitted).graphs == 1


def _assert_same_gradient(actual: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> None:
    def gradient(out: torch.Tensor) -> Any:
        return torch.autograd.grad((out * out).sum(), x)[0]

    torch.testing.assert_close(gradient(actual), gradient(expected))


def test_a_tensors_value_has_no_symbol_in_forge_trace() -> None:
    with pytest.raises(TypeError, match=r"the value of t0: .* is not known while tracing"):
        forge.trace(lambda x: x * x.sum().item(), torch.ones(2))


class Padded(torch.nn.Module):
    """A module that pads by the number in a buffer, which Dynamo reads."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (self.count, 1), mode=self.mode).exp()


@pytest.mark.parametrize("mode", ["constant", "reflect", "circular"])
def test_padding_by_the_value_of_a_buffer_is_one_graph(mode: str) -> None:
    model = Padded(mode)
    jitted = forge.jit(model, fullgraph=True)
    x = torch.randn(1, 3, 8, requires_grad=True)
    for _ in range(2):
        actual, expected = jitted(x), model(x)
        torch.testing.assert_close(actual, expected)
        _assert_same_gradient(actual, expected, x)
        model.count.add_(1)
    assert forge.explain(jitted).graphs == 1


def test_windows_of_which_none_is_outside_are_counted_as_torch_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.capture.fake_values.CHECK_META", True)
    jitted = forge.jit(lambda x: torch.nn.functional.max_pool1d(x, 2, ceil_mode=True), dynamic=True, fullgraph=True)
    for length in (7, 8, 9):
        x = torch.randn(1, 3, length)
        torch.testing.assert_close(jitted(x), torch.nn.functional.max_pool1d(x, 2, ceil_mode=True))
