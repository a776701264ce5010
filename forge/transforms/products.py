"""Matrix products and their epilogues, each as one call, which an executor may run by one kernel.

A product's epilogue consists of the pointwise calls, and the views between them, of results of the product and of other
calls of its epilogue: a bias, an activation or its gradient, a residual, a scale, a conversion. They become one
composite at the position of the last of them, so that an epilogue belongs to the last product that it reads. The
composite returns the values with other users: the sum before an activation, if a backward reads that, too.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.ir import BoundSymbol, Proxy, Symbol, Tag, Trace
from forge.ir.bounded import BoundedDict
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.pytree import proxies, tensors, tree_map
from forge.ir.structure import key_of
from forge.prims import statically_true

Asked = Callable[[BoundSymbol], object]
Readers = Mapping[str, Sequence[int]]
Row = tuple[Symbol, tuple[Any, ...], dict[str, Any]]  # a call: its symbol and its arguments
_symbols: BoundedDict = BoundedDict(4096)


class ProductSymbol(Symbol):
    """A product with its epilogue: a composite of calls, which its first argument describes."""


@dataclass(frozen=True)
class _Input:
    """An argument of the composite, by index."""

    place: int

    def __repr__(self) -> str:
        return f"in{self.place}"


@dataclass(frozen=True)
class _Result:
    """A result of an earlier call of the composite, by index among the results of all."""

    place: int

    def __repr__(self) -> str:
        return f"out{self.place}"


class _Group:
    """The calls of a product and its epilogue so far, and their positions in the trace. is_open: whether another may
    follow, since no other call has read a result."""

    def __init__(self, product: BoundSymbol, place: int) -> None:
        self.calls = [product]
        self.places = [place]
        self.numel = tensors(product.output)[0].numel()
        self.is_open = True

    def add(self, call: BoundSymbol, place: int) -> None:
        self.calls.append(call)
        self.places.append(place)


def products(
    trace: Trace,
    *,
    is_product: Asked,
    is_epilogue: Asked,
    is_fused: Asked,
    views: Container[str],
    wins: Callable[[BoundSymbol, BoundSymbol], bool],
) -> Trace:
    """Return the trace with the products and their epilogues as one call each where that wins.

    Args:
        trace: The trace.
        is_product: Whether a call is a product that may be in such a call.
        is_epilogue: Whether a call may be in an epilogue.
        is_fused: Whether a call is in a region.
        views: The names of values that alias others.
        wins: Whether such a call is faster than its parts. It takes the call, and a call of it and of the calls that
            would be in one region with its epilogue if this were not in it.
    """
    groups = _find_groups(trace, is_product, is_epilogue)
    readers = _readers(trace)
    replacements: dict[int, BoundSymbol] = {}
    inside: set[int] = set()
    for group in groups:
        _shorten(group, readers, views)
        call = _call_of(group.calls, _escaping(group.calls, group.places, readers), ProductSymbol)
        if wins(call, _with_neighbours(trace, group, call, readers, views, is_fused)):
            replacements[group.places[-1]] = call
            inside.update(group.places)
    if not replacements:
        return trace
    calls = [replacements.get(place, bound) for place, bound in enumerate(trace.bound_symbols)]
    return trace.derive(
        "products", [each for place, each in enumerate(calls) if place in replacements or place not in inside]
    )


def _find_groups(trace: Trace, is_product: Asked, is_epilogue: Asked) -> list[_Group]:
    groups: list[_Group] = []
    owners: dict[str, _Group] = {}
    for place, bound in enumerate(trace.bound_symbols):
        if Tag.EFFECT in bound.all_tags:  # no call moves after it
            for group in groups:
                group.is_open = False
        read = {id(owners[name]): owners[name] for name in bound.inputs if name in owners}.values()
        owner = _owner(bound, list(read), is_epilogue)
        for group in read:
            group.is_open = group.is_open and group is owner
        if owner is not None:
            owner.add(bound, place)
        elif is_product(bound):
            owner = _Group(bound, place)
            groups.append(owner)
        if owner is not None:
            owners.update((name, owner) for name in bound.outputs)
    return groups


def _owner(bound: BoundSymbol, read: list[_Group], is_epilogue: Asked) -> _Group | None:
    """Return the group that a call can join, the last one if there are several."""
    for group in sorted(read, key=lambda group: group.places[0], reverse=True):
        same = all(statically_true(proxy.numel() == group.numel) for proxy in tensors(bound.output))
        if group.is_open and same and is_epilogue(bound):
            return group
    return None


def _readers(trace: Trace) -> Readers:
    """Return the positions of the calls that read each value; the trace's end, as the position after the last, reads
    its output."""
    result: dict[str, list[int]] = {}
    for place, bound in enumerate(trace.bound_symbols):
        for name in bound.inputs:
            result.setdefault(name, []).append(place)
    for name in trace.output_names:
        result.setdefault(name, []).append(len(trace.bound_symbols))
    return result


def _escaping(calls: Sequence[BoundSymbol], places: Collection[int], readers: Readers) -> list[str]:
    """Return the results of calls that have users outside of these positions."""
    inside = set(places)
    results = [name for call in calls for name in call.outputs]
    return [name for name in results if not inside.issuperset(readers.get(name, ()))]


def _shorten(group: _Group, readers: Readers, views: Container[str]) -> None:
    """Remove calls from the end of a group until it returns no view."""
    while len(group.calls) > 1 and any(name in views for name in _escaping(group.calls, group.places, readers)):
        group.calls.pop()
        group.places.pop()


def _with_neighbours(
    trace: Trace, group: _Group, call: BoundSymbol, readers: Readers, views: Container[str], is_fused: Asked
) -> BoundSymbol:
    """Return the call of a group with the fused users of its results, through views too: an epilogue that is free in
    their region saves no call."""
    if len(group.calls) == 1:
        return call
    followers: set[int] = set()
    waiting = list(call.outputs)
    while waiting:
        for place in readers.get(waiting.pop(), ()):
            if place == len(trace.bound_symbols) or place in followers or place in group.places:
                continue
            reader = trace.bound_symbols[place]
            if all(name in views for name in reader.outputs):
                followers.add(place)
                waiting += reader.outputs
            elif is_fused(reader):
                followers.add(place)
    if not followers:
        return call
    calls = [call, *[trace.bound_symbols[place] for place in sorted(followers)]]
    return _call_of(calls, _escaping(calls, [*group.places, *followers], readers), Symbol)


def _call_of(calls: Sequence[BoundSymbol], escaping: Sequence[str], kind: type[Symbol]) -> BoundSymbol:
    """Return one call of several, which returns their results of these names."""
    inputs: list[Any] = []
    operands: dict[str, Any] = {}

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, (Proxy, *SYMBOLIC_TYPES)):
            return leaf
        key = leaf.name if isinstance(leaf, Proxy) else str(leaf)
        if key not in operands:
            operands[key] = _Input(len(inputs))
            inputs.append(leaf)
        return operands[key]

    rows: list[Row] = []
    results: list[Proxy] = []
    for call in calls:
        rows.append((call.symbol, *tree_map(described, (tuple(call.args), call.kwargs))))
        for proxy in proxies(call.output):
            operands[proxy.name] = _Result(len(results))
            results.append(proxy)
    places = {proxy.name: place for place, proxy in enumerate(results)}
    returned = [places[name] for name in escaping]
    symbol, text = _symbol_of(rows, returned, kind)
    source = next((call.source for call in calls if call.source is not None), None)
    return BoundSymbol(symbol, (text, *inputs), {}, tuple(results[place] for place in returned), list(calls), source)


def _symbol_of(rows: Sequence[Row], returned: Sequence[int], kind: type[Symbol]) -> tuple[Symbol, str]:
    """Return the symbol that such calls share, and a text that distinguishes it from others of its name."""
    text = "; ".join([f"{symbol.id}{args}{kwargs or ''}" for symbol, args, kwargs in rows]) + f" -> {[*returned]}"
    key = (kind, text, *[(symbol, key_of(args), key_of(kwargs)) for symbol, args, kwargs in rows])
    if key not in _symbols:
        name = "_".join(symbol.name for symbol, _, _ in rows)
        _symbols[key] = kind(name, f"forge.product.{name}", body=_body(rows, returned))
    return _symbols[key], text


def _body(rows: Sequence[Row], returned: Sequence[int]) -> Callable[..., tuple[Any, ...]]:
    def body(text: str, *inputs: Any) -> tuple[Any, ...]:
        results: list[Any] = []

        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Input):
                return inputs[leaf.place]
            return results[leaf.place] if isinstance(leaf, _Result) else leaf

        for symbol, args, kwargs in rows:
            own_args, own_kwargs = tree_map(value, (args, kwargs))
            results += proxies(symbol(*own_args, **own_kwargs))
        return tuple(results[place] for place in returned)

    return body
