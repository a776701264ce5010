"""The translation of a region to nvFuser's operators, and the decision about the calls that have one."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from forge.executors.executor import Decision, Declined, call_checker, decline
from forge.executors.nvfuserex.definition import DTYPES, Definition, Output, Ref, TensorInput
from forge.executors.nvfuserex.rules import RULES
from forge.executors.nvfuserex.writer import Untranslatable, Writer, can_say
from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.ir.proxies import SYMBOLIC_TYPES, Dim, hint_of
from forge.ir.pytree import leaves, tensors
from forge.ir.strides import without_gaps
from forge.prims.core import statically_true
from forge.transforms.dce import live_calls

MOST_DIMS = 8


def takes(bound: BoundSymbol, device: str) -> Decision:
    """Return whether all parts of a call have nvFuser operators, on tensors of a device of this type."""
    rule = RULES.get(bound.symbol.id)
    if rule is None:
        return _parts_are_taken(bound, device)
    fits = _fits(bound, device)
    if not fits or rule.checker is None:
        return fits
    return call_checker(rule.checker, *bound.args, **bound.kwargs)


def _parts_are_taken(bound: BoundSymbol, device: str) -> Decision:
    parts = live_calls(bound.subsymbols, bound.outputs)
    if not parts:
        return decline(f"nvFuser has no operator for {bound.symbol.id}")
    for part in parts:
        decision = takes(part, device)
        if not decision:
            return decision
    return True


def _fits(bound: BoundSymbol, device: str) -> Decision:
    """Return whether nvFuser has the dtypes, the ranks and the lengths of a prim's tensors."""
    if any(isinstance(leaf, (torch.SymFloat, torch.SymBool)) for leaf in leaves((bound.args, bound.kwargs))):
        return decline("the call reads a number that differs from run to run and is not whole")
    for proxy in tensors(bound.output):
        if proxy.device.type != device:
            return decline(f"the call gives a tensor on {proxy.device}, and nvFuser computes on {device}")
    for proxy in tensors((bound.output, bound.args, bound.kwargs)):
        decision = _is_described(proxy)
        if not decision:
            return decision
    others = [leaf for leaf in leaves((bound.args, bound.kwargs)) if isinstance(leaf, torch.SymInt)]
    return _are_said(others)


def _is_described(proxy: TensorProxy) -> Decision:
    if proxy.dtype not in DTYPES:
        return decline(f"nvFuser has no {proxy.dtype} for {proxy}")
    if proxy.ndim > MOST_DIMS:
        return decline(f"nvFuser takes up to {MOST_DIMS} dims, and {proxy} has {proxy.ndim}")
    if not all(statically_true(size >= 1) for size in proxy.shape):
        return decline(f"{proxy} may be empty")
    return _are_said(proxy.shape)


def _are_said(lengths: Iterable[Dim]) -> Decision:
    for size in lengths:
        if not can_say(size):
            return decline(f"the length {size} has no expression in nvFuser's operators")
    return True


def prims_of(bound: BoundSymbol) -> list[BoundSymbol]:
    """Return the calls with rules to which a call decomposes."""
    if bound.symbol.id in RULES:
        return [bound]
    return [prim for part in live_calls(bound.subsymbols, bound.outputs) for prim in prims_of(part)]


def translate(region: Trace, library: Any, device: str) -> Definition:
    """Return nvFuser's definition of a region. Raises Untranslatable with the reason."""
    if not any(isinstance(proxy, TensorProxy) and proxy.device.type == device for proxy in region.inputs):
        raise Untranslatable(f"the call reads no tensor on {device}")
    writer = Writer(region.inputs, lambda proxy: _describe(proxy, library, device))
    for bound in region.bound_symbols:
        for prim in prims_of(bound):
            ref = RULES[prim.symbol.id].write(writer, *prim.args, **prim.kwargs)
            writer.values[prim.output.name] = writer.cast(ref, prim.output.dtype)
    outputs = _outputs(region.output, writer)
    return Definition(writer.places, writer.inputs, tuple(writer.operations), outputs)


# inputs


def _describe(proxy: TensorProxy, library: Any, device: str) -> TensorInput:
    decision = _is_described(proxy)
    if isinstance(decision, Declined):
        raise Untranslatable(decision.reason)
    if proxy.device.type != device and proxy.ndim:
        raise Untranslatable(f"the call reads {proxy}, and nvFuser computes on {device}")
    sizes, strides = (list(map(hint_of, each)) for each in (proxy.shape, strides_in_region(proxy)))
    contiguity, order = library.compute_tensor_descriptor(sizes, strides)
    if any(isinstance(each, SYMBOLIC_TYPES) for each in (*proxy.shape, *strides_in_region(proxy))):
        _check_for_all_sizes(proxy, order)
    shape = tuple(size if isinstance(size, int) else -1 for size in proxy.shape)
    return TensorInput(shape, tuple(contiguity), tuple(order), proxy.dtype, proxy.device.type != device)


def _check_for_all_sizes(proxy: TensorProxy, order: Sequence[int]) -> None:
    """Check that one descriptor holds for all sizes: the tensor is dense and no size may be 1."""
    longer = all(isinstance(size, int) or statically_true(size >= 2) for size in proxy.shape)
    if not longer or not _is_dense(proxy, order):
        raise Untranslatable(f"the strides of {proxy} depend on lengths that differ from run to run")


def _is_dense(proxy: TensorProxy, order: Sequence[int]) -> bool:
    """Return whether a tensor is known to have no gaps between its elements, with its dims in this order."""
    pairs = zip(proxy.shape, strides_in_region(proxy), dense_strides(proxy.shape, order), strict=True)
    return all(statically_true(size == 1) or statically_true(stride == step) for size, stride, step in pairs)


def strides_in_region(proxy: TensorProxy) -> tuple[Dim, ...]:
    """Return the strides of a region's input or result, which are known if the executor is `strided`."""
    assert proxy.strides is not None
    return proxy.strides


def dense_strides(shape: Sequence[Dim], order: Sequence[int]) -> tuple[Dim, ...]:
    """Return the strides of a dense tensor whose dim i is the order[i]-th from the fastest."""
    return without_gaps(shape, sorted(range(len(shape)), key=lambda dim: order[dim]))


# outputs


def _outputs(proxies: Sequence[TensorProxy], writer: Writer) -> tuple[Output, ...]:
    refs = {Ref(index) for index in range(len(writer.inputs))}
    outputs = []
    for proxy in proxies:
        ref, order = writer.values[proxy.name], stride_order(proxy)
        is_alias = ref in writer.aliases or ref in refs
        if proxy.ndim > 1:
            ref = writer.op("stride_order", ref, order)
        elif ref in refs:  # two results are two values
            ref = writer.op("set", ref)
        refs.add(ref)
        outputs.append(Output(ref, order, _strides(proxy, order), is_alias))
    return tuple(outputs)


def _strides(proxy: TensorProxy, order: Sequence[int]) -> tuple[int, ...] | None:
    """Return a result's strides for a definition; None for symbolic ones, which its dim order implies."""
    if all(isinstance(each, int) for each in (*proxy.shape, *strides_in_region(proxy))):
        return tuple(map(int, strides_in_region(proxy)))
    if not _is_dense(proxy, order):
        raise Untranslatable(f"the strides of {proxy} depend on lengths that differ from run to run")
    return None


def stride_order(proxy: TensorProxy) -> tuple[int, ...]:
    """Return the number of faster dims of each dim; of dims with equal strides, the first is the slower."""
    sizes, strides = (list(map(hint_of, each)) for each in (proxy.shape, strides_in_region(proxy)))
    fastest = sorted(range(proxy.ndim), key=lambda dim: (strides[dim], sizes[dim], -dim))
    return tuple(fastest.index(dim) for dim in range(proxy.ndim))
