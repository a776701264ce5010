"""Functions of tensors as CUDA graphs: recorded once, then replayed on memory that stays where it is.

A graph reads its inputs where they were when it was recorded. One that is elsewhere call after call is copied to where
it was then; for one that moved once, as a parameter does, the function is recorded again. A graph's results lie in
memory of its own: it may run again once nobody holds them any more; meanwhile another recording of the function runs.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from forge.ir.bounded import BoundedDict
from forge.ir.checks import in_one_line
from forge.torch_internals.tensors import storage_address, storage_use_count

_WARM_UP = 3  # calls before a function is recorded: libraries allocate, kernels are compiled
_MOVES = 2  # of an input between calls, before it is copied
_KEPT = 4  # recordings of a function
_log = logging.getLogger("forge.cuda_graphs")


class CapturedGraph(Protocol):
    """A function's recorded graph, which a recorder made and which can be replayed."""

    outputs: Sequence[Any]

    def replay(self) -> None:
        """Run it once more; `outputs` have the new values."""


class CudaRecorder:
    """Records what a function does on a CUDA device's current stream."""

    device_type = "cuda"

    def new_pool(self) -> Any:
        """Return new memory that recordings share."""
        return torch.cuda.graph_pool_handle()

    def stream(self) -> int:
        """Return the stream that a call runs on."""
        return torch.cuda.current_stream().cuda_stream

    def is_recording(self) -> bool:
        """Return whether another recording is under way."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, function: Callable, inputs: Sequence[Any], pool: Any) -> CapturedGraph:
        """Record a call, which does not run yet. Raises what the call raises, or torch where it cannot be recorded."""
        graph: Any = torch.cuda.CUDAGraph()  # which holds what it computes
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = function(*inputs)
        except Exception:
            _forget_recording()
            raise
        graph.outputs = outputs
        return graph


def _forget_recording() -> None:
    """Replace the generator's state after a failed recording, which it takes for one that goes on."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


_recorder: Any = CudaRecorder()


def recorder() -> Any:
    """Return the recorder of CUDA graphs."""
    return _recorder


class Pool:
    """Memory of several functions' recordings, which are known in the order in which they were made: what one uses
    while it runs, a later one may have been given for its results."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._recordings: list[weakref.ref[_GraphCapture]] = []

    @property
    def handle(self) -> Any:
        """The memory's; another one's where no recording is left, since torch gives up a pool with its last graph."""
        self._recordings = [each for each in self._recordings if each() is not None]
        if not self._recordings:
            self._handle = recorder().new_pool()
        return self._handle

    def add(self, recorded: "_GraphCapture") -> None:
        """Add a new recording in this memory."""
        self._recordings.append(weakref.ref(recorded))

    def is_free_for(self, recorded: "_GraphCapture") -> bool:
        """Return whether no live tensor uses the memory that it would write to."""
        for each in reversed(self._recordings):
            found = each()
            if found is not None and found.is_held():
                return False
            if found is recorded:
                return True
        return True


# the recordings by the memory of their results
_owners: "weakref.WeakValueDictionary[int, _GraphCapture]" = weakref.WeakValueDictionary()


class _GraphCapture:
    """One recording: the addresses of its inputs, and its outputs."""

    def __init__(self, function: Callable, inputs: Sequence[Any], copied: frozenset[int], pool: Pool) -> None:
        self.signature = _signature(inputs, copied)
        self.copies = {place: _like(inputs[place]) for place in copied if isinstance(inputs[place], torch.Tensor)}
        self.places = [
            (place, each.data_ptr())
            for place, each in enumerate(inputs)
            if isinstance(each, torch.Tensor) and place not in self.copies
        ]
        self._copy(inputs)
        given = [self.copies.get(place, each) for place, each in enumerate(inputs)]
        self.recording = recorder().record(function, given, pool.handle)
        others = {_memory(each) for each in inputs if isinstance(each, torch.Tensor)}
        own = {_memory(each): each.untyped_storage() for each in self.recording.outputs if _is_tensor(each)}
        self._storages = [storage for memory, storage in own.items() if memory not in others]
        self._uses = [_uses(storage) for storage in self._storages]
        _owners.update((memory, self) for memory in own if memory not in others)
        pool.add(self)

    def is_held(self) -> bool:
        """Return whether memory of its results is referenced from outside."""
        return any(_uses(storage) > uses for storage, uses in zip(self._storages, self._uses, strict=True))

    def reads(self, pointers: Sequence[int | None]) -> bool:
        """Return whether it reads inputs that are there."""
        return all(pointers[place] == pointer for place, pointer in self.places)

    def _copy(self, inputs: Sequence[Any]) -> None:
        for place, copy in self.copies.items():
            _unique_elements(copy).copy_(_unique_elements(inputs[place]))

    def run(self, inputs: Sequence[Any], kept: Sequence[bool]) -> tuple:
        """Return its results: `kept` ones in memory of their own."""
        self._copy(inputs)
        self.recording.replay()
        return tuple(
            (each.clone() if keep else each.detach()) if _is_tensor(each) else each
            for each, keep in zip(self.recording.outputs, kept, strict=True)
        )


class Graph:
    """A function of tensors and numbers that returns a tuple; recorded after a few calls.

    kept: for each result, whether the caller may keep it for good. `failed` says why it cannot be recorded; such a
    function is called. `recordings` counts them.
    """

    def __init__(self, name: str, function: Callable, pool: Pool, kept: Sequence[bool]) -> None:
        self.__name__ = name
        self.failed: str | None = None
        self.recordings = 0
        self._function = function
        self._pool = pool
        self._kept = kept
        self._calls = BoundedDict(256)  # by signature, of those that no recording served
        self._last: list[int | None] = []
        self._moves: list[int] = []
        self._recorded: list[_GraphCapture] = []
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> tuple:
        """Return the function's results, replayed or computed."""
        if self.failed is not None or not self._lock.acquire(blocking=False):
            return self._function(*inputs)
        try:
            if recorder().is_recording():
                return self._function(*inputs)
            found = self._find(inputs)
            return self._function(*inputs) if found is None else found.run(inputs, self._kept)
        finally:
            self._lock.release()

    def _find(self, inputs: Sequence[Any]) -> _GraphCapture | None:
        """Return a recording that may run now, an old one or a new one; None where the function is to be called."""
        pointers = [each.data_ptr() if isinstance(each, torch.Tensor) else None for each in inputs]
        self._watch(inputs, pointers)
        copied = frozenset(place for place, moves in enumerate(self._moves) if moves >= _MOVES)
        signature = _signature(inputs, copied)
        alike = [each for each in self._recorded if each.signature == signature and each.reads(pointers)]
        for each in alike:
            if self._pool.is_free_for(each):
                return each
        self._calls[signature] = calls = (self._calls.get(signature) or 0) + 1
        if calls <= _WARM_UP or len(alike) >= _KEPT:
            return None
        return self._record(inputs, copied)

    def _watch(self, inputs: Sequence[Any], pointers: list[int | None]) -> None:
        """Count how often each input was elsewhere than before. Results of other recordings are where they belong."""
        if not self._last:
            self._moves = [0] * len(pointers)
        for place, (before, pointer) in enumerate(zip(self._last, pointers, strict=False)):
            if before != pointer:
                stays = _is_tensor(inputs[place]) and _memory(inputs[place]) in _owners
                self._moves[place] = 0 if stays else self._moves[place] + 1
        self._last = pointers

    def _record(self, inputs: Sequence[Any], copied: frozenset[int]) -> _GraphCapture | None:
        try:
            made = _GraphCapture(self._function, inputs, copied, self._pool)
        except Exception as error:
            self.failed = in_one_line(error)
            _log.debug("%s cannot be recorded", self.__name__, exc_info=True)
            self._recorded.clear()
            return None
        self.recordings += 1
        self._recorded = [made, *self._recorded][: 2 * _KEPT]
        return made


def _signature(inputs: Sequence[Any], copied: frozenset[int]) -> tuple:
    """Return a key of the recording that fits the inputs: their metadata, and the addresses of those that are not
    copied. Parameters' metadata is guarded by Dynamo."""
    described = [
        (each.shape, each.stride(), each.dtype) if isinstance(each, torch.Tensor) else _plain(each)
        for each in inputs
        if type(each) is not torch.nn.Parameter
    ]
    return (recorder().stream(), copied, *described)


def _plain(value: Any) -> Any:
    """Return a hashable key of an argument: for a tensor its shape, strides and address, for a list those of its
    items."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return (value.shape, value.stride(), value.data_ptr()) if isinstance(value, torch.Tensor) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == recorder().device_type


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _unique_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return an expanded tensor's elements, each once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _uses(storage: torch.UntypedStorage) -> int:
    return storage_use_count(storage_address(storage))
