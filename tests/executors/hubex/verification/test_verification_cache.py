"""Verdicts apply only to the verified kernel; a worker belongs to one process; failures not caused by a kernel are not
kept."""

import ctypes
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.hubex import Kernel, Verifier, gather
from forge.executors.hubex.verification import process, verification_cache
from forge.executors.hubex.verification.messages import Answer, Question
from forge.executors.hubex.verification.process import can_fork
from tests.hub.kernels import native_module
from tests.hub.repositories import GELU

QUESTION = Question(torch.device("cpu"), torch.float32)
SCALE = [1.0]
MANIFEST = """
forge_kernels: 1
library: {name: acme}
ops:
- op: torch.nn.functional.gelu
  kernels:
  - {name: mine, kernel_name: "python:verified_kernel:f", args: {x: input}, where: ["approximate == 'none'"]}
"""

forks = pytest.mark.skipif(not can_fork(), reason="where torch has a GPU, no copy of the process can differentiate")


def declared(function: Callable, **options: Any) -> Kernel:
    where = "approximate == 'none'"
    return forge.kernel("torch.nn.functional.gelu", function, args={"x": "input"}, where=where, **options)


def reason(kernel: Kernel) -> str | None:
    return Verifier(20).answer(kernel, QUESTION).reason


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record whether kernels are verified in a "worker" or a "fork"."""
    found: list[str] = []
    ask, ask_fork = verification_cache.worker.ask, verification_cache.ask_fork
    monkeypatch.setattr(verification_cache.worker, "ask", lambda *args: found.append("worker") or ask(*args))
    monkeypatch.setattr(verification_cache, "ask_fork", lambda *args: found.append("fork") or ask_fork(*args))
    return found


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kernel]]:
    """Yield a function that returns the kernel of a standalone manifest, with its modules written and imported anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "kernels.yaml").write_text(MANIFEST)

    def forget() -> None:
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.startswith("verified_")]:
            del sys.modules[name]

    def write(**modules: str) -> Kernel:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(f"import torch\nimport torch.nn.functional as F\n{text}\n")
        forget()
        (kernel,) = gather([tmp_path / "kernels.yaml"])
        return kernel

    yield write
    forget()


# identity of verified kernels


def test_a_helper_module_that_changed_is_verified_again(manifest: Callable, asked: list) -> None:
    kernel = "import verified_helper\ndef f(x):\n    return verified_helper.g(x)"
    assert reason(manifest(verified_kernel=kernel, verified_helper="def g(x):\n    return F.gelu(x)")) is None
    wrong = manifest(verified_helper="def g(x):\n    return F.gelu(x) + 0.25")
    assert "values differ by up to 0.25" in reason(wrong)
    assert reason(manifest(verified_helper="def g(x):\n    return F.gelu(x)")) is None
    assert asked == ["worker"] * 2  # the last was known


def test_a_constant_of_a_helpers_helper_that_changed_is_verified_again(manifest: Callable) -> None:
    helper = "import verified_values\ndef g(x):\n    return F.gelu(x) * verified_values.SCALE"
    kernel = "from verified_helper import g\ndef f(x):\n    return g(x)"
    assert reason(manifest(verified_kernel=kernel, verified_helper=helper, verified_values="SCALE = 1.0")) is None
    assert "values differ" in reason(manifest(verified_values="SCALE = 1.25"))


def test_a_native_module_that_changed_is_verified_again(
    manifest: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = "import verified_native\ndef f(x):\n    return F.gelu(x) * verified_native.value()"
    found = []
    for returns in (1, 2):
        folder = tmp_path / f"returns_{returns}"  # Python does not load one path twice
        folder.mkdir()
        (folder / "verified_native.so").write_bytes(native_module(tmp_path, "verified_native", returns))
        monkeypatch.syspath_prepend(str(folder))
        found.append(reason(manifest(verified_kernel=kernel)))
    assert found[0] is None and "values differ" in found[1]


def test_a_module_that_is_not_as_its_file_is_verified_as_it_is(manifest: Callable, asked: list) -> None:
    """The worker would import the file, which is correct; the running module is not."""
    kernel = manifest(verified_kernel="SCALE = 1.0\ndef f(x):\n    return F.gelu(x) * SCALE")
    sys.modules["verified_kernel"].SCALE = 2.0
    assert "values differ" in reason(kernel)
    assert asked[0] == "worker"


def _differentiates() -> None:
    assert process._differentiates()


@pytest.fixture
def differentiating_forks() -> None:
    """Skip the test if a fork cannot differentiate: a torch built for GPUs that has traced with fake tensors has
    autograd threads, which no fork has."""
    if not hasattr(os, "fork") or in_a_fork(_differentiates):
        pytest.skip("no copy of this process can differentiate")


@pytest.mark.usefixtures("differentiating_forks")
def test_a_kernel_declared_in_python_is_verified_again_where_what_it_reads_changed(asked: list) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * SCALE[0]

    kernel, verifier = declared(scaled), Verifier(20)
    assert verifier.answer(kernel, QUESTION).reason is None
    SCALE[0] = 2.0
    try:
        assert "values differ" in verifier.answer(kernel, QUESTION).reason
    finally:
        SCALE[0] = 1.0
    assert verifier.answer(kernel, QUESTION).reason is None
    assert asked == ["fork"] * 2


@forks
def test_an_attribute_that_changed_is_verified_again() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * scaled.factor

    scaled.factor = 1.0
    kernel, verifier = declared(scaled), Verifier(20)
    assert verifier.answer(kernel, QUESTION).reason is None
    scaled.factor = 2.0
    assert "values differ" in verifier.answer(kernel, QUESTION).reason


@forks
def test_a_forward_that_changed_is_verified_again() -> None:
    def made(factor: float) -> Kernel:
        grad = {
            "kernel_name": lambda g, x, saved: torch.ops.aten.gelu_backward(g, saved),
            "forward": lambda x: (F.gelu(x) * factor, x),
            "saves": {"saved": ["T", "[..., H]"]},
        }
        shape = {"arg_meta": {"input": "T"}, "type_alias": {"T": [torch.float32]}, "shape": {"input": "[..., H]"}}
        return declared(lambda x: F.gelu(x), name="mine", grad=grad, **shape)

    assert reason(made(1.0)) is None
    assert reason(made(1.0)) is None
    first, other = (
        verification_cache._key(each, verification_cache.fingerprint(each), QUESTION) for each in (made(1.0), made(2.0))
    )
    assert first != other


@pytest.mark.usefixtures("differentiating_forks")
def test_what_is_known_of_a_kernel_declared_in_python_is_kept_on_disk(asked: list) -> None:
    kernel = declared(lambda x: F.gelu(x))
    assert reason(kernel) is None and reason(kernel) is None
    assert asked == ["fork"]


@pytest.mark.usefixtures("differentiating_forks")
def test_what_cannot_be_known_elsewhere_is_kept_in_this_process_alone(asked: list) -> None:
    lock = threading.Lock()

    def locked(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return F.gelu(x)

    kernel, verifier = declared(locked), Verifier(20)
    assert verifier.answer(kernel, QUESTION).reason is None
    assert verifier.answer(kernel, QUESTION).reason is None
    assert asked == ["fork"]
    assert not on_disk()
    assert reason(kernel) is None and len(asked) == 2


# the verifying process


def in_a_fork(run: Callable[[], Any]) -> int:
    """Return the exit status of a forked process that runs a function."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def right(repository: Callable) -> Kernel:
    (kernel,) = gather([repository("right", "def f(x):\n    return F.gelu(x)", **GELU).folder])
    return kernel


@forks
def test_the_exit_of_a_forked_child_leaves_the_worker_to_its_parent(repository: Callable) -> None:
    assert reason(right(repository)) is None
    before, starts = verification_cache.worker.server.judge, verification_cache.worker.starts
    assert in_a_fork(verification_cache.worker.stop) == 0  # as atexit does
    assert verification_cache.worker.server.process.poll() is None
    os.kill(before, 0)
    (other,) = gather([repository("other", "def f(x):\n    return F.gelu(x) * 1", **GELU).folder])
    assert reason(other) is None
    assert (verification_cache.worker.server.judge, verification_cache.worker.starts) == (before, starts)


@forks
@pytest.mark.slow
def test_a_forked_child_has_a_worker_of_its_own(repository: Callable) -> None:
    kernel = right(repository)
    verification_cache.worker.start()
    theirs = verification_cache.worker.server.process.pid

    def ask() -> None:
        assert verification_cache.worker.server is None
        assert reason(kernel) is None
        assert verification_cache.worker.starts == 1 and verification_cache.worker.server.process.pid != theirs
        verification_cache.worker.stop()

    assert in_a_fork(ask) == 0
    assert verification_cache.worker.server.process.poll() is None


@forks
def test_a_fork_while_a_thread_verifies_does_not_wait_for_it() -> None:
    verifier = Verifier(20)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with verifier._lock, verification_cache.worker._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def ask() -> None:
        signal.alarm(60)
        decision = verifier.verdict(declared(lambda x: F.gelu(x)), (torch.randn(4),), {})
        assert decision is True

    try:
        assert in_a_fork(ask) == 0
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_an_interrupted_question_is_not_answered_to_the_next(
    repository: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = right(repository)
    receive = process.receive

    def interrupted(channel: Any, seconds: float | None = None) -> Any:
        kind, value = receive(channel, seconds)
        if kind == "sample":
            raise KeyboardInterrupt
        return kind, value

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(process, "receive", interrupted)
        reason(kernel)
    assert not on_disk()
    (wrong,) = gather([repository("wrong", "def f(x):\n    return F.gelu(x) + 1", **GELU).folder])
    assert "values differ" in reason(wrong)
    assert reason(kernel) is None


def test_a_worker_that_somebody_ended_is_asked_again(repository: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = right(repository)
    verification_cache.worker.start()
    channel = verification_cache.worker.server.channel

    def ended(message: Any) -> None:
        monkeypatch.delattr(channel, "send")
        os.kill(verification_cache.worker.server.judge, signal.SIGKILL)
        channel.send(message)

    monkeypatch.setattr(channel, "send", ended)
    assert reason(kernel) is None


@forks
def test_where_a_copy_cannot_differentiate_the_worker_is_asked(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch built for GPUs has threads for them even on a machine without any."""
    monkeypatch.setattr(process.forks, "differentiate", True)
    with monkeypatch.context() as patch:
        patch.setattr(process, "_differentiates", lambda: False)
        assert reason(declared(lambda x: F.gelu(x), name="first")) is None
    assert not can_fork()
    assert reason(declared(lambda x: F.gelu(x), name="second")) is None
    assert asked == ["fork", "worker", "worker"]


@forks
def test_a_copy_says_that_autograd_does_not_run_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    assert process._differentiates()
    monkeypatch.setattr(torch.autograd, "grad", refused)
    assert not process._differentiates()


@forks
def test_what_crashes_does_so_in_a_copy_although_that_cannot_differentiate(
    asked: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.Lock()  # an object that cannot be sent to the worker

    def crashes(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return ctypes.string_at(0)

    def right(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return F.gelu(x)

    monkeypatch.setattr(process.forks, "differentiate", False)
    assert reason(declared(crashes, grad="composite")).startswith("crashed (signal 11)")
    assert reason(declared(right, grad="composite")) is None
    assert asked == ["fork", "fork"]


def test_a_function_of_a_module_that_is_nowhere_else_is_verified_here(
    asked: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("verified_nowhere")
    exec("import torch.nn.functional as F\ndef f(x):\n    return F.gelu(x)", vars(module))
    monkeypatch.setitem(sys.modules, "verified_nowhere", module)
    monkeypatch.setattr(process.forks, "differentiate", False)
    assert reason(declared(module.f)) is None
    assert asked[0] == "worker"


# results that last


def on_disk() -> list[Path]:
    folder = verification_cache._folder()
    return sorted(folder.iterdir()) if folder.is_dir() else []


def ending(number: int) -> str:
    return f"import os\n\n\ndef f(x):\n    os.kill(os.getpid(), {int(number)})\n    time.sleep(10)"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_an_end_that_others_bring_about_is_not_kept(repository: Callable, number: int) -> None:
    """The system kills a process when memory is short, as a user may."""
    (kernel,) = gather([repository("ended", ending(number), **GELU).folder])
    assert reason(kernel).startswith(f"was ended (signal {int(number)}) on input: float32[")
    assert not on_disk()


@pytest.mark.parametrize(
    "code", ["def f(x):\n    ctypes.string_at(0)", ending(signal.SIGABRT), "import os\ndef f(x):\n    os._exit(3)"]
)
def test_an_end_of_the_kernels_own_doing_is_kept(repository: Callable, code: str) -> None:
    (kernel,) = gather([repository("ended", code, **GELU).folder])
    assert reason(kernel).startswith(("crashed (signal", "ended the process with status 3"))
    assert len(on_disk()) == 1


@pytest.mark.parametrize("error", ["MemoryError()", "torch.OutOfMemoryError('none left')"])
def test_a_machine_without_memory_says_nothing_of_a_kernel(repository: Callable, error: str) -> None:
    (kernel,) = gather([repository("large", f"def f(x):\n    raise {error}", **GELU).folder])
    assert reason(kernel).startswith("cannot be verified: ")
    assert not on_disk()


@pytest.mark.parametrize(("returned", "kind"), [("None", "NoneType"), ("(F.gelu(x), x + 1)", "tuple")])
def test_another_number_of_results_is_found(repository: Callable, returned: str, kind: str) -> None:
    (kernel,) = gather([repository("counted", f"def f(x):\n    return {returned}", **GELU).folder])
    assert f"it returns a {kind}, but must return a tensor" in reason(kernel) and len(on_disk()) == 1


@forks
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_fork_that_ends_is_kept_where_it_is_the_kernels_doing(number: int) -> None:
    def ended(x: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(number)
        return x

    answer: Answer = Verifier(20).answer(declared(ended), QUESTION)
    assert answer.reason is not None and answer.lasting == (number == signal.SIGSEGV)
