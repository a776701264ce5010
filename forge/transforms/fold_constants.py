"""Constant folding: calls that depend on no input run once (masks, position ids, constants); those that depend on
weights alone, once until a weight changes (forge.jit(freeze=True))."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from forge import clang
from forge.ir import BoundSymbol, Dim, Proxy, Tag, TensorProxy, Trace, recording
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.pytree import leaves, names, proxies, tensors, tree_map
from forge.ir.symbol import substitute
from forge.transforms.dce import live_calls
from forge.transforms.makers import is_view
from forge.transforms.shared_memory import returned_names

PINNED = frozenset({Tag.RANDOM, Tag.EFFECT, Tag.UNINITIALIZED, Tag.OPAQUE, Tag.SYNCHRONIZING})
BYTE_LIMIT = 64 * 2**20


class FoldablePartition(NamedTuple):
    """A partitioned trace: `ahead` is a program of the calls that can run ahead of time, `rest` are the other calls,
    which read its results."""

    ahead: Trace
    rest: list[BoundSymbol]

    @property
    def values(self) -> tuple[TensorProxy, ...]:
        """Return the results of `ahead`, which `rest` reads."""
        values: tuple[TensorProxy, ...] = self.ahead.output
        return values


def fold_constants(
    trace: Trace, run: Callable[[Trace], tuple[torch.Tensor, ...]], byte_limit: int = BYTE_LIMIT
) -> Trace:
    """Return the trace with input-independent calls evaluated now, by `run`, and kept as constants.

    Outputs are never constants (the caller may mutate them); views that only expand a constant stay; and the largest
    values are not folded if the constants would take more than `byte_limit` bytes in all.
    """
    too_large: set[str] = set()
    while True:
        calls = independent_calls(trace, left_out=too_large)
        partition = _partition(trace, _without_expanded_views(calls), calls, [])
        if sum(map(_bytes, partition.values)) <= byte_limit:
            break
        too_large.add(max(partition.values, key=_bytes).name)
    if not partition.values:
        return trace
    new = trace.derive("fold_constants", partition.rest)
    values = run(partition.ahead)
    new.constants.update(zip(names(partition.values), values, strict=True))
    return _with_numbers(new, {x.name: value for x, value in zip(partition.values, values, strict=True)})


def _without_expanded_views(calls: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Return the calls except expanding views, and views of these: they copy nothing."""
    expanded: set[str] = set()
    others: list[BoundSymbol] = []
    for bound in calls:
        if is_view(bound):
            input_size, output_size = (
                sum(x.numel() for x in tensors(part)) for part in ([bound.args, bound.kwargs], bound.output)
            )
            if output_size > input_size or not expanded.isdisjoint(bound.inputs):
                expanded.update(bound.outputs)
                continue
        others.append(bound)
    return others


def _with_numbers(trace: Trace, values: Mapping[str, torch.Tensor]) -> Trace:
    """Return the trace with numbers for single-element CPU constants, such as torch.tensor(8.0), in calls of tensors on
    another device, if the resulting dtype is the same. Fused regions and CUDA graphs read no memory of another
    device."""
    numbers = {name: x.item() for name, x in values.items() if not x.ndim and x.device.type == "cpu"}
    if not any(_meets_other_device(bound, numbers) for bound in trace.bound_symbols):
        return trace
    new = trace.derive(trace.stage)
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            calls = _call_with_numbers(new, bound, numbers) if _meets_other_device(bound, numbers) else None
            for call in calls or [bound]:
                new.record(call)
    for name in numbers.keys() - {name for bound in new.bound_symbols for name in bound.inputs}:
        del new.constants[name]
    return new


def _meets_other_device(bound: BoundSymbol, numbers: Mapping[str, Any]) -> bool:
    """Return whether a call's result is on another device than one of these CPU constants."""
    outputs = tensors(bound.output)
    return (
        not numbers.keys().isdisjoint(bound.inputs) and bool(outputs) and all(x.device.type != "cpu" for x in outputs)
    )


def _call_with_numbers(new: Trace, bound: BoundSymbol, numbers: Mapping[str, Any]) -> list[BoundSymbol] | None:
    """Return the calls with numbers; None if the symbol accepts none there, or its result would differ."""
    of_user = bound.symbol.op is not None or bound.symbol.rule is not None
    if of_user or not isinstance(bound.output, TensorProxy) or not PINNED.isdisjoint(bound.all_tags):
        return None
    if not all(_has_range_of(bound.output.dtype, numbers[name]) for name in bound.inputs if name in numbers):
        return None

    def number(leaf: Any) -> Any:
        return numbers.get(leaf.name, leaf) if isinstance(leaf, TensorProxy) else leaf

    args, kwargs = tree_map(number, (bound.args, bound.kwargs))
    try:
        with new.collecting() as recorded, new.set_tags(bound.tags, bound.source):
            output = bound.symbol(*args, **kwargs)
    except Exception:  # the symbol accepts no number there
        return None
    if not isinstance(output, TensorProxy) or _metadata(output) != _metadata(bound.output):
        return None
    return [substitute(call, {output.name: bound.output}) for call in recorded]


def _has_range_of(dtype: torch.dtype, value: float | complex) -> bool:
    """Return whether a number is in the range of a dtype: some functions of torch (clamp, where) reject other numbers,
    but convert a tensor."""
    size = abs(value)
    if dtype == torch.bool or not math.isfinite(size):
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return size <= torch.finfo(dtype).max
    return isinstance(value, int) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def partition_by_weights(trace: Trace, weights: Collection[str], byte_limit: int = BYTE_LIMIT) -> FoldablePartition:
    """Return the trace without the calls that depend on the inputs `weights` alone, and the program that computes the
    values that the rest reads of them.

    A call that makes more than `byte_limit` bytes from less than half as many stays.
    """
    calls = independent_calls(trace, weights, byte_limit)
    constant = set(map(id, independent_calls(trace)))
    prologue = [bound for bound in calls if id(bound) not in constant]
    return _partition(trace, prologue, calls, [proxy for proxy in trace.inputs if proxy.name in weights])


def _partition(
    trace: Trace, prologue: list[BoundSymbol], calls: list[BoundSymbol], inputs: list[Proxy]
) -> FoldablePartition:
    """Partition a program. `prologue` are the calls to remove from the rest, `calls` all that may run ahead."""
    prologue_ids = set(map(id, prologue))
    rest = live_calls([bound for bound in trace.bound_symbols if id(bound) not in prologue_ids], trace.output_names)
    read = {name for bound in rest for name in bound.inputs}
    definitions = {proxy.name: proxy for bound in prologue for proxy in proxies(bound.output)}
    outputs = [proxy for name, proxy in definitions.items() if name in read and isinstance(proxy, TensorProxy)]
    needed = live_calls(calls, names(outputs))
    used_names = {name for bound in needed for name in bound.inputs}
    weights = [proxy for proxy in inputs if proxy.name in used_names]
    name = "weights" if weights else None
    return FoldablePartition(trace.derive("hoisted", needed, name=name, inputs=weights, output=tuple(outputs)), rest)


def independent_calls(
    trace: Trace, weights: Collection[str] = (), byte_limit: int = BYTE_LIMIT, left_out: Collection[str] = ()
) -> list[BoundSymbol]:
    """Return the calls that depend on no input but `weights`, and make no output and none of `left_out`."""
    outputs = returned_names(trace).union(left_out)
    fixed = {*trace.constants, *weights}
    result: list[BoundSymbol] = []
    for bound in trace.bound_symbols:
        if not (_independent(bound, fixed) and outputs.isdisjoint(bound.outputs)):
            continue
        if weights and _expands(bound, byte_limit):
            continue
        result.append(bound)
        fixed.update(bound.outputs)
    return result


def _independent(bound: BoundSymbol, fixed: set[str]) -> bool:
    if not PINNED.isdisjoint(bound.all_tags) or not all(name in fixed for name in bound.inputs):
        return False
    return not any(isinstance(leaf, SYMBOLIC_TYPES) for leaf in leaves([bound.args, bound.kwargs]))


def _expands(bound: BoundSymbol, byte_limit: int) -> bool:
    """Return whether a call's results are much larger than its arguments."""
    output_bytes = sum(map(_bytes, tensors(bound.output)))
    return output_bytes > byte_limit and output_bytes > 2 * sum(map(_bytes, tensors([bound.args, bound.kwargs])))


def _metadata(proxy: TensorProxy) -> tuple[Any, ...]:
    return proxy.shape, proxy.dtype, proxy.device


def _bytes(proxy: TensorProxy) -> Dim:
    return proxy.numel() * proxy.element_size()
