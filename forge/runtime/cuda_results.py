"""Results of CUDA graphs, and how callers receive them."""

import sys
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from forge.runtime.cuda_memory import Donation, Memory, outlive
from forge.runtime.cuda_recorder import recorder
from forge.torch_internals.tensors import StorageWeakRef, storage_address, storage_at, storage_use_count

_LARGE = 2**24  # bytes of a result that is returned without a copy
_FEW = 8  # results, which are cheap to copy if they are not large
TURNS = 2  # recordings that alternate to return their results


class HandingOut(Enum):
    """The ways in which a recording returns results that the caller may keep."""

    IN_TURN = "as they are: two recordings take turns, since little else is held with the results"
    LARGE = "large ones as they are, as long as the caller drops them before the next call"
    COPIES = "copied"


class Results:
    """The results of a recording: their memory, and how each is returned.

    Args:
        outputs: The results in the recording's memory.
        returned: For each, whether the caller may keep it indefinitely.
        read: The tensors that the recording reads; None for those whose memory was donated.
        before: How other recordings of the same inputs, whose results are held, return theirs.

    Attributes:
        addresses: The addresses of the results' memory.
        donatable: Indices of storages that no result for the caller aliases, by their addresses in C++.
        weak_storages: Weak references to all storages that ever aliased the results' memory.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        returned: Sequence[bool],
        read: Sequence[torch.Tensor | None],
        before: Collection[HandingOut],
    ) -> None:
        theirs = {memory_of(each) for each in read if each is not None} - {0}  # of empty tensors
        shared = [place for place, each in enumerate(outputs) if _is_tensor(each) and memory_of(each) in theirs]
        for place in shared:
            if returned[place]:
                raise NotImplementedError(f"result {place} shares the memory of an input")
        self._views = {place: _input_of(outputs[place], place, read) for place in shared}
        places: dict[int, list[int]] = {}
        for place, each in enumerate(outputs):
            if _is_tensor(each) and memory_of(each) and place not in self._views:  # an empty one has no memory
                places.setdefault(memory_of(each), []).append(place)
        self.addresses = list(places)
        self._groups = list(places.values())
        self.handing_out = _way_to_hand_out(outputs, returned, before)
        smallest = {HandingOut.COPIES: sys.maxsize, HandingOut.LARGE: _LARGE, HandingOut.IN_TURN: 0}[self.handing_out]
        self._takes = [
            _as_it_is if not _is_tensor(each) else _CLONE if keep and each.nbytes < smallest else _DETACH
            for each, keep in zip(outputs, returned, strict=True)
        ]
        self._copied_together = [
            _require_one_kind([outputs[place] for place in group], group)
            for group in self._groups
            if any(self._takes[place] is _CLONE for place in group)
            and (len(group) > 1 or not _is_cloned_alike(outputs[group[0]]))
        ]
        for place in (*self._views, *(place for group in self._copied_together for place in group)):
            self._takes[place] = _nothing
        # a reference to an input would keep its memory from being free for the next input
        self._outputs: list[Any] = [None if place in self._views else each for place, each in enumerate(outputs)]
        self._storages: list[Any] = [outputs[place].untyped_storage() for place, *_ in self._groups]
        self._counters = list(map(storage_address, self._storages))
        self._uses = list(map(storage_use_count, self._counters))
        is_own = [not any(returned[place] or _is_lazy(outputs[place]) for place in group) for group in self._groups]
        self.donatable = {counter: i for i, counter in enumerate(self._counters) if is_own[i]}
        self.weak_storages = list(map(StorageWeakRef, self._storages))

    def outlived_by(self, graph: Any) -> None:
        """Keep the graph, which writes the results, alive while others hold their memory."""
        outlive(self, self._counters, self._uses, self.weak_storages, graph)

    def is_held(self) -> bool:
        """Return whether the results' memory is referenced from outside."""
        return list(map(storage_use_count, self._counters)) != self._uses

    def users(self, number: int) -> int:
        """Return how often a storage is referenced from outside."""
        return storage_use_count(self._counters[number]) - self._uses[number]

    def hand_out(self, read: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """Return the results of the last run, which read these tensors."""
        results = [take(each) for take, each in zip(self._takes, self._outputs, strict=True)]
        for place, (source, *view) in self._views.items():
            results[place] = _view_of(read[source], *view)
        for group in self._copied_together:
            for place, copy in zip(group, _copies([self._outputs[place] for place in group]), strict=True):
                results[place] = copy
        return tuple(results)

    def release(self, numbers: Collection[int]) -> Mapping[int, list[tuple[int, "Span"]]]:
        """Give up ownership of storages: the last tensor that aliases one frees its memory. Return the input of
        `show`."""
        spans: dict[int, list[tuple[int, Span]]] = {}
        for number in numbers:
            spans[number] = [(place, Span(self._outputs[place])) for place in self._groups[number]]
            for place in self._groups[number]:
                self._outputs[place] = None
            del self.donatable[self._counters[number]]
            self._storages[number] = None
        return spans

    def storage(self, number: int) -> torch.UntypedStorage:
        """Return a storage."""
        return self._storages[number]

    def show(self, spans: Mapping[int, list[tuple[int, "Span"]]], memory: Memory, recording: int) -> None:
        """Alias the memory of released storages, which was donated to the recording of that number."""
        for number, places in spans.items():
            self._storages[number] = storage = places[0][1].storage()
            for place, span in places:
                self._outputs[place] = span.tensor(storage)
            self._counters[number] = storage_address(self._storages[number])
            self._uses[number] = storage_use_count(self._counters[number])
        counters = [self._counters[number] for number in spans]
        storages = [StorageWeakRef(self._storages[number]) for number in spans]
        self.weak_storages += storages
        memory.add_donation(Donation(self, counters, storages, recording))


class Span:
    """The location and metadata of a tensor without lazy conjugation or negation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = storage.data_ptr(), tensor.device, storage.nbytes()
        self._shape, self._strides, self._offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._dtype = tensor.dtype

    def storage(self) -> torch.UntypedStorage:
        """Return a storage that aliases the tensor's memory without owning it."""
        return storage_at(*self._storage)

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in a storage."""
        result = torch.empty(0, dtype=self._dtype, device=storage.device)
        return result.set_(storage, self._offset, self._shape, self._strides)


def _way_to_hand_out(outputs: Sequence[Any], returned: Sequence[bool], before: Collection[HandingOut]) -> HandingOut:
    sizes = [(keep, each.nbytes) for each, keep in zip(outputs, returned, strict=True) if _is_tensor(each)]
    theirs = [size for keep, size in sizes if keep]
    others = sum(size for keep, size in sizes if not keep)
    if any(way is not HandingOut.IN_TURN for way in before) or len(before) >= TURNS:
        return HandingOut.COPIES
    if theirs and others > sum(theirs):
        return HandingOut.LARGE
    are_cheap = 0 < len(theirs) <= _FEW and sum(theirs) < _LARGE
    return HandingOut.COPIES if before and are_cheap else HandingOut.IN_TURN


_CLONE, _DETACH = torch.Tensor.clone, torch.Tensor.detach


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def unique_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the distinct elements of an expanded tensor."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _as_it_is(value: Any) -> Any:
    return value


def _nothing(value: Any) -> None:
    return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == recorder().device_type


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is lazily conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


def _extent(tensor: torch.Tensor) -> range:
    """Return its storage's elements from the first to the last that it uses."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + last + 1 if tensor.numel() else start)


def _input_of(result: torch.Tensor, number: int, read: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Return the index of the tensor that a result is a view of, and the result's shape, strides and offset in it."""
    extent = _extent(result)
    for place, each in enumerate(read):
        if each is None or memory_of(each) != memory_of(result) or _kind(each) != _kind(result):
            continue
        own = _extent(each)
        if own.start <= extent.start and extent.stop <= own.stop:
            return place, result.shape, result.stride(), extent.start - own.start
    raise NotImplementedError(f"result {number} shares the memory of an input")


def _view_of(tensor: Any, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """Return a view of an input: it shares the input's version counter, which records mutations."""
    return tensor.detach().as_strided(shape, strides, tensor.storage_offset() + offset)


def _is_cloned_alike(tensor: torch.Tensor) -> bool:
    """Return whether its clone has its strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _require_one_kind(tensors: Sequence[torch.Tensor], places: list[int]) -> list[int]:
    if any(_kind(each) != (tensors[0].dtype, False, False) for each in tensors):
        raise NotImplementedError(f"results {places} share memory, as several kinds of numbers")
    return places


def _copies(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return copies of tensors that preserve their aliasing."""
    first = tensors[0]
    copy = first.as_strided([first.untyped_storage().nbytes() // first.element_size()], [1], 0).clone()
    return [copy.as_strided(each.shape, each.stride(), each.storage_offset()).detach() for each in tensors]
