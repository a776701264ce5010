"""Numbers that are known only at run time: read from tensors, and checked as soon as they are known."""

from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from forge import prims
from forge.capture.aliasing import Pair
from forge.capture.checks import Check, checks_of, computes_number
from forge.capture.fake_values import fake_tensors
from forge.compiler.program import Unsupported
from forge.ir import NUMBER_TYPES, SYMBOLIC_TYPES, BoundSymbol, NumberProxy, Symbol, Tag, TensorProxy, Trace
from forge.ir.pytree import leaves, names, tree_map
from forge.torch_internals.sympy import SymT, ValueRanges, int_oo, raw_expression, symbol_is_type
from forge.torch_internals.tensors import version_of
from forge.torchlang import parameters

_ACTS = frozenset({Tag.EFFECT, Tag.RANDOM})
_SIZE = torch.ops.aten.sym_size.int


class RuntimeNumbers:
    """The numbers of a graph that its program reads from tensors, and the checks of these numbers.

    env: the values of the graph's nodes. read: the names of the numbers read so far in the trace.
    """

    def __init__(self, graph: Graph, trace: Trace, env: dict[Node, Any], read: set[str]) -> None:
        self.read = read
        self.checks = checks_of(graph)  # that are not recorded yet
        self._trace = trace
        self._env = env
        self._graph_numbers = GraphNumbers()

    def item(self, x: TensorProxy, example: Any) -> Any:
        """Return the number in a 0-d tensor; its read is recorded if it is a symbol."""
        if not isinstance(example, SYMBOLIC_TYPES):
            return example
        self._record(prims.item, (self._trace.memory.read(x),), example)
        return example

    def _record(self, symbol: Symbol, args: tuple, value: Any) -> None:
        """Record the read of a number that is known only at run time."""
        (symbol_of,) = raw_expression(
            value.node
        ).free_symbols  # without Dynamo's simplifications; a bool is one that is 1
        number = NumberProxy(str(symbol_of), value)
        if number.name not in self.read:
            self.read.add(number.name)
            self._trace.names.add(number.name)
            self._trace.record(BoundSymbol(symbol, args, {}, number))
            self.add_checks()

    def add_checks(self) -> None:
        """Record the checks that the program can already make, before it computes on their numbers."""
        for node in list(self.checks):
            if all(map(self._is_known, node.all_input_nodes)):
                self.add_check(node)

    def _is_known(self, node: Node) -> bool:
        if not isinstance(node.meta.get("example_value"), NUMBER_TYPES):
            return node in self._env
        return self._trace.names.issuperset(names(self._graph_numbers.number(node)))

    def add_check(self, node: Node) -> None:
        """Record a check, once."""
        if node not in self.checks:
            return
        self.checks.remove(node)
        condition, *values = self._trace.memory.read_all(tree_map(self._as_asked, node.args))
        if isinstance(node.target, Check):
            prims.require(condition, node.target.message, node.target.error, *values)
        else:
            prims.require(condition, *values, RuntimeError if self._has_acted() else prims.ViolatedAssumption)

    def _as_asked(self, value: Any) -> Any:
        """Return a node's value; a number as the graph computes it."""
        return self._env[value] if isinstance(value, Node) and value in self._env else self._graph_numbers.number(value)

    def _has_acted(self) -> bool:
        """Return whether the program already has side effects that it may not repeat."""
        calls = (bound for bound in self._trace.bound_symbols if bound.symbol is not prims.require)
        return any(not _ACTS.isdisjoint(bound.all_tags) for bound in calls)

    def read_lengths(self, output: Any, example: Any) -> None:
        """Record the data-dependent sizes of a call's results: numbers that the results define."""
        for proxy, fake in zip(leaves(output), leaves(example), strict=True):
            for dim, count in enumerate(fake.shape if isinstance(fake, torch.Tensor) else ()):
                if _is_read(count):
                    self._record(prims.length, (proxy, dim), count)

    def must_know_lengths(self, name: str, example: Any) -> None:
        """Raise Unsupported for results with data-dependent sizes that no result defines."""
        if not self._trace.names.issuperset(map(str, free_unbacked_symbols(fake_tensors(example)))):
            raise Unsupported(
                f"how long the result of {name} is depends on the values that it is given",
                "compute on the mask (torch.where, x * mask) or take torch.nonzero_static: their lengths are known",
            )

    def read_numbers(self, operands: list[Pair], target: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments of a call with a number wherever torch reads one from a 0-d tensor."""
        numbers = {handle.name: number for handle, number in [*_constants(operands), *_items(operands)]}
        if not numbers:
            return args, kwargs

        def read(x: TensorProxy) -> Any:
            return self.item(x, numbers[x.name]) if x.name in numbers else x

        return parameters.read_numbers(target, args, kwargs, read)

    def read_offset(self, operands: list[Pair], example: Any) -> None:
        """Record the read of a value's storage offset if that is an index in a 0-d tensor."""
        offset = example.storage_offset() if isinstance(example, torch.Tensor) else 0
        if isinstance(offset, torch.SymInt):
            symbols = set(map(str, offset.node.expr.free_symbols)) - set(self._trace.names)
            for handle, number in _items(operands):
                if str(number.node.expr) in symbols:
                    self.item(handle, number)


def _items(operands: list[Pair]) -> list[tuple[Any, torch.SymInt]]:
    """Return the 0-d tensors from which Dynamo read an integer, and the integers."""
    memos = [(handle, getattr(fake, "item_memo", None)) for handle, fake in operands]
    return [(handle, number) for handle, number in memos if isinstance(number, torch.SymInt)]


def known_constant(fake: Any) -> Any:
    """Return the number of a 0-d tensor that Dynamo knows, a literal or NumPy's; None for any other, and if it is
    mutated: of the values that it had, Dynamo keeps the last."""
    constant = getattr(fake, "constant", None)
    return None if constant is None or constant.ndim or version_of(fake) else constant.item()


def _constants(operands: list[Pair]) -> list[tuple[Any, Any]]:
    """Return the 0-d tensors whose numbers Dynamo knows, and the numbers."""
    constants = [(handle, known_constant(fake)) for handle, fake in operands]
    return [(handle, number) for handle, number in constants if number is not None]


def _is_read(length: Any) -> bool:
    """Return whether a size is a data-dependent symbol, before Dynamo's simplifications."""
    expression = raw_expression(length.node) if isinstance(length, torch.SymInt) else None
    return isinstance(expression, sympy.Symbol) and symbol_is_type(expression, SymT.UNBACKED_INT)


class GraphNumbers:
    """The symbolic numbers of a graph as the graph computes them. Dynamo's own are specialized by later guards: `n ==
    4` is True once Dynamo has assumed it."""

    def __init__(self) -> None:
        self._environment = ShapeEnv()
        self._numbers: dict[Node, Any] = {}

    def number(self, node: Any) -> Any:
        """Return the number of a node, of symbols without assumptions; a value that is not a number as it is."""
        example = node.meta.get("example_value") if isinstance(node, Node) else None
        if not isinstance(example, NUMBER_TYPES):
            return node if example is None else example
        if node not in self._numbers:
            self._numbers[node] = self._compute(node, example)
        return self._numbers[node]

    def _compute(self, node: Node, example: Any) -> Any:
        if computes_number(node) and callable(node.target):
            return node.target(*torch.fx.map_arg(node.args, self.number))
        if node.target is _SIZE:  # before torch 2.13, its example may be a specialized integer
            tensor, dim = node.all_input_nodes[0], node.args[1]
            example = tensor.meta["example_value"].size(dim)
        if not isinstance(example, SYMBOLIC_TYPES):
            return example
        kind, expression = example.node.pytype, raw_expression(example.node)
        bounds = ValueRanges(-int_oo, int_oo) if kind is int else ValueRanges.unknown()
        self._environment.var_to_range |= dict.fromkeys(expression.free_symbols, bounds)
        return type(example)(SymNode(expression, self._environment, kind, None))
