"""Retained records of compiled programs: those that explain reads, the stages of small programs, nothing of freed
ones."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import forge
from forge.capture.handles import handle_of
from forge.compiler import report
from forge.ir import BoundSymbol, Trace
from forge.ir.structure import key_of


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a program of twenty calls a large one that is not read from disk, so that its stages are compiled on
    request."""
    monkeypatch.setenv("FORGE_CACHE", "0")
    monkeypatch.setattr(report, "MAX_CALLS", 20)


def curve(x: torch.Tensor) -> torch.Tensor:
    """Compute a curve in some calls, including composite ones."""
    for _ in range(4):
        x = torch.nn.functional.gelu(x).softmax(-1)
    return x.sum()


def trained(function: Callable) -> Callable:
    jitted = forge.jit(function, executors=["torch"])
    jitted(torch.randn(3, 3, requires_grad=True)).backward()
    return jitted


def test_a_small_program_has_all_its_stages_with_no_option() -> None:
    jitted = trained(curve)
    assert [trace.stage for trace in forge.last_traces(jitted)][-2:] == ["claim", "lifetimes"]
    assert len(forge.last_traces(jitted)) > 4 and len(forge.last_backward_traces(jitted)) == 3
    assert not forge.explain(jitted).shortened


def test_of_a_large_program_the_last_stages_are_kept_and_what_explain_tells(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    jitted = trained(curve)
    explained = forge.explain(jitted)
    with pytest.warns(UserWarning, match="FORGE_KEEP_STAGES=1"):
        (forward,) = forge.last_traces(jitted)
    with pytest.warns(UserWarning, match="FORGE_KEEP_STAGES=1"):
        (backward,) = forge.last_backward_traces(jitted)
    assert forward.stage == backward.stage == "lifetimes"
    assert "FORGE_KEEP_STAGES=1" in str(explained)
    monkeypatch.setattr(report, "MAX_CALLS", 10_000)
    small = trained(curve)
    assert [row.operation for row in explained.rows] == [row.operation for row in forge.explain(small).rows]
    assert str(forward).splitlines()[1:] == str(forge.last_traces(small)[-1]).splitlines()[1:]


def test_all_stages_are_kept_where_the_environment_asks_for_them(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_KEEP_STAGES", "1")
    assert len(forge.last_traces(trained(curve))) > 4


def test_the_stages_of_a_backward_that_is_compiled_later_are_within_the_bound_too(few: None) -> None:
    x = torch.randn(3, 3, requires_grad=True)
    jitted = forge.jit(lambda x: (x.sum(), curve(x) * x), executors=["torch"])
    jitted(x)[1].sum().backward()
    loss, curved = jitted(x)
    (slope,) = torch.autograd.grad(loss + curved.sum(), x, create_graph=True)
    slope.sum().backward()
    latest = handle_of(jitted).latest
    assert latest.double_backwards
    for each in (latest, *latest.double_backwards):
        assert [trace.stage for trace in (*each.traces, *each.backward_traces)] == ["lifetimes", "lifetimes"]


def test_what_explain_tells_holds_no_calls(few: None) -> None:
    jitted = trained(curve)
    handle_of(jitted).latest.traces.clear()
    handle_of(jitted).latest.backward_traces.clear()
    for claim in handle_of(jitted).latest.claims:
        held = [each for each in gc.get_referents(claim) if isinstance(each, (BoundSymbol, Trace))]
        assert held == []


def test_recompiles_do_not_pile_up_programs() -> None:
    """Dynamo stops at its limit, and runs the rest in eager."""
    jitted = forge.jit(lambda x: (x * 2).sum(), executors=["torch"], dynamic=False)
    for size in range(2, 32):
        x = torch.randn(size, requires_grad=True)
        jitted(x).backward()
        torch.testing.assert_close(x.grad, torch.full((size,), 2.0))
    limit = torch._dynamo.config.recompile_limit
    assert len(handle_of(jitted).reports) <= limit
    assert forge.explain(jitted).graphs <= limit


def test_programs_of_a_function_that_dynamo_forgets_are_gone() -> None:
    jitted = forge.jit(lambda x: (x * 2).sum(), executors=["torch"], dynamic=False)
    for size in range(2, 6):
        jitted(torch.randn(size, requires_grad=True)).backward()
    programs = [weakref.ref(each) for each in handle_of(jitted).reports]
    assert len(programs) == 4
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in programs[:-1]] == [None] * 3  # except the latest, which last_traces returns


def test_a_key_of_a_length_tells_graphs_apart_and_keeps_none_alive() -> None:
    """Every dynamic graph has its own environment of symbols, which holds Dynamo's knowledge of the frame."""
    keys: list[tuple] = []

    def see(trace: Trace) -> Trace:
        lengths = [each for proxy in trace.inputs for each in getattr(proxy, "shape", ())]
        keys.append(tuple(map(key_of, lengths)))
        return trace

    for _ in range(2):
        forge.jit(lambda x, y: x * 2 + y, executors=["torch"], dynamic=True, transforms=[see])(*torch.ones(2, 5))
    assert set(keys[0]).isdisjoint(keys[1])
    assert not any(isinstance(part, ShapeEnv) for key in keys for each in key for part in each)
