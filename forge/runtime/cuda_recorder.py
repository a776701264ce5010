"""The recorder of CUDA graphs; tests substitute one for the CPU."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from forge.torch_internals.cuda import clear_cublas_workspaces, end_allocate_to_pool, release_pool
from forge.torch_internals.versions import TORCH


class CapturedGraph(Protocol):
    """A function's recorded graph, which can be replayed."""

    def replay(self) -> None:
        """Replay the graph into the memory of the results that `record` returned."""


class CudaRecorder:
    """Recorder of a function's work on a CUDA device's current stream."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}  # to record on; torch's own belongs to one device

    def new_pool(self) -> Any:
        """Return a new memory pool that recordings share."""
        return torch.cuda.graph_pool_handle()

    def stream(self) -> tuple[int, int]:
        """Return the device and the stream that a call runs on."""
        stream = torch.cuda.current_stream()
        return stream.device_index, stream.cuda_stream

    def has_room(self) -> bool:
        """Return whether the device has as much free memory as programs use while they run."""
        free, _ = torch.cuda.mem_get_info()
        return free >= torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def is_on(self, device: torch.device) -> bool:
        """Return whether calls on a device can be recorded now: it is the current one."""
        return device.type == self.device_type and device.index == torch.cuda.current_device()

    def is_recording(self) -> bool:
        """Return whether another recording is in progress."""
        return torch.cuda.is_current_stream_capturing()

    def record(
        self, function: Callable[[list[Any]], Sequence[Any]], boxed: list[Any], pool: Any
    ) -> tuple[CapturedGraph, Sequence[Any]]:
        """Record a call without running it. Return the graph, and the tensors that will have its results.

        function: takes its arguments in one list, which it empties. Raises the call's errors, and torch's if it cannot
        be recorded.
        """
        device = torch.cuda.current_device()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream())
        clear_cublas_workspaces()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = function(boxed)
        except Exception:
            torch.cuda.set_stream(current)  # torch leaves the other one current if a recording cannot end
            _end_failed_recording(device, stream, pool)
            raise
        finally:
            # each recording has its own workspace: another's may be freed, or written concurrently
            clear_cublas_workspaces()
        if not all(self.is_on(each.device) for each in outputs if isinstance(each, torch.Tensor)):
            raise NotImplementedError("a result is on another device than the current one")
        return graph, outputs


def _end_failed_recording(device: int, stream: torch.cuda.Stream, pool: Any) -> None:
    """Reset torch's state after a failed recording: the allocator, which would route later memory to its pool, and
    the random generator."""
    with suppress(RuntimeError):  # torch has ended it
        end_allocate_to_pool(device, pool)
        release_pool(device, pool)
    if TORCH < (2, 13):  # its generator keeps recording until a recording ends
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=f"cuda:{device}")


_recorder: Any = CudaRecorder()
recording_lock = threading.Lock()  # torch records one graph at a time


def recorder() -> Any:
    """Return the recorder of CUDA graphs."""
    return _recorder
