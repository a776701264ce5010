"""The collectives of a trace: what each sends, where it starts and is awaited, and which calls overlap with it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from forge import prims
from forge.executors.torchex.distributed import start_unshard
from forge.ir import BoundSymbol, Symbol, Tag, Trace
from forge.ir.printing import STATEMENTS
from forge.ir.proxies import bytes_of
from forge.ir.pytree import tensors
from forge.ir.source import Source
from forge.prims.distributed import MESSAGE_TAGS
from forge.torch_internals.distributed import process_group
from forge.transforms.makers import innermost, is_view

_OPERATIONS: Mapping[Symbol, str] = {
    prims.all_reduce: "all_reduce",
    prims.all_gather_into_tensor: "all_gather",
    prims.reduce_scatter_tensor: "reduce_scatter",
    prims.all_to_all_single: "all_to_all",
    prims.unshard: "all_gather",
    prims.reduce_to_shard: "reduce_scatter",
}
_SYNCHRONOUS = frozenset({prims.unshard, prims.reduce_to_shard})  # the call itself waits
_HOPS = {"all_reduce": 2}  # of a ring: a reduce-scatter and an all-gather; other operations take one


class Collective(NamedTuple):
    """A message of a trace to the processes of a group.

    Attributes:
        operation: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        group: The name under which torch knows the process group.
        group_size: The number of its processes; None where this process does not know the group.
        tensors: The number of tensors that are sent together.
        bytes: The size of the full tensors: all that is gathered, or what is reduced, scattered or exchanged.
        start: The position of the call that starts it in the trace.
        wait: The position of the call that waits for it; `start` if that is the same call, None if no call waits.
        overlap: The names of the calls that compute while the message is in flight.
        source: The user's line, or None.
    """

    operation: str
    group: str
    group_size: int | None
    tensors: int
    bytes: int
    start: int
    wait: int | None
    overlap: tuple[str, ...]
    source: Source | None

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that each process sends by a ring algorithm.

        Source: R. Thakur et al., Optimization of Collective Communication Operations in MPICH (2005).
        """
        size = self.group_size or 1
        share = (size - 1) / size if self.group_size else 1.0
        return int(_HOPS.get(self.operation, 1) * self.bytes * share)

    @property
    def steps(self) -> int:
        """Return the number of steps of that algorithm."""
        return _HOPS.get(self.operation, 1) * ((self.group_size or 1) - 1)


def communicates(bound: BoundSymbol) -> bool:
    """Return whether a call starts a message or waits for one."""
    if not MESSAGE_TAGS.isdisjoint(bound.symbol.tags):
        return True
    return any(call.symbol in _OPERATIONS or call.symbol is prims.wait_tensor for call in innermost(bound))


def computes(bound: BoundSymbol) -> bool:
    """Return whether a call does more than communicate, view a tensor, or end a lifetime."""
    return bound.symbol not in STATEMENTS and not communicates(bound) and not is_view(bound)


def collectives_of(trace: Trace) -> list[Collective]:
    """Return the collectives of an executable trace, in the order in which they start."""
    waits: dict[str, int] = {}  # by the name of the awaited value
    for position, bound in enumerate(trace.bound_symbols):
        for name in _awaited(bound):
            waits.setdefault(name, position)
    return [
        Collective(operation, group, size, count, whole, start, wait, _names(overlap(trace, start, wait)), bound.source)
        for start, bound in enumerate(trace.bound_symbols)
        for operation, group, size, count, whole, wait in _started(start, bound, waits)
    ]


def overlap(trace: Trace, start: int, wait: int | None) -> list[BoundSymbol]:
    """Return the calls of the trace that compute between a collective's start and its wait."""
    return [bound for bound in trace.bound_symbols[start + 1 : start if wait is None else wait] if computes(bound)]


def _names(calls: Iterable[BoundSymbol]) -> tuple[str, ...]:
    return tuple(bound.symbol.name for bound in calls)


def _awaited(bound: BoundSymbol) -> Iterator[str]:
    if Tag.AWAITS in bound.symbol.tags:
        yield from (x.name for x in bound.args[0])
    elif communicates(bound):
        yield from (call.args[0].name for call in innermost(bound) if call.symbol is prims.wait_tensor)


def _started(start: int, bound: BoundSymbol, waits: Mapping[str, int]) -> Iterator[tuple[Any, ...]]:
    """Yield (operation, group, group_size, tensors, bytes, wait) of the messages that a call starts."""
    if Tag.SENDS in bound.symbol.tags:
        _, lengths, _, _, (size, group, replicas) = bound.args
        started, gathers = tensors(bound.output), bound.symbol is start_unshard
        payload = [x for x, length in zip(started, lengths, strict=True) if not gathers or length is not None]
        whole = sum(map(bytes_of, payload)) * (1 if gathers else size)  # a reduction's output is only a part of it
        operation, wait = "all_gather" if gathers else "reduce_scatter", waits.get(started[0].name)
        yield operation, group, size, len(started), whole, wait
        if replicas is not None and not gathers:
            yield "all_reduce", replicas, _size_of(replicas), len(started), whole // size, wait
    elif communicates(bound):
        for call in innermost(bound):
            if call.symbol in _OPERATIONS:
                arguments = call.symbol.bind(call.args, call.kwargs)
                group = arguments["group"]
                size = arguments.get("group_size") or _size_of(group)
                whole = max(bytes_of(call.args[0]), bytes_of(call.output))
                wait = start if call.symbol in _SYNCHRONOUS else waits.get(call.output.name)
                yield _OPERATIONS[call.symbol], group, size, 1, whole, wait


def _size_of(group: str) -> int | None:
    pg = process_group(group)
    return None if pg is None else pg.size()
