"""Splitting a joint program into a forward that saves residuals and a backward that reads them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch

from forge import prims
from forge.ir import BoundSymbol, NumberProxy, Proxy, Tag, TensorProxy, Trace, recording
from forge.ir.printing import in_words
from forge.ir.pytree import names, proxies, rename
from forge.ir.pytree import tensors as tensors_of
from forge.ir.source import Source
from forge.transforms.cse import merge_calls
from forge.transforms.dce import KEPT, live_calls
from forge.transforms.grad import Joint, backward
from forge.transforms.shared_memory import SharedMemory


class SavedValue(NamedTuple):
    """A tensor that a forward saves for its backward.

    metadata: in words. bytes: None for symbolic sizes. own: whether saving it keeps memory alive that the
    program's inputs and results do not. source: the location of its producer.
    """

    name: str
    metadata: str
    bytes: int | None
    own: bool
    source: Source | None


@dataclass(eq=False)
class Split:
    """A forward that returns (outputs, saved tensors, saved numbers), and the values that the backward may read."""

    forward: Trace
    saved_tensors: list[TensorProxy]
    saved_numbers: list[Proxy]

    def saved_values(self) -> list[SavedValue]:
        """Return the saved values, in order."""
        outputs, values, _ = self.forward.output
        memory = SharedMemory(self.forward.bound_symbols)
        there = memory.of([*self.forward.input_names, *names(outputs)])
        makers = {name: bound for bound in self.forward.bound_symbols for name in bound.outputs}
        result = []
        for proxy, value in zip(self.saved_tensors, values, strict=True):
            count = proxy.numel()
            size = count * proxy.dtype.itemsize if isinstance(count, int) else None
            source = makers[proxy.name].source if proxy.name in makers else None
            result.append(SavedValue(proxy.name, in_words(proxy), size, value.name not in there, source))
        return result


def seeds_of(
    trace: Trace, outputs: Sequence[TensorProxy], requires_grad: Iterable[bool] = repeat(False)
) -> dict[str, TensorProxy]:
    """Return the gradients of outputs of a trace, as inputs of its backward, by the output's name."""
    seeds = {}
    for output, required in zip(outputs, requires_grad, strict=False):
        name = f"grad_{output.name}"
        while name in trace.names:  # a differentiable backward has gradients among its own inputs
            name = f"{name}_"
        seeds[output.name] = TensorProxy(name, output.shape, output.dtype, output.device, requires_grad=required)
    return seeds


def backward_of(
    joint: Joint,
    outputs: Sequence[TensorProxy],
    targets: Sequence[Proxy],
    mutated: Iterable[str] = (),
    parameters: Collection[str] = (),
) -> tuple[Trace, set[str], set[str]]:
    """Return the backward from these outputs to the inputs `targets`, without repetitions; the names of values that it
    must read as copies (see `_exposed_names`), and of those that it must not recompute from (see
    `_read_for_some`).

    mutated: inputs that are written to after the forward. parameters: weights of modules, which change after the
    backward. Results of the forward's calls are not computed twice, except values to copy.
    """
    raw_backward = backward(joint, seeds_of(joint.forward, outputs), targets)
    visible = {*names(tensors_of(joint.forward.inputs)), *joint.forward.output_names}.difference(parameters)
    memory = SharedMemory(joint.forward.bound_symbols)
    exposed = _exposed_names(joint.forward, raw_backward, memory, mutated, visible)
    calls = [bound for bound in joint.forward.bound_symbols if exposed.isdisjoint(bound.outputs)]
    return _simplify(raw_backward, calls), exposed, _read_for_some(joint.forward, raw_backward, memory, visible)


def _simplify(trace: Trace, visible: list[BoundSymbol]) -> Trace:
    available: dict[tuple[Any, ...], BoundSymbol] = {}
    merge_calls(visible, protected=set(), available=available)
    calls, renamed = merge_calls(trace.bound_symbols, protected=set(), available=available)
    output = rename(trace.output, renamed)
    return trace.derive("backward, cse, dce", live_calls(calls, names(output)), output=output)


def backward_of_saved(joint: Joint, parts: Split, outputs: Sequence[TensorProxy], targets: Sequence[Proxy]) -> Trace:
    """Return the backward of a split forward; its inputs are the saved tensors, the saved numbers, and the
    gradients."""
    saved = {proxy.name for proxy in parts.saved_tensors}
    producers = [bound for bound in parts.forward.bound_symbols if not saved.isdisjoint(bound.outputs)]
    calls = joint.forward.bound_symbols
    # the backward's untagged calls include those that `rematerialize` has tagged since it was first made
    untagged = [bound.replace(tags=bound.tags - {Tag.RECOMPUTE}) for bound in calls if Tag.RECOMPUTE in bound.tags]
    visible = [*calls, *untagged, *producers]
    raw_backward = backward(joint, seeds_of(joint.forward, outputs), targets)
    while True:  # a saved value may depend on others that are not saved: these are seen, but cannot be read
        trace = recompute(parts.forward.bound_symbols, _simplify(raw_backward, visible))
        missing = {name for name in free_names(trace, set()) if name not in saved}
        readable = [bound for bound in visible if missing.isdisjoint(bound.outputs)]
        if len(readable) == len(visible):
            break
        visible = readable
    inputs = [*parts.saved_tensors, *parts.saved_numbers, *trace.inputs]
    return trace.derive(trace.stage, trace.bound_symbols, inputs=inputs)


def free_names(trace: Trace, lengths: set[str]) -> list[str]:
    """Return the names that a trace reads but neither defines nor takes as inputs, in order of first use. lengths: as
    for `reads`."""
    definitions = set(trace.input_names) | set(trace.constants)
    read: dict[str, None] = {}
    for bound in trace.bound_symbols:
        for name in bound.reads(lengths):
            if name not in definitions:
                read.setdefault(name)
        definitions.update(bound.outputs)
    for name in trace.output_names:
        if name not in definitions:
            read.setdefault(name)
    return list(read)


def split(forward: Trace, backward: Trace, copied: Collection[str] = (), also: Sequence[Proxy] = ()) -> Split:
    """Cut the joint program after the forward: exactly the values that the backward reads are saved.

    A composite of the forward stays one call unless the backward reads a value from inside it. Recomputed values are
    not saved. The values `copied` (see `backward_of`) are saved as copies, if the backward reads them. The values
    `also` are saved in any case.
    """
    sizes = _lengths(forward)
    more = [proxy.name for proxy in also]
    live = {*free_names(backward, sizes), *more, *forward.output_names}
    calls = unfold(forward.bound_symbols, live)
    needed = list(dict.fromkeys([*free_names(recompute(calls, backward), sizes), *more]))
    live = {*needed, *forward.output_names}
    calls = live_calls(unfold(calls, live), live)
    defined = {proxy.name: proxy for proxy in forward.inputs}
    for bound in calls:
        defined.update((proxy.name, proxy) for proxy in proxies(bound.output))
    missing = [name for name in needed if name not in defined]
    assert not missing, f"the backward reads {missing}, which the forward does not make"
    operands = [*tensors_of(backward.inputs), *tensors_of([defined[name] for name in needed])]
    needed += [name for name in _symbols(forward.inputs, operands) if name in sizes and name not in needed]
    saved = [defined[name] for name in needed]
    tensors = [proxy for proxy in saved if isinstance(proxy, TensorProxy)]
    numbers = [proxy for proxy in saved if not isinstance(proxy, TensorProxy)]
    new = forward.derive("split", calls, name="forward")
    with recording(new):
        copies = tuple(prims.clone(proxy) if proxy.name in copied else proxy for proxy in tensors)
    new.output = (forward.output, copies, tuple(numbers))
    return Split(new, tensors, numbers)


def _symbols(inputs: Iterable[Proxy], tensors: Iterable[TensorProxy]) -> list[str]:
    """Return the symbols that a backward may read without naming them: those in the sizes and strides of its inputs. A
    tensor defines only symbols that are sizes by themselves, and integers cost next to nothing."""
    numbers = [proxy.name for proxy in inputs if isinstance(getattr(proxy, "value", None), torch.SymInt)]
    return list(dict.fromkeys([*names([proxy.shape for proxy in tensors]), *numbers]))


def _exposed_names(
    forward: Trace, raw_backward: Trace, memory: SharedMemory, mutated: Iterable[str], visible: Collection[str]
) -> set[str]:
    """Return the names of values whose memory may be written to between forward and backward. A backward that reads
    one, unlike eager's, must read a copy.

    These are the inputs `mutated`, which the program itself writes to, and the values `visible` to the caller, inputs
    and results. Values that gradient rules read are not exposed: eager saves them, too, and a write to one is an error
    there. Aliases are treated alike. raw_backward: the backward as the rules make it.
    """
    sizes = _lengths(forward)
    live = raw_backward.derive(raw_backward.stage, live_calls(raw_backward.bound_symbols, raw_backward.output_names))
    read = set(free_names(live, sizes))
    read.update(free_names(recompute(unfold(forward.bound_symbols, read), live), sizes))
    return memory.of(mutated) | (memory.of(visible) - memory.of(read))


def _read_for_some(forward: Trace, raw_backward: Trace, memory: SharedMemory, visible: Collection[str]) -> set[str]:
    """Return the names of those values `visible` to the caller that gradient rules read for gradients of some outputs
    and not of others, and of their aliases.

    Eager allows a change of such a value before a backward from the others alone, which therefore must not read it: no
    call that reads it is recomputed. raw_backward: the backward as the rules make it, from gradients of several
    outputs.
    """
    seeds, sizes = raw_backward.input_names, _lengths(forward)
    if len(seeds) < 2:
        return set()
    flows = {name: {name} for name in seeds}  # the gradients of outputs that a value depends on
    needs: dict[str, set[str]] = {}  # the operands of each value that depends on no gradient
    read: dict[str, set[str]] = {name: set() for name in seeds}
    definitions = {*seeds, *raw_backward.constants}
    for bound in live_calls(raw_backward.bound_symbols, raw_backward.output_names):
        operands = bound.reads(sizes)
        origins = set().union(*[flows.get(name, ()) for name in operands])
        below = set().union(
            *[needs.get(name, ()) for name in operands], (name for name in operands if name not in definitions)
        )
        for origin in origins:
            read[origin] |= below
        for name in bound.outputs:
            definitions.add(name)
            flows[name] = origins
            if not origins:
                needs[name] = below
    groups = [memory.of(each).intersection(visible) for each in read.values()]
    everything: set[str] = set().union(*groups)
    return memory.of(everything.difference(everything.intersection(*groups)))


def _lengths(forward: Trace) -> set[str]:
    outputs = (bound.output for bound in forward.bound_symbols)
    return {proxy.name for proxy in (*forward.inputs, *outputs) if isinstance(proxy, NumberProxy)}


def recompute(forward: list[BoundSymbol], backward: Trace) -> Trace:
    """Return the backward with the calls of the forward that it recomputes, each just before its first use.

    A random call is not recomputed: its draws are saved.
    """
    makers = {
        name: bound
        for call in forward
        for bound in (leaf_calls(call.subsymbols) if Tag.OPAQUE_TO_PASSES in call.tags else [call])
        if Tag.RECOMPUTE in bound.tags and KEPT.isdisjoint(bound.all_tags)
        for name in bound.outputs
    }
    if not makers:
        return backward
    calls: list[BoundSymbol] = []
    visited: set[str] = set()

    def make(names: list[str]) -> None:  # not recursive: chains are long
        waiting: list[tuple[BoundSymbol | None, Iterator[str]]] = [(None, iter(names))]
        while waiting:
            bound, rest = waiting[-1]
            name = next(rest, None)
            if name is None:
                waiting.pop()
                calls.extend([bound] if bound is not None else ())
            elif name in makers and name not in visited:
                visited.update(makers[name].outputs)
                waiting.append((makers[name], iter(makers[name].inputs)))

    for bound in backward.bound_symbols:
        make(bound.inputs)
        calls.append(bound)
    make(backward.output_names)
    return backward.derive(f"{backward.stage}, recompute", calls)


def leaf_calls(calls: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Yield the calls without parts, among these and inside of them."""
    for bound in calls:
        yield from leaf_calls(bound.subsymbols) if bound.subsymbols else (bound,)


def unfold(calls: list[BoundSymbol], targets: set[str]) -> list[BoundSymbol]:
    """Return the calls with every composite replaced by its subsymbols that contains a wanted name."""
    flat = []
    for bound in calls:
        if bound.subsymbols and Tag.OPAQUE_TO_PASSES not in bound.tags and _shows_inside(bound, targets):
            flat.extend(unfold(list(bound.subsymbols), targets))
        else:
            flat.append(bound)
    return flat


def _shows_inside(bound: BoundSymbol, targets: set[str]) -> bool:
    outside = set(bound.outputs)
    return any((name in targets and name not in outside) for sub in bound.subsymbols for name in _all_outputs(sub))


def _all_outputs(bound: BoundSymbol) -> list[str]:
    names = list(bound.outputs)
    for sub in bound.subsymbols:
        names.extend(_all_outputs(sub))
    return names
