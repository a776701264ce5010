"""A trace as a graph of prims in one normal form, in which equal computations look equal.

Calls are flattened to prims; values are numbered by what they compute (so that repeated calls are one node); no-op
casts, clones, `* 1` and `+ 0` vanish; x ** 2 is x * x, x ** -0.5 and 1 / sqrt(x) are rsqrt(x); nested broadcasts and
reshapes are one; dims count from the back. A value through which no gradients flow (under no_grad, or detached) is
another one than a value through which they do, and a recomputed value another one than a saved value. Used to compare
programs, never to run them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forge import prims
from forge.ir import NUMBER_TYPES, BoundSymbol, Proxy, Tag, TensorProxy, Trace
from forge.ir.pytree import tensors
from forge.ir.symbol import MODES, NO_TAGS
from forge.transforms.cse import UNMERGEABLE, argument_key

COMMUTATIVE = frozenset(
    prim.id
    for prim in (
        prims.add,
        prims.mul,
        prims.maximum,
        prims.minimum,
        prims.eq,
        prims.ne,
        prims.bitwise_and,
        prims.bitwise_or,
        prims.bitwise_xor,
    )
)
_IDENTITIES = frozenset(prim.id for prim in (prims.clone, prims.contiguous))
CAST, BROADCAST, RESHAPE = prims.convert_element_type.id, prims.broadcast_in_dim.id, prims.reshape.id


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One value: the prim that computes it, from other nodes and literals; `proxy` has its metadata.

    `args` holds nodes, literals and tuples of them. An input has the id "input" and its name as argument. `index` is
    the output's number where a prim has several, `tags` the tags of its call that change what the value means.
    """

    id: str
    args: tuple
    proxy: TensorProxy
    key: Any
    index: int = 0
    tags: frozenset[Tag] = NO_TAGS

    def __repr__(self) -> str:
        return f"{self.proxy.name} = {self.id}{self.args}"


class Canonical:
    """The normal form of a trace: `node_of[name]` for every name in it; `visible` names a node as its program does.

    `between` holds the broadcasts that became part of a larger one: they have names of their own in the program.
    """

    def __init__(self, inputs: Iterable[Proxy], calls: Sequence[BoundSymbol]) -> None:
        self.node_of: dict[str, Node] = {}
        self.visible: dict[int, list[TensorProxy]] = {}
        self.between: dict[int, list[Node]] = {}
        self.traced: dict[Any, Any] = {}  # caches of searches, for this program alone
        self.favoured: set[tuple[str, int]] = set()  # (parameter, node) that searches try first
        self._reshaped: dict[int, list[Node]] = {}
        self._nodes: dict[Any, Node] = {}
        self._tags = NO_TAGS
        without_grad = calls and all(Tag.NO_GRAD in bound.tags for bound in calls)  # of its inputs, too
        self._input_tags = frozenset({Tag.NO_GRAD}) if without_grad else NO_TAGS
        for proxy in inputs:
            self.add_input(proxy)
        for bound in calls:
            self._flatten(bound)
            self.show(bound)

    def add_input(self, proxy: Proxy) -> None:
        """Add a value that the program is given."""
        if isinstance(proxy, TensorProxy):
            node = self._intern("input", (proxy.name,), proxy, tags=self._input_tags)
            self.node_of[proxy.name] = node
            self.visible.setdefault(id(node), []).append(proxy)

    def embed(
        self,
        inputs: dict[str, Node],
        calls: Iterable[BoundSymbol],
        outputs: Iterable[str],
        tags: frozenset[Tag] = NO_TAGS,
    ) -> list[Node]:
        """Return the nodes that another program's outputs would be here, its inputs being these nodes and its calls
        carrying these tags: the very nodes of this program where it computes the same."""
        outer = self.node_of
        self.node_of, self._tags = dict(inputs), tags
        try:
            for bound in calls:
                self._flatten(bound)
            return [self.node_of[name] for name in outputs]
        finally:
            self.node_of, self._tags = outer, NO_TAGS

    def show(self, bound: BoundSymbol) -> None:
        """Make a call's results visible: what stands in the program itself, not inside a composite."""
        for proxy in tensors(bound.output):
            node = self.node_of[proxy.name]
            proxies = self.visible.setdefault(id(node), [])
            if all(other.name != proxy.name for other in proxies):
                proxies.append(proxy)

    def same_elements(self, node: Node) -> list[Node]:
        """Every shape of a value that the program has made so far; as it was computed comes last."""
        base = before_reshapes(node)
        return [*self._reshaped.get(id(base), ()), base]

    def _flatten(self, bound: BoundSymbol) -> None:
        if bound.subsymbols:
            for sub in bound.subsymbols:
                self._flatten(sub)
            return
        for index, proxy in enumerate(tensors(bound.output)):
            if proxy.name not in self.node_of:
                self.node_of[proxy.name] = self._node(bound, proxy, index)

    def _node(self, bound: BoundSymbol, proxy: TensorProxy, index: int) -> Node:
        prim = bound.symbol.id
        if not UNMERGEABLE.isdisjoint(bound.all_tags):
            return Node(prim, (), proxy, ("only", proxy.name), index)
        args = tuple([self._argument(arg) for arg in (*bound.args, *bound.kwargs.values())])
        tags = (bound.tags | self._tags) & MODES
        simpler = _simplify(prim, args, proxy)
        if isinstance(simpler, Node):
            if Tag.NO_GRAD not in tags or Tag.NO_GRAD in simpler.tags:
                return simpler
            simpler = prims.detach.id, (simpler,)
        node = self._intern(*simpler, proxy, index, tags)
        if prim == BROADCAST and args[0].id == BROADCAST:
            within = self.between.setdefault(id(node), [])
            if all(other is not args[0] for other in within):
                within.append(args[0])
        return node

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, TensorProxy):
            node = self.node_of.get(arg.name)
            if node is None:  # a constant of the trace
                self.add_input(arg)
                node = self.node_of[arg.name]
            return node
        if isinstance(arg, (tuple, list)):
            return tuple(self._argument(item) for item in arg)
        return arg

    def _intern(self, id: str, args: tuple, proxy: TensorProxy, index: int = 0, tags: frozenset[Tag] = NO_TAGS) -> Node:
        parts = [_key(arg) for arg in args]
        if id in COMMUTATIVE:
            parts.sort(key=str)
        key = (id, index, tags, *parts)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(id, args, proxy, len(self._nodes), index, tags)
            if id == RESHAPE:
                self._reshaped.setdefault(_identity(args[0]), []).append(node)
        return node


def canonical(trace: Trace) -> Canonical:
    """Return the normal form of a recorded trace."""
    return Canonical(trace.inputs, trace.bound_symbols)


_identity = id  # where a parameter has the name


def _key(arg: Any) -> Any:
    kind = type(arg)
    if kind is Node:
        return Node, arg.key
    if kind is int:
        return int, arg
    if kind is tuple:
        return tuple([_key(item) for item in arg])
    return argument_key(arg)


def _is_number(value: Any, expected: float) -> bool:
    return isinstance(value, NUMBER_TYPES) and isinstance(value, (int, float)) and value == expected


def _simplify(id: str, args: tuple, proxy: TensorProxy) -> "Node | tuple[str, tuple]":
    """Return the node that a call is equal to, or its id and arguments in normal form."""
    if id in _IDENTITIES:
        return args[0]
    rewrite = _REWRITES.get(id)
    return rewrite(args, proxy) if rewrite is not None else (id, args)


def _cast(args: tuple, proxy: TensorProxy) -> "Node | tuple[str, tuple]":
    x = args[0]
    return x if x.proxy.dtype == proxy.dtype else (CAST, (x, proxy.dtype))


def _broadcast(args: tuple, proxy: TensorProxy) -> "Node | tuple[str, tuple]":
    x, shape, dims = args
    if x.id == BROADCAST:
        inner, _, inner_dims = x.args
        x, dims = inner, tuple(dims[dim] for dim in inner_dims)
    if len(x.proxy.shape) == len(shape) and all(map(prims.same, x.proxy.shape, shape)):
        return x
    return BROADCAST, (x, tuple(shape), tuple(dims))


def _reshape(args: tuple, proxy: TensorProxy) -> "Node | tuple[str, tuple]":
    x = args[0]
    while x.id == RESHAPE:
        x = x.args[0]
    if len(x.proxy.shape) == proxy.ndim and all(map(prims.same, x.proxy.shape, proxy.shape)):
        return x
    return RESHAPE, (x, proxy.shape)


def _pow(args: tuple, proxy: TensorProxy) -> tuple[str, tuple]:
    base, exponent = args
    if _is_number(exponent, 2):
        return prims.mul.id, (base, base)
    if _is_number(exponent, -0.5):
        return prims.rsqrt.id, (base,)
    return prims.pow.id, args


def _reciprocal_of_root(x: Any) -> Node | None:
    return x.args[0] if isinstance(x, Node) and x.id == prims.sqrt.id else None


def _div(args: tuple, proxy: TensorProxy) -> tuple[str, tuple]:
    if _is_number(args[0], 1) and _reciprocal_of_root(args[1]) is not None:
        return prims.rsqrt.id, (_reciprocal_of_root(args[1]),)
    return prims.div.id, args


def _reciprocal(args: tuple, proxy: TensorProxy) -> tuple[str, tuple]:
    root = _reciprocal_of_root(args[0])
    return (prims.rsqrt.id, (root,)) if root is not None else (prims.reciprocal.id, args)


def _slice(args: tuple, proxy: TensorProxy) -> "Node | tuple[str, tuple]":
    x, dim, start, stop, *step = args
    return prims.slice.id, (x, dim, start, stop, *(step or (1,)))


def _drop_neutral(id: str, neutral: float) -> Any:
    def rewrite(args: tuple, proxy: TensorProxy) -> "Node | tuple[str, tuple]":
        for x, other in (args, args[::-1]):
            if isinstance(x, Node) and _is_number(other, neutral) and x.proxy.dtype == proxy.dtype:
                return x
        return id, args

    return rewrite


_REWRITES = {
    CAST: _cast,
    BROADCAST: _broadcast,
    RESHAPE: _reshape,
    prims.pow.id: _pow,
    prims.div.id: _div,
    prims.reciprocal.id: _reciprocal,
    prims.slice.id: _slice,
    prims.mul.id: _drop_neutral(prims.mul.id, 1),
    prims.add.id: _drop_neutral(prims.add.id, 0),
}


def before_reshapes(node: Node) -> Node:
    """Return the input of a reshape; any other node itself."""
    return node.args[0] if node.id == RESHAPE else node


def relative_args(node: Node) -> tuple:
    """Return the node's arguments with dims counted from the back, so that ranks do not matter."""
    if node.id == prims.pad.id:
        return _padding(node)
    where = _DIM_ARGUMENTS.get(node.id)
    if where is None:
        return node.args
    args = list(node.args)
    rank = node.args[0].proxy.ndim if isinstance(node.args[0], Node) else node.proxy.ndim
    for position in where:
        dims = args[position]
        args[position] = tuple(dim - rank for dim in dims) if isinstance(dims, tuple) else dims - rank
    return tuple(args)


def _padding(node: Node) -> tuple:
    """Return the padding without the leading dims that have none."""
    x, padding, *rest = node.args
    first = next((i for i, sides in enumerate(padding) if tuple(sides) != (0, 0)), len(padding))
    return x, padding[first:], *rest


_DIM_ARGUMENTS = {
    prims.sum.id: (1,),
    prims.amax.id: (1,),
    prims.amin.id: (1,),
    prims.cumsum.id: (1,),
    prims.slice.id: (1,),
    prims.cat.id: (1,),
    prims.flip.id: (1,),
    prims.gather.id: (1,),
    prims.squeeze.id: (1,),
}
