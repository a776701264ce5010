"""Functions of tensors as CUDA graphs: recorded once, then replayed on memory at fixed addresses.

A graph reads its inputs at the addresses of its recording. An input that moves at every call is copied to its recorded
address; after a single move, such as a parameter's, the function is recorded again. A graph's results are in its
own memory: it may be replayed once nothing refers to them; until then another recording of the function runs.
Results for the caller are returned in that memory too if they keep little else alive, by two recordings that
alternate; large ones as long as the caller drops them before the next call; otherwise they are copied.

Layers that are alike share a program where each is captured by itself: the function is recorded for the parameters of
each, since their results are alive together.

Results of another graph that have no other references and are read for the last time are donated: the graph that reads
them reuses their memory, as a backward does with the forward's residuals.
"""

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import increment_version

from forge.ir.bounded import BoundedDict
from forge.ir.checks import in_one_line
from forge.runtime.cuda_memory import Memory, Pool, acquired
from forge.runtime.cuda_recorder import recorder, recording_lock
from forge.runtime.cuda_results import TURNS, HandingOut, Results, Span, memory_of, unique_elements
from forge.torch_internals.tensors import StorageWeakRef, storage_id

_WARM_UP = 3  # calls before a function is recorded: libraries allocate, kernels are compiled
_WARM = 2  # if its program ran before without graphs: these calls show which inputs move
_WARM_SIZES = 4  # calls with the same sizes, if they are symbolic and CUDA graphs were not requested
_MOST_SIZES = 64  # calls of such a function without a recording, after which its sizes are taken to vary at each call
_MOVES = 2  # of an input between calls, before it is copied; one move of a small input that is no parameter
_SMALL = 2**24  # bytes
_RECORDINGS = 4  # of a function, for one set of inputs
_UNREQUESTED = 3  # if CUDA graphs were not requested: each recording has its own memory
_PATIENCE = 3  # calls blocked by held results, with replays between them, before an unrequested re-recording
_MOST = 12  # recordings in vain, if CUDA graphs were not requested
_MOST_WRITTEN = 2  # recordings in vain, of a function that writes to inputs that move
_PROFITABLE = 8  # replays after which a recording has paid for itself
_UNUSED = 32  # replays of another recording of the same inputs, after which one is dropped
_MOST_LAYERS = 128  # that share a function
_COPY_BYTES = 2**26  # of inputs per call, up to which unrequested graphs are recorded
_log = logging.getLogger("forge.cuda_graphs")

# the recordings, by the memory of their results
_owners: "WeakValueDictionary[int, _Recording]" = WeakValueDictionary()


class _Inputs:
    """The arguments of a call: tensors, their addresses, and the others.

    values: all arguments. checked: indices of those whose metadata may vary between calls; None: all. count: the number
    of tensors, if known.
    """

    def __init__(self, values: list[Any], checked: Collection[int] | None, count: int | None = None) -> None:
        self.values = values
        all_are = count == len(values)
        self.tensors: list[Any] = list(values) if all_are else [x for x in values if isinstance(x, torch.Tensor)]
        self.pointers = list(map(_ADDRESS, self.tensors))
        self.key = tuple(self._described(range(len(values)) if checked is None else checked))
        if len(self.tensors) < len(values):
            self.key += tuple(_plain(each) for each in values if not isinstance(each, torch.Tensor))

    def _described(self, places: Collection[int]) -> Iterator[tuple[Any, ...]]:
        for place in places:
            each = self.values[place]
            if isinstance(each, torch.Tensor) and type(each) is not torch.nn.Parameter:  # Dynamo guards parameters
                yield each.shape, each.stride(), each.dtype, each.is_conj(), each.is_neg()

    def places(self) -> list[int]:
        """Return the index of each tensor among all arguments."""
        return [place for place, each in enumerate(self.values) if isinstance(each, torch.Tensor)]

    def set(self, place: int, among_all: int, tensor: torch.Tensor | None) -> None:
        """Set the tensor at index `place` among the tensors, and `among_all` among all arguments."""
        self.tensors[place] = self.values[among_all] = tensor


class _Parameters:
    """The parameters of the first call of a function, by the first of them."""

    def __init__(self) -> None:
        self._place: int | None = None  # among all arguments; -1: there is none
        self._address = 0
        self._memory: StorageWeakRef | None = None

    def other(self, arguments: Sequence[Any]) -> torch.nn.Parameter | None:
        """Return the first parameter of a call if it is another one's; parameters that moved are the same."""
        if self._place is None:
            self._place = next((i for i, each in enumerate(arguments) if type(each) is torch.nn.Parameter), -1)
        if self._place < 0:
            return None
        parameter: torch.nn.Parameter = arguments[self._place]
        if (address := _ADDRESS(parameter)) == self._address:
            return None
        if self._memory is not None and not self._memory.expired():
            return parameter
        self._address, self._memory = address, StorageWeakRef(parameter.untyped_storage())
        return None


class _Donated(NamedTuple):
    """An input that is read for the last time and whose memory is reused: its index among the tensors and among all
    arguments, and its location."""

    place: int
    among_all: int
    span: Span


class _Recording:
    """One recording: the addresses of its inputs, and its results.

    last: indices of tensors that the function reads for the last time. copied: indices of tensors that are copied
    before each replay. returned: for each result, whether the caller may keep it. memories: the stream's, and the one
    to record in. before: how other recordings return their results.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        inputs: _Inputs,
        last: Collection[int],
        copied: frozenset[int],
        returned: Sequence[bool],
        memories: tuple[Memory, Memory],
        before: Collection[HandingOut],
    ) -> None:
        self.key, self.copied = inputs.key, copied
        self.stream_memory, self.memory = memories
        self.unused = 0
        self.copies = {place: _like(inputs.tensors[place]) for place in copied}
        self._fixed = [place for place in range(len(inputs.tensors)) if place not in copied]
        self._addresses = [inputs.pointers[place] for place in self._fixed]
        self._copy(inputs.tensors)
        handle = self.memory.handle
        self.number = self.memory.next_number()
        places = inputs.places()
        sources = self._accept_donations(inputs, [place for place in last if place not in copied], places)
        numbers = {results: {each for source, each in sources if source is results} for results, _ in sources}
        released = [(results, results.release(of_results)) for results, of_results in numbers.items()]
        try:
            try:
                self._graph, outputs = recorder().record(function, self._boxed(inputs, places), handle)
            finally:
                for results, spans in released:
                    results.show(spans, self.memory, self.number)
            read = [self.copies.get(place, each) for place, each in enumerate(inputs.tensors)]
            self.results = Results(outputs, returned, read, before)
        except Exception:
            self.give_back(inputs, [results.storage(number) for results, number in sources])
            raise
        self.results.outlived_by(self._graph)
        self.storages = self.results.weak_storages
        _owners.update(dict.fromkeys(self.results.addresses, self))
        self.memory.add(self)

    def _boxed(self, inputs: _Inputs, places: Sequence[int]) -> list[Any]:
        """Return the arguments, with some replaced by copies; donated ones have no other reference."""
        boxed = list(inputs.values)
        for place, copy in self.copies.items():
            boxed[places[place]] = copy
        for each, tensor in zip(self._donated, self._fresh, strict=True):
            boxed[each.among_all] = tensor
        del self._fresh
        return boxed

    def _accept_donations(
        self, inputs: _Inputs, candidates: Sequence[int], places: Sequence[int]
    ) -> list[tuple[Results, int]]:
        """Remove from `inputs` those candidates that are results of recordings in this memory without other references.
        Return these results for each, and the index of its storage among them."""
        by_owner: dict[tuple[Results, int], list[tuple[_Donated, torch.Tensor]]] = {}
        for place in candidates:
            tensor = inputs.tensors[place]
            owner = _owners.get(memory_of(tensor))
            number = None if owner is None else owner.results.donatable.get(storage_id(tensor))
            if (
                owner is None
                or number is None
                or owner.memory is not self.memory
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                continue
            donated = _Donated(place, places[place], Span(tensor))
            by_owner.setdefault((owner.results, number), []).append((donated, tensor.detach()))
            del tensor
            inputs.set(place, places[place], None)
        self._donated: list[_Donated] = []
        self._fresh: list[torch.Tensor] = []
        sources: list[tuple[Results, int]] = []
        for (results, number), donations in by_owner.items():
            if results.users(number) == len(donations):
                sources += [(results, number)] * len(donations)
                self._donated += [each for each, _ in donations]
                self._fresh += [tensor for _, tensor in donations]
                continue
            for each, tensor in donations:
                inputs.set(each.place, each.among_all, tensor)
        return sources

    def take_donated(self, inputs: _Inputs) -> list[torch.UntypedStorage]:
        """Drop the inputs whose memory is reused, so that it is free if nothing else refers to them. Return their
        storages, whose Python objects the results hold as well: these references do not count."""
        storages = [inputs.tensors[each.place].untyped_storage() for each in self._donated]
        for each in self._donated:
            inputs.set(each.place, each.among_all, None)
        return storages

    def give_back(self, inputs: _Inputs, storages: Sequence[torch.UntypedStorage]) -> None:
        """Restore the dropped inputs: tensors of the same storages, which track references to the memory."""
        for each, storage in zip(self._donated, storages, strict=True):
            inputs.set(each.place, each.among_all, each.span.tensor(storage))

    def is_held(self) -> bool:
        """Return whether its results are referenced from outside."""
        return self.results.is_held()

    def reads(self, pointers: Sequence[int]) -> bool:
        """Return whether it reads inputs at these addresses."""
        return [pointers[place] for place in self._fixed] == self._addresses

    def _copy(self, tensors: Sequence[Any]) -> None:
        for place, copy in self.copies.items():
            unique_elements(copy).copy_(unique_elements(tensors[place]))

    def run(self, inputs: _Inputs) -> tuple[Any, ...]:
        """Replay the graph, and return its results."""
        self._copy(inputs.tensors)
        self._graph.replay()
        return self.results.hand_out(inputs.tensors)


class Graph:
    """A function of tensors and numbers that returns a tuple; recorded after a few calls. It takes its arguments in one
    list, which it empties.

    Attributes:
        returned: For each result, whether the caller may keep it indefinitely.
        checked: Indices of arguments whose metadata may vary between calls; None: all.
        writes: Indices of arguments that the function writes to.
        last: Indices of arguments without later readers.
        transient: Indices of arguments that are new tensors at each call, which may reuse the addresses of others.
        is_requested: False if CUDA graphs were not requested; such a program is not recorded if memory is short or many
            inputs would be copied.
        has_symbolic_sizes: Whether sizes may vary between calls; each set of sizes is recorded.
        failed: The reason why the function cannot be recorded, and runs uncaptured.
        recordings: The number of times it was recorded.
        in_vain: The number of recordings, the last one excluded, that were replayed only a few times.
    """

    def __init__(  # noqa: PLR0913  a record's fields
        self,
        name: str,
        function: Callable[[list[Any]], Sequence[Any]],
        pool: Pool,
        returned: Sequence[bool],
        checked: Collection[int] | None = None,
        writes: Collection[int] = (),
        last: Collection[int] = (),
        transient: Collection[int] = (),
        *,
        is_requested: bool = True,
        has_symbolic_sizes: bool = False,
    ) -> None:
        self.__name__ = name
        self.failed: str | None = None
        self.recordings = self.in_vain = 0
        self._count: int | None = None  # of tensors among its arguments
        self._runs = 0  # since the last recording
        self._function = function
        self._pool = pool
        self._returned = returned
        self._checked = checked
        self._writes = writes
        self._last = frozenset(last).difference(writes)
        self._transient = frozenset(transient)
        self._is_requested = is_requested
        self._warm_up = _WARM_UP if is_requested else _WARM_SIZES if has_symbolic_sizes else _WARM
        self._most_unserved = sys.maxsize if is_requested or not has_symbolic_sizes else _MOST_SIZES
        self._unserved = 0  # calls
        self._calls = BoundedDict(256)  # by key, of those that no recording served
        self._waits: list[int] = []  # `_runs` at calls for which memory was held
        self._pointers: list[int] = []  # of the last call
        self._moves: list[int] = []
        self._recorded: list[_Recording] = []
        self._is_alone = False  # in its memory
        self._lock = threading.Lock()
        self._first_parameters = _Parameters()
        # of other parameters, by the address of the first, with its memory
        self._layers: BoundedDict[int, tuple[Graph, StorageWeakRef]] = BoundedDict(_MOST_LAYERS)
        self._like = partial(
            Graph, name, function, pool, returned, checked, writes, last, transient,
            is_requested=is_requested, has_symbolic_sizes=has_symbolic_sizes,
        )  # fmt: skip

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        """Return the function's results, replayed or computed."""
        parameter = self._first_parameters.other(boxed)
        return self._call(boxed) if parameter is None else self._layer(parameter)._call(boxed)

    def _layer(self, parameter: torch.nn.Parameter) -> "Graph":
        """Return the graph of other parameters than those of the first call, of which this one is the first."""
        address = _ADDRESS(parameter)
        if (layer := self._layers.get(address)) is not None:
            return layer[0]
        for freed in [each for each, (_, memory) in self._layers.items() if memory.expired()]:
            del self._layers[freed]
        graph = self._like()
        self._layers[address] = graph, StorageWeakRef(parameter.untyped_storage())
        return graph

    def _call(self, boxed: list[Any]) -> Sequence[Any]:
        if self.failed is not None or recorder().is_recording():
            return self._function(boxed)
        memory = self._pool.memory()
        with acquired(self._lock) as is_alone, acquired(memory.lock) as is_free:
            if is_alone and is_free:
                inputs = _Inputs(boxed, self._checked, self._count)
                self._count = len(inputs.tensors)
                recording = self._find(inputs, memory)
                if recording is not None:
                    results = recording.run(inputs)
                    self._runs += 1
                    if self._writes:
                        increment_version([boxed[place] for place in self._writes])
                    boxed.clear()
                    return results
                del inputs
        return self._function(boxed)

    def _find(self, inputs: _Inputs, memory: Memory) -> _Recording | None:
        """Return an old or new recording that can run now; None if the function must be called."""
        alike = [
            each
            for each in self._recorded
            if each.stream_memory is memory and each.key == inputs.key and each.reads(inputs.pointers)
        ]
        for each in alike:
            storages = each.take_donated(inputs)
            if each.memory.is_free_for(each):
                self._drop_unused(each, alike)
                return each
            each.give_back(inputs, storages)
            del storages
        self._watch(inputs)
        self._calls[inputs.key] = calls = (self._calls.get(inputs.key) or 0) + 1
        if calls <= self._warm_up:
            self._unserved += 1
            if self._unserved > self._most_unserved and not self.recordings:
                self.failed = "its sizes are others at each call"
            return None
        if not all(recorder().is_on(each.device) for each in inputs.tensors):
            return None
        blocked = [each for each in alike if not each.is_held()]  # by results of others
        if len(alike) - len(blocked) >= (_RECORDINGS if self._is_requested else _UNREQUESTED):
            return None
        if alike and self._may_be_free_soon(blocked):
            return None
        with acquired(recording_lock) as is_alone:
            return self._record(inputs, memory, alike, blocked) if is_alone else None

    def _may_be_free_soon(self, blocked: Collection[_Recording]) -> bool:
        """Return whether a call is not worth a recording, which needs its own memory: results are rarely held for long,
        and another thread may be about to drop them, as torch's does after a backward.

        blocked: the recordings of these inputs that results of other recordings keep from running. The caller may hold
        a recording's own results for long."""
        is_held_by_caller = any(self._returned) and not blocked
        if self._is_requested or is_held_by_caller:
            return False
        self._waits = [*(runs for runs in self._waits if runs > self._runs - _UNUSED), self._runs]
        return len(self._waits) < _PATIENCE

    def _drop_unused(self, used: _Recording, alike: Sequence[_Recording]) -> None:
        """Drop recordings of the same inputs that were not needed for a while: each holds its own memory."""
        if len(alike) == 1:
            return
        for each in alike:
            each.unused = 0 if each is used else each.unused + 1
        if self.in_vain <= _MOST // 2:
            self._recorded = [each for each in self._recorded if each.unused < _UNUSED]

    def _watch(self, inputs: _Inputs) -> None:
        """Count how often each input moved between calls. Results of other recordings are where they belong."""
        if len(self._pointers) != len(inputs.pointers):
            self._moves = [0] * len(inputs.pointers)
        for place, (before, pointer) in enumerate(zip(self._pointers, inputs.pointers, strict=False)):
            if before != pointer:
                self._moves[place] = 0 if memory_of(inputs.tensors[place]) in _owners else self._moves[place] + 1
        self._pointers = inputs.pointers

    def _record(
        self, inputs: _Inputs, memory: Memory, alike: list[_Recording], blocked: list[_Recording]
    ) -> _Recording | None:
        places = inputs.places()
        writes = {place for place, among_all in enumerate(places) if among_all in self._writes}
        moves = [self._moves_of(inputs, place, among_all) for place, among_all in enumerate(places)]
        copied = frozenset(i for i, x in enumerate(inputs.tensors) if i not in writes and _is_copied(x, moves[i]))
        self.in_vain += bool(self.recordings) and self._runs < _PROFITABLE
        self._runs = 0
        self._waits.clear()
        ways = [(each.results.handing_out, each in blocked) for each in alike]
        before = [way for way, is_blocked in ways if way is HandingOut.COPIES or not is_blocked]
        self._is_alone |= bool(blocked)
        self._drop_useless(inputs, alike, blocked)
        last = [place for place, among_all in enumerate(places) if among_all in self._last]
        try:
            if not self._is_requested and self.in_vain >= _MOST:
                raise NotImplementedError(f"it was recorded {self.recordings} times, for inputs that move")
            if self.in_vain >= _MOST_WRITTEN and any(self._moves[place] for place in writes):
                raise NotImplementedError("an input that is written to is elsewhere at each call")
            if not self._is_requested:
                self._require_little_memory(inputs, copied)
            memories = memory, self._memory_for(inputs, last, memory)
            recording = _Recording(self._function, inputs, last, copied, self._returned, memories, before)
        except Exception as error:
            self.failed = in_one_line(error)
            _log.debug("%s cannot be recorded", self.__name__, exc_info=True)
            self._recorded.clear()
            return None
        self.recordings += 1
        replaces = recording.results.handing_out is HandingOut.COPIES and len(before) < TURNS
        replaced = [each for each in alike if replaces and each.results.handing_out is not HandingOut.COPIES]
        others = [each for each in self._recorded if each not in replaced]
        self._recorded = [recording, *others][: 2 * _RECORDINGS]
        return recording

    def _moves_of(self, inputs: _Inputs, place: int, among_all: int) -> int:
        """Return how often an input moved, at least 1 if it is transient."""
        is_transient = among_all in self._transient and memory_of(inputs.tensors[place]) not in _owners
        return max(self._moves[place], is_transient)

    def _drop_useless(self, inputs: _Inputs, alike: list[_Recording], blocked: list[_Recording]) -> None:
        """Drop the recordings whose inputs have moved, and the blocked ones: a new one may reuse their memory."""
        useless = [each for each in self._recorded if each.key == inputs.key and each not in alike] + blocked
        self._recorded = [each for each in self._recorded if each not in useless]
        alike[:] = [each for each in alike if each not in blocked]
        blocked.clear()

    def _memory_for(self, inputs: _Inputs, last: Sequence[int], memory: Memory) -> Memory:
        """Return the memory to record in: that of the results which are read for the last time; for a first recording,
        the stream's; after results of others blocked it, private memory.

        Later recordings in the same memory block earlier ones while their results are held.
        """
        if self._is_alone:
            return Memory(is_private=True)
        owners = [_owners.get(memory_of(inputs.tensors[place])) for place in last]
        homes = {id(each.memory): each.memory for each in owners if each is not None and each.stream_memory is memory}
        (home,) = homes.values() if len(homes) == 1 else (memory,)
        is_shared = home is memory and self.recordings and not memory.is_empty
        if is_shared or home.is_private or home.is_donated_and_held():
            return Memory()
        return home

    def _require_little_memory(self, inputs: _Inputs, copied: Collection[int]) -> None:
        copy_bytes = sum(inputs.tensors[place].nbytes for place in copied)
        if copy_bytes > _COPY_BYTES:
            raise NotImplementedError(f"{copy_bytes / 1e6:.0f} MB of inputs are elsewhere at each call")
        if not recorder().has_room():
            raise NotImplementedError("the device has little memory left")


_ADDRESS = torch.Tensor.data_ptr


def _is_copied(tensor: torch.Tensor, moves: int) -> bool:
    """Return whether an input that moved a few times between calls is copied to its recorded address."""
    return moves >= _MOVES or (moves > 0 and type(tensor) is not torch.nn.Parameter and tensor.nbytes <= _SMALL)


def _plain(value: Any) -> Any:
    """Return a hashable key of an argument: a tensor's shape, strides and address, or the keys of a list's
    items."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.data_ptr()
    return type(value), value.hex() if isinstance(value, float) else value  # 1 == 1.0 == True, and 0.0 == -0.0


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
