"""Updates of a slice of an input, such as one position of a cache, are written in place.

    new = index_copy(cache, 2, position, key)          new = cache.index_copy_(2, position, key)
    out = attend(query, new)                       ->  out = attend(query, new)
    cache.copy_(new)

Recording turns each write into a new value, which is copied into the input at the end of the program: the whole input
would be read and written twice for one element. Inductor has such a pass, too (reinplace), for the programs that it
compiles.
"""

from collections.abc import Callable

from forge import prims, torchlang
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace
from forge.ir.pytree import names
from forge.ir.symbol import substitute
from forge.transforms.dce import KEPT
from forge.transforms.shared_memory import SharedMemory

# calls that read only the metadata of their first argument, and return the value of their second
_METADATA_FIRST = frozenset({prims.copy_, prims.with_data, torchlang.copy})


def write_in_place(trace: Trace, operator_of: Callable[[BoundSymbol], Symbol | None]) -> Trace:
    """Return a program without gradients in which the input is updated in place.

    An input is not updated in place if another call reads it before or after, since calls are reordered later, or if
    its new value may alias a result. Writing twice has the effect of writing once, so the program may still run again
    in eager.

    Args:
        trace: The program, with the copies to its inputs.
        operator_of: Returns the operator that writes to a call's first argument the elements that the call replaces in
            a copy of it, and None for a call that is not such an update.
    """
    finder = _Finder(trace, operator_of)
    replaced: dict[int, BoundSymbol | None] = {}
    renamed: dict[str, TensorProxy] = {}
    for bound in trace.bound_symbols:
        updates = finder.updates_before(bound) if bound.symbol is prims.copy_ else None
        if updates is None:
            continue
        replaced[id(bound)] = None
        for call in updates:
            operator = operator_of(call)
            if operator is None:
                replaced[id(call)] = None
                renamed[call.output.name] = call.args[1]
            else:
                new = BoundSymbol(operator, call.args, call.kwargs, call.output, source=call.source, tags=call.tags)
                replaced[id(call)] = new
    if not replaced:
        return trace
    for name, proxy in renamed.items():  # in order: a later one may stand for an earlier one
        renamed[name] = renamed.get(proxy.name, proxy)
    calls = [replaced.get(id(bound), bound) for bound in trace.bound_symbols]
    return trace.derive("write_in_place", [substitute(call, renamed) for call in calls if call is not None])


class _Finder:
    def __init__(self, trace: Trace, operator_of: Callable[[BoundSymbol], Symbol | None]) -> None:
        self.operator_of = operator_of
        self.inputs = set(trace.input_names)
        self.makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
        self.readers: dict[str, list[BoundSymbol]] = {}  # of a value, not only of its metadata
        outputs = set(trace.output_names)
        for bound in reversed(trace.bound_symbols):
            is_read = any(name in outputs or name in self.readers for name in bound.outputs)
            if is_read or not KEPT.isdisjoint(bound.all_tags):
                for name in names(bound.args[1:]) if bound.symbol in _METADATA_FIRST else bound.inputs:
                    self.readers.setdefault(name, []).append(bound)
        self.returned = SharedMemory(trace.bound_symbols).of(trace.output_names)

    def updates_before(self, copy: BoundSymbol) -> list[BoundSymbol] | None:
        """Return the calls that compute the new value of a copy's target from its old one, in order; None if they
        cannot write in place."""
        target, value = copy.args
        if target.name not in self.inputs:
            return None
        chain = [copy]
        while value.name != target.name:
            call = self.makers.get(value.name)
            if call is None or value.name in self.returned or not self._is_update(call):
                return None
            if (value.dtype, value.device, tuple(value.shape)) != (target.dtype, target.device, tuple(target.shape)):
                return None
            if len(chain) > 1 and not self._is_read_by_these_alone(value.name, chain):
                return None
            chain.append(call)
            value = call.args[1 if call.symbol in _METADATA_FIRST else 0]
        writes = any(call.symbol not in _METADATA_FIRST for call in chain)
        return chain[:0:-1] if writes and self._is_read_by_these_alone(target.name, chain) else None

    def _is_update(self, call: BoundSymbol) -> bool:
        if call.symbol in _METADATA_FIRST:
            return True
        takes_tensor_first = bool(call.args) and isinstance(call.args[0], TensorProxy)
        return takes_tensor_first and self.operator_of(call) is not None

    def _is_read_by_these_alone(self, name: str, calls: list[BoundSymbol]) -> bool:
        return all(
            any(reader is call for call in calls) and not _is_read_by_what_it_writes(name, reader)
            for reader in self.readers.get(name, ())
        )


def _is_read_by_what_it_writes(name: str, call: BoundSymbol) -> bool:
    """Return whether an update reads a value for its index or its source: it would read its own writes."""
    return call.symbol not in _METADATA_FIRST and name in names([call.args[1:], call.kwargs])
