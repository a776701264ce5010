"""Programs with Inductor's regions that would be silently wrong if a region took too much, or promised wrong
strides."""

import os
import threading
import warnings
from typing import Any

import pytest
import torch
from capture.programs import effects, modules, views  # noqa: F401  each fills the table
from capture.programs.table import PROGRAMS, Jit, differences, no_jit, observed
from torch import nn

import forge
from forge.executors.inductorex import inductorex
from tests.markers import slow_except

pytestmark = pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for Inductor's kernels")

CHOSEN = (
    "view_as_in_training",  # a scatter writes to a copy
    "einsum_diagonal_in_training",
    "vsplit_changed_through",
    "the_real_part_and_a_slice",
    "attention_without_features_or_rows",  # lengths become symbols
)


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_EXECUTORS", "inductor,torch")


@pytest.mark.parametrize("name", slow_except(PROGRAMS, *CHOSEN))
def test_a_program_is_eagers_in_regions(name: str) -> None:
    program = PROGRAMS[name]
    expected = observed(program.run, no_jit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = observed(program.run, Jit())
    assert differences(actual, expected) == []


def same(function: Any, *inputs: torch.Tensor, **options: Any) -> Any:
    """Run it fused and in eager, and compare results, strides and gradients."""
    ours, theirs = ([x.detach().clone().requires_grad_(x.requires_grad) for x in inputs] for _ in range(2))
    jitted = forge.jit(function, **options)
    actual, expected = jitted(*ours), function(*theirs)
    torch.testing.assert_close(actual, expected, check_stride=True)
    if expected.requires_grad:
        seed = torch.randn_like(expected)
        actual.backward(seed)
        expected.backward(seed)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    return jitted


def fused(jitted: Any) -> list[str]:
    return [row.operation for row in forge.explain(jitted).rows if row.executor == "inductor"]


def test_a_chain_is_one_region_forward_and_one_backward() -> None:
    jitted = same(lambda x: torch.softmax(torch.tanh(x) * x + 1, -1), torch.randn(4, 8, requires_grad=True))
    assert {"torch.tanh", "torch.mul", "torch.add", "torch.softmax"} <= set(fused(jitted))
    for trace in (forge.last_traces(jitted)[-1], forge.last_backward_traces(jitted)[-1]):
        assert sum(bound.symbol.id.startswith("inductor.") for bound in trace.bound_symbols) == 1


def test_a_single_kernel_of_torchs_is_no_region() -> None:
    assert fused(same(lambda x: torch.exp(x), torch.randn(4))) == []


def test_float64_never_meets_the_artifact_of_float32() -> None:
    function = lambda x: torch.exp(x) * 3 + 1
    for dtype in (torch.float32, torch.float64, torch.float32):
        assert fused(same(function, torch.randn(5, 3, dtype=dtype)))


def test_an_empty_part_of_a_join_changes_no_strides() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1)
        return torch.cat([y * 2 + 1, y[..., :0]], -1)

    same(function, torch.randn(3, 4))


def test_two_equal_results_have_memory_of_their_own() -> None:
    jitted = forge.jit(lambda x: (x * 2 + 1, x * 2 + 1))
    one, other = jitted(torch.ones(3))
    one.add_(5)
    assert other.tolist() == [3, 3, 3]


def test_a_gradient_of_other_strides_is_taken() -> None:
    jitted = forge.jit(lambda x: torch.tanh(x) * 2 + x)
    for seed in (torch.randn(4, 3).t(), torch.ones(()).expand(3, 4), torch.randn(3, 8)[:, ::2]):
        x, y = (torch.linspace(-1, 1, 12).view(3, 4).requires_grad_() for _ in range(2))
        jitted(x).backward(seed)
        (torch.tanh(y) * 2 + y).backward(seed)
        torch.testing.assert_close(x.grad, y.grad)


def test_what_torch_converts_wrongly_when_fused_is_torchs() -> None:
    pool = nn.AvgPool2d(3, 2, 1, ceil_mode=True)
    same(lambda x: pool(x * 2) + 1, torch.rand(1, 1, 8, 8, requires_grad=True))


@pytest.mark.parametrize("memory", ["speed", "balanced", "smallest"])
@pytest.mark.one_in(3)
def test_what_is_saved_is_less_and_gradients_are_the_same(memory: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    function = lambda x: torch.sigmoid(layers(x)) * x
    jitted = same(function, torch.randn(16, 8, requires_grad=True), memory=memory)
    saved = forge.last_traces(jitted)[-1].output[1]
    assert (len(saved) > 8) is (memory == "speed")


def test_nothing_runs_beside_a_program_that_was_not_called() -> None:
    """A process may fork between forge.jit and the first call: a compiling thread would leave its locks held."""
    before = set(threading.enumerate())
    forge.jit(lambda x: torch.exp(x) * 2)
    assert set(threading.enumerate()) == before


def test_an_unknown_choice_of_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory is 'small', but must be one of speed, balanced, smallest"):
        forge.jit(torch.sin, memory="small")


def test_the_environment_keeps_programs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "FORGE_EXECUTORS", "torch")
    assert fused(same(lambda x: torch.exp(x) * 3 + 1, torch.randn(4))) == []


@pytest.mark.parametrize("cache", [False, True])
def test_batched_gradients_are_torchs(cache: bool) -> None:
    """Only torch's own code runs on the results of torch.autograd.grad(is_grads_batched=True)."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ x.mT).exp() * 2).sum(-1)

    jitted, x = forge.jit(function, executors=["inductor", "torch"], cache=cache), torch.randn(4, 4)
    expected = torch.autograd.functional.jacobian(function, x, vectorize=True)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.functional.jacobian(jitted, x, vectorize=True), expected)
    x.requires_grad_()
    (one,), (other,) = (torch.autograd.grad(run(x).sum(), x) for run in (jitted, function))
    torch.testing.assert_close(one, other)


def test_what_torch_negates_where_it_is_read_is_negated() -> None:
    """The imaginary part of a conjugate is used inside a program, as its input, and as a gradient."""

    def inside(z: torch.Tensor) -> torch.Tensor:
        return (z.conj().imag + 1).relu() * z.real

    def given(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1).exp()

    def of_given(z: torch.Tensor) -> torch.Tensor:
        return z.imag.sin().exp()

    z = torch.randn(3, 4, dtype=torch.complex64)
    x = torch.randn(3, 4, requires_grad=True)
    for function, argument in ((inside, z), (given, z.conj().imag), (of_given, z.conj())):
        torch.testing.assert_close(forge.jit(function)(argument), function(argument))
    gradients = [torch.autograd.grad(run(x), x, z.conj().imag)[0] for run in (given, forge.jit(given))]
    torch.testing.assert_close(*gradients)
