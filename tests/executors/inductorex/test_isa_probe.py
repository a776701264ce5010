"""Inductor's probe of the machine runs while the first program is captured."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import cpu_vec_isa

import forge
from forge.executors.inductorex import isa_probe


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Yield a list that records, for each request, whether the probe's thread made it, with an empty cache of
    Inductor's."""
    asked: list[bool] = []
    pick = cpu_vec_isa.pick_vec_isa

    def noted() -> cpu_vec_isa.VecISA:
        asked.append(threading.current_thread().name == "forge-ahead")
        return pick()

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", noted)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FORGE_BACKGROUND", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    isa_probe.ask.cache_clear()
    yield asked
    isa_probe.wait()
    isa_probe.ask.cache_clear()


def compile_two(executors: list[bool]) -> None:
    for each in (torch.sin, torch.cos):
        forge.jit(lambda x, each=each: each(x) + 1, executors=executors)(torch.ones(3))


def test_one_thread_asks_for_all_programs_and_they_wait_for_it(asking: list[bool]) -> None:
    compile_two(["inductor", "torch"])
    assert asking[0] and not any(asking[1:]) and isa_probe.marker_path().exists()


def test_nobody_asks_what_is_known(asking: list[bool]) -> None:
    isa_probe.marker_path().touch()
    compile_two(["inductor", "torch"])
    assert not any(asking)


def test_nobody_asks_without_inductor(asking: list[bool]) -> None:
    compile_two(["torch"])
    isa_probe.wait()
    assert not any(asking)


def test_nobody_asks_where_nothing_shall_run_in_the_background(
    asking: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_BACKGROUND", "0")
    compile_two(["inductor", "torch"])
    assert not any(asking)


@pytest.mark.failing_regions
def test_who_compiles_asks_again_after_a_failure(asking: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("there is no room")

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", fail)
    compile_two(["inductor", "torch"])
    assert not isa_probe.marker_path().exists()


def test_who_compiles_asks_where_no_thread_can_be_started(asking: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert isa_probe.ask() is None
    compile_two(["inductor", "torch"])
    assert asking and not any(asking)


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the codes that Inductor itself tries to load, in a separate cache."""
    codes: list[str] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: codes.append(code) or code == "works")
    isa_probe.remember.__wrapped__()
    return codes


def test_what_could_be_loaded_once_is_not_asked_again(
    checked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isa = cpu_vec_isa.VecAVX2()
    assert [isa.check_build(code) for code in ("works", "works", "fails", "fails")] == [True, True, False, False]
    assert checked == ["works", "fails", "fails"]
    assert cpu_vec_isa.VecAVX512().check_build("works") and checked[3:] == ["works"]  # other flags
    compiler = tmp_path / "c++"
    compiler.touch(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert isa.check_build("works") and checked[4:] == ["works"]
    os.utime(compiler, (1, 1))  # another one in place of it
    assert isa.check_build("works") and isa.check_build("works") and checked[5:] == ["works"]


def test_an_answer_that_cannot_be_kept_is_given(checked: list[str], tmp_path: Path) -> None:
    (tmp_path / "forge-isa").touch()  # no folder
    assert cpu_vec_isa.VecAVX2().check_build("works") and checked == ["works"]


@pytest.mark.slow
def test_processes_that_compile_for_this_one_remember() -> None:
    program = "from torch._inductor import cpu_vec_isa\nimport forge.executors.inductorex.worker\n"
    program += "assert hasattr(cpu_vec_isa.VecISA.check_build, '__wrapped__')"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_waits_for_the_answer(asking: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", go.wait)
    thread = isa_probe.ask()
    threading.Timer(0.2, go.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if go.is_set() else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("first", ["forge", "filelock"])
@pytest.mark.slow
def test_a_thread_that_a_fork_waits_for_may_lock_files(first: str, tmp_path: Path) -> None:
    program = f"""
import os, threading, time
import {first}
from filelock import FileLock
from forge.executors.inductorex import processes

def lock():
    with processes.no_fork, FileLock({str(tmp_path / "lock")!r}):
        held.set()
        time.sleep(0.2)

held = threading.Event()
thread = threading.Thread(target=lock, daemon=True)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    os._exit(0)
thread.join()
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
def test_a_process_that_ends_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    program = "import torch, forge\nforge.jit(lambda x: x + 1, cache=False)(torch.ones(8))"
    subprocess.run([sys.executable, "-c", program], check=True)
    time.sleep(0.5)
    found = subprocess.run(["ps", "-eo", "args"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert str(tmp_path) not in found
