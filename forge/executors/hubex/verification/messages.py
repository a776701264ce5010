"""What a program and the process that verifies its kernels say to each other: pickled values through pipes."""

import os
import pickle
import select
import struct
import time
from dataclasses import dataclass
from typing import Any

import torch

from forge.executors.calls import Call
from forge.executors.hubex.kernels import Origin
from forge.hub.manifest import KernelEntry

HEADER = struct.Struct("!Q")


@dataclass(frozen=True)
class Question:
    """Whether a kernel is right: for calls such as `call`, or in general, for a device and dtype. gradients: whether
    they are compared, too."""

    device: torch.device
    dtype: torch.dtype
    call: Call | None = None
    gradients: bool = True


@dataclass(frozen=True)
class Answer:
    """reason: why the kernel failed, None where it did not. accepted: how many samples it took. rejected: why it did
    not take the first that it did not. lasting: whether it would be the same another time."""

    reason: str | None
    accepted: int = 0
    rejected: str = ""
    lasting: bool = True


@dataclass(frozen=True)
class Request:
    """A question to a process that must find the kernel first: gather() of its origin, then its operator and name; or
    what forge.kernel was given, pickled. digest: of the kernel that is meant (verification/fingerprint.py). entry: what
    the kernel's manifest says, where that is all that who judges it has to know of it."""

    origin: Origin
    op: str
    name: str
    folder: str
    path: tuple[str, ...]
    environment: dict[str, str]
    seconds: float
    question: Question
    digest: str
    declared: bytes | None = None
    entry: KernelEntry | None = None


class Silent(Exception):
    """Nothing came in time."""


class Ended(Exception):
    """The other end was closed."""


def send(fd: int, message: Any) -> None:
    """Writes one message, whole."""
    data = pickle.dumps(message)
    data = HEADER.pack(len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int, seconds: float | None = None) -> Any:
    """The next message. Raises Silent when it does not come within `seconds`, Ended when there will be none."""
    until = None if seconds is None else time.monotonic() + seconds
    (length,) = HEADER.unpack(read(fd, HEADER.size, until))
    return pickle.loads(read(fd, length, until))


def read(fd: int, length: int, until: float | None = None) -> bytes:
    """So many bytes. Raises as `receive` does."""
    data = bytearray()
    while len(data) < length:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([fd], [], [], left)[0]:
            raise Silent
        part = os.read(fd, length - len(data))
        if not part:
            raise Ended
        data += part
    return bytes(data)
