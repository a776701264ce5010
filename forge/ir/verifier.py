"""A trace's invariants: each name has one definition, and no call reads a name before or after it is defined."""

from collections.abc import Iterator
from typing import NamedTuple

from forge.ir.printing import DEL
from forge.ir.symbol import BoundSymbol
from forge.ir.trace import Trace


class NameFault(NamedTuple):
    """A name that is read where it is undefined or deleted, or is redefined. call: None for the output."""

    name: str
    call: BoundSymbol | None
    is_definition: bool

    def __str__(self) -> str:
        who = "the output" if self.call is None else repr(self.call)
        if self.is_definition:
            return f"{who} defines {self.name}, which is defined before"
        return f"{who} reads {self.name}, which no call before it defines, or one deletes"


def name_faults(trace: Trace) -> Iterator[NameFault]:
    """Yield the faults of a trace's names, in the order of its calls."""
    defined = {*trace.input_names, *trace.constants}
    alive = set(defined)
    for bound in trace.bound_symbols:
        yield from (NameFault(name, bound, False) for name in bound.inputs if name not in alive)
        yield from (NameFault(name, bound, True) for name in bound.outputs if name in defined)
        if bound.symbol is DEL:
            alive.difference_update(bound.inputs)
        defined.update(bound.outputs)
        alive.update(bound.outputs)
    yield from (NameFault(name, None, False) for name in trace.output_names if name not in alive)


def verify(trace: Trace) -> None:
    """Raise AssertionError if a name of a trace has two definitions, or is read where it has none."""
    fault = next(name_faults(trace), None)
    assert fault is None, f"{trace.name}, after {trace.stage}: {fault}"
