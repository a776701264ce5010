"""The process that verifies kernels: python -m forge.executors.hubex.worker, started by verification/process.py.

It never runs a kernel itself: it forks a child, the judge, and reports its death, so that a successor starts at once.
Standard input is the channel to the program. The judge forks the sandbox (verification/sandbox.py), which imports the
kernel and does not have this channel: the judge makes the samples, knows the correct results, and receives only results
from the kernel. The judge imports a kernel only if its reference is code of its own repository.
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
        signal.setitimer(signal.ITIMER_REAL, 100 * request.seconds + 600)  # in case nobody is left to end this process
        try:
            answer = _answer(request, sandbox, lambda text: channel.send(("sample", text)))
        except SandboxDied:
            sandbox.die_alike()
        channel.send(answer)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(request: Request, sandbox: Sandbox, report: Callable[[str], None]) -> tuple[str, Answer | None]:
    """Return ("answer", Answer), or ("differs", None) if the kernel in this process is not the requested one."""
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
    """Return the kernel, or the reason why it was not found."""
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
    """Return whether a user's own manifest names the function: an operator that the program registers, say. An error of
    a repository's code in this process is no reason to verify it elsewhere."""
    names = [entry.kernel_name, entry.grad.kernel_name, entry.grad.forward]
    return str(source).endswith(ALONE) and not any(name is not None and name.startswith("hub:") for name in names)


def _take_environment(request: Request) -> None:
    os.environ.clear()
    os.environ.update(request.environment)


_kernels: dict[Any, list[Kernel]] = {}


def find(request: Request) -> Kernel:
    """Return the kernel of a request. The sender checked the policy; the files must be the same."""
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
