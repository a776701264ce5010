"""Inductor regions that fail to compile or to run, in the default configuration: torch runs their calls from then
on."""

import linecache
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cache.support import from_disk, is_cached
from torch import nn

import forge
from forge.cache import programs
from forge.executors import RegionError, decline
from forge.executors.inductorex import artifacts, aten_graph, inductorex, lower, out_of_process
from forge.ir.bounded import BoundedDict
from forge.runtime import tiering
from forge.torch_internals.versions import TORCH

pytestmark = pytest.mark.skipif(not inductorex.is_available(), reason="Inductor cannot be used here")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = torch.tanh(self.first(x)) * 2 + x
        return torch.softmax(self.second(h).view(-1, 2, 4).transpose(0, 1) + self.calls, -1)


class Attending(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(0, 1)[None] for each in (x, self.first(x), self.second(x)))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).tanh() * self.calls


def broken(boxed: list[Any]) -> list[torch.Tensor]:
    """Fail like a generated function that reads an undefined size."""
    boxed.clear()
    raise NameError("name 's18' is not defined")


@pytest.fixture(autouse=True)
def _default() -> None:
    torch._dynamo.reset()


class Squared(torch.autograd.Function):
    """A product, whose gradient has more calls."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.mm(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.sin() * 2 + ctx.saved_tensors[0]


class Products(Net):
    """A module only whose backward has regions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Squared.apply(self.first.weight) @ x


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make Inductor compile nothing, and return the counter of its calls."""
    asked: list[int] = []

    def fail(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        asked.append(len(graph.graph.nodes))
        raise RuntimeError("boom")

    monkeypatch.setattr(lower, "compile_graph", fail)
    return asked


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every function that Inductor compiles fail when it is called."""
    compile_graph = lower.compile_graph

    def compiled(*args: Any, **kwargs: Any) -> Any:
        graph = compile_graph(*args, **kwargs)
        graph.current_callable = broken
        return graph

    monkeypatch.setattr(lower, "compile_graph", compiled)


def steps(call: Callable, model: nn.Module, sizes: tuple[int, ...] = (3, 3)) -> list[torch.Tensor]:
    torch.manual_seed(0)
    found = []
    for size in sizes:
        result = call(torch.randn(size, 8))
        result.square().sum().backward()
        found += [result, *(p.grad.clone() for p in model.parameters()), model.calls.clone()]
    return found


def pair(kind: type[Net] = Net) -> tuple[Net, Net]:
    torch.manual_seed(1)
    models = kind(), kind()
    models[1].load_state_dict(models[0].state_dict())
    return models


def told(jitted: Any, model: nn.Module, sizes: tuple[int, ...] = (3, 3)) -> tuple[list[torch.Tensor], list[str]]:
    """Return the results of steps, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = steps(jitted, model, sizes)
    return found, [str(each.message) for each in caught if "runs its calls" in str(each.message)]


@pytest.mark.usefixtures("breaks")
@pytest.mark.parametrize("sizes", [(3, 3), (3, 5, 6)], ids=["one size", "several sizes"])
@pytest.mark.one_in(2)
def test_forward_and_backward_go_on(sizes: tuple[int, ...]) -> None:
    model, other = pair()
    jitted = forge.jit(model)
    found, warned = told(jitted, model, sizes)
    torch.testing.assert_close(found, steps(other, other, sizes))
    assert warned and len(set(warned)) <= len(warned) == len(regions(jitted))
    assert all("torch runs its calls from now on: NameError: name 's18' is not defined" in each for each in warned)
    assert {row.executor for row in forge.explain(jitted).rows} == {"torch"}


def regions(jitted: Any) -> list[str]:
    """Return the regions that failed."""
    compiled = [
        claim for each in forge.explain(jitted)._still_there() for claim in (*each.claims, *each.backward_claims)
    ]
    return list({id(each.fallback): each.region for each in compiled if each.fallback is not None}.values())


@pytest.mark.usefixtures("breaks")
def test_strict_raises_what_a_region_raises() -> None:
    model, _ = pair()
    with pytest.raises(NameError, match="name 's18' is not defined"):
        steps(forge.jit(model, strict=True), model)


@pytest.mark.failing_regions
def test_regions_that_inductor_cannot_compile(uncompiled: list[int], caplog: pytest.LogCaptureFixture) -> None:
    model, other = pair()
    jitted = forge.jit(model)
    with pytest.warns(UserWarning, match="cannot be compiled") as caught:
        found = steps(jitted, model)
    torch.testing.assert_close(found, steps(other, other))
    assert len(uncompiled) > 1 and len(caught) == 1  # all for one reason
    message = "forge: inductor.fusion0 cannot be compiled, torch runs its calls from now on: RuntimeError: boom"
    assert str(caught[0].message) == message and caught[0].filename == __file__
    assert linecache.getline(__file__, caught[0].lineno).strip().startswith("h = torch.tanh(self.first(x))")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    rows = forge.explain(jitted).rows
    assert not any(row.region for row in rows)
    assert any(("inductor", "Inductor failed: RuntimeError: boom") in row.declined for row in rows)


@pytest.mark.failing_regions
@pytest.mark.parametrize("kind", [Net, Products], ids=["forward", "backward"])
@pytest.mark.parametrize("before", [False, True], ids=["first", "after torch ran it"])
def test_strict_raises_what_inductor_cannot_compile(kind: type[Net], before: bool, uncompiled: list[int]) -> None:
    model, _ = pair(kind)
    x = torch.randn(8, 8)
    if before:
        with pytest.warns(UserWarning, match="cannot be compiled"):
            forge.jit(model)(x).sum().backward()
        torch._dynamo.reset()
    region = r"inductor\.fusion\d cannot be compiled: test_broken_regions\.py:\d+ .*: RuntimeError: boom"
    jitted = forge.jit(model, strict=True)
    for _ in range(2):
        with pytest.raises(RegionError, match=region) as raised:
            jitted(x).sum().backward()
        assert type(raised.value.__cause__) is RuntimeError and str(raised.value.__cause__) == "boom"
    assert uncompiled


def test_what_inductor_is_known_not_to_compile_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("it reads no length of an empty tensor")

    monkeypatch.setattr(lower, "_size_binding", refuse)
    model, other = pair()
    jitted = forge.jit(model, strict=True)
    found, warned = told(jitted, model)
    torch.testing.assert_close(found, steps(other, other))
    assert not warned
    why = {reason for row in forge.explain(jitted).rows for _, reason in row.declined}
    assert "Inductor cannot compile it: NotImplementedError: it reads no length of an empty tensor" in why


@pytest.mark.parametrize("strict", [False, True])
def test_larger_regions_that_cannot_be_compiled(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller regions still run compiled."""
    monkeypatch.setattr(out_of_process._Queue, "put", lambda queue, job: None)
    monkeypatch.setattr(
        out_of_process._Job, "result", lambda job: decline("the region could not be compiled: RuntimeError: boom")
    )
    model, other = pair()
    jitted = forge.jit(model, strict=strict)
    sizes = (3,) * (tiering.CALLS_TO_PROMOTE + 2)
    found, warned = told(jitted, model, sizes)
    torch.testing.assert_close(found, steps(other, other, sizes))
    assert forge.finish_compiling(jitted, timeout=60) and not warned
    assert "inductor" in {row.executor for row in forge.explain(jitted).rows}


@pytest.mark.skipif(TORCH < (2, 13), reason="before torch 2.13, Inductor's file names each length by its own symbol")
def test_a_file_that_inductor_generated_and_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file reads the symbol of one length by the name of another, which turned out to be equal."""
    monkeypatch.setattr(aten_graph, "_canonical_size", lambda value: value)

    def met(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = y + x
        wide = z.expand(x.shape[0], -1)
        steps = torch.diff(wide, prepend=wide[:, :1] - 17, dim=-1)
        return both @ both.t(), steps != 17, torch.arange(x.shape[0]) + 17

    jitted = forge.jit(met)
    given = lambda length: (torch.ones(length, 3), torch.ones(length, 3), torch.arange(6)[None])
    torch.testing.assert_close(jitted(*given(4)), met(*given(4)))
    with pytest.warns(
        UserWarning, match=r"inductor\.fusion0 failed, torch runs its calls from now on: NameError: name"
    ):
        torch.testing.assert_close(jitted(*given(5)), met(*given(5)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(jitted(*given(6)), met(*given(6)))


@pytest.mark.parametrize("kind", [Net, Attending])
@pytest.mark.one_in(2)
def test_larger_regions_that_fail(kind: type[Net], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_process._Queue, "put", lambda queue, job: None)
    monkeypatch.setattr(out_of_process._Job, "result", lambda job: b"an artifact")
    monkeypatch.setattr(out_of_process, "load_with_strides", lambda data, strides: broken)
    model, other = pair(kind)
    jitted = forge.jit(model)
    expected = steps(other, other)
    torch.testing.assert_close(steps(jitted, model), expected)
    model.zero_grad()
    other.zero_grad()
    assert forge.finish_compiling(jitted, timeout=60)
    found, warned = told(jitted, model)
    torch.testing.assert_close(found, steps(other, other))
    assert len(warned) == 2 and all("inductor-whole.fusion0 failed" in each for each in warned)
    assert {row.executor for row in forge.explain(jitted).rows} == {"torch"}


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_from_disk_whose_regions_fail(strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(programs, "_loaded", BoundedDict(64))
    model, other = pair()
    expected = steps(other, other)
    torch.testing.assert_close(steps(forge.jit(model, strict=strict), model), expected)
    model, _ = pair()
    torch._dynamo.reset()
    from_disk(monkeypatch)
    monkeypatch.setattr(artifacts, "load", lambda data: broken)
    jitted = forge.jit(model, strict=strict)
    if strict:
        with pytest.raises(NameError, match="name 's18' is not defined"):
            steps(jitted, model)
        return
    found, warned = told(jitted, model)
    torch.testing.assert_close(found, expected)
    assert is_cached(jitted) and len(warned) == len(regions(jitted)) > 1
    assert {row.executor for row in forge.explain(jitted).rows} == {"torch"}
