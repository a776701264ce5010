"""Functions of torch that are written in Python are inlined: their calls are the program's."""

from collections.abc import Callable

import pytest
import torch

import forge
from forge import torchlang
from forge.capture import inline_python
from forge.ir import TensorProxy, Trace, recording

MASK = torch.tensor([[True, False, True], [True, True, True]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.masked.softmax(x, -1, mask=MASK),
        lambda x: torch.masked.var(x, 1, mask=MASK, unbiased=True),
        lambda x: torch.masked.median(x, 1, mask=MASK[0]),
        lambda x: x * torch.signal.windows.kaiser(3, beta=5.0, dtype=x.dtype),
    ],
    ids=["softmax", "var", "median", "kaiser"],
)
def test_its_calls_are_native_and_differentiated(function: Callable) -> None:
    found = []
    for run in (function, forge.jit(function, strict=True, fullgraph=True)):
        x = torch.arange(6.0, dtype=torch.float64).view(2, 3).cos().requires_grad_()
        out = run(x)
        found.append([out, *torch.autograd.grad(out.exp().sum(), x)])
    torch.testing.assert_close(found[1], found[0])


def test_nothing_stays_of_one_that_cannot_be_traced() -> None:
    """It calls functions that torchlang does not have, or it reads values."""

    def missing(x: TensorProxy) -> TensorProxy:
        raise NotImplementedError(f"torchlang does not have that of {x.exp()}")

    def branching(x: TensorProxy) -> TensorProxy:
        return x if x.exp().sum() > 0 else -x

    trace = Trace()
    with recording(trace, torchlang.language):
        x = trace.add_input(trace.tensor((3,), torch.float32, torch.device("cpu")))
        for function in (missing, branching):
            function.__module__ = "torch.masked.tests"
            assert inline_python.record(function, (x,), {}) is NotImplemented
        assert inline_python.record(torch.linalg.vander, (x,), {}) is NotImplemented
    assert not trace.bound_symbols


def test_functions_of_torch_nn_that_ask_their_arguments_first_are_traced() -> None:
    trace = Trace()
    with recording(trace, torchlang.language):
        x = trace.add_input(trace.tensor((3,), torch.float32, torch.device("cpu")))
        assert inline_python.record(torch.nn.functional.softmin, (x,), {}) is not NotImplemented
    assert trace.bound_symbols


def test_one_that_asks_for_values_runs_in_eager() -> None:
    """The median of integers is refused if a whole row is masked out."""

    def median(x: torch.Tensor) -> torch.Tensor:
        return torch.masked.median(x, 1, mask=MASK) + 1

    x = torch.arange(6).view(2, 3)
    torch.testing.assert_close(forge.jit(median)(x), median(x))


def test_a_window_of_a_length_that_changes() -> None:
    def windowed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.signal.windows.hann(x.shape[0], sym=False)

    jitted = forge.jit(windowed, dynamic=True, strict=True)
    for length in (5, 8, 13):
        x = torch.randn(length)
        torch.testing.assert_close(jitted(x), windowed(x))
