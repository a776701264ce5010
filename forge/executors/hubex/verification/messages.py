"""Messages between a program and the process that verifies its kernels: pickled values through a socket."""

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from forge.executors.calls import Call
from forge.executors.hubex.kernels import Origin
from forge.hub.manifest import KernelEntry


@dataclass(frozen=True)
class Question:
    """The question whether a kernel is right: for calls such as `call`, or in general for a device and dtype.
    gradients: whether they are compared, too."""

    device: torch.device
    dtype: torch.dtype
    call: Call | None = None
    gradients: bool = True


@dataclass(frozen=True)
class Answer:
    """The result of a verification. reason: why the kernel failed, None where it did not. accepted: how many samples
    it took. rejected: why it did not take the first that it did not. lasting: whether it would be the same another
    time."""

    reason: str | None
    accepted: int = 0
    rejected: str = ""
    lasting: bool = True


@dataclass(frozen=True)
class Request:
    """A question to a process that must find the kernel first: gather() of its origin, then its operator and name; or
    the arguments of forge.kernel, pickled (`declared`). digest: of the kernel that is meant (hubex/fingerprint.py).
    entry: of the kernel's manifest, where the judge needs nothing else of the kernel."""

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
    """Return the next message. Raises TimeoutError where none comes within `seconds`, EOFError or another OSError where
    the other end was closed."""
    if not channel.poll(seconds):
        raise TimeoutError
    return channel.recv()
