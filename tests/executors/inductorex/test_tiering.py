"""Small programs that are called often get larger regions, which another process compiles."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import forge
from forge.capture.handles import handle_of
from forge.compiler.layout import Layout
from forge.executors.executor import Declined
from forge.executors.inductorex import graphs, out_of_process
from forge.runtime import tiering

EXECUTORS = ["inductor", "torch"]
TIMEOUT = 300.0


class Chain(nn.Module):
    """A chain of 8-by-8 products with curves between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projection(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).tanh() * 2


def runners(jitted: Callable) -> set[str]:
    return {row.executor for row in forge.explain(jitted).rows}


def finish(jitted: Callable) -> None:
    assert forge.finish_compiling(jitted, timeout=TIMEOUT)


def gradients(module: nn.Module, result: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(result.square().sum(), list(module.parameters())))


@pytest.mark.slow
def test_a_small_program_runs_as_one_region_in_the_end() -> None:
    module, x = Chain(), torch.randn(8, 8)
    jitted = forge.jit(module, executors=EXECUTORS)
    with torch.no_grad():
        first = jitted(x)
        assert runners(jitted) == {"inductor", "torch"}
        finish(jitted)
        assert runners(jitted) == {"inductor-whole"}
        torch.testing.assert_close(jitted(x), module(x))
        torch.testing.assert_close(jitted(x), first)
        assert len(forge.last_traces(jitted)[-1].bound_symbols) < 4


def test_training_goes_on_with_larger_regions() -> None:
    module, x = Chain(), torch.randn(8, 8)
    jitted = forge.jit(module, executors=EXECUTORS)
    expected = gradients(module, module(x))
    before = jitted(x)  # its backward runs after the forward was replaced
    finish(jitted)
    after = jitted(x)
    for result in (before, after):
        torch.testing.assert_close(gradients(module, result), expected)
    assert runners(jitted) == {"inductor-whole"}


@pytest.mark.slow
def test_other_backwards_follow_larger_regions() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x @ x.mT) @ x
        return (y.exp() + y).sum(), y.sigmoid() @ x.mT

    jitted = forge.jit(two, executors=EXECUTORS)
    x = (torch.randn(4, 4) / 4).requires_grad_()
    jitted(x)
    finish(jitted)
    (expected,) = torch.autograd.grad(two(x)[1].sum(), x)
    (result,) = torch.autograd.grad(jitted(x)[1].sum(), x)  # another output than the loss
    torch.testing.assert_close(result, expected)
    (expected,) = torch.autograd.grad(two(x)[0], x, create_graph=True)
    (result,) = torch.autograd.grad(jitted(x)[0], x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x), torch.autograd.grad(expected.sum(), x))


@pytest.mark.slow
def test_a_programs_writes_and_views_stay() -> None:
    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ x.mT) @ x
        total += y.exp().mean(0)
        return (y * 2).mT

    jitted, x = forge.jit(step, executors=EXECUTORS), torch.randn(4, 4)
    expected_total, total = torch.zeros(4), torch.zeros(4)
    for called in range(3):
        expected, result = step(x, expected_total), jitted(x, total)
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(total, expected_total)
        if called == 0:
            finish(jitted)
    assert "inductor-whole" in runners(jitted)


@pytest.mark.slow
def test_a_call_often_enough_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering, "CALLS_TO_PROMOTE", 3)
    module, x = Chain(), torch.randn(8, 8)
    jitted = forge.jit(module, executors=EXECUTORS)
    until = time.monotonic() + TIMEOUT
    with torch.no_grad():
        while runners_or_none(jitted) != {"inductor-whole"} and time.monotonic() < until:
            torch.testing.assert_close(jitted(x), module(x))
            time.sleep(0.01)
    assert runners(jitted) == {"inductor-whole"}


def runners_or_none(jitted: Callable) -> set[str]:
    return runners(jitted) if forge.explain(jitted).graphs else set()


@pytest.mark.slow
def test_attention_is_the_kernel_that_the_caller_allows() -> None:
    module, x = Attending(), torch.randn(1, 2, 6, 8)
    jitted = forge.jit(module, executors=EXECUTORS)
    jitted(x)
    finish(jitted)
    assert runners(jitted) == {"inductor-whole"}
    calls = regions_called(jitted)
    torch.testing.assert_close(jitted(x), module(x))
    assert calls() == 1
    with sdpa_kernel(SDPBackend.MATH):
        result, expected = jitted(x), module(x)
        torch.testing.assert_close(gradients(module, result), gradients(module, expected))
    assert calls() == 1


def regions_called(jitted: Callable) -> Callable[[], int]:
    """Return a function that counts the calls of the last trace's first region."""
    count = 0
    (call,) = [
        bound.symbol.op for bound in forge.last_traces(jitted)[-1].bound_symbols if "fusion" in bound.symbol.name
    ]
    compilation = call if isinstance(call, out_of_process.Compilation) else call.args[0]
    run = compilation._function

    def counted(boxed: list) -> list:
        nonlocal count
        count += 1
        return run(boxed)

    compilation._function = counted
    return lambda: count


@pytest.mark.parametrize("setting", ["environment", "deterministic", "dynamic"])
def test_what_stays_as_it_is(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting == "environment":
        monkeypatch.setenv("FORGE_BACKGROUND", "0")
    monkeypatch.setattr(tiering, "CALLS_TO_PROMOTE", 1)
    module, x = Chain(), torch.randn(8, 8)
    jitted = forge.jit(module, executors=EXECUTORS, dynamic=setting == "dynamic" or None)
    torch.use_deterministic_algorithms(setting == "deterministic")
    try:
        with torch.no_grad():
            for _ in range(3):
                jitted(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not handle_of(jitted).tiered_programs() and forge.finish_compiling(jitted)


def test_a_graph_that_cannot_be_compiled_elsewhere_keeps_its_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(out_of_process, "_queue", out_of_process._Queue())  # without a process that waits
    module, x = Chain(), torch.randn(8, 8)
    jitted = forge.jit(module, executors=EXECUTORS)
    with torch.no_grad():
        jitted(x)
        finish(jitted)
        torch.testing.assert_close(jitted(x), module(x))
    assert runners(jitted) == {"inductor", "torch"}


@pytest.mark.parametrize("data", [b"", b"no artifact"])
def test_an_artifact_that_cannot_be_loaded_declines(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_process._Job, "result", lambda job: data)
    monkeypatch.setattr(out_of_process._Queue, "put", lambda queue, job: None)
    compilation = out_of_process.Compilation(graphs.PlainGraph([], [], []), {})
    while compilation.state() is False:
        time.sleep(0.01)
    assert isinstance(compilation.state(), Declined) and "cannot be loaded" in compilation.state().reason


@pytest.mark.slow
def test_a_forked_child_keeps_its_regions() -> None:
    module, x = Chain(), torch.randn(8, 8)
    jitted = forge.jit(module, executors=EXECUTORS)
    with torch.no_grad():
        expected = jitted(x)
        (tiered,) = handle_of(jitted).tiered_programs()
        tiered.promote()  # the other process has just started
        child = os.fork()
        if child == 0:
            done = forge.finish_compiling(jitted, timeout=TIMEOUT) and torch.equal(jitted(x), expected)
            os._exit(0 if done and runners(jitted) == {"inductor", "torch"} else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finish(jitted)
    assert runners(jitted) == {"inductor-whole"}


def test_a_program_that_is_gone_stops_its_process() -> None:
    job = out_of_process._Job(b"")
    out_of_process._Queue().put(job)
    assert job.worker is not None
    job.stop()
    assert job.worker.returncode is not None and isinstance(job.result(), Declined)


def test_one_process_compiles_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = out_of_process._Queue()
    queue._limit = 1
    monkeypatch.setattr(out_of_process, "_queue", queue)
    modules = [Chain(), Chain().double(), Attending()]
    jitted = [forge.jit(module, executors=EXECUTORS) for module in modules]
    given = [torch.randn(12, 8), torch.randn(12, 8).double(), torch.randn(1, 2, 6, 8)]
    with torch.no_grad():
        for each, x in zip(jitted, given, strict=True):
            each(x)
            (tiered,) = handle_of(each).tiered_programs()
            tiered.promote()
        for each in jitted:
            finish(each)
        for each, module, x in zip(jitted, modules, given, strict=True):
            torch.testing.assert_close(each(x), module(x))
            assert runners(each) == {"inductor-whole"}
    (worker,) = queue._running
    assert worker.returncode is None
    queue.stop()
    assert worker.returncode is not None


@pytest.mark.slow
def test_a_process_of_another_environment_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, jobs = out_of_process._Queue(), [out_of_process._Job(b"") for _ in range(3)]
    queue._limit = 1
    monkeypatch.setattr(out_of_process, "_queue", queue)
    workers = []
    for job in jobs:
        queue.put(job)
        while job.result() is False:
            time.sleep(0.05)
        assert job.worker is not None
        workers.append(job.worker)
        if len(workers) == 2:
            monkeypatch.setenv("CXX", "another")
    assert workers[0] is workers[1] is not workers[2] and workers[0].returncode is not None
    queue.stop()


def test_a_job_for_a_process_that_has_just_ended_is_done_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = out_of_process._Queue()
    monkeypatch.setattr(out_of_process, "_queue", queue)
    monkeypatch.setattr(out_of_process.processes, "start", ended_at_once)
    job = out_of_process._Job(b"")
    queue.put(job)
    job.worker.process.wait()
    first = job.worker
    assert job.result() is False and job.worker is not first
    queue.stop()


def ended_at_once(command: list[str], environment: dict[str, str], output: Any) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=output, bufsize=0)


@pytest.mark.slow
def test_a_module_of_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    module, x = Chain(), torch.randn(8, 8)
    jitted = forge.jit(module, executors=EXECUTORS)
    with torch.no_grad():
        jitted(x)
        finish(jitted)
    assert runners(jitted) == {"inductor-whole"} and not (tmp_path / "ran").exists()


def test_a_graph_that_holds_a_tensor_stays_in_its_process() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.held

    layout = Layout((2,), (1,), torch.float32, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="held"):
        graphs.describe(torch.fx.symbolic_trace(Holding()), [layout])


def small(width: int, layers: int, device: str = "cpu") -> bool:
    """Return whether a chain of products is a small program."""

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            x = x @ w
        return x

    with FakeTensorMode():
        given = [torch.empty(width, width, device=device) for _ in range(2)]
    trace = forge.trace(chain, *given)
    return tiering.hidden_seconds(trace, 2 * width**3 * layers) == 0


def test_small_is_what_costs_more_to_call_than_to_compute() -> None:
    assert small(16, 8)
    assert not small(16, 2)  # nothing is to be gained
    assert not small(1024, 8)


def test_a_program_that_keeps_a_gpu_busy_longer_than_its_calls_take_is_not_small() -> None:
    """At width 2048, the work takes 0.39 ms and the calls 0.16 ms; a CPU, which runs them sequentially, would gain."""
    assert small(1400, 8, "cuda")
    assert not small(2048, 8, "cuda")


def hidden(width: int, layers: int, device: str) -> float | None:
    """Return the seconds of its calls that a chain of products hides."""

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            x = x @ w
        return x

    with FakeTensorMode():
        given = [torch.empty(width, width, device=device) for _ in range(2)]
    return tiering.hidden_seconds(forge.trace(chain, *given), 2 * width**3 * layers)


def test_the_processor_decides_whether_a_gpu_waits() -> None:
    assert hidden(64, 8, "cuda") == 0
    between = hidden(2048, 8, "cuda")
    assert between is not None
    assert 8 * 2e-5 < between < 8 * 1e-4
    assert hidden(8192, 8, "cuda") is None
    assert hidden(2048, 8, "cpu") is None


class Timed:
    """A program whose calls take some seconds each, by the clock of tiering, and which is compiled again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, *, idle: bool) -> None:
        self.now, self.seconds, self.calls = 0.0, seconds, 0
        self.compiled: list[Callable] = []
        monkeypatch.setattr(tiering, "_gpu_is_idle", lambda: idle)
        monkeypatch.setattr(tiering.time, "perf_counter", lambda: self.now)

    def first(self) -> str:
        self.calls += 1
        self.now += self.seconds if self.calls % 4 else 1.0  # a full queue of launches holds some up
        return "first"

    def compile(self, function: Callable) -> tiering.TierResult:
        self.compiled.append(function)
        return tiering.TierResult(lambda: "second", lambda: True, lambda: None)


@pytest.mark.parametrize(
    ("seconds", "idle", "compiled"),
    [(0.002, False, True), (0.0007, False, False), (0.0004, True, True), (0.0002, True, False)],
)
def test_a_program_that_was_seen_to_make_its_gpu_wait_is_compiled_again(
    seconds: float, idle: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(monkeypatch, seconds, idle=idle)
    program = tiering.TieredProgram(timed.compile, 0.001)
    call = program.wrap(timed.first)
    assert program.promote() and not timed.compiled  # nothing was measured or is being compiled
    results = [call() for _ in range(2 * tiering.CALLS_TO_PROMOTE)]
    assert timed.compiled == ([timed.first] if compiled else [])
    assert results[-1] == ("second" if compiled else "first")
    assert program.promote()


def test_a_program_that_makes_its_gpu_wait_later_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(monkeypatch, 0.0004, idle=False)
    call = tiering.TieredProgram(timed.compile, 0.001, 4).wrap(timed.first)
    assert {call() for _ in range(8)} == {"first"}
    timed.seconds = 0.002
    assert [call() for _ in range(40)][-1] == "second"


def test_a_program_is_measured_a_few_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(monkeypatch, 0.0004, idle=False)
    call = tiering.TieredProgram(timed.compile, 0.001, 4).wrap(timed.first)
    for _ in range(100):
        call()
    timed.seconds = 0.002
    assert {call() for _ in range(100)} == {"first"} and not timed.compiled
