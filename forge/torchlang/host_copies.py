"""Asynchronous copies between host memory and an accelerator, for offloaded parameters.

Source: J. Ren et al., ZeRO-Offload (2021).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from forge.torch_internals.fake_tensors import FakeTensor


class HostCopies:
    """The copies for a message: of its payload from host memory, or of its result to host memory.

    On a GPU they run on separate streams, one for each direction. The process waits for them, because it may write to
    the host memory that they read, and reads the memory that they write. On other devices, and for fake tensors, the
    copies are synchronous.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._done: Any = None
        self._memory: list[torch.Tensor] = []  # on the device, which later copies must not reuse before that

    def upload(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Start to copy tensors to a device, unless they are there already."""
        if all(x.device == device for x in tensors):
            return [*tensors]
        with self._beside_computation("upload", device, tensors):
            self._memory = [x.to(device, non_blocking=True) for x in tensors]
        return self._memory

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Send the uploads inside the context after they and the current stream's work so far; the stream does not
        wait."""
        if self._stream is None:
            yield
            return
        stream = _stream(self._stream.device, "send")
        stream.wait_stream(self._stream)
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # the memory may have been in use there
        with torch.cuda.stream(stream):
            yield

    def download(
        self, tensors: Sequence[torch.Tensor], device: torch.device, until_there: Callable[[], None]
    ) -> list[torch.Tensor]:
        """Start to copy tensors to host memory, pinned for a GPU, after they have arrived."""
        pinned = tensors[0].is_cuda and not isinstance(tensors[0], FakeTensor)
        targets = [torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=pinned) for x in tensors]
        self._memory = [*tensors]
        with self._beside_computation("download", tensors[0].device, tensors):
            until_there()
            return [target.copy_(x, non_blocking=pinned) for x, target in zip(tensors, targets, strict=True)]

    def wait(self, until_sent: Callable[[], None]) -> None:
        """Make the process wait for the copies, and later copies, which may reuse their memory, wait for the
        message."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                until_sent()
            self._done.synchronize()

    @contextlib.contextmanager
    def _beside_computation(
        self, direction: str, device: torch.device, tensors: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        if device.type != "cuda" or isinstance(tensors[0], FakeTensor):
            yield
            return
        self._stream, self._done = _stream(device, direction), torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            yield
            self._done.record(self._stream)


@functools.cache
def _stream(device: torch.device, purpose: str) -> Any:
    return torch.cuda.Stream(device)
