"""The process that verifies kernels: python -m forge.executors.hubex.worker, started by verification/process.py.

It never runs a kernel itself: it forks a child that judges, and says when the child died, so that another one takes its
place at once. The child reads questions from standard input and answers to what was standard output; what a kernel
prints goes to standard error. The child has a child of its own, the runner (verification/runner.py), which imports the
kernel and has none of these channels: the judge makes the samples, knows the right results, and hears of the kernel
what it computes. Only a kernel that is compared with code of its own repository is imported by the judge.
"""

import os
import pickle
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forge import hub
from forge.executors.hubex.declared import kernel
from forge.executors.hubex.fingerprint import fingerprint
from forge.executors.hubex.gather import gather, kernel_of
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.messages import Answer, Ended, Request, receive, send
from forge.executors.hubex.verification.process import become_expendable
from forge.executors.hubex.verification.runner import Called, Died, Runner
from forge.executors.hubex.verification.verify import verify
from forge.hub.lockfile import ALONE

DIFFERS = "differs"


def main() -> None:
    """Serves until standard input is closed."""
    become_expendable()
    answers = os.dup(1)
    os.dup2(2, 1)
    if not hasattr(os, "fork"):
        _serve(answers)
        return
    while True:
        child = os.fork()
        if child == 0:
            _serve(answers)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if _is_over():
            return
        send(answers, ("died", status))


def _is_over() -> bool:
    """Whether nobody will ask any more: standard input is closed, and empty."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return any(event & select.POLLHUP and not event & select.POLLIN for _, event in poll.poll(0))


def _serve(answers: int) -> None:
    runner = Runner(_found, keep_out=(0, answers)) if hasattr(os, "fork") else None
    send(answers, ("ready", os.getpid()))
    while True:
        try:
            request = receive(0)
        except Ended:
            return
        _end_after(100 * request.seconds + 600)
        report = lambda text: send(answers, ("sample", text))
        try:
            apart = runner is not None and request.entry is not None
            answer = _judged(request, runner, report) if apart else _answer(request, report)
        except Died:
            runner.die_alike()
        send(answers, answer)
        _end_after(0)


def _end_after(seconds: float) -> None:
    """Ends the process then, should nobody be there to do so; 0 is never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _judged(request: Request, runner: Runner, report: Callable[[str], None]) -> tuple[str, Answer | None]:
    """As _answer, of a kernel that the runner runs; nothing of it is imported here."""
    _take_environment(request)
    problem = runner.find(request)
    if problem is not None:
        return ("differs", None) if problem == DIFFERS else ("answer", Answer(problem, lasting=False))
    entry = request.entry
    functions = {entry.grad.forward: "forward", entry.grad.kernel_name: "backward", entry.kernel_name: "function"}
    kernel = kernel_of(entry, lambda name: Called(runner, functions[name]), request.origin)
    return "answer", verify(kernel, request.question, report)


def _found(request: Request) -> tuple[Kernel | None, str | None]:
    """The kernel, or why it is not there: in the runner."""
    _take_place(request)
    try:
        kernel = find(request)
    except Exception as error:
        if _is_of_the_program(request):
            return None, DIFFERS
        return None, f"cannot be verified: {type(error).__name__}: {error}"
    return (kernel, None) if fingerprint(kernel).digest == request.digest else (None, DIFFERS)


def _is_of_the_program(request: Request) -> bool:
    """Whether a manifest of the user's own names what runs: an operator that the program registers, say. What a
    repository's code raises here is no reason to judge it anywhere else."""
    entry = request.entry
    named = [entry.kernel_name, entry.grad.kernel_name, entry.grad.forward]
    alone = str(request.origin.source).endswith(ALONE)
    return alone and not any(name is not None and name.startswith("hub:") for name in named)


def _take_environment(request: Request) -> None:
    os.environ.clear()
    os.environ.update(request.environment)


def _take_place(request: Request) -> None:
    os.chdir(request.folder)
    sys.path[:] = request.path
    _take_environment(request)


def _answer(request: Request, report: Callable[[str], None]) -> tuple[str, Answer | None]:
    """("answer", Answer), or ("differs", None) where what is found here is not the kernel that was asked about."""
    _take_place(request)
    try:
        kernel = find(request)
    except Exception:  # of a module that is not to be imported here, say, or an operator that the program registers
        return "differs", None
    if fingerprint(kernel).digest != request.digest:
        return "differs", None
    return "answer", verify(kernel, request.question, report)


_known: dict[Any, list[Kernel]] = {}


def find(request: Request) -> Kernel:
    """The kernel that a request is about: the policy was asked by who sent it, and the files must be the same."""
    if request.declared is not None:
        op, fn, options = pickle.loads(request.declared)
        return kernel(op, fn, **options)
    origin = request.origin
    if origin not in _known:
        policy = replace(origin.policy or hub.Policy(), trust="any", local=True, build=False, signatures="off")
        _known[origin] = gather([origin.source], lock=origin.lock, policy=policy, backend=origin.backend)
    for each in _known[origin]:
        if (each.entry.op, each.name, each.origin) == (request.op, request.name, origin):
            return each
    raise hub.IntegrityError(f"{origin.source} has no kernel {request.name} of {request.op} with the same files")


if __name__ == "__main__":
    main()
