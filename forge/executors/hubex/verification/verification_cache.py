"""Verification of kernels before they are trusted: each is compared with its reference, in a separate process.

After a crash, a hang, an exception or a wrong value the program continues without the kernel. An answer is valid for
the kernel's fingerprint (fingerprint.py): it is cached in memory and, if another process can identify the same kernel,
on disk.
"""

import atexit
import contextlib
import hashlib
import json
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from forge.executors.calls import NotReproducible, call_of
from forge.executors.executor import Decision, Declined, decline
from forge.executors.fingerprint import Fingerprint, verifier_versions
from forge.executors.hubex.fingerprint import fingerprint
from forge.executors.hubex.kernels import Kernel, compares_values
from forge.executors.hubex.verification.messages import Answer, Question
from forge.executors.hubex.verification.process import Worker, ask_fork, can_fork, pickle_kernel, verifying
from forge.executors.hubex.verification.symbolic import symbolic_call
from forge.hub.errors import HubNotice
from forge.ir.source import warn
from forge.support import owner_only_store
from forge.support.dtypes import dtype_name
from forge.support.owner_only_store import user_cache

FORMAT = 4
HEAD = f"forge verdict {FORMAT}\n".encode()
SIZE = 64 << 20  # the limit of the cache in bytes
SECONDS = 60.0
OK = "ok"
NO_VALUES = "its values were not compared: the operator has no reference"

worker = Worker()
atexit.register(worker.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=worker.disown_a_parents)


class Verifier:
    """Verifier of kernels for calls, once per kernel and metadata of the arguments.

    seconds: the time limit of a kernel for one sample.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._trusted: list[Kernel] = []
        self._answers: dict[str, Answer] = {}
        self._failed: dict[str, str] = {}
        self._uncompared: set[str] = set()
        self._lock = threading.RLock()
        _verifiers.add(self)

    def trust(self, kernels: Iterable[Kernel]) -> None:
        """Trust these kernels without verification."""
        self._trusted += kernels

    def verdict(self, kernel: Kernel, args: tuple, kwargs: dict) -> Decision:
        """Return True, or Declined with the sample on which the kernel failed."""
        if self.trusts(kernel):
            return True
        if verifying.active:
            return decline("another kernel is being verified, which may be what it calls")
        try:
            call, symbolic = call_of(args, kwargs), symbolic_call(args, kwargs)
        except NotReproducible as reason:
            return decline(str(reason))
        first = next(iter(call.metas), None)
        if first is None:
            return decline("the kernel cannot be verified: no argument is a tensor")
        with self._lock:
            general = Question(first.device, first.dtype)
            return self._decide(kernel, general, replace(general, call=call, symbolic=symbolic))

    def _decide(self, kernel: Kernel, general: Question, particular: Question) -> Decision:
        subject = fingerprint(kernel)
        identity = _identity(kernel, subject, general.device)
        reason = self._failed.get(identity)
        if reason is not None:
            return decline(reason)
        reason = None if kernel.particular else self._answer(kernel, subject, general).reason
        if reason is None:
            answer = self._answer(kernel, subject, particular)
            reason = answer.reason or zero_accepted(answer)
        if reason is not None:
            self._failed[identity] = reason
            warn(f"kernel {kernel.name} of {kernel.entry.op} is not used: {reason}", category=HubNotice)
            return decline(reason)
        if not compares_values(kernel) and identity not in self._uncompared:
            self._uncompared.add(identity)
            warn(f"kernel {kernel.name} of {kernel.entry.op} is used, but {NO_VALUES}", category=HubNotice)
        return True

    def has_warned_of(self, reason: str) -> bool:
        """Return whether a kernel failed for this reason, and the failure was reported as a warning."""
        return reason in self._failed.values()

    def trusts(self, kernel: Kernel) -> bool:
        """Return whether a kernel is trusted without verification."""
        return any(kernel is each for each in self._trusted)

    @property
    def is_lasting(self) -> bool:
        """Return whether another process would compute the same answers."""
        return not verifying.active and all(answer.lasting for answer in list(self._answers.values()))

    def identity(self, kernels: Iterable[Kernel]) -> str | Declined:
        """Return a key of the trusted kernels; Declined for a program's own verifier, and while an answer is not
        lasting."""
        if self is not verifier:
            return decline("the kernels of this executor have a verifier of their own")
        if not self.is_lasting:
            return decline("a kernel could not be verified, for a reason that may pass")
        return repr([self.trusts(kernel) for kernel in kernels])

    def status(self, kernel: Kernel, device: torch.device) -> tuple[str, str]:
        """Return "verified", "not verified yet", "declined" or "trusted", and the reason, without running a kernel."""
        if self.trusts(kernel):
            return "trusted", "used without verification"
        subject = fingerprint(kernel)
        answers = {
            dtype: self._stored_answer(subject, _key(kernel, subject, Question(device, dtype)))
            for dtype in kernel.dtypes
        }
        failed = self._failed.get(_identity(kernel, subject, device))
        reasons = [failed, *[answer.reason for answer in answers.values() if answer]]
        reason = next(filter(None, reasons), None)
        if reason is not None:
            return "declined", reason
        right = [dtype_name(dtype) for dtype, answer in answers.items() if answer is not None and answer.accepted]
        if not right:
            return "not verified yet", "its first use does it"
        notes = [] if len(right) == len(answers) else [f"for {', '.join(right)} so far"]
        return "verified", "; ".join([*notes, *([] if compares_values(kernel) else [NO_VALUES])])

    def answer(self, kernel: Kernel, question: Question) -> Answer:
        """Return the answer from memory, from disk, or from a verification process."""
        return self._answer(kernel, fingerprint(kernel), question)

    def _answer(self, kernel: Kernel, subject: Fingerprint, question: Question) -> Answer:
        key = _key(kernel, subject, question)
        answer = self._stored_answer(subject, key)
        if answer is None:
            answer = self._answers[key] = self._ask(kernel, question, subject.digest)
            if subject.is_lasting and answer.lasting:
                _write(key, kernel, answer)
        return answer

    def _stored_answer(self, subject: Fingerprint, key: str) -> Answer | None:
        """Return the answer from memory or from disk."""
        answer = self._answers.get(key)
        if answer is None and subject.is_lasting:
            answer = _read(key)
            if answer is not None:
                self._answers[key] = answer
        return answer

    def _ask(self, kernel: Kernel, question: Question, digest: str) -> Answer:
        """Verify a kernel from files in the worker; else use the first that is possible of a fork, the worker with a
        pickled kernel, and this process."""
        answer = None
        if kernel.origin.source is not None:
            answer = worker.ask(kernel, question, self.seconds, digest)
        if answer is None and can_fork():
            answer = ask_fork(kernel, question, self.seconds, _verify())
        declared = pickle_kernel(kernel) if answer is None else None
        if declared is not None:
            answer = worker.ask(kernel, question, self.seconds, digest, declared)
        return self._verify_here(kernel, question) if answer is None else answer

    def _verify_here(self, kernel: Kernel, question: Question) -> Answer:
        """Verify in this process, after a run in a fork, if possible, which a crash would end instead."""
        if can_fork(gradients=False):
            answer = ask_fork(kernel, replace(question, gradients=False), self.seconds, _verify())
            if answer is not None and answer.reason is not None:
                return answer
        return _verify()(kernel, question, lambda text: None)


def _verify() -> Callable[..., Answer]:
    # imports the OpInfos, which a program needs nowhere else
    from forge.executors.hubex.verification.comparison import verify

    return verify


_verifiers: weakref.WeakSet[Verifier] = weakref.WeakSet()


def _unlock() -> None:
    """Replace locks in a fork of this process, since the thread that held one does not exist there."""
    for each in _verifiers:
        each._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def zero_accepted(answer: Answer) -> str | None:
    """Return the reason of failure for a kernel that took no sample; None if it took one."""
    if answer.accepted:
        return None
    return f"failed verification: it took none of the samples{f'; {answer.rejected}' if answer.rejected else ''}"


def verify_all(kernel: Kernel, verifier: Verifier) -> Iterator[tuple[str, ...]]:
    """Yield (kernel, op, dtype, device, samples, verdict) for each declared dtype and each available device."""
    if not kernel.devices:
        yield kernel.name, kernel.operation, "-", "-", "0", "no device that it is for is here"
    for device in kernel.devices:
        for dtype in kernel.dtypes:
            answer = verifier.answer(kernel, Question(device, dtype))
            right = OK if compares_values(kernel) else f"{OK}, but {NO_VALUES}"
            verdict = answer.reason or zero_accepted(answer) or right
            yield kernel.name, kernel.operation, dtype_name(dtype), str(device), str(answer.accepted), verdict


# keys and files


def _identity(kernel: Kernel, subject: Fingerprint, device: torch.device) -> str:
    """Return the identity of a kernel, and of the device on which it runs."""
    return repr((FORMAT, *verifier_versions(), _device_name(device), kernel.name, subject))


def _key(kernel: Kernel, subject: Fingerprint, question: Question) -> str:
    return hashlib.sha256(f"{_identity(kernel, subject, question.device)}{question!r}".encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _folder() -> Path:
    """Return the folder of verdicts."""
    return user_cache() / "verdicts"


def _read(key: str) -> Answer | None:
    """Return the answer on disk to exactly this question; None, with a notice, for an untrusted file."""
    path = _folder() / f"{key}.verdict"
    try:
        values = json.loads(owner_only_store.read(path, HEAD))
        return Answer(**values["answer"]) if values["key"] == key else None
    except FileNotFoundError:
        return None
    except owner_only_store.UntrustedFile as reason:
        message = "what was found of a kernel before is not believed, and asked for again"
        warn(f"{message}: {path}: {reason}", category=HubNotice)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


def _write(key: str, kernel: Kernel, answer: Answer) -> None:
    """Write an answer atomically; a cache that is not writable is no error."""
    data: dict[str, Any] = {"key": key, "kernel": kernel.name, "op": kernel.entry.op, "answer": asdict(answer)}
    with contextlib.suppress(owner_only_store.UntrustedFile, OSError):
        owner_only_store.write(_folder() / f"{key}.verdict", HEAD, json.dumps(data).encode(), SIZE)


verifier = Verifier()
