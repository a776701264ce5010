"""Messages between a program and the process that verifies its kernels: pickled values through a socket."""

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from forge.executors.calls import Call
from forge.executors.hubex.kernels import Origin
from forge.executors.hubex.verification.symbolic import SymbolicCall
from forge.hub.manifest import KernelEntry


@dataclass(frozen=True)
class Question:
    """A request to verify a kernel, for calls such as `call`, or in general for a device and dtype. gradients: whether
    gradients are compared too. symbolic: the call in terms of its symbolic sizes."""

    device: torch.device
    dtype: torch.dtype
    call: Call | None = None
    gradients: bool = True
    symbolic: SymbolicCall | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a verification. reason: why the kernel failed, None if it passed. accepted: the number of samples
    that the kernel took. rejected: why it declined the first sample that it did not take. lasting: whether the result
    is reproducible."""

    reason: str | None
    accepted: int = 0
    rejected: str = ""
    lasting: bool = True


@dataclass(frozen=True)
class Request:
    """A question to a process that has to find the kernel first: by gather() of its origin, then by operator and name;
    or from the pickled arguments of forge.kernel (`declared`). digest: the kernel's fingerprint (hubex/fingerprint.py).
    entry: its manifest entry, if the judge needs nothing else of the kernel."""

    origin: Origin
    op: str | None
    name: str
    folder: str
    path: tuple[str, ...]
    environment: dict[str, str]
    seconds: float
    question: Question
    digest: str
    declared: bytes | None = None
    entry: KernelEntry | None = None


def receive(channel: Connection, seconds: float | None = None) -> Any:
    """Return the next message. Raises TimeoutError if none arrives within `seconds`, EOFError or another OSError if the
    other end was closed."""
    if not channel.poll(seconds):
        raise TimeoutError
    return channel.recv()
