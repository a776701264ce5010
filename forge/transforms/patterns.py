"""Patterns: a reference in plain torch is found in a trace and becomes one call of a composite symbol.

    @pattern
    def rms_norm(x, weight, eps: float):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

The reference is traced to prims and compared in normal form (forge/transforms/canonical.py). A match is proven in two
steps. A skeleton, in which casts and broadcasts are transparent and what depends on sizes matches anything, finds what
each parameter stands for, operands of commutative prims in either order. Then the reference is traced with exactly
those dtypes, shapes and numbers, and embedded in the program's normal form: it is the same value there, or no match.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from forge import torchlang
from forge.ir import NUMBER_TYPES, BoundSymbol, Symbol, TensorProxy, Trace, check, recording, speaking
from forge.ir.bounded import Bounded
from forge.ir.pytree import tensors
from forge.transforms.canonical import BROADCAST, CAST, COMMUTATIVE, RESHAPE, Canonical, Node, relative_args, unshaped
from forge.transforms.dce import live_calls
from forge.transforms.ordering import in_order

_TRANSPARENT = frozenset({CAST, BROADCAST})
_SIZES = ((2, 3, 4, 8), (3, 5, 6, 16))
_SCALARS: dict[Any, tuple[tuple, tuple]] = {  # values that no reference writes itself, for each of two traces
    float: ((0.0137, 0.0251, 0.0389), (0.0173, 0.0217, 0.0331)),
    int: ((-1013, -1019, -1021), (-1031, -1033, -1039)),
}
_CPU = torch.device("cpu")


class _Wild:
    """An argument of the skeleton that depends on sizes."""


class _Scalar:
    """An argument of the skeleton that is a number parameter."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Skeleton:
    """One node of a reference's skeleton: a prim over skeletons, wild and number arguments; or a parameter."""

    __slots__ = ("args", "id", "parameter")

    def __init__(self, id: str, args: tuple, parameter: str | None) -> None:
        self.id = id
        self.args = args
        self.parameter = parameter


class Pattern:
    """A reference to find. Parameters annotated `float` or `int` are numbers, the others tensors: `torch.LongTensor`
    one integer for each vector of the others, along their last dim.

    `symbol` is the composite that a match becomes, with the parameters as arguments in order; its body is the
    reference, so that it has a decomposition and a gradient. A reference that returns several tensors is anchored at
    the last.
    Raises TypeError for a reference with *args or **kwargs, ValueError for one that computes nothing.
    """

    def __init__(self, reference: Callable, name: str | None = None) -> None:
        self.reference = reference
        self.name = name or reference.__name__
        parameters = inspect.signature(reference).parameters.values()
        for parameter in parameters:
            check(
                parameter.kind is parameter.POSITIONAL_OR_KEYWORD,
                lambda parameter=parameter: f"pattern {self.name}: {parameter} is not a plain parameter",
                TypeError,
            )
        self.parameters = [p.name for p in parameters]
        self.annotations = {p.name: p.annotation for p in parameters}
        self.numbers = [p.name for p in parameters if p.annotation in _SCALARS]
        self.tensors = [p.name for p in parameters if p.annotation not in _SCALARS]
        self.symbol = Symbol(self.name, f"pattern.{self.name}", body=self._body)
        self.symbol.__doc__ = reference.__doc__
        self.skeleton = self._trace_skeleton()
        self.size = _count(self.skeleton)
        self._exact: dict[tuple, tuple[list[str], list[BoundSymbol], list[str]] | None] = Bounded(256)

    def __reduce__(self) -> tuple:
        """Pickled as what it is made of."""
        return Pattern, (self.reference, self.name)

    def _body(self, *args: Any) -> Any:
        with speaking(torchlang.language):
            return self.reference(*args)

    def _trace(self, metadata: dict[str, Any]) -> tuple[list[str], list[BoundSymbol], list[str]]:
        """(inputs, calls, outputs) of the reference on tensors (shape, dtype, device) and numbers."""
        trace = Trace(self.name)
        arguments = []
        with recording(trace, torchlang.language):
            for parameter in self.parameters:
                value = metadata[parameter]
                if isinstance(value, tuple):
                    value = trace.add_input(trace.tensor(*value, name=parameter))
                arguments.append(value)
            result = self.reference(*arguments)
        return trace.input_names, trace.bound_symbols, [proxy.name for proxy in tensors(result)]

    def _trace_skeleton(self) -> list[_Skeleton]:
        roots, stand_ins = [], []
        for trial in range(len(_SIZES)):
            metadata = self._stand_ins(trial, alike=True)
            try:
                inputs, calls, outputs = self._trace(metadata)
            except RuntimeError:  # half of a tensor meets a whole one
                metadata = self._stand_ins(trial, alike=False)
                inputs, calls, outputs = self._trace(metadata)
            stand_ins.append(metadata)
            check(bool(calls), lambda: f"pattern {self.name}: the reference computes nothing")
            graph = Canonical((), ())
            leaves = {name: Node("input", (name,), TensorProxy(name, *metadata[name]), name) for name in inputs}
            roots.append(graph.embed(leaves, calls, outputs))
        values = {name: tuple(metadata[name] for metadata in stand_ins) for name in self.numbers}
        memo: dict[int, _Skeleton] = {}
        return [_merge(a, b, values, memo) for a, b in zip(*roots, strict=True)]

    def _stand_ins(self, trial: int, *, alike: bool) -> dict[str, Any]:
        """What the skeleton is traced with: tensors of one shape (`alike`), or that broadcast to the first."""
        numbers = {kind: iter(values[trial]) for kind, values in _SCALARS.items()}
        metadata: dict[str, Any] = {}
        for name, kind in self.annotations.items():
            *sizes, last = _SIZES[trial]
            if kind in numbers:
                metadata[name] = next(numbers[kind])
            elif kind is torch.LongTensor:
                metadata[name] = (tuple(sizes), torch.int64, _CPU)
            else:
                metadata[name] = ((*sizes, last if alike or name == self.tensors[0] else 1), torch.float32, _CPU)
        return metadata

    def exact(self, binding: dict[str, Any], graph: Canonical) -> tuple[list[str], list[BoundSymbol], list[str]] | None:
        """The reference traced on what a binding stands for; None where it does not take that.

        Kept by its metadata: for this program alone where lengths are symbols of it.
        """
        metadata = {
            name: (value.proxy.shape, value.proxy.dtype, value.proxy.device) if isinstance(value, Node) else value
            for name, value in binding.items()
        }
        shapes = [value[0] for value in metadata.values() if isinstance(value, tuple)]
        symbolic = any(not isinstance(dim, int) for shape in shapes for dim in shape)
        kept = graph.traced.setdefault(self, {}) if symbolic else self._exact
        key = tuple([str(metadata[name]) for name in self.parameters])
        traced = kept.get(key, ...)
        if traced is ...:
            try:
                traced = self._trace(metadata)
            except (RuntimeError, ValueError, TypeError, IndexError):  # shapes that do not go together, say
                traced = None
            kept[key] = traced
        return traced

    def __repr__(self) -> str:
        return f"<pattern {self.name}({', '.join(self.parameters)})>"


def pattern(reference: Callable) -> Pattern:
    """Decorator: the pattern whose reference the function is."""
    return Pattern(reference)


def _merge(a: Any, b: Any, scalars: dict[str, tuple], memo: dict[int, _Skeleton]) -> Any:
    """The skeleton of two traces of one reference: what differs between them is a number parameter or wild."""
    if isinstance(a, Node):
        while a.id in _TRANSPARENT:
            a, b = a.args[0], b.args[0]
        if id(a) not in memo:
            if a.id == "input":
                memo[id(a)] = _Skeleton("input", (), a.args[0])
            else:
                pairs = zip(relative_args(a), relative_args(b), strict=True)
                memo[id(a)] = _Skeleton(a.id, tuple(_merge(x, y, scalars, memo) for x, y in pairs), None)
        return memo[id(a)]
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_merge(x, y, scalars, memo) for x, y in zip(a, b, strict=True))
    for name, values in scalars.items():
        if (a, b) == values:
            return _Scalar(name)
    return a if type(a) is type(b) and a == b else _Wild()


def _count(part: Any) -> int:
    """The number of prims in a skeleton."""
    if isinstance(part, _Skeleton):
        return (part.parameter is None) + sum(map(_count, part.args))
    return sum(map(_count, part)) if isinstance(part, (tuple, list)) else 0


class Match:
    """One site: the pattern, what its parameters stand for, and the names of the values that it computes."""

    def __init__(
        self, pattern: Pattern, binding: dict[str, Any], outputs: list[TensorProxy], covered: set[int]
    ) -> None:
        self.pattern = pattern
        self.binding = binding
        self.outputs = outputs
        self.covered = covered

    def __repr__(self) -> str:
        return f"<match of {self.pattern.name} at {', '.join(proxy.name for proxy in self.outputs)}>"


def find_matches(trace: Trace, patterns: Sequence[Pattern]) -> list[Match]:
    """The sites of `patterns` in a trace, in program order; an earlier pattern goes before a later one.

    Two sites do not share a computation (casts and broadcasts apart).
    """
    graph = Canonical(trace.inputs, trace.bound_symbols)
    roots = _visible_roots(trace, graph)
    by_prim: dict[str, list[tuple[str, Node]]] = {}
    for name, node in roots:
        by_prim.setdefault(_strip(node).id, []).append((name, node))
    program = _Dependencies(trace)
    taken: set[int] = set()
    found: dict[str, Match] = {}
    for each in patterns:
        for name, node in by_prim.get(each.skeleton[-1].id, ()):
            if name in found:
                continue
            match = _match_at(each, node, graph)
            if match is not None and match.covered.isdisjoint(taken) and program.is_convex(match):
                taken |= match.covered
                found[match.outputs[-1].name] = match
    order = {name: position for position, (name, _) in enumerate(roots)}
    return sorted(found.values(), key=lambda match: order[match.outputs[-1].name])


def _visible_roots(trace: Trace, graph: Canonical) -> list[tuple[str, Node]]:
    """Each value that the program computes in plain sight, under its first name."""
    roots, seen = [], set()
    for bound in trace.bound_symbols:
        if isinstance(bound.output, TensorProxy) and bound.outputs:
            node = graph.node_of[bound.output.name]
            if id(node) not in seen and node.id != "input":
                seen.add(id(node))
                roots.append((bound.output.name, node))
    return roots


def _strip(node: Node) -> Node:
    while node.id in _TRANSPARENT:
        node = node.args[0]
    return node


def _match_at(pattern: Pattern, root: Node, graph: Canonical) -> Match | None:
    for binding in _unify(pattern.skeleton[-1], root, {}, graph):
        if any(name not in binding for name in pattern.parameters):
            continue
        traced = pattern.exact(binding, graph)
        if traced is None:
            continue
        nodes = graph.embed({name: binding[name] for name in traced[0]}, *traced[1:], _strip(root).tags)
        if nodes[-1] is not root or any(id(node) not in graph.visible for node in nodes):
            continue
        shown = [graph.visible[id(node)][0] for node in nodes]
        stand_ins = {
            name: graph.visible[id(value)][0] if isinstance(value, Node) else value for name, value in binding.items()
        }
        bound = {name: value for name, value in binding.items() if isinstance(value, Node)}
        graph.favoured.update((name, id(value)) for name, value in bound.items())
        leaves = {id(each) for value in bound.values() for each in (value, unshaped(value))}
        return Match(pattern, stand_ins, shown, _covered(root, leaves, graph))
    return None


def _unify(part: Any, node: Any, binding: dict[str, Any], graph: Canonical) -> Iterator[dict[str, Any]]:
    """Every way in which a skeleton's part can be a node's, as what its parameters stand for."""
    if isinstance(part, _Skeleton):
        if not isinstance(node, Node):
            return
        if part.parameter is not None:
            yield from _bind(part.parameter, node, binding, graph)
            return
        node = _strip(node)
        if part.id == RESHAPE:
            for candidate in graph.same_elements(node):
                yield from _unify(part.args[0], candidate, binding, graph)
        elif node.id == part.id and len(node.args) == len(part.args):
            args = relative_args(node)
            yield from _unify_all(part.args, args, binding, graph)
            if part.id in COMMUTATIVE:
                yield from _unify_all(part.args, args[::-1], binding, graph)
    elif isinstance(part, tuple):
        if isinstance(node, tuple) and len(part) == len(node):
            yield from _unify_all(part, node, binding, graph)
    elif isinstance(part, _Scalar):
        if isinstance(node, NUMBER_TYPES) and binding.get(part.name, node) == node:
            yield {**binding, part.name: node}
    elif isinstance(part, _Wild) or (not isinstance(node, Node) and part == node):
        yield binding


def _unify_all(parts: tuple, nodes: tuple, binding: dict[str, Any], graph: Canonical) -> Iterator[dict[str, Any]]:
    if not parts:
        yield binding
        return
    for first in _unify(parts[0], nodes[0], binding, graph):
        yield from _unify_all(parts[1:], nodes[1:], first, graph)


def _bind(name: str, node: Node, binding: dict[str, Any], graph: Canonical) -> Iterator[dict[str, Any]]:
    """A parameter may stand for a node, or for what was cast or broadcast to it: first for what it stood for elsewhere
    (all layers share their cosines), then for the innermost."""
    candidates = [node]
    while node.id in _TRANSPARENT:
        candidates += graph.between.get(id(node), ())
        node = node.args[0]
        candidates.append(node)
    candidates.reverse()
    candidates.sort(key=lambda candidate: (name, id(candidate)) not in graph.favoured)
    for candidate in candidates:
        if id(candidate) in graph.visible and binding.get(name, candidate) is candidate:
            yield {**binding, name: candidate}


def _covered(root: Node, leaves: set[int], graph: Canonical) -> set[int]:
    """The computations of a site, without those that merely cast or broadcast."""
    found: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif isinstance(node, Node) and id(node) not in leaves and id(node) not in found:
            if node.id not in _TRANSPARENT:
                found.add(id(node))
            elif any(id(inner) in leaves for inner in graph.between.get(id(node), ())):
                continue
            stack.extend(node.args)
    return found


class _Dependencies:
    """Who makes each value of a program, and where."""

    def __init__(self, trace: Trace) -> None:
        self.makers = {name: (i, bound) for i, bound in enumerate(trace.bound_symbols) for name in bound.outputs}

    def is_convex(self, match: Match) -> bool:
        """Whether each output is a call's only one, and no input is computed from an output."""
        if any(out.name not in self.makers or len(self.makers[out.name][1].outputs) > 1 for out in match.outputs):
            return False
        made = {output.name for output in match.outputs}
        first = min(self.makers[name][0] for name in made)
        stack = [value.name for value in match.binding.values() if isinstance(value, TensorProxy)]
        seen: set[str] = set()
        while stack:
            name = stack.pop()
            if name in made:
                return False
            position, bound = self.makers.get(name, (-1, None))
            if position > first and name not in seen:
                seen.add(name)
                stack.extend(bound.inputs)
        return True


def replace_patterns(trace: Trace, patterns: Sequence[Pattern]) -> tuple[Trace, list[Match]]:
    """The trace with every site of `patterns` one call of the pattern's symbol, and the sites."""
    matches = find_matches(trace, patterns)
    while matches:
        new, places = _replaced(trace, matches)
        ordered, stuck = in_order(new.bound_symbols, [*trace.input_names, *trace.constants])
        if not stuck:
            new.bound_symbols[:] = live_calls(ordered, new.output_names)
            return new, matches
        late = [name for bound in stuck for name in bound.outputs]  # two sites, each of which needs the other
        first = next(places[name] for name in late if name in places and len(places[name].outputs) > 1)
        matches = [match for match in matches if match is not first]
    return trace, []


def _replaced(trace: Trace, matches: list[Match]) -> tuple[Trace, dict[str, Match]]:
    """The trace with each match in place of its first output's call, and which that is; perhaps before its inputs."""
    places = {match.outputs[0].name: match for match in matches}
    made = {proxy.name for match in matches for proxy in match.outputs}
    new = trace.derive("patterns")
    with recording(new, torchlang.language):
        for bound in trace.bound_symbols:
            match = next((places[name] for name in bound.outputs if name in places), None)
            if match is not None:
                _place(match, bound, new)
            elif made.isdisjoint(bound.outputs):
                new.record(bound)
    return new, places


def _place(match: Match, bound: BoundSymbol, new: Trace) -> None:
    with new.tagged(bound.tags, bound.source):
        output = match.pattern.symbol(*[match.binding[name] for name in match.pattern.parameters])
    for proxy, kept in zip(tensors(output), match.outputs, strict=True):
        new.names.discard(proxy.name)
        proxy.name = kept.name
