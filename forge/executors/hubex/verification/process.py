"""Verification in another process: a worker that finds the kernel or receives it, or a fork of this process.

Either belongs to the process that started it: forks of its owner neither use nor end it. A death that the kernel did
not cause (by the system or a person) is no verdict on the kernel.
"""

import contextlib
import faulthandler
import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import ChainMap
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.messages import Answer, Question, Request, receive
from forge.hub.compat import library
from forge.hub.manifest import KernelEntry
from forge.support import child_processes
from forge.torch_internals.dispatch import (
    OpOverload,
    OpOverloadPacket,
    disable_current_modes,
    overload_name,
    packet_name,
)

START = 300.0  # timeout in seconds for the start of a process, on a busy machine
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # the latter because it forks
Verify = Callable[[Kernel, Question, Callable[[str], None]], Answer]
_FAULTS = frozenset(getattr(signal, f"SIG{name}", None) for name in "SEGV BUS ILL FPE ABRT TRAP SYS".split())


class VerificationFlag(threading.local):
    """A thread-local flag, set while a kernel is verified: operators that the kernel calls then run no other kernel."""

    active = False


class Forks:
    """State that says whether a fork of this process can differentiate: autograd's threads, one per GPU, do not survive
    a fork. A torch build for GPUs starts them even without a GPU, once it has traced with fake tensors; only the fork
    can find out."""

    differentiate = True


verifying = VerificationFlag()
forks = Forks()


class _AskAgain(Exception):
    """A failure after which another process has to verify the kernel. answer: the answer if that one fails too; None if
    it found another kernel."""

    def __init__(self, answer: Answer | None) -> None:
        self.answer = answer


class _Server:
    """A started worker process and the channel to it. errors: its standard error. judge: the id of its child."""

    def __init__(self) -> None:
        self.channel, theirs = Pipe()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        self.process = subprocess.Popen(
            child_processes.run_module("forge.executors.hubex.worker"),
            stdin=theirs.fileno(),
            stdout=self.errors,
            stderr=self.errors,
            env={**child_processes.environment(), **ENVIRONMENT},
        )
        theirs.close()
        self.judge: int | None = None

    def close(self) -> None:
        """Close this process's end."""
        self.channel.close()
        self.errors.close()

    def kill(self) -> None:
        """End the process and its child."""
        self.process.kill()
        if self.judge is not None:
            _kill(self.judge)
        self.process.wait()
        self.close()

    def renew(self) -> None:
        """Kill its child, so that the worker forks another."""
        if self.judge is not None:
            _kill(self.judge)
        self.wait_for("died")
        self.wait_for("ready")

    def catch_up(self) -> None:
        """Read the messages since the last answer, about a child that died and its successor."""
        while self.channel.poll():
            self.wait_for("ready")

    def wait_for(self, expected: str) -> None:
        """Read messages until one of this kind."""
        kind = None
        while kind != expected:
            kind, value = receive(self.channel, START)
        if kind == "ready":
            self.judge = value

    def last_error(self) -> str:
        """Return the last line of its standard error, after a colon."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


class Worker:
    """The process that runs kernels, started at its first use and restarted if it dies."""

    def __init__(self) -> None:
        self.starts = 0
        self.server: _Server | None = None
        self._lock = threading.RLock()
        self._owner = os.getpid()

    def ask(
        self, kernel: Kernel, question: Question, seconds: float, digest: str, declared: bytes | None = None
    ) -> Answer | None:
        """Return the worker's answer, or how the kernel killed it; None if it finds another kernel than this process's.
        digest: the kernel's fingerprint. declared: the result of `pickle_kernel`, for a kernel declared in Python."""
        self.disown_a_parents()
        request = _request(kernel, question, seconds, digest, declared)
        with self._lock:
            try:
                return self._ask(request)
            except _AskAgain:  # the child imported another module of the same name, or was killed from outside
                pass
            try:
                return self._ask(request)
            except _AskAgain as failure:
                return failure.answer

    def _ask(self, request: Request) -> Answer:
        server = None
        try:
            server = self.start()
            server.channel.send(request)
            return _listen_to_worker(server, request.seconds)
        except (EOFError, OSError) as error:
            last = "" if server is None else server.last_error()
            answer = Answer(f"the process that verifies kernels ended{last}", lasting=False)
            self.stop()
            raise _AskAgain(answer) from error
        except _AskAgain:
            raise
        except BaseException:  # an interrupt, say: the next question must not receive this one's answer
            self.stop()
            raise

    def start(self) -> _Server:
        """Start the worker unless one runs."""
        if self.server is not None and self.server.process.poll() is None:
            self.server.catch_up()
            return self.server
        self.stop()
        self.starts += 1
        self.server = _Server()
        self.server.wait_for("ready")
        return self.server

    def stop(self) -> None:
        """End the worker if this process owns it."""
        self.disown_a_parents()
        server, self.server = self.server, None
        if server is not None:
            server.kill()

    def disown_a_parents(self) -> None:
        """Drop the worker in a fork of the process that started it, without ending it."""
        if self._owner == os.getpid():
            return
        server, self.server = self.server, None
        self._owner, self._lock, self.starts = os.getpid(), threading.RLock(), 0
        if server is not None:
            server.process.returncode = 0  # it is no child of this process, which cannot wait for it
            server.close()  # else the worker would not notice that its owner died


def _listen_to_worker(server: _Server, seconds: float) -> Answer:
    sample = None
    while True:
        try:
            kind, value = receive(server.channel, seconds if sample else max(seconds, START))
        except TimeoutError:
            server.renew()
            return _no_answer(seconds, sample)
        if kind == "answer":
            if value.reason is not None:  # a wrong kernel may have corrupted the process
                server.renew()
            return value
        if kind == "differs":
            server.renew()
            raise _AskAgain(None)
        if kind == "died":
            server.wait_for("ready")
            answer = _death(value, sample)
            if sample is None:  # the kernel may not have started
                raise _AskAgain(answer)
            return answer
        sample = value


def _request(kernel: Kernel, question: Question, seconds: float, digest: str, declared: bytes | None = None) -> Request:
    path, environment = child_processes.search_path(), {**child_processes.environment(), **ENVIRONMENT}
    relative = [os.path.abspath(each) for each in sys.path if not os.path.isabs(each)]
    place = (os.getcwd(), (*path, *relative), environment)  # last, so that files there do not shadow installed modules
    about = (digest, declared, _entry_for_judge(kernel))
    return Request(kernel.origin, kernel.entry.op, kernel.name, *place, seconds, question, *about)


def _entry_for_judge(kernel: Kernel) -> KernelEntry | None:
    """Return the entry of a kernel whose reference is in torch or forge, not in its own repository; else None."""
    entry, grad = kernel.entry, kernel.entry.grad
    is_theirs = kernel.target.function is None and (kernel.pattern is None or not entry.op.startswith("python:"))
    functions = (entry.fn, grad.fn, grad.forward_fn)
    return entry if kernel.origin.source is not None and is_theirs and functions == (None, None, None) else None


def pickle_kernel(kernel: Kernel) -> bytes | None:
    """Pickle a kernel declared in Python, for another process to declare it again; return None for other kernels and
    if pickling fails."""
    if kernel.declared is None or kernel.target.function is not None:  # an operator of this process only
        return None
    data = io.BytesIO()
    try:
        base = library("cloudpickle").Pickler
        pickler = type("Pickler", (base,), {"dispatch_table": ChainMap(_reducers(), base.dispatch_table)})
        pickler(data).dump(kernel.declared)
    except Exception:  # cloudpickle is missing or fails, with any error of the objects' own code
        return None
    return data.getvalue()


_REDUCERS: dict[type, Callable[[Any], tuple]] = {  # torch.ops and its contents, by name
    type(torch.ops): lambda ops: (getattr, (torch, "ops")),
    type(torch.ops.aten): lambda namespace: (getattr, (torch.ops, namespace.name)),
    OpOverloadPacket: lambda packet: (_operator, (*packet_name(packet).split("::"),)),
    OpOverload: lambda overload: (getattr, (overload.overloadpacket, overload_name(overload))),
}
_TRITON_OPTIONS = (
    "version do_not_specialize do_not_specialize_on_alignment debug noinline _repr launch_metadata".split()
)


def _reducers() -> dict[type, Callable[[Any], tuple]]:
    jit = sys.modules.get("triton.runtime.jit")
    return _REDUCERS if jit is None else {**_REDUCERS, jit.JITFunction: _reduce_triton}


def _reduce_triton(function: Any) -> tuple:
    """Reduce a Triton kernel to its Python function, which the receiver compiles."""
    options = {name.removeprefix("_"): getattr(function, name) for name in _TRITON_OPTIONS if hasattr(function, name)}
    return _triton_kernel, (function.fn, options)


def _triton_kernel(function: Callable, options: dict[str, Any]) -> Any:
    return importlib.import_module("triton.runtime.jit").JITFunction(function, **options)


def _operator(namespace: str, name: str) -> OpOverloadPacket:
    return getattr(getattr(torch.ops, namespace), name)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _no_answer(seconds: float, sample: str | None) -> Answer:
    return Answer(f"no answer within {seconds:g} s on {sample or 'its import'}", lasting=False)


def _death(status: int, sample: str | None) -> Answer:
    """Return an answer for a death, lasting only if the kernel's own code caused it while it ran: other causes send
    other signals, as the system does without memory, and an import may fail because of the machine."""
    code = os.waitstatus_to_exitcode(status)
    its_own = code >= 0 or -code in _FAULTS
    if code >= 0:
        how = f"ended the process with status {code}"
    else:
        how = f"{'crashed' if its_own else 'was ended'} (signal {-code})"
    return Answer(f"{how} on {sample or 'its import'}", lasting=its_own and sample is not None)


def become_expendable() -> None:
    """Prepare this process for kernels: a crash leaves no core dump and no stack trace, and signals that they send to
    their process group do not reach the program."""
    import resource  # Unix only, like fork

    with contextlib.suppress(OSError):  # it leads a session already
        os.setsid()
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's Ctrl-C is for the program, which ends it
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def can_fork(*, gradients: bool = True) -> bool:
    """Return whether a fork of this process could run a kernel and differentiate it."""
    return hasattr(os, "fork") and not torch.cuda.is_available() and (forks.differentiate or not gradients)


def ask_fork(kernel: Kernel, question: Question, seconds: float, verify: Verify) -> Answer | None:
    """Return the answer of a fork of this process, or None if the fork cannot differentiate."""
    reading, writing = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warns of forks with threads; the child starts none
        child = os.fork()
    if child == 0:
        _answer_and_exit(kernel, question, writing, verify)
    writing.close()
    with reading:
        answer = _listen_to_fork(reading, child, seconds)
    if question.gradients:
        forks.differentiate = answer is not None
    return answer


def _differentiates() -> bool:
    """Return whether autograd runs in this process."""
    with disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        try:
            torch.autograd.grad(x * 1, x)
        except RuntimeError:
            return False
    return True


def _listen_to_fork(channel: Connection, child: int, seconds: float) -> Answer | None:
    sample = None
    try:
        while True:
            kind, value = receive(channel, seconds)
            if kind == "answer":
                os.waitpid(child, 0)
                return value
            sample = value
    except TimeoutError:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:  # another fork of this process may hold the pipe
            return _death(status, sample)
        _end(child)
        return _no_answer(seconds, sample)
    except (EOFError, OSError):
        return _death(os.waitpid(child, 0)[1], sample)
    except BaseException:
        _end(child)
        raise


def _end(child: int) -> None:
    _kill(child)
    os.waitpid(child, 0)


def _answer_and_exit(kernel: Kernel, question: Question, writing: Connection, verify: Verify) -> NoReturn:
    status = 1
    try:
        become_expendable()
        able = not question.gradients or _differentiates()
        report = lambda text: writing.send(("sample", text))
        writing.send(("answer", verify(kernel, question, report) if able else None))
        status = 0
    finally:
        os._exit(status)  # skip the program's exit handlers
