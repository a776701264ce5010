"""The process that verifies kernels: python -m forge.executors.hubex.worker, started by verification/process.py.

It never runs a kernel itself: it forks a child that judges, and says when the child died, so that another one takes its
place at once. Standard input is the channel to the program. The child has a child of its own, the sandbox
(verification/sandbox.py), which imports the kernel and does not have this channel: the judge makes the samples, knows
the right results, and sees nothing of the kernel but its results. Only a kernel that is compared with code of its own
repository is imported by the judge.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from forge import hub
from forge.executors.hubex.declaration import kernel
from forge.executors.hubex.fingerprint import fingerprint
from forge.executors.hubex.gather import gather, kernel_of
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.comparison import verify
from forge.executors.hubex.verification.messages import Answer, Request, receive
from forge.executors.hubex.verification.process import become_expendable
from forge.executors.hubex.verification.sandbox import RemoteFunction, Sandbox, SandboxDied
from forge.hub.lockfile import ALONE
from forge.hub.manifest import KernelEntry

DIFFERS = "differs"


def main() -> None:
    """Serve until the program closes the channel."""
    become_expendable()
    channel = Connection(0)
    while True:
        child = os.fork()
        if child == 0:
            _serve(channel)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        try:
            channel.send(("died", status))
        except OSError:
            return


def _serve(channel: Connection) -> None:
    sandbox = Sandbox(_find_kernel)
    channel.send(("ready", os.getpid()))
    while True:
        try:
            request = receive(channel)
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_REAL, 100 * request.seconds + 600)  # should nobody be there to end this process
        try:
            answer = _answer(request, sandbox, lambda text: channel.send(("sample", text)))
        except SandboxDied:
            sandbox.die_alike()
        channel.send(answer)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(request: Request, sandbox: Sandbox, report: Callable[[str], None]) -> tuple[str, Answer | None]:
    """Return ("answer", Answer), or ("differs", None) where the kernel here is not the one that was asked about."""
    entry = request.entry
    if entry is None:
        kernel = _find_kernel(request)
    else:
        _take_environment(request)
        roles = {entry.grad.forward: "forward", entry.grad.kernel_name: "backward", entry.kernel_name: "function"}
        roles |= {entry.assumes: "assumes", entry.samples: "samples"}
        problem = sandbox.find(request)
        kernel = problem or kernel_of(entry, lambda name: RemoteFunction(sandbox, roles[name], name), request.origin)
    if isinstance(kernel, str):
        return ("differs", None) if kernel == DIFFERS else ("answer", Answer(kernel, lasting=False))
    return "answer", verify(kernel, request.question, report)


def _find_kernel(request: Request) -> Kernel | str:
    """Return the kernel, or why it is not there."""
    os.chdir(request.folder)
    sys.path[:] = request.path
    _take_environment(request)
    try:
        kernel = find(request)
    except Exception as error:
        if request.entry is None or _is_of_the_program(request.entry, request.origin.source):
            return DIFFERS
        return f"cannot be verified: {type(error).__name__}: {error}"
    return kernel if fingerprint(kernel).digest == request.digest else DIFFERS


def _is_of_the_program(entry: KernelEntry, source: str | None) -> bool:
    """Return whether a manifest of the user's own names what runs: an operator that the program registers, say. An
    error of a repository's code here is no reason to judge it anywhere else."""
    names = [entry.kernel_name, entry.grad.kernel_name, entry.grad.forward]
    return str(source).endswith(ALONE) and not any(name is not None and name.startswith("hub:") for name in names)


def _take_environment(request: Request) -> None:
    os.environ.clear()
    os.environ.update(request.environment)


_kernels: dict[Any, list[Kernel]] = {}


def find(request: Request) -> Kernel:
    """Return the kernel that a request is about: the sender asked the policy, and the files must be the same."""
    if request.declared is not None:
        op, fn, options = pickle.loads(request.declared)
        return kernel(op, fn, **options)
    origin = request.origin
    assert origin.source is not None, "only kernels of a source are asked for by their origin"
    if origin not in _kernels:
        policy = replace(origin.policy or hub.Policy(), trust="any", local=True, build=False, signatures="off")
        _kernels[origin] = gather([origin.source], lock=origin.lock, policy=policy, backend=origin.backend)
    for each in _kernels[origin]:
        if (each.entry.op, each.name, each.origin) == (request.op, request.name, origin):
            return each
    raise hub.IntegrityError(f"{origin.source} has no kernel {request.name} of {request.op} with the same files")


if __name__ == "__main__":
    main()
