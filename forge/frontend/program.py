"""What a front end hands over: a pure trace, and an epilogue that does what eager does to its caller's memory.

The trace computes values. The epilogue writes changed inputs back, makes the outputs that are views (of inputs, or of
each other) and builds the user's result. In training it runs outside of the autograd.Function, so that torch's autograd
sees the writes and the views.
"""

from typing import Any

from forge import prims
from forge.ir import Proxy, TensorProxy, Trace, recording
from forge.ir.memory import Memory, Storage
from forge.ir.pytree import tree_map


class Program:
    """A recorded program.

    `trace` maps inputs to a flat list of values; `epilogue` maps inputs and those values to the result, and is None
    where the result is a tuple of the values themselves. `mutated` lists the positions of inputs that change.
    """

    def __init__(self, trace: Trace, epilogue: Trace | None, mutated: list[int]) -> None:
        self.trace = trace
        self.epilogue = epilogue
        self.mutated = mutated


class _Finisher:
    """Collects the values that an epilogue needs."""

    def __init__(self, trace: Trace, memory: Memory) -> None:
        self.trace = trace
        self.memory = memory
        self.inputs = {proxy.name for proxy in trace.inputs}
        self.values: list[TensorProxy] = []
        self.value_of: dict[int, TensorProxy] = {}
        self.taken: set[str] = set(self.inputs) | set(trace.constants)

    def value(self, storage: Storage) -> TensorProxy:
        """The storage's final value, as a value of the trace that nothing else shares."""
        known = self.value_of.get(id(storage))
        if known is None:
            known = storage.value
            if known.name in self.taken:
                known = prims.clone(known)
            self.taken.add(known.name)
            self.value_of[id(storage)] = known
            self.values.append(known)
        return known


def finish(trace: Trace, result: Any, memory: Memory) -> Program:
    """Ends a recording whose handles form `result`."""
    with recording(trace):
        finisher = _Finisher(trace, memory)
        inputs = {proxy.name: position for position, proxy in enumerate(trace.inputs)}
        written = [storage for storage in memory.written if storage.root.name in inputs]
        writes = [(storage, finisher.value(storage)) for storage in written]
        plan = tree_map(lambda leaf: _Planned(leaf, finisher) if isinstance(leaf, TensorProxy) else leaf, result)
    trace.output = tuple(finisher.values)
    mutated = [inputs[storage.root.name] for storage in written]
    simple = (
        not writes
        and isinstance(result, (tuple, list))
        and all(isinstance(each, _Planned) and each.is_value for each in plan)
    )
    if simple and [each.base.name for each in plan] == [value.name for value in finisher.values]:
        return Program(trace, None, mutated)
    return Program(trace, _epilogue(trace, finisher, writes, plan), mutated)


class _Planned:
    """How one tensor of the result is made: from an input or a value, through a chain of views."""

    def __init__(self, handle: TensorProxy, finisher: _Finisher) -> None:
        ref = finisher.memory.ref(handle)
        storage = ref.storage
        self.chain = ref.chain
        self.from_input = storage.root.name in finisher.inputs
        if self.from_input:
            self.base = storage.root
        elif storage.root.name in finisher.trace.constants:
            self.base, self.chain = prims.clone(finisher.memory.read(handle)), ()
            finisher.values.append(self.base)
        else:
            self.base = finisher.value(storage)

    @property
    def is_value(self) -> bool:
        return not self.from_input and not self.chain


def _epilogue(trace: Trace, finisher: _Finisher, writes: list[tuple[Storage, TensorProxy]], plan: Any) -> Trace:
    epilogue = trace.derive("epilogue", name="epilogue", inputs=[*trace.inputs, *finisher.values])
    with recording(epilogue):
        for storage, value in writes:
            prims.copy_(storage.root, value, storage.silently)
        cache: dict[tuple, Proxy] = {}
        epilogue.output = tree_map(lambda leaf: _show(leaf, cache) if isinstance(leaf, _Planned) else leaf, plan)
    return epilogue


def _show(planned: _Planned, cache: dict[tuple, Proxy]) -> Proxy:
    shown: Proxy = planned.base
    key: tuple = (shown.name,)
    for step in planned.chain:
        key = (*key, id(step))
        if key not in cache:
            cache[key] = step.show(shown)
        shown = cache[key]
    return shown


def inline_epilogue(trace: Trace, epilogue: Trace | None) -> Trace:
    """One trace that computes and then does what the epilogue does: what runs when no gradient is needed."""
    if epilogue is None:
        return trace
    joined = trace.derive("with epilogue", [*trace.bound_symbols, *epilogue.bound_symbols], output=epilogue.output)
    joined.names |= epilogue.names
    return joined
