"""Functions of tensors as CUDA graphs: recorded once, then replayed on memory that stays where it is.

A graph reads its inputs where they were when it was recorded. One that is elsewhere call after call is copied to where
it was then; for one that moved once, as a parameter does, the function is recorded again. A graph's results lie in
memory of its own: it may run again once nobody holds them any more; meanwhile another recording of the function runs.
Results for the caller are handed out in that memory too where little else is held with them, by two recordings that
take turns; large ones as long as the caller drops them before the next call; otherwise they are copied.

Another graph's results that nobody else holds and that are read for the last time are donated: their memory is used
again by the graph that reads them, as a backward does with what its forward saved.
"""

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import increment_version

from forge.ir.bounded import BoundedDict
from forge.ir.checks import in_one_line
from forge.runtime.cuda_memory import Memory, Pool, acquired
from forge.runtime.cuda_recorder import recorder, recording_lock
from forge.runtime.cuda_results import TURNS, HandingOut, Results, Span, memory_of, unique_elements
from forge.torch_internals.tensors import storage_id

_WARM_UP = 3  # calls before a function is recorded: libraries allocate, kernels are compiled
_WARM = 2  # of one whose program ran before without graphs: it is seen which inputs move
_WARM_SIZES = 4  # of one of symbolic sizes that nobody asked for, with the same ones
_MOST_SIZES = 64  # calls of such a one without a recording: its sizes are others at each call
_MOVES = 2  # of an input between calls, before it is copied; one, if it is a small one and no parameter
_SMALL = 2**24  # bytes
_RECORDINGS = 4  # of a function, for one set of inputs
_UNREQUESTED = 3  # of one that is recorded without having been asked for: each holds memory of its own
_PATIENCE = 3  # calls for which the recordings of one that nobody asked for are not free, but free for those between
_MOST = 12  # recordings in vain, of one that nobody asked for
_MOST_WRITTEN = 2  # recordings in vain, of one that writes to inputs which are elsewhere
_PROFITABLE = 8  # runs of a recording, which take less than it and they do without
_UNUSED = 32  # runs of another recording of the same inputs, after which one is dropped
_COPY_BYTES = 2**26  # of inputs a call, under which graphs that nobody asked for are recorded
_log = logging.getLogger("forge.cuda_graphs")

# the recordings by the memory of their results
_owners: "WeakValueDictionary[int, _Recording]" = WeakValueDictionary()


class _Inputs:
    """The arguments of a call: tensors, their addresses, and the others.

    values: all arguments. checked: places among them whose metadata may differ from call to call; None: all. count: how
    many are tensors, where that is known.
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
            if isinstance(each, torch.Tensor) and type(each) is not torch.nn.Parameter:  # those Dynamo guards
                yield each.shape, each.stride(), each.dtype, each.is_conj(), each.is_neg()

    def places(self) -> list[int]:
        """Return the place of each tensor among all arguments."""
        return [place for place, each in enumerate(self.values) if isinstance(each, torch.Tensor)]

    def set(self, place: int, among_all: int, tensor: torch.Tensor | None) -> None:
        """Set the tensor at a place, which is another one among all arguments."""
        self.tensors[place] = self.values[among_all] = tensor


class _Donated(NamedTuple):
    """An input that is read for the last time, and whose memory is used again: its place among the tensors and among
    all arguments, and where it is."""

    place: int
    among_all: int
    span: Span


class _Recording:
    """One recording: the addresses of its inputs, and its results.

    last: places of tensors that the function reads for the last time. copied: those of tensors that are copied before
    each run. returned: for each result, whether the caller may keep it. memories: that of the stream, and the one to
    record in. before: how other recordings hand out their results.
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
        """Return the arguments, with copies in the place of some; those that were donated have no other reference."""
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
        """Take those candidates out of `inputs` which are results of recordings in this memory, and which nobody else
        holds. Return for each these results, and the number of its storage among them."""
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
        """Drop the inputs whose memory it uses, so that it is free if nobody else holds them. Return their storages,
        whose Python objects are those that their results hold: they are not counted as held by them."""
        storages = [inputs.tensors[each.place].untyped_storage() for each in self._donated]
        for each in self._donated:
            inputs.set(each.place, each.among_all, None)
        return storages

    def give_back(self, inputs: _Inputs, storages: Sequence[torch.UntypedStorage]) -> None:
        """Give the inputs that were dropped back: tensors of the same storages, which tell who holds the memory."""
        for each, storage in zip(self._donated, storages, strict=True):
            inputs.set(each.place, each.among_all, each.span.tensor(storage))

    def is_held(self) -> bool:
        """Return whether its results are referenced from outside."""
        return self.results.is_held()

    def reads(self, pointers: Sequence[int]) -> bool:
        """Return whether it reads inputs that are there."""
        return [pointers[place] for place in self._fixed] == self._addresses

    def _copy(self, tensors: Sequence[Any]) -> None:
        for place, copy in self.copies.items():
            unique_elements(copy).copy_(unique_elements(tensors[place]))

    def run(self, inputs: _Inputs) -> tuple[Any, ...]:
        """Return its results."""
        self._copy(inputs.tensors)
        self._graph.replay()
        return self.results.hand_out(inputs.tensors)


class Graph:
    """A function of tensors and numbers that returns a tuple; recorded after a few calls. It takes its arguments in one
    list, which it empties.

    Attributes:
        returned: For each result, whether the caller may keep it for good.
        checked: Places of arguments whose metadata may differ from call to call; None: all.
        writes: Places of arguments that the function writes to.
        last: Places of arguments that nobody reads afterwards.
        transient: Places of arguments that are other tensors at each call, which may happen to be where others were.
        is_requested: False for a program that is recorded without having been asked for, which is not recorded where
            memory is short or many inputs would be copied.
        has_symbolic_sizes: Whether sizes may differ from call to call; each set of sizes is recorded.
        failed: The reason why the function cannot be recorded, and is called.
        recordings: The number of times it was recorded.
        in_vain: The number of recordings before the last one that ran a few times.
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
        self._waits: list[int] = []  # for calls that no recording served because memory was held: the runs before
        self._pointers: list[int] = []  # of the last call
        self._moves: list[int] = []
        self._recorded: list[_Recording] = []
        self._is_alone = False  # in its memory
        self._lock = threading.Lock()

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        """Return the function's results, replayed or computed."""
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
        """Return a recording that may run now, an old one or a new one; None where the function is to be called."""
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
        """Return whether a call is not worth a recording, which has memory of its own: what is held is rarely held, and
        another thread may be about to drop it, as torch's does that ran a backward.

        blocked: the recordings of these inputs that the results of others keep from running. The caller may hold those
        of its own for long."""
        is_held_by_caller = any(self._returned) and not blocked
        if self._is_requested or is_held_by_caller:
            return False
        self._waits = [*(runs for runs in self._waits if runs > self._runs - _UNUSED), self._runs]
        return len(self._waits) < _PATIENCE

    def _drop_unused(self, used: _Recording, alike: Sequence[_Recording]) -> None:
        """Drop recordings of the same inputs that were not needed for a while: each holds memory of its own."""
        if len(alike) == 1:
            return
        for each in alike:
            each.unused = 0 if each is used else each.unused + 1
        if self.in_vain <= _MOST // 2:
            self._recorded = [each for each in self._recorded if each.unused < _UNUSED]

    def _watch(self, inputs: _Inputs) -> None:
        """Count how often each input was elsewhere than before. Results of other recordings are where they belong."""
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
        """Return how often an input moved, or is known to move."""
        is_transient = among_all in self._transient and memory_of(inputs.tensors[place]) not in _owners
        return max(self._moves[place], is_transient)

    def _drop_useless(self, inputs: _Inputs, alike: list[_Recording], blocked: list[_Recording]) -> None:
        """Drop the recordings whose inputs are elsewhere now, and the blocked ones: a new one may use their memory."""
        useless = [each for each in self._recorded if each.key == inputs.key and each not in alike] + blocked
        self._recorded = [each for each in self._recorded if each not in useless]
        alike[:] = [each for each in alike if each not in blocked]
        blocked.clear()

    def _memory_for(self, inputs: _Inputs, last: Sequence[int], memory: Memory) -> Memory:
        """Return the memory to record in: that of the results which are read for the last time; for a first recording,
        the stream's; after results of others kept it from running, memory of its own.

        Later recordings in the same memory keep those before them from running while their results are held.
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
    """Return whether an input that moved a few times between calls is copied to where it was."""
    return moves >= _MOVES or (moves > 0 and type(tensor) is not torch.nn.Parameter and tensor.nbytes <= _SMALL)


def _plain(value: Any) -> Any:
    """Return a hashable key of an argument: for a tensor its shape, strides and address, for a list those of its
    items."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.data_ptr()
    return type(value), value.hex() if isinstance(value, float) else value  # 1 == 1.0 == True, and 0.0 == -0.0


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
