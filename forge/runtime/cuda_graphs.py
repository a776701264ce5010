"""Functions of tensors as CUDA graphs: recorded once, then replayed on memory that stays where it is.

A graph reads its inputs where they were when it was recorded. One that is elsewhere call after call is copied to where
it was then; for one that moved once, as a parameter does, the function is recorded again. A graph's results lie in
memory of its own: it may run again once nobody holds them any more; meanwhile another recording of the function runs.
Results for the caller are handed out in that memory too where little else is held with them, by two recordings that
take turns; large ones as long as the caller drops them before the next call; otherwise they are copied.
"""

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from forge.ir.bounded import BoundedDict
from forge.ir.checks import in_one_line
from forge.torch_internals.cuda import clear_cublas_workspaces, end_allocate_to_pool, release_pool
from forge.torch_internals.tensors import storage_address, storage_use_count
from forge.torch_internals.versions import TORCH

_WARM_UP = 3  # calls before a function is recorded: libraries allocate, kernels are compiled
_WARM = 2  # of one whose program ran before without graphs: it is seen which inputs move
_MOVES = 2  # of an input between calls, before it is copied; one, if it is a small one and no parameter
_SMALL = 2**24  # bytes
_RECORDINGS = 4  # of a function, for one set of inputs
_UNREQUESTED = 3  # of one that is recorded without having been asked for: each holds memory of its own
_TURNS = 2  # of these hand their results out in turn
_LARGE = 2**24  # bytes of a result that is handed out as it is
_MOST = 12  # recordings in all, of one that nobody asked for
_COPY_BYTES = 2**26  # of inputs a call, under which graphs that nobody asked for are recorded
_log = logging.getLogger("forge.cuda_graphs")


class CapturedGraph(Protocol):
    """A function's recorded graph, which a recorder made and which can be replayed."""

    outputs: Sequence[Any]

    def replay(self) -> None:
        """Run it once more; `outputs` have the new values."""


class CudaRecorder:
    """Records what a function does on a CUDA device's current stream."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}  # to record on; torch's own is of one device

    def new_pool(self) -> Any:
        """Return new memory that recordings share."""
        return torch.cuda.graph_pool_handle()

    def stream(self) -> tuple[int, int]:
        """Return the device and the stream that a call runs on."""
        stream = torch.cuda.current_stream()
        return stream.device_index, stream.cuda_stream

    def has_room(self) -> bool:
        """Return whether the device has memory left for as much as programs use of it while they run."""
        free, _ = torch.cuda.mem_get_info()
        return free >= torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def is_on(self, device: torch.device) -> bool:
        """Return whether calls on a device can be recorded now: it is the current one."""
        return device.type == self.device_type and device.index == torch.cuda.current_device()

    def is_recording(self) -> bool:
        """Return whether another recording is under way."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, function: Callable, inputs: Sequence[Any], pool: Any) -> CapturedGraph:
        """Record a call, which does not run yet. Raises what the call raises, or torch where it cannot be recorded."""
        device = torch.cuda.current_device()
        graph: Any = torch.cuda.CUDAGraph()  # which holds what it computes
        current = torch.cuda.current_stream()
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream())
        clear_cublas_workspaces()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = function(*inputs)
        except Exception:
            torch.cuda.set_stream(current)  # torch leaves the other one current where a recording cannot end
            _end_failed_recording(device, stream, pool)
            raise
        finally:
            # each recording has a workspace in its own memory: another's may be freed, or written at the same time
            clear_cublas_workspaces()
        if not all(self.is_on(each.device) for each in outputs if isinstance(each, torch.Tensor)):
            raise NotImplementedError("a result is on another device than the current one")
        graph.outputs = outputs
        return graph


def _end_failed_recording(device: int, stream: torch.cuda.Stream, pool: Any) -> None:
    """End what torch takes for a recording that goes on: the allocator, which would give its memory to later ones, and
    the random generator."""
    with suppress(RuntimeError):  # torch has ended it
        end_allocate_to_pool(device, pool)
        release_pool(device, pool)
    if TORCH < (2, 13):  # its generator is recording until a recording ends
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=f"cuda:{device}")


_recorder: Any = CudaRecorder()
_recording = threading.Lock()


def recorder() -> Any:
    """Return the recorder of CUDA graphs."""
    return _recorder


class Memory:
    """The memory of several functions' recordings on one stream, which are known in the order in which they were made:
    memory that one uses while it runs, a later one may have been given for its results.

    Whoever uses a recording holds `lock` until its results have owners.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._handle: Any = None
        self._recordings: list[weakref.ref[_GraphCapture]] = []

    @property
    def handle(self) -> Any:
        """The memory's handle; a new one where no recording is left, since torch gives up a pool with its last
        graph."""
        self._recordings = [each for each in self._recordings if each() is not None]
        if not self._recordings:
            self._handle = recorder().new_pool()
        return self._handle

    @property
    def is_empty(self) -> bool:
        """True if no recording is left."""
        return all(each() is None for each in self._recordings)

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


class Pool:
    """Memory for the recordings of several functions, for each stream its own: streams run at the same time."""

    def __init__(self) -> None:
        self._memories: dict[Any, Memory] = {}

    def memory(self) -> Memory:
        """Return the memory of the current stream."""
        stream = recorder().stream()
        found = self._memories.get(stream)
        return self._memories.setdefault(stream, Memory()) if found is None else found


# the recordings by the memory of their results
_owners: "weakref.WeakValueDictionary[int, _GraphCapture]" = weakref.WeakValueDictionary()


class HandingOut(Enum):
    """The ways in which a recording gives results that the caller may keep."""

    IN_TURN = "as they are: two recordings take turns, since little else is held with the results"
    LARGE = "large ones as they are, as long as the caller drops them before the next call"
    COPIES = "copied"


class _GraphCapture:
    """One recording: the addresses of its inputs, and its outputs.

    copied: places of tensors that are copied before each run. kept: for each result, whether the caller may keep it.
    memories: that of the stream, and the one to record in. may_alias: the caller may be given the memory
    itself.
    """

    def __init__(
        self,
        function: Callable,
        inputs: "_Inputs",
        copied: frozenset[int],
        kept: Sequence[bool],
        memories: tuple[Memory, Memory],
        *,
        may_alias: bool,
    ) -> None:
        self.key, self.copied = inputs.key, copied
        self.stream_memory, self.memory = memories
        self.copies = {place: _like(inputs.tensors[place]) for place in copied}
        self._fixed = [place for place in range(len(inputs.tensors)) if place not in copied]
        self._addresses = [inputs.pointers[place] for place in self._fixed]
        self._copy(inputs.tensors)
        self.recording = recorder().record(function, inputs.with_copies(self.copies), self.memory.handle)
        self._keep_track_of_results(inputs, kept, may_alias)
        self.memory.add(self)

    def _keep_track_of_results(self, inputs: "_Inputs", kept: Sequence[bool], may_alias: bool) -> None:
        """Note the storages of the results, and which of these are copied for the caller."""
        outputs, read = self.recording.outputs, inputs.tensors_with(self.copies)
        theirs = set(map(_memory, read)) - {0}  # of empty tensors
        for place, (each, keep) in enumerate(zip(outputs, kept, strict=True)):
            if keep and _is_tensor(each) and _memory(each) in theirs:
                raise NotImplementedError(f"result {place} shares the memory of an input")
        self._views = {
            place: _input_of(each, place, read)
            for place, each in enumerate(outputs)
            if _is_tensor(each) and _memory(each) in theirs
        }
        places: dict[int, list[int]] = {}
        for place, each in enumerate(outputs):
            if _is_tensor(each) and _memory(each) and place not in self._views:  # an empty one has none
                places.setdefault(_memory(each), []).append(place)
        self._storages = [outputs[place].untyped_storage() for place, *_ in places.values()]
        self._use_counters = list(map(storage_address, self._storages))
        _owners.update(dict.fromkeys(places, self))
        sizes = [(keep, each.nbytes) for each, keep in zip(outputs, kept, strict=True) if _is_tensor(each)]
        held_with_them = sum(size for keep, size in sizes if not keep)
        if not may_alias:
            self.handing_out = HandingOut.COPIES
        elif not any(kept) or held_with_them <= sum(size for keep, size in sizes if keep):
            self.handing_out = HandingOut.IN_TURN
        else:
            self.handing_out = HandingOut.LARGE
        smallest = {HandingOut.COPIES: sys.maxsize, HandingOut.LARGE: _LARGE, HandingOut.IN_TURN: 0}[self.handing_out]
        self._takes = [
            _as_it_is if not _is_tensor(each) else _CLONE if keep and each.nbytes < smallest else _DETACH
            for each, keep in zip(outputs, kept, strict=True)
        ]
        self._copied_together = [
            _require_one_kind([outputs[place] for place in group], group)
            for group in places.values()
            if any(self._takes[place] is _CLONE for place in group)
            and (len(group) > 1 or not _is_cloned_alike(outputs[group[0]]))
        ]
        for place in (*self._views, *(place for group in self._copied_together for place in group)):
            self._takes[place] = _nothing
        # an input's memory is not held: it would never be free for the next input
        self.recording.outputs = [None if place in self._views else each for place, each in enumerate(outputs)]
        self._uses = list(map(storage_use_count, self._use_counters))

    def is_held(self) -> bool:
        """Return whether memory of its results is referenced from outside."""
        return list(map(storage_use_count, self._use_counters)) != self._uses

    def reads(self, pointers: Sequence[int]) -> bool:
        """Return whether it reads inputs that are there."""
        return [pointers[place] for place in self._fixed] == self._addresses

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        for place, copy in self.copies.items():
            _unique_elements(copy).copy_(_unique_elements(tensors[place]))

    def run(self, inputs: "_Inputs") -> tuple:
        """Return its results."""
        self._copy(inputs.tensors)
        self.recording.replay()
        outputs = self.recording.outputs
        results = [take(each) for take, each in zip(self._takes, outputs, strict=True)]
        for place, (source, *view) in self._views.items():
            results[place] = _view_of(inputs.tensors[source], *view)
        for group in self._copied_together:
            for place, copy in zip(group, _copies([outputs[place] for place in group]), strict=True):
                results[place] = copy
        return tuple(results)


class _Inputs:
    """The arguments of a call: tensors, their addresses, and the others.

    checked: places among all arguments whose metadata may differ from call to call; None: all.
    """

    def __init__(self, values: Sequence[Any], checked: Collection[int] | None) -> None:
        self.values = values
        self.tensors = [each for each in values if isinstance(each, torch.Tensor)]
        self.pointers = list(map(_ADDRESS, self.tensors))
        self.key = tuple(self._described(range(len(values)) if checked is None else checked))
        if len(self.tensors) < len(values):
            self.key += tuple(_plain(each) for each in values if not isinstance(each, torch.Tensor))

    def _described(self, places: Collection[int]) -> Iterator[tuple]:
        for place in places:
            each = self.values[place]
            if isinstance(each, torch.Tensor) and type(each) is not torch.nn.Parameter:  # those Dynamo guards
                yield each.shape, each.stride(), each.dtype, each.is_conj(), each.is_neg()

    def places_of(self, places: Collection[int]) -> list[int]:
        """Return the places among the tensors of those at `places` among all arguments."""
        return [sum(isinstance(each, torch.Tensor) for each in self.values[:place]) for place in places]

    def tensors_with(self, copies: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors with copies in the place of some."""
        return [copies.get(place, each) for place, each in enumerate(self.tensors)]

    def with_copies(self, copies: dict[int, torch.Tensor]) -> list[Any]:
        """Return the arguments with copies in the place of some tensors."""
        tensors = iter(self.tensors_with(copies))
        return [next(tensors) if isinstance(each, torch.Tensor) else each for each in self.values]


class Graph:
    """A function of tensors and numbers that returns a tuple; recorded after a few calls.

    Attributes:
        kept: For each result, whether the caller may keep it for good.
        checked: Places of arguments whose metadata may differ from call to call; None: all.
        written: Places of arguments that the function writes to.
        is_requested: False for a program that is recorded without having been asked for, which is not recorded where
            memory is short or many inputs would be copied.
        failed: The reason why the function cannot be recorded, and is called.
        recordings: The number of times it was recorded.
    """

    def __init__(
        self,
        name: str,
        function: Callable,
        pool: Pool,
        kept: Sequence[bool],
        checked: Collection[int] | None = None,
        written: Collection[int] = (),
        *,
        is_requested: bool = True,
    ) -> None:
        self.__name__ = name
        self.failed: str | None = None
        self.recordings = 0
        self._function = function
        self._pool = pool
        self._kept = kept
        self._checked = checked
        self._written = written
        self._is_requested = is_requested
        self._calls = BoundedDict(256)  # by key, of those that no recording served
        self._last: list[int] = []
        self._moves: list[int] = []
        self._recorded: list[_GraphCapture] = []
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> tuple:
        """Return the function's results, replayed or computed."""
        if self.failed is not None or recorder().is_recording():
            return self._function(*inputs)
        memory = self._pool.memory()
        with _acquired(self._lock) as is_alone, _acquired(memory.lock) as is_free:
            if is_alone and is_free:
                described = _Inputs(inputs, self._checked)
                found = self._find(described, memory)
                if found is not None:
                    results = found.run(described)
                    if self._written:
                        increment_version([inputs[place] for place in self._written])
                    return results
        return self._function(*inputs)

    def _find(self, inputs: _Inputs, memory: Memory) -> _GraphCapture | None:
        """Return a recording that may run now, an old one or a new one; None where the function is to be called."""
        alike = [
            each
            for each in self._recorded
            if each.stream_memory is memory and each.key == inputs.key and each.reads(inputs.pointers)
        ]
        for each in alike:
            if each.memory.is_free_for(each):
                return each
        self._watch(inputs)
        self._calls[inputs.key] = calls = (self._calls.get(inputs.key) or 0) + 1
        if calls <= (_WARM_UP if self._is_requested else _WARM) or len(alike) >= (
            _RECORDINGS if self._is_requested else _UNREQUESTED
        ):
            return None
        if not all(recorder().is_on(each.device) for each in inputs.tensors):
            return None
        with _acquired(_recording) as is_alone:  # torch records one graph at a time
            return self._record(inputs, memory, alike) if is_alone else None

    def _watch(self, inputs: _Inputs) -> None:
        """Count how often each input was elsewhere than before. Results of other recordings are where they belong."""
        if len(self._last) != len(inputs.pointers):
            self._moves = [0] * len(inputs.pointers)
        for place, (before, pointer) in enumerate(zip(self._last, inputs.pointers, strict=False)):
            if before != pointer:
                self._moves[place] = 0 if _memory(inputs.tensors[place]) in _owners else self._moves[place] + 1
        self._last = inputs.pointers

    def _record(self, inputs: _Inputs, memory: Memory, alike: Sequence[_GraphCapture]) -> _GraphCapture | None:
        copied = frozenset(place for place, moves in enumerate(self._moves) if _is_copied(inputs.tensors[place], moves))
        ways = [each.handing_out for each in alike]
        may_alias = set(ways) <= {HandingOut.IN_TURN} and len(ways) < _TURNS
        stale = [each for each in self._recorded if each.key == inputs.key and each not in alike]
        self._recorded = [each for each in self._recorded if each not in stale]
        del stale  # the new recording may use their memory
        # a later recording in the same memory would keep those before it from running while its results are held
        own = Memory() if self.recordings and not memory.is_empty else memory
        try:
            if not self._is_requested and self.recordings >= _MOST:
                raise NotImplementedError(f"it was recorded {self.recordings} times, for inputs that move")
            if self._written and not copied.isdisjoint(inputs.places_of(self._written)):
                raise NotImplementedError("an input that is written to is elsewhere at each call")
            if not self._is_requested:
                self._require_little_memory(inputs, copied)
            made = _GraphCapture(self._function, inputs, copied, self._kept, (memory, own), may_alias=may_alias)
        except Exception as error:
            self.failed = in_one_line(error)
            _log.debug("%s cannot be recorded", self.__name__, exc_info=True)
            self._recorded.clear()
            return None
        self.recordings += 1
        others = [each for each in self._recorded if each not in alike or each.handing_out is not HandingOut.LARGE]
        self._recorded = [made, *others][: 2 * _RECORDINGS]
        return made

    def _require_little_memory(self, inputs: _Inputs, copied: Collection[int]) -> None:
        moved = sum(inputs.tensors[place].nbytes for place in copied)
        if moved > _COPY_BYTES:
            raise NotImplementedError(f"{moved / 1e6:.0f} MB of inputs are elsewhere at each call")
        if not recorder().has_room():
            raise NotImplementedError("the device has little memory left")


_ADDRESS, _CLONE, _DETACH = torch.Tensor.data_ptr, torch.Tensor.clone, torch.Tensor.detach


def _is_copied(tensor: torch.Tensor, moves: int) -> bool:
    """Return whether an input that moved a few times between calls is copied to where it was."""
    return moves >= _MOVES or (moves > 0 and type(tensor) is not torch.nn.Parameter and tensor.nbytes <= _SMALL)


def _as_it_is(value: Any) -> Any:
    return value


@contextmanager
def _acquired(lock: threading.Lock) -> Iterator[bool]:
    """Hold a lock if it is free; give whether it was."""
    is_free = lock.acquire(blocking=False)
    try:
        yield is_free
    finally:
        if is_free:
            lock.release()


def _plain(value: Any) -> Any:
    """Return a hashable key of an argument: for a tensor its shape, strides and address, for a list those of its
    items."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.data_ptr()
    return type(value), value.hex() if isinstance(value, float) else value  # 1 == 1.0 == True, and 0.0 == -0.0


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == recorder().device_type


def _nothing(value: Any) -> None:
    return None


def _kind(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _extent(tensor: torch.Tensor) -> range:
    """Return the elements of its storage from its first to its last."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + last + 1 if tensor.numel() else start)


def _input_of(result: torch.Tensor, number: int, read: Sequence[torch.Tensor]) -> tuple:
    """Return the place of the tensor that a result is a view of, and the result's shape, strides and offset in it."""
    extent = _extent(result)
    for place, each in enumerate(read):
        own = _extent(each)
        is_inside = own.start <= extent.start and extent.stop <= own.stop
        if is_inside and _memory(each) == _memory(result) and _kind(each) == _kind(result):
            return place, result.shape, result.stride(), extent.start - own.start
    raise NotImplementedError(f"result {number} shares the memory of an input")


def _view_of(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """Return a view of an input: it has the input's version, which tells whether it changed."""
    return tensor.detach().as_strided(shape, strides, tensor.storage_offset() + offset)


def _is_cloned_alike(tensor: torch.Tensor) -> bool:
    """Return whether its clone has its strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _require_one_kind(tensors: Sequence[torch.Tensor], places: list[int]) -> list[int]:
    if any(_kind(each) != (tensors[0].dtype, False, False) for each in tensors):
        raise NotImplementedError(f"results {places} share memory, as several kinds of numbers")
    return places


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors that share memory, which share memory as well."""
    first = tensors[0]
    copy = first.as_strided([first.untyped_storage().nbytes() // first.element_size()], [1], 0).clone()
    return [copy.as_strided(each.shape, each.stride(), each.storage_offset()).detach() for each in tensors]


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
