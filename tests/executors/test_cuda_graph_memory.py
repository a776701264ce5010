"""The writers of the memory of CUDA graphs: graphs that reuse the memory of tensors passed to them for the last
time."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from forge.runtime.cuda_graphs import Graph
from forge.runtime.cuda_memory import Pool
from tests.executors import test_cuda_graphs

device = test_cuda_graphs.device
MANY = 12


def graph(function: Callable, pool: Pool, returned: Sequence[bool], **options: Any) -> Graph:
    """Return a graph of a function with separate arguments."""

    def call(boxed: list[Any]) -> tuple[torch.Tensor, ...]:
        values = list(boxed)
        boxed.clear()
        return function(*values)

    return Graph(function.__name__, call, pool, returned, **options)


def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sin() * 2, (x * x).exp()


def backward(saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (((saved @ saved).tanh() + 1).cos() * 3,)


def with_view(saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *backward(saved), saved.t()


def run(first: Graph, second: Graph, x: torch.Tensor) -> tuple[Any, Any]:
    """Return the results of the graph that reads the first graph's saved tensors, and those of their functions."""
    saved = [*first([x])[1:]]
    expected = second._function([each.clone() for each in saved])
    return second(saved), expected


def donations(second: Graph) -> list[int]:
    return [len(each._donated) for each in second._recorded]


@pytest.mark.parametrize("keeps", [False, True])
def test_results_of_a_graph_that_is_gone_are_not_overwritten(device: str, keeps: bool) -> None:
    x, pool = torch.randn(4, 4, device=device), Pool()
    other, first = (graph(forward, pool, [True, not keeps]) for _ in range(2))
    for each in (other, first):
        for _ in range(MANY):
            each([x])
    assert other._recorded[0].memory is first._recorded[0].memory
    (recorded,) = other._recorded
    result, saved = first([x])
    expected = result.clone(), saved.clone()
    del first, each
    gc.collect()
    other([x])
    torch.testing.assert_close((result, saved), expected)
    assert not recorded.memory.is_free_for(recorded)
    del result, saved
    assert recorded.memory.is_free_for(recorded)


def test_donated_memory_of_a_graph_that_is_gone_is_not_overwritten(device: str) -> None:
    x, pool = torch.randn(4, 4, device=device), Pool()
    other, first, second = (
        graph(forward, pool, [True] * 2),
        graph(forward, pool, [True, False]),
        graph(backward, pool, [True], last=[0]),
    )
    for _ in range(MANY):
        other([x])
    for _ in range(MANY):
        run(first, second, x)
    assert donations(second) == [1]
    saved = [*first([x])[1:]]
    expected = saved[0].clone()
    del first
    gc.collect()
    other([x])
    torch.testing.assert_close(saved[0], expected)
    torch.testing.assert_close(second(saved), backward(expected))


@pytest.mark.parametrize("function", [backward, with_view])
@pytest.mark.parametrize("fails", [False, True])
def test_donated_inputs_that_are_given_back_are_known(
    device: str, function: Callable, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph that reads them cannot run, because they are held elsewhere, or it cannot be recorded."""
    x, pool = torch.randn(4, 4, device=device), Pool()
    first, second = graph(forward, pool, [True, False]), graph(function, pool, [True] * len(function(x)), last=[0])
    recorder = test_cuda_graphs.cuda_recorder.recorder()
    record = recorder.record

    def fail(*args: Any) -> Any:
        record(*args)
        raise RuntimeError("this cannot be recorded")

    for _ in range(MANY):
        first([x])
    if fails:
        monkeypatch.setattr(recorder, "record", fail)
    else:
        for _ in range(MANY):
            run(first, second, x)
        assert donations(second) == [1]
    held = []
    for step in range(MANY):
        x.fill_(step / MANY)
        saved = [*first([x])[1:]]
        expected = function(saved[0].clone())
        also_held = [] if fails else [*saved]
        held.append((second(saved), expected))
        del also_held
        for actual, wanted in held:
            torch.testing.assert_close(actual, wanted)
    assert fails is (second.failed is not None) or function is with_view


def test_a_conjugate_view_is_not_donated(device: str) -> None:
    def product(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x.exp()

    def sums(saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return saved * 2, saved + 1

    x, pool = torch.randn(4, 4, device=device, dtype=torch.complex64), Pool()
    first, second = graph(product, pool, [True, False]), graph(sums, pool, [True] * 2, last=[0])
    for step in range(2 * MANY):
        saved = [first([x])[1].conj()]
        also_held = [*saved] if step > MANY else []
        torch.testing.assert_close(second(saved), sums(x.exp().conj()))
        del also_held


def test_what_is_recorded_before_a_backward_leaves_its_memory_alone(device: str) -> None:
    x, pool = torch.randn(4, 4, device=device), Pool()
    first, second = graph(forward, pool, [True, False]), graph(backward, pool, [True], last=[0])
    for _ in range(MANY):
        run(first, second, x)
    assert donations(second) == [1]
    other = graph(forward, pool, [True] * 2)
    for _ in range(MANY):
        saved = [*first([x])[1:]]
        other([x])
        torch.testing.assert_close(second(saved), backward(forward(x)[1]))
    assert other.recordings > 0


def test_donated_memory_outlives_its_recordings(device: str) -> None:
    """torch frees a pool with its last graph; tensors that view donated memory do not own it."""
    x, pool = torch.randn(4, 4, device=device), Pool()
    first, second = graph(forward, pool, [True, False]), graph(backward, pool, [True], last=[0])
    for _ in range(MANY):
        run(first, second, x)
    assert donations(second) == [1]
    recorded = weakref.ref(first._recorded[0]._graph)
    _, saved = first([x])
    expected = saved.clone()
    first._recorded.clear(), second._recorded.clear()
    gc.collect()
    assert recorded() is not None
    if device == "cuda":
        torch.cuda.empty_cache()
        others = [torch.zeros(2**18, device=device) for _ in range(8)]
        torch.testing.assert_close(saved, expected)
        del others
    del saved
    for _ in range(MANY):
        first([x])  # is recorded again
    gc.collect()
    assert recorded() is None


def test_a_recording_whose_results_nobody_holds_leaves_nothing(device: str) -> None:
    x, first = torch.randn(4, 4, device=device), graph(forward, Pool(), [True, False])
    for _ in range(MANY):
        first([x])
    recorded = weakref.ref(first._recorded[0]._graph)
    first._recorded.clear()
    assert recorded() is None
