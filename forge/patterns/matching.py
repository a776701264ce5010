"""Where patterns are in a trace.

A match is proven in two steps. A pattern's skeleton finds what each parameter stands for, operands of commutative prims
in either order. Then the reference is traced with exactly those dtypes, shapes and numbers, and embedded in the
program's normal form: it is the same value there, or no match.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from forge.ir import NUMBER_TYPES, TensorProxy, Trace
from forge.patterns.canonical import COMMUTATIVE, RESHAPE, Canonical, Node, before_reshapes, relative_args
from forge.patterns.reference import TRANSPARENT, Pattern, Scalar, Skeleton, Wild


class Match(NamedTuple):
    """One site: the pattern, what its parameters stand for, and the names of the values that it computes."""

    pattern: Pattern
    binding: dict[str, Any]
    outputs: list[TensorProxy]
    covered: set[int]

    @property
    def site(self) -> tuple[Pattern, str]:
        """The pattern, and the name of the last of the values."""
        return self.pattern, self.outputs[-1].name

    def __repr__(self) -> str:
        return f"<match of {self.pattern.name} at {', '.join(proxy.name for proxy in self.outputs)}>"


def find_matches(
    trace: Trace, patterns: Sequence[Pattern], declined: Collection[tuple[Pattern, str]] = ()
) -> list[Match]:
    """Return the sites of `patterns` in a trace, in program order; an earlier pattern goes before a later one.

    Two sites do not share a computation (casts and broadcasts apart). declined: sites that are none, each the pattern
    and the name of its last output.
    """
    graph = Canonical(trace.inputs, trace.bound_symbols)
    sites = _Sites(trace, graph)
    program = _Dependencies(trace)
    matches: dict[str, Match] = {}
    for each in patterns:
        for name, node in sites.by_prim.get(each.skeleton[-1].id, ()):
            if name in matches:
                continue
            match = _match_at(each, node, graph, sites)
            if match is None or match.site in declined:
                continue
            if match.covered.isdisjoint(sites.covered) and program.is_convex(match):
                sites.covered |= match.covered
                matches[match.outputs[-1].name] = match
    return sorted(matches.values(), key=lambda match: sites.order[match.outputs[-1].name])


class _Sites:
    """The values of a program that a pattern's output may be, by the prim that computes them, in program order.

    covered: the computations of the sites that were found so far.
    """

    def __init__(self, trace: Trace, graph: Canonical) -> None:
        self.covered: set[int] = set()
        self.by_prim: dict[str, list[tuple[str, Node]]] = {}
        self.order: dict[str, int] = {}
        self._places: dict[int, int] = {}
        self._possible: dict[int, list[Node]] = {}
        self._graph = graph
        for index, (name, node) in enumerate(_visible_roots(trace, graph)):
            self.by_prim.setdefault(_strip(node).id, []).append((name, node))
            self.order[name] = self._places[id(node)] = index

    def before(self, root: Node, part: Skeleton) -> list[Node]:
        """Yield the candidates for an output besides the root: the values before it that no site has, from the last
        on."""
        possible = self._possible.get(id(part))
        if possible is None:
            nodes = [node for _, node in self.by_prim.get(part.id, ())]
            possible = [node for node in nodes if next(_unify(part, node, {}, self._graph), None) is not None]
            self._possible[id(part)] = possible
        place = self._places[id(root)]
        return [
            node
            for node in reversed(possible)
            if self._places[id(node)] < place and id(_strip(node)) not in self.covered
        ]


def _visible_roots(trace: Trace, graph: Canonical) -> list[tuple[str, Node]]:
    """Return each value that the program computes in plain sight, under its first name."""
    roots, visited = [], set()
    for bound in trace.bound_symbols:
        if isinstance(bound.output, TensorProxy) and bound.outputs:
            node = graph.node_of[bound.output.name]
            if id(node) not in visited and node.id != "input":
                visited.add(id(node))
                roots.append((bound.output.name, node))
    return roots


def _strip(node: Node) -> Node:
    while node.id in TRANSPARENT:
        node = node.args[0]
    return node


def _match_at(pattern: Pattern, root: Node, graph: Canonical, sites: _Sites) -> Match | None:
    for binding in _bindings(pattern, root, graph, sites):
        if any(name not in binding for name in pattern.parameters):
            continue
        traced = pattern.exact(binding, graph)
        if traced is None:
            continue
        nodes = graph.embed({name: binding[name] for name in traced[0]}, *traced[1:], _strip(root).tags)
        distinct = {id(node) for node in nodes}
        if nodes[-1] is not root or len(distinct) < len(nodes) or not distinct <= graph.visible.keys():
            continue
        outputs = [graph.visible[id(node)][0] for node in nodes]
        stand_ins = {
            name: graph.visible[id(value)][0] if isinstance(value, Node) else value for name, value in binding.items()
        }
        bound = {name: value for name, value in binding.items() if isinstance(value, Node)}
        graph.favoured.update((name, id(value)) for name, value in bound.items())
        leaves = {id(each) for value in bound.values() for each in (value, before_reshapes(value))}
        return Match(pattern, stand_ins, outputs, _computations(nodes, leaves, graph))
    return None


def _bindings(pattern: Pattern, root: Node, graph: Canonical, sites: _Sites) -> Iterator[dict[str, Any]]:
    """Yield the bindings of the parameters for which the root is the last output, and values before it are the others:
    of queries and keys, neither is computed from the other."""

    def complete(binding: dict[str, Any], parts: list[Skeleton]) -> Iterator[dict[str, Any]]:
        apart = next((part for part in parts if not part.parameters <= binding.keys()), None)
        if apart is None:
            yield binding
            return
        for node in sites.before(root, apart):
            for larger in _unify(apart, node, binding, graph):
                yield from complete(larger, parts)

    for binding in _unify(pattern.skeleton[-1], root, {}, graph):
        yield from complete(binding, pattern.skeleton[:-1])


def _unify(part: Any, node: Any, binding: dict[str, Any], graph: Canonical) -> Iterator[dict[str, Any]]:
    """Every way in which a skeleton's part can be a node's, as what its parameters stand for."""
    if isinstance(part, Skeleton):
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
    elif isinstance(part, Scalar):
        if isinstance(node, NUMBER_TYPES) and binding.get(part.name, node) == node:
            yield {**binding, part.name: node}
    elif isinstance(part, Wild) or (not isinstance(node, Node) and part == node):
        yield binding


def _unify_all(parts: tuple, nodes: tuple, binding: dict[str, Any], graph: Canonical) -> Iterator[dict[str, Any]]:
    if not parts:
        yield binding
        return
    for first in _unify(parts[0], nodes[0], binding, graph):
        yield from _unify_all(parts[1:], nodes[1:], first, graph)


def _bind(name: str, node: Node, binding: dict[str, Any], graph: Canonical) -> Iterator[dict[str, Any]]:
    """Bind a parameter to a node, or to what was cast or broadcast to it: first to what it stood for elsewhere (all
    layers share their cosines), then to the innermost."""
    candidates = [node]
    while node.id in TRANSPARENT:
        candidates += graph.between.get(id(node), ())
        node = node.args[0]
        candidates.append(node)
    candidates.reverse()
    candidates.sort(key=lambda candidate: (name, id(candidate)) not in graph.favoured)
    for candidate in candidates:
        if id(candidate) in graph.visible and binding.get(name, candidate) is candidate:
            yield {**binding, name: candidate}


def _computations(outputs: list[Node], leaves: set[int], graph: Canonical) -> set[int]:
    """Return the computations of a site, without those that merely cast or broadcast."""
    computations: set[int] = set()
    stack: list[Any] = list(outputs)
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif isinstance(node, Node) and id(node) not in leaves and id(node) not in computations:
            if node.id not in TRANSPARENT:
                computations.add(id(node))
            elif any(id(inner) in leaves for inner in graph.between.get(id(node), ())):
                continue
            stack.extend(node.args)
    return computations


class _Dependencies:
    """Who makes each value of a program, and where."""

    def __init__(self, trace: Trace) -> None:
        self.makers = {name: (i, bound) for i, bound in enumerate(trace.bound_symbols) for name in bound.outputs}

    def is_convex(self, match: Match) -> bool:
        """Return whether each output is a call's only one, and no input is computed from an output."""
        if any(out.name not in self.makers or len(self.makers[out.name][1].outputs) > 1 for out in match.outputs):
            return False
        outputs = {output.name for output in match.outputs}
        first = min(self.makers[name][0] for name in outputs)
        stack = [value.name for value in match.binding.values() if isinstance(value, TensorProxy)]
        visited: set[str] = set()
        while stack:
            name = stack.pop()
            if name in outputs:
                return False
            position, bound = self.makers.get(name, (-1, None))
            if bound is not None and position > first and name not in visited:
                visited.add(name)
                stack.extend(bound.inputs)
        return True
