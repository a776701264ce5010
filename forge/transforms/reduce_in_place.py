"""Reductions over processes that write to their input's memory, if nothing reads the input again.

    reduced = all_reduce(product)    ->    reduced = all_reduce_(product)

torch's functional collective copies its input first. The copy costs time and memory, and has a new address at each
call, where CUDA graphs need fixed ones. Inductor does the same for the programs that it compiles (its pass reinplace).
"""

from collections.abc import Collection, Iterator
from itertools import islice

from forge import prims
from forge.ir import BoundSymbol, Symbol, Tag, Trace
from forge.transforms.makers import innermost
from forge.transforms.overlap_calls import is_start
from forge.transforms.shared_memory import SharedMemory


def is_reduction(bound: BoundSymbol) -> bool:
    """Return whether a claimed call is a single prims.all_reduce."""
    return [call.symbol for call in islice(innermost(bound), 2)] == [prims.all_reduce]


def reduce_in_place(trace: Trace, operator: Symbol, unknown: Collection[str] = ()) -> Trace:
    """Return the claimed trace with calls of `operator` for reductions whose input dies.

    The input is a value that calls of the trace made, and aliases no argument of theirs. Neither it nor a view of it is
    returned, read later, or sent by another collective, which may be in flight.

    Args:
        trace: The claimed trace, with each collective where it runs.
        operator: The operator that has the arguments of prims.all_reduce and writes to the first one.
        unknown: The names of values that may have unknown aliases, beside those of opaque calls.
    """
    places = set(_places(trace, operator, unknown))
    if not places:
        return trace
    calls = [_in_place(x, operator) if place in places else x for place, x in enumerate(trace.bound_symbols)]
    return trace.derive("reduce_in_place", calls)


def _places(trace: Trace, operator: Symbol, unknown: Collection[str]) -> Iterator[int]:
    shared = SharedMemory(trace.bound_symbols)
    visible = {*shared.of([*trace.input_names, *trace.output_names, *trace.constants]), *unknown}  # to others
    readers: dict[str, list[int]] = {}
    for place, bound in enumerate(trace.bound_symbols):
        for name in bound.inputs:
            readers.setdefault(name, []).append(place)
        if Tag.OPAQUE in bound.all_tags:
            visible.update(bound.inputs, bound.outputs)  # it may keep aliases of them
    for place, bound in enumerate(trace.bound_symbols):
        if bound.symbol.executor is not operator.executor or not is_reduction(bound):
            continue
        memory = shared.of([bound.args[0].name])
        others = {each for name in memory for each in readers.get(name, ())} - {place}
        is_sent = any(_sends(trace.bound_symbols[each]) for each in others)
        if memory.isdisjoint(visible) and not is_sent and all(each < place for each in others):
            yield place


def _sends(bound: BoundSymbol) -> bool:
    return Tag.SENDS in bound.all_tags or is_start(bound)


def _in_place(bound: BoundSymbol, operator: Symbol) -> BoundSymbol:
    return BoundSymbol(operator, bound.args, bound.kwargs, bound.output, bound.subsymbols, bound.source, bound.tags)
