"""Asking another process whether a kernel is right: a worker that finds it or is sent it, or a fork of this one.

Either belongs to the process that started it: a fork of that one neither asks nor ends it. What ended a process without
the kernel's doing (the system, a person) says nothing of the kernel.
"""

import contextlib
import faulthandler
import importlib
import io
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import ChainMap
from collections.abc import Callable
from typing import Any

import torch

from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.messages import Answer, Ended, Question, Request, Silent, receive, send
from forge.hub.compat import library
from forge.hub.manifest import KernelEntry
from forge.support import child_processes
from forge.torch_internals.dispatch import OpOverload, OpOverloadPacket, disable_current_modes

try:
    import resource
except ImportError:  # not a Unix
    resource = None

START = 300.0  # seconds until a process is there, on a machine that is busy
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # the latter: it forks


class Verifying(threading.local):
    """Whether this thread runs a kernel to verify it: an operator that it calls runs no other kernel meanwhile."""

    active = False


class Forks:
    """Whether a copy of this process can differentiate, as far as is known: autograd's threads, which torch has for
    each GPU, do not survive a fork. A torch that is built for GPUs starts them where there is none, too, once it has
    traced with fake tensors; only the copy can tell."""

    differentiate = True


verifying = Verifying()
forks = Forks()


class _AskAgain(Exception):
    """Another process must be asked. answer: what to answer where that one cannot answer either; None where what it
    finds is another kernel."""

    def __init__(self, answer: Answer | None) -> None:
        self.answer = answer


class Worker:
    """The process that runs kernels: started when it is first needed, kept, started again should it end."""

    def __init__(self) -> None:
        self.starts = 0
        self._process: subprocess.Popen | None = None
        self._child: int | None = None
        self._errors: Any = None
        self._lock = threading.RLock()
        self._owner = os.getpid()

    def ask(
        self, kernel: Kernel, question: Question, seconds: float, digest: str, declared: bytes | None = None
    ) -> Answer | None:
        """What the worker answers, or how the kernel ended it; None where what it finds is not the kernel of this
        process. digest: the kernel's fingerprint. declared: as of `pickled`, for a kernel declared in Python."""
        self.disown_a_parents()
        request = _request(kernel, question, seconds, digest, declared)
        with self._lock:
            try:
                return self._ask(request)
            except _AskAgain:  # a child that imported something else by the same name, or that somebody ended
                pass
            try:
                return self._ask(request)
            except _AskAgain as again:
                return again.answer

    def _ask(self, request: Request) -> Answer:
        try:
            self._start()
            send(self._process.stdin.fileno(), request)
            return self._listen(request.seconds)
        except (Ended, Silent, OSError) as error:
            answer = Answer(f"the process that verifies kernels ended{self._last_error()}", lasting=False)
            self.stop()
            raise _AskAgain(answer) from error
        except _AskAgain:
            raise
        except BaseException:  # an interrupt, say: its answer must not be taken for that to another question
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the worker, where it is this process's own."""
        self.disown_a_parents()
        if self._process is None:
            return
        self._process.stdin.close()
        self._process.kill()
        if self._child is not None:
            _kill(self._child)
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self._process, self._child = None, None

    def disown_a_parents(self) -> None:
        """In a fork of the process that started the worker: forgets it, and leaves it to its owner."""
        if self._owner == os.getpid():
            return
        process, errors = self._process, self._errors
        self._process, self._child, self._errors = None, None, None
        self._owner, self._lock, self.starts = os.getpid(), threading.RLock(), 0
        if process is not None:
            process.returncode = 0  # it is no child of this process, which has nobody to wait for
            for file in (process.stdin, process.stdout, errors):
                file.close()  # else the worker would not see the end of its owner

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._catch_up()
            return
        self.stop()
        self.starts += 1
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        self._process = subprocess.Popen(
            child_processes.run_module("forge.executors.hubex.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**child_processes.environment(), **ENVIRONMENT},
        )
        self._receive("ready")

    def _catch_up(self) -> None:
        """Reads the messages since the last answer: a child that ended, and the one in its place."""
        while select.select([self._process.stdout], [], [], 0)[0]:
            self._receive("ready")

    def _listen(self, seconds: float) -> Answer:
        sample = None
        while True:
            try:
                kind, value = receive(self._process.stdout.fileno(), seconds if sample else max(seconds, START))
            except Silent:
                self._renew()
                return _no_answer(seconds, sample)
            if kind == "answer":
                if value.reason is not None:  # a wrong kernel may have left anything behind
                    self._renew()
                return value
            if kind == "differs":
                self._renew()
                raise _AskAgain(None)
            if kind == "died":
                self._receive("ready")
                answer = _death(value, sample)
                if sample is None:  # it may not have begun
                    raise _AskAgain(answer)
                return answer
            sample = value

    def _renew(self) -> None:
        _kill(self._child)
        self._receive("died")
        self._receive("ready")

    def _receive(self, wanted: str) -> None:
        kind = None
        while kind != wanted:
            kind, value = receive(self._process.stdout.fileno(), START)
        if kind == "ready":
            self._child = value

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def _request(kernel: Kernel, question: Question, seconds: float, digest: str, declared: bytes | None = None) -> Request:
    path, environment = child_processes.search_path(), {**child_processes.environment(), **ENVIRONMENT}
    relative = [os.path.abspath(each) for each in sys.path if not os.path.isabs(each)]
    place = (os.getcwd(), (*path, *relative), environment)  # what is there shadows no module that is installed
    about = (digest, declared, _entry(kernel))
    return Request(kernel.origin, kernel.entry.op, kernel.name, *place, seconds, question, *about)


def _entry(kernel: Kernel) -> KernelEntry | None:
    """The entry of a kernel that is compared with torch or forge, and with nothing of its own repository."""
    entry, grad = kernel.entry, kernel.entry.grad
    is_theirs = kernel.target.function is None and (kernel.pattern is None or not entry.op.startswith("python:"))
    given = (entry.fn, grad.fn, grad.forward_fn)
    return entry if kernel.origin.source is not None and is_theirs and given == (None, None, None) else None


def pickled(kernel: Kernel) -> bytes | None:
    """A kernel declared in Python, for another process to declare again; None for others, and where it cannot be."""
    if kernel.declared is None or kernel.target.function is not None:  # an operator of this process alone
        return None
    data = io.BytesIO()
    try:
        base = library("cloudpickle").Pickler
        pickler = type("Pickler", (base,), {"dispatch_table": ChainMap(_reducers(), base.dispatch_table)})
        pickler(data).dump(kernel.declared)
    except Exception:  # cloudpickle is not there, or cannot do it: it raises what the objects' own code raises
        return None
    return data.getvalue()


_REDUCERS: dict[type, Callable[[Any], tuple]] = {  # torch.ops and what is in it, by name
    type(torch.ops): lambda ops: (getattr, (torch, "ops")),
    type(torch.ops.aten): lambda namespace: (getattr, (torch.ops, namespace.name)),
    OpOverloadPacket: lambda packet: (_operator, (*packet._qualified_op_name.split("::"),)),
    OpOverload: lambda overload: (getattr, (overload.overloadpacket, overload._overloadname)),
}


def _reducers() -> dict[type, Callable[[Any], tuple]]:
    jit = sys.modules.get("triton.runtime.jit")
    return _REDUCERS if jit is None else {**_REDUCERS, jit.JITFunction: _triton_reduced}


def _triton_reduced(function: Any) -> tuple:
    """A Triton kernel as the function that it was made of, which is compiled where it arrives."""
    options = {name.removeprefix("_"): getattr(function, name) for name in _TRITON_OPTIONS if hasattr(function, name)}
    return _triton_kernel, (function.fn, options)


_TRITON_OPTIONS = (
    "version do_not_specialize do_not_specialize_on_alignment debug noinline _repr launch_metadata".split()
)


def _triton_kernel(function: Callable, options: dict[str, Any]) -> Any:
    return importlib.import_module("triton.runtime.jit").JITFunction(function, **options)


def _operator(namespace: str, name: str) -> OpOverloadPacket:
    return getattr(getattr(torch.ops, namespace), name)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _no_answer(seconds: float, sample: str | None) -> Answer:
    return Answer(f"no answer within {seconds:g} s on {sample or 'its import'}", lasting=False)


def _death(status: int, sample: str | None) -> Answer:
    """Lasting where the kernel's own code did it while it ran: others send other signals, as a system without memory
    does, and an import fails for reasons of the machine's."""
    code = os.waitstatus_to_exitcode(status)
    its_own = code >= 0 or -code in _FAULTS
    if code >= 0:
        how = f"ended the process with status {code}"
    else:
        how = f"{'crashed' if its_own else 'was ended'} (signal {-code})"
    return Answer(f"{how} on {sample or 'its import'}", lasting=its_own and sample is not None)


_FAULTS = frozenset(getattr(signal, f"SIG{name}", None) for name in "SEGV BUS ILL FPE ABRT TRAP SYS".split())


def become_expendable() -> None:
    """Before kernels run in this process: should they end it, it leaves no core and no stack trace; and what they send
    to their process group does not reach the program."""
    with contextlib.suppress(AttributeError, OSError):  # there are no sessions here, or it leads one
        os.setsid()
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's Ctrl-C is for the program, which ends it
    torch.set_num_threads(1)
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def can_fork(*, gradients: bool = True) -> bool:
    """Whether a copy of this process could run a kernel, and differentiate it."""
    return hasattr(os, "fork") and not torch.cuda.is_available() and (forks.differentiate or not gradients)


def ask_fork(kernel: Kernel, question: Question, seconds: float, verify: Callable[..., Answer]) -> Answer | None:
    """What a copy of this process answers; None where it turned out that it cannot differentiate."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads; the child starts none
        child = os.fork()
    if child == 0:
        _answer_and_exit(kernel, question, writing, verify)
    os.close(writing)
    try:
        answer = _listen_to_fork(reading, child, seconds)
    finally:
        os.close(reading)
    if question.gradients:
        forks.differentiate = answer is not None
    return answer


def _differentiates() -> bool:
    """Whether autograd runs in this process."""
    with disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        try:
            torch.autograd.grad(x * 1, x)
        except RuntimeError:
            return False
    return True


def _listen_to_fork(reading: int, child: int, seconds: float) -> Answer | None:
    sample = None
    try:
        while True:
            kind, value = receive(reading, seconds)
            if kind == "answer":
                os.waitpid(child, 0)
                return value
            sample = value
    except Silent:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:  # and another fork of this process holds the pipe
            return _death(status, sample)
        _end(child)
        return _no_answer(seconds, sample)
    except Ended:
        return _death(os.waitpid(child, 0)[1], sample)
    except BaseException:
        _end(child)
        raise


def _end(child: int) -> None:
    _kill(child)
    os.waitpid(child, 0)


def _answer_and_exit(kernel: Kernel, question: Question, writing: int, verify: Callable[..., Answer]) -> None:
    status = 1
    try:
        become_expendable()
        able = not question.gradients or _differentiates()
        report = lambda text: send(writing, ("sample", text))
        send(writing, ("answer", verify(kernel, question, report) if able else None))
        status = 0
    finally:
        os._exit(status)  # nothing of the program's own runs at exit
