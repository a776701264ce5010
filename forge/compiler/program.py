"""The result of a front end: a pure trace, and an epilogue that has eager's effects on the caller's memory.

The trace computes values. The epilogue writes mutated inputs back, makes the outputs that are views (of inputs, or of
each other) and builds the user's result. In training it runs outside of the autograd.Function, so that torch's autograd
sees the writes and the views.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from forge import prims
from forge.ir import BoundSymbol, Proxy, Tag, TensorProxy, Trace, current_trace, recording
from forge.ir.memory import Memory, Storage
from forge.ir.pytree import leaves, names, proxies, rename, tree_map
from forge.ir.source import Source
from forge.ir.symbol import substitute


class StrictError(RuntimeError):
    """A program breaks a rule that its user has set.

    The rules are those of `forge.jit(strict=True)`, which refuses torch functions without a torchlang symbol and code
    that forge cannot compile, and of `Explanation.require`.
    """


class Unsupported(NotImplementedError):
    """A program that forge cannot compile and that runs in eager; carries the reason.

    advice: what to write instead. source: the location of the call, which the message names.
    """

    def __init__(self, reason: str, advice: str = "take that call out of it") -> None:
        super().__init__(reason)
        self.advice = advice
        self.source: Source | None = None

    def __str__(self) -> str:
        line = self.source and self.source.line
        return f"{self.args[0]} ({line})" if line else str(self.args[0])

    def at(self, source: Source | None) -> None:
        """Set the source to the call at `source`, unless a nested call is already known."""
        self.source = self.source or source


class EagerFallback(Exception):
    """A frame must run in eager because of one call. `reason` is the exception that torch would raise for it though
    Dynamo's fake tensors did not; in eager the program may catch it. If Dynamo's graph differs from the program,
    `reason` is an Unsupported."""

    def __init__(self, reason: Exception, source: Source | None = None) -> None:
        line = source.line if source is not None else None
        super().__init__(f"{reason} ({line})" if line else str(reason))
        self.reason = reason
        self.source = source
        if line:
            reason.add_note(f"at {line}")


class Program:
    """A recorded program.

    `trace` maps inputs to a flat list of values; `epilogue` maps inputs and those values to the result, and is None
    if the result is a tuple of the values themselves. `mutated` lists the positions of inputs that change. `grad`
    is the grad mode in which the program is called. `weights` lists the positions of inputs that are parameters or
    buffers of modules, `unversioned` those of weights whose changes no version counter records.
    """

    weights: Sequence[int] = ()
    unversioned: Sequence[int] = ()

    def __init__(self, trace: Trace, epilogue: Trace | None, mutated: list[int], *, grad: bool) -> None:
        self.trace = trace
        self.epilogue = epilogue
        self.mutated = mutated
        self.grad = grad


class _Finisher:
    """Collector of the values that an epilogue needs."""

    def __init__(self, trace: Trace, memory: Memory) -> None:
        self.trace = trace
        self.memory = memory
        self.inputs = {proxy.name for proxy in trace.inputs}
        self.values: list[TensorProxy] = []
        self.value_of: dict[int, TensorProxy] = {}
        self.used_names: set[str] = set(self.inputs) | set(trace.constants)
        self.dirty = {storage.root.name for storage in memory.dirty}
        self.items = {
            bound.output.name: bound for bound in trace.bound_symbols if bound.symbol in (prims.item, prims.length)
        }

    def value(self, storage: Storage) -> TensorProxy:
        """Return the storage's final value, as a value of the trace that nothing else aliases."""
        value = self.value_of.get(id(storage))
        if value is None:
            value = storage.value
            if value.name in self.used_names:
                value = prims.clone(value)
            self.used_names.add(value.name)
            self.value_of[id(storage)] = value
            self.values.append(value)
        return value

    def numbers(self, of: Any) -> list[BoundSymbol]:
        """Return the calls by which an epilogue can read the numbers in a pytree."""
        return [self.read(self.items[name]) for name in dict.fromkeys(names(of)) if name in self.items]

    def read(self, item: BoundSymbol) -> BoundSymbol:
        """Return the call by which an epilogue can read a number of a tensor: an unchanged input, or a value."""
        tensor, *rest = item.args
        if tensor.name not in self.inputs or tensor.name in self.dirty:
            tensor = prims.clone(tensor) if tensor.name in self.used_names else tensor
            self.used_names.add(tensor.name)
            self.values.append(tensor)
        return BoundSymbol(item.symbol, (tensor, *rest), {}, item.output)


def finish(trace: Trace, result: Any, *, grad: bool) -> Program:
    """End a recording whose handles form `result`; this thread is in the grad mode that the program leaves, and was
    in `grad` when it began."""
    memory = trace.memory
    with recording(trace), trace.set_tags(() if grad else {Tag.NO_GRAD}):
        finisher = _Finisher(trace, memory)
        inputs = {proxy.name: position for position, proxy in enumerate(trace.inputs)}
        dirty = [storage for storage in memory.dirty if storage.root.name in inputs]
        writes = [(storage, finisher.value(storage)) for storage in dirty]
        plan = tree_map(lambda leaf: _OutputPlan(leaf, finisher) if isinstance(leaf, TensorProxy) else leaf, result)
        numbers = finisher.numbers([leaf for leaf in leaves(plan) if not isinstance(leaf, _OutputPlan)])
    trace.output = tuple(finisher.values)
    _check_names(trace)
    mutated = [inputs[storage.root.name] for storage in dirty]
    simple = (
        not writes
        and torch.is_grad_enabled() == grad
        and isinstance(result, (tuple, list))
        and all(isinstance(each, _OutputPlan) and each.is_value for each in plan)
    )
    if simple and [each.base.name for each in plan] == [value.name for value in finisher.values]:
        return Program(trace, None, mutated, grad=grad)
    return Program(trace, _epilogue(trace, finisher, writes, plan, numbers, grad), mutated, grad=grad)


def _check_names(trace: Trace) -> None:
    """Raise Unsupported if a call reads a size that neither an input nor an earlier call defines."""
    definitions = {*trace.input_names, *trace.constants}
    for bound in trace.bound_symbols:
        for name in bound.inputs:
            if name not in definitions:
                raise Unsupported(f"{bound.symbol.id} reads the length {name}, which is known to no input")
        definitions.update(bound.outputs)


class _OutputPlan:
    """A plan for one tensor of the result: an input or a value, and a chain of views. written: values that are written
    to it afterwards, for the sake of its autograd history."""

    def __init__(self, handle: TensorProxy, finisher: _Finisher) -> None:
        ref = finisher.memory.ref(handle)
        storage = ref.storage
        self.chain = ref.chain
        needed = [tensor.name for step in self.chain for tensor in step.tensors]
        self.elsewhere = storage.root.name in finisher.memory.elsewhere
        self.from_input = storage.root.name in finisher.inputs and finisher.inputs.issuperset(needed)
        if self.from_input:
            self.base = storage.root
        elif storage.root.name in finisher.trace.constants or not finisher.inputs.issuperset(needed):
            self.base, self.chain = prims.clone(finisher.memory.read(handle)), ()
            finisher.values.append(self.base)
        else:
            self.base = finisher.value(storage)
        self.items = finisher.numbers([(step.args, step.kwargs) for step in self.chain])
        self.new_value: TensorProxy | None = None
        if finisher.memory.has_gained_history(handle) and self.chain:
            self.new_value = prims.clone(finisher.memory.read(handle))
            finisher.values.append(self.new_value)

    @property
    def is_value(self) -> bool:
        return not self.from_input and not self.chain and not self.elsewhere


class _Epilogue:
    """Writer of an epilogue's calls, each in its grad mode."""

    def __init__(self, grad: bool, inference: bool) -> None:
        self.grad = grad
        self.inference = inference
        self.views: dict[tuple[Any, ...], TensorProxy] = {}
        self.numbers: set[str] = set()

    def read(self, numbers: Iterable[BoundSymbol]) -> None:
        """Write calls that read a number of a tensor, once for all outputs that need it."""
        for number in numbers:
            if self.numbers.isdisjoint(number.outputs):
                self.numbers.update(number.outputs)
                current_trace().record(number)

    def set_grad(self, mode: bool) -> None:
        """Write a call that enables or disables grad for the calls after it."""
        if mode != self.grad:
            prims.set_grad_enabled(mode)
            self.grad = mode

    def write(self, storage: Storage, value: TensorProxy) -> None:
        """Write the final value of a changed input."""
        self.set_grad(not storage.silently)
        (prims.copy_ if storage.versioned else prims.copy_data_)(storage.root, value)

    def show(self, planned: _OutputPlan) -> TensorProxy:
        """Return a tensor of the result; views that several outputs share are written once."""
        result: TensorProxy = planned.base
        key: tuple[Any, ...] = (result.name,)
        if planned.elsewhere:
            result = self.get_or_make((*key, "elsewhere"), lambda: prims.as_inference(planned.base, not self.inference))
        self.read(planned.items)
        for step in planned.chain:
            key = (*key, id(step))
            if key not in self.views:
                self.set_grad(step.grad)
            result = self.get_or_make(key, partial(step.show, result))
        if planned.new_value is not None:
            self.set_grad(True)
            prims.copy_(result, planned.new_value)
        return result

    def get_or_make(self, key: tuple[Any, ...], make: Callable[[], TensorProxy]) -> TensorProxy:
        if key not in self.views:
            self.views[key] = make()
        return self.views[key]


def _epilogue(
    trace: Trace,
    finisher: _Finisher,
    writes: list[tuple[Storage, TensorProxy]],
    plan: Any,
    numbers: list[BoundSymbol],
    grad: bool,
) -> Trace:
    epilogue = trace.derive("epilogue", name="epilogue", inputs=[*trace.inputs, *finisher.values])
    sources = {name: bound.source for bound in trace.bound_symbols for name in bound.outputs}
    with recording(epilogue), epilogue.set_tags({Tag.NO_FUSE}):
        writer = _Epilogue(grad, finisher.memory.inference)
        writer.read(numbers)
        for storage, value in writes:
            epilogue.source = sources.get(value.name)
            writer.write(storage, value)
        epilogue.source = None
        epilogue.output = tree_map(lambda leaf: writer.show(leaf) if isinstance(leaf, _OutputPlan) else leaf, plan)
        writer.set_grad(torch.is_grad_enabled())
    return epilogue


def inline_epilogue(program: Program, trace: Trace) -> Trace:
    """Return one trace that computes and then runs the epilogue, for programs that need no gradient.

    `trace` is the program's own, transformed.
    """
    epilogue = program.epilogue
    quiet = program.grad and bool(trace.differentiable_inputs)
    if epilogue is None and not quiet:
        return trace
    stage = trace.stage if epilogue is None else "with epilogue"
    joined = trace.derive(stage, trace.bound_symbols, output=epilogue.output if epilogue else trace.output)
    if quiet:
        with recording(joined):
            with joined.collecting() as off:
                prims.set_grad_enabled(False)
            with joined.collecting() as on:
                prims.set_grad_enabled(True)
        joined.bound_symbols[:] = [*off, *joined.bound_symbols, *on]
    if epilogue is not None:
        joined.names |= epilogue.names
        others = _of_other_names(epilogue, joined)
        joined.bound_symbols.extend(substitute(bound, others) for bound in epilogue.bound_symbols)
        joined.output = rename(joined.output, others)
    return joined


def write_early(epilogue: Trace, forward: Trace, active: Collection[str]) -> tuple[Trace, Trace]:
    """Move the epilogue's writes that autograd need not see (running statistics, counters) to the end of the forward.

    Return (epilogue, forward). torch.utils.checkpoint then repeats these writes: it stops the recomputation when the
    forward's tensors are saved.

    active: the names of values through which gradients flow.
    """

    def is_early(bound: BoundSymbol) -> bool:
        if bound.symbol not in (prims.copy_, prims.copy_data_):
            return False
        target, value = bound.args
        return not target.requires_grad and value.name not in active

    early = [bound for bound in epilogue.bound_symbols if is_early(bound)]
    late = [bound for bound in epilogue.bound_symbols if not is_early(bound)]
    return epilogue.derive(epilogue.stage, late), forward.derive(forward.stage, [*forward.bound_symbols, *early])


def _of_other_names(epilogue: Trace, joined: Trace) -> dict[str, Proxy]:
    """Return new names for values of the epilogue whose names a transform has given to another value of the trace:
    a result, a constant (folded), or an input (a folded weight)."""
    collisions = {
        *joined.input_names,
        *joined.constants,
        *(name for call in joined.bound_symbols for name in call.outputs),
    }
    collisions.intersection_update(name for bound in epilogue.bound_symbols for name in bound.outputs)
    others: dict[str, Proxy] = {}
    for proxy in proxies([bound.output for bound in epilogue.bound_symbols]):
        if proxy.name in collisions and proxy.name not in others:
            others[proxy.name] = copy.copy(proxy)
            others[proxy.name].name = joined.fresh_name()
    return others
