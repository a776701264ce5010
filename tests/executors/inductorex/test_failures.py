"""Failures of Inductor, after which torch runs the calls: threads, forks, unwritable caches, dying compilers."""

import logging
import os
import resource
import shutil
import signal
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpu_vec_isa import pick_vec_isa

import forge
from forge.capture.handles import handle_of
from forge.executors import RegionError, claim, inductorex, resolve_executors
from forge.executors.inductorex import compile_wait, lower
from forge.ir import TensorProxy

EXECUTORS = ["inductor", "torch"]


def curve(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sigmoid() * x


def other_curve(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-x) * x + 3


def third_curve(x: torch.Tensor) -> torch.Tensor:
    return x.tanh().exp() - 3


def check(function: Callable, *, fuses: bool) -> Callable:
    """Jit and call the function, forward and backward: compare the result with eager, and the number of regions with
    `fuses`."""
    jitted = forge.jit(function, executors=EXECUTORS)
    x, same = (torch.linspace(-1, 1, 12, requires_grad=True) for _ in range(2))
    expected, result = function(same), jitted(x)
    expected.sum().backward()
    result.sum().backward()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(x.grad, same.grad)
    assert any("fusion" in bound.symbol.name for bound in forge.last_traces(jitted)[-1].bound_symbols) == fuses
    return jitted


def why_not(jitted: Callable) -> str:
    """Return the reason why the first call of the program is in no region."""
    return next(reason for name, reason in handle_of(jitted).reports[-1].claims[0].declined if name == "inductor")


def test_two_threads_compile_at_once() -> None:
    x = torch.randn(3, 5)
    functions = [curve, other_curve, curve, other_curve]
    traces = [forge.trace(function, x) for function in functions]
    results: list[torch.Tensor | None] = [None] * len(functions)
    ready = threading.Barrier(len(functions))

    def compile(place: int) -> None:
        ready.wait()
        results[place] = claim(traces[place], resolve_executors(EXECUTORS))[0].python_callable()(x)

    threads = [threading.Thread(target=compile, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for function, result in zip(functions, results, strict=True):
        torch.testing.assert_close(result, function(x))


def test_waits_of_another_thread_are_its_own() -> None:
    waited: list[str] = []
    scope = {"__file__": "module.py"}
    with compile_wait.defer_waits() as started:
        thread = threading.Thread(target=lambda: (AsyncCompile().wait(dict(scope)), waited.append("there")))
        thread.start()
        thread.join()
        assert waited == ["there"] and not started.waits
        AsyncCompile().wait(dict(scope))
        assert len(started.waits) == 1
    compile_wait.finish()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, torch neither compiles nor differentiates in a fork")
def test_a_forked_child_compiles_after_its_parent_did() -> None:
    check(curve, fuses=True)
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # end the process if it hangs
        try:
            with torch.no_grad():
                x = torch.randn(7)
                jitted = forge.jit(other_curve, executors=EXECUTORS)
                right = torch.allclose(jitted(x), other_curve(x))
                fused = "fusion0" in str(forge.last_traces(jitted)[-1])
            os._exit(0 if right and fused else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.failing_regions
def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    jitted = check(curve, fuses=False)
    assert "Inductor failed: NotADirectoryError" in why_not(jitted)
    assert len(notices.records) == 1


@pytest.mark.failing_regions
def test_a_full_disk_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: pytest.LogCaptureFixture
) -> None:
    pick_vec_isa()  # Inductor caches an instruction set as unsupported even if only its build failed
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # limit the size of files, including those of g++
    try:
        check(curve, fuses=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(notices.records) == 1
    check(other_curve, fuses=True)


@pytest.mark.failing_regions
def test_a_compiler_that_is_killed_leaves_its_regions_to_torch(
    tmp_path: Path, notices: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *.main.cpp*) kill -9 $$;; esac\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(stat.S_IRWXU)
    with inductor_config.patch({"cpp.cxx": (None, str(compiler))}):
        jitted = check(curve, fuses=False)
        assert "Inductor's kernel could not be built: CppCompileError" in why_not(jitted)
        assert len(notices.records) == 1
        assert "test_failures.py" in notices.text and "inductor.fusion0 cannot be compiled" in notices.text
        strict = forge.jit(third_curve, executors=EXECUTORS, strict=True)
        for _ in range(2):
            with pytest.raises(
                RegionError, match=r"inductor\.fusion0 .*test_failures\.py:.*: CppCompileError"
            ) as raised:
                strict(torch.ones(3))
            assert type(raised.value.__cause__).__name__ == "CppCompileError"
    check(other_curve, fuses=True)


@pytest.mark.failing_regions
def test_what_fails_deletes_empty_files_of_inductors_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: pytest.LogCaptureFixture
) -> None:
    """Inductor reads them again in every later process. Locks, and files about to be written, are empty, too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    files = [tmp_path / name for name in ("old.py", "old.main.so", "old.lock", "new.py", "full.py")]
    for file in files:
        file.write_text("x = 1" if file.stem == "full" else "")
        if file.stem != "new":
            os.utime(file, (0, 0))
    compile_wait.notice(AttributeError("no attribute 'call'"))
    assert [file.name for file in files if file.exists()] == ["old.lock", "new.py", "full.py"]
    assert "no attribute 'call'; 2 empty files of its cache are deleted" in notices.text


def test_without_a_compiler_there_is_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_EXECUTORS", "inductor,torch")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    inductorex._can_compile_for.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no C\\+\\+ compiler was found") as found:
            for function in (curve, other_curve):
                torch.testing.assert_close(forge.jit(function)(torch.ones(3)), function(torch.ones(3)))
        assert len([each for each in found if "compiler" in str(each.message)]) == 1
    finally:
        inductorex._can_compile_for.cache_clear()


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture the log and warnings of regions that fail, as in a process in which nothing has failed yet."""
    caplog.set_level(logging.WARNING, "forge.inductor")
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message="forge:")
        logging.captureWarnings(True)
        yield caplog
        logging.captureWarnings(False)


def settings_of(monkeypatch: pytest.MonkeyPatch, fails: Callable[[dict[str, object]], None]) -> list[dict[str, object]]:
    """Return the list of Inductor's settings for the regions compiled from now on, as on a GPU; `fails` may raise for
    them."""
    compile_graph, seen = lower.compile_graph, list[dict[str, object]]()

    def compile_with(*args: Any, settings: dict[str, object], **options: Any) -> Any:
        seen.append(dict(settings))
        fails(seen[-1])
        return compile_graph(*args, settings=settings, **options)

    monkeypatch.setattr(lower, "is_on_gpu", lambda value: isinstance(value, (torch.Tensor, TensorProxy)))
    monkeypatch.setattr(lower, "compile_graph", compile_with)
    return seen


PLAIN = {"triton.persistent_reductions": False, "triton.coalesce_tiling_analysis": False}


def test_a_region_that_inductor_cannot_compile_is_compiled_by_plainer_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(settings: dict[str, object]) -> None:
        if not settings:
            raise AssertionError("of an analysis of reads")

    seen = settings_of(monkeypatch, fails)
    check(lambda x: x.cos().exp() - 5, fuses=True)
    assert seen == [{}, PLAIN] * 2  # a forward and a backward


def test_a_region_whose_kernel_cannot_be_built_is_compiled_by_plainer_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finish = compile_wait.PendingArtifact.finish

    def fails(started: compile_wait.PendingArtifact) -> Exception | None:
        error = finish(started)
        return RuntimeError("PassManager::run failed") if error is None and started.again is not None else error

    seen = settings_of(monkeypatch, lambda settings: None)
    monkeypatch.setattr(compile_wait.PendingArtifact, "finish", fails)
    with caplog.at_level(logging.INFO, logger="forge.inductor"):
        check(lambda x: x.cos().exp() - 6, fuses=True)
    assert seen.count(PLAIN) == seen.count({}) == 2
    assert "PassManager::run failed" in caplog.text


@pytest.mark.failing_regions
def test_a_region_that_plainer_code_does_not_help_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(settings: dict[str, object]) -> None:
        raise AssertionError("twice" if settings else "once")

    seen = settings_of(monkeypatch, fails)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(lambda x: x.cos().exp() - 7, fuses=False)
    assert seen == [{}, PLAIN] * 2
    assert "once" in str(caught[0].message)
