"""Products of one input with several weights become one, of which each is a slice: queries, keys and values; gates.

    linear(x, q, a), linear(x, k, b) = split(linear(x, cat(q, k), cat(a, b)))

if the weights are weights of a frozen program. A slice is a view; one that the program returns, or mutates through a
view, which keeps its strides, is a copy, and so are all if an opaque call may depend on torch's strides of them
(torch.as_strided).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from forge import clang, prims, torchlang
from forge.ir import BoundSymbol, Dim, Tag, TensorProxy, Trace, recording
from forge.ir.symbol import substitute
from forge.transforms.freezing import Freezing
from forge.transforms.makers import Makers, innermost

LINEAR = torchlang.linear
PRODUCTS = frozenset({torchlang.matmul, torchlang.mm})
SPLIT = torchlang.split
_KEEP_STRIDES = frozenset({prims.slice_scatter, prims.view_scatter})


class _Product(NamedTuple):
    """One call: x times `weight`, (out, in) of a linear layer and (in, out) of a product, plus `bias`."""

    bound: BoundSymbol
    x: TensorProxy
    weight: TensorProxy
    bias: TensorProxy | None

    @property
    def columns(self) -> Dim:
        """Return the number of output columns: results for each row of x."""
        return self.weight.shape[0 if self.bound.symbol is LINEAR else 1]


def join_products(
    trace: Trace, freezing: Freezing, in_torch: Callable[[BoundSymbol], bool] = lambda bound: True
) -> Trace:
    """Return the trace with linear layers (and products with a matrix) of one input joined, if their weights are
    constant.

    `in_torch` returns whether a call runs as torch runs it: one for which the user selected another kernel stays.
    """
    values = freezing.values(trace)
    groups: dict[tuple[Any, ...], list[_Product]] = {}
    for bound in trace.bound_symbols:
        product = _product(bound, values)
        if product is not None and in_torch(bound):
            key = (bound.symbol, product.x.name, product.weight.dtype, bound.mode)
            groups.setdefault(key, []).append(product)
    joined = {group[0].bound.output.name: group for group in groups.values() if len(group) > 1}
    if not joined:
        return trace
    makers = Makers(trace)
    for group in joined.values():
        names = [freezing.owner(product.weight.name, makers) for product in group]
        freezing.folds.append(f"{', '.join(names)}: one product with {sum(each.columns for each in group)} columns")
    return _rewrite(trace, freezing.calls(trace), joined)


def _product(bound: BoundSymbol, values: set[str]) -> _Product | None:
    """Return a call as a product with a matrix that depends on weights alone."""
    if bound.symbol is LINEAR:
        arguments = LINEAR.bind(bound.args, bound.kwargs)
        x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    elif bound.symbol in PRODUCTS:
        x, weight = list(bound.symbol.bind(bound.args, bound.kwargs).values())[:2]
        bias = None
    else:
        return None
    constant = weight.name in values and (bias is None or (bias.name in values and bias.ndim == 1))
    if not constant or x.name in values or weight.ndim != 2 or x.ndim < 1 or bound.output.ndim != x.ndim:
        return None
    return _Product(bound, x, weight, bias) if bound.output.dtype == x.dtype == weight.dtype else None


def _rewrite(trace: Trace, ahead: Sequence[BoundSymbol], joined: dict[str, list[_Product]]) -> Trace:
    """Return the trace with the products joined. `ahead` are the calls that compute the weights, which come first."""
    first = set(map(id, ahead))
    dead = {product.bound.output.name for group in joined.values() for product in group}
    opaque = any(Tag.OPAQUE in bound.all_tags for bound in trace.bound_symbols)
    copied = dead if opaque else dead.intersection(trace.output_names) | _changed_names(trace, dead)
    new = trace.derive("join_products", [*ahead])
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            name = bound.outputs[0] if bound.outputs else None
            if name in joined:
                _record(new, joined[name], copied)
            elif id(bound) not in first and name not in dead:
                new.record(bound)
    return new


def _changed_names(trace: Trace, names: set[str]) -> set[str]:
    """Return the values among `names` that the program mutates through a view: by a scatter into it."""
    root_of = {name: name for name in names}
    result = set()
    for bound in trace.bound_symbols:
        roots = {root_of[name] for name in bound.inputs if name in root_of}
        if roots and Tag.VIEW in bound.all_tags:
            root_of.update((name, root) for name in bound.outputs for root in roots)
        if any(call.symbol in _KEEP_STRIDES for call in innermost(bound)):
            result |= roots
    return result


def _record(new: Trace, group: list[_Product], copied: set[str]) -> None:
    """Record one product and its slices; those of these names are copies."""
    bound = group[0].bound
    with new.collecting() as recorded, new.set_tags(bound.tags, bound.source):
        whole = _join(group)
        parts = list(SPLIT(whole, [each.columns for each in group], whole.ndim - 1))
        for i, each in enumerate(group):
            if each.bound.output.name in copied:
                parts[i] = prims.clone(parts[i], torch.contiguous_format)
    renamed = {part.name: each.bound.output for part, each in zip(parts, group, strict=True)}
    for call in recorded:
        new.record(substitute(call, renamed))


def _join(group: list[_Product]) -> TensorProxy:
    first = group[0]
    weights = [each.weight for each in group]
    if first.bound.symbol is not LINEAR:
        product: TensorProxy = first.bound.symbol(first.x, clang.cat(weights, 1))
        return product
    if all(each.bias is None for each in group):
        return LINEAR(first.x, clang.cat(weights, 0))
    biases = [each.bias if each.bias is not None else _zeros(each) for each in group]
    return LINEAR(first.x, clang.cat(weights, 0), clang.cat(biases, 0))


def _zeros(product: _Product) -> TensorProxy:
    return prims.full((product.columns,), 0, product.weight.dtype, product.weight.device)
