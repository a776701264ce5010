"""Writes to inputs joined into one call: running statistics and counters, of which a model has hundreds."""

from collections.abc import Iterable
from typing import Any

from forge import prims
from forge.ir import BoundSymbol, Symbol, Tag, Trace
from forge.ir.symbol import NO_TAGS
from forge.prims.core import same_shape
from forge.transforms.shared_memory import SharedMemory

_BARRIERS = frozenset({Tag.EFFECT, Tag.OPAQUE, Tag.DONATES})  # their writes are not known


class _Group:
    """Copies of one dtype and device, which may run at the position of the last of them."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.targets: set[str] = set()  # with their aliases
        self.sources: set[str] = set()

    def add(self, place: int, targets: Iterable[str], sources: Iterable[str]) -> None:
        self.places.append(place)
        self.targets.update(targets)
        self.sources.update(sources)


def is_copy(bound: BoundSymbol) -> bool:
    """Return whether a claimed call is a single prims.copy_."""
    return [call.symbol for call in bound.subsymbols] == [prims.copy_]


def join_copies(trace: Trace, operator: Symbol) -> Trace:
    """Return the claimed trace with the copies to inputs as calls of `operator`, a (targets, sources) of the executor
    that runs them: one per dtype and device, at the position of the last copy.

    A copy runs later only if no call in between reads or writes its target, or writes its source.
    """
    calls = trace.bound_symbols
    groups = [group.places for group in _groups(trace, operator.executor) if len(group.places) > 1]
    if not groups:
        return trace
    joined: dict[int, BoundSymbol | None] = {place: None for places in groups for place in places}
    joined.update((places[-1], _join([calls[place] for place in places], operator)) for places in groups)
    new = [joined.get(place, bound) for place, bound in enumerate(calls)]
    return trace.derive("join_copies", [bound for bound in new if bound is not None])


def _groups(trace: Trace, executor: Any) -> list[_Group]:
    groups: list[_Group] = []
    open_groups: dict[Any, _Group] = {}
    shared = SharedMemory(trace.bound_symbols)
    inputs = set(trace.input_names)

    def close(*, reads: set[str], writes: set[str]) -> None:
        for key, group in [*open_groups.items()]:
            if not (group.targets.isdisjoint(reads | writes) and group.sources.isdisjoint(writes)):
                del open_groups[key]

    for place, bound in enumerate(trace.bound_symbols):
        if not is_copy(bound) or bound.args[0].name not in inputs:
            if not _BARRIERS.isdisjoint(bound.all_tags):
                open_groups.clear()
            elif open_groups:
                close(reads=shared.of([*bound.inputs, *bound.outputs]), writes=set())
            continue
        target, source = bound.args
        targets, sources = shared.of([target.name]), shared.of([source.name])
        close(reads=sources, writes=targets)
        if bound.symbol.executor is executor and targets.isdisjoint(sources) and _are_alike(target, source):
            key = target.device, target.dtype
            if key not in open_groups:
                open_groups[key] = _Group()
                groups.append(open_groups[key])
            open_groups[key].add(place, targets, sources)
    return groups


def _are_alike(target: Any, source: Any) -> bool:
    """Return whether torch's multi-tensor kernel accepts both; it accepts no conjugates."""
    if target.dtype is not source.dtype or target.device != source.device or target.dtype.is_complex:
        return False
    return same_shape(target.shape, source.shape)


def _join(copies: list[BoundSymbol], operator: Symbol) -> BoundSymbol:
    targets, sources = [[bound.args[i] for bound in copies] for i in (0, 1)]
    tags = NO_TAGS.union(*[bound.tags for bound in copies])
    return BoundSymbol(operator, (targets, sources), {}, None, copies, copies[-1].source, tags)
