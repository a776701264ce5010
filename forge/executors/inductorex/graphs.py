"""Graphs of aten operators as plain values, for a process that compiles them."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from forge.compiler.layout import Layout
from forge.ir.pytree import tree_map
from forge.torch_internals.dispatch import OpOverload
from forge.torch_internals.fake_tensors import FakeTensorMode


@dataclass(frozen=True)
class _Reference:
    """A node by its index in the graph."""

    place: int


@dataclass(frozen=True)
class _Operator:
    """An aten operator by its name."""

    name: str

    def find(self) -> Any:
        value: Any = torch.ops
        for part in self.name.split("."):
            value = getattr(value, part)
        return value


ROUNDED = "low_precision_pointwise_barrier"  # the key that Inductor's lowerings read in a node's metadata
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class PlainGraph:
    """A graph of aten operators as plain data: the layouts of its inputs, (target, args, kwargs) of each call, its
    outputs, and the calls that round their results to half precision."""

    inputs: list[Layout]
    calls: list[tuple]
    output: Any
    rounded: frozenset[int] = frozenset()


def describe(graph: GraphModule, inputs: list[Layout]) -> PlainGraph:
    """Return the graph as plain values. Raises NotImplementedError for a tensor or another object in it."""
    places: dict[Node, _Reference] = {}
    calls: list[tuple] = []
    rounded: set[int] = set()

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return places[leaf]
        if isinstance(leaf, OpOverload):
            return _Operator(str(leaf))
        if leaf is operator.getitem or isinstance(leaf, _PLAIN):
            return leaf
        raise NotImplementedError(f"a graph that reads {leaf!r} stays in its process")

    for node in graph.graph.nodes:
        if node.op == "call_function":
            if node.meta.get(ROUNDED):
                rounded.add(len(calls))
            calls.append(tree_map(value, (node.target, tuple(node.args), dict(node.kwargs))))
        elif node.op == "output":
            return PlainGraph(inputs, calls, tree_map(value, node.args[0]), frozenset(rounded))
        elif node.op != "placeholder":
            raise NotImplementedError(f"a graph that holds {node.target} stays in its process")
        places[node] = _Reference(len(places))
    raise AssertionError("a graph without an output")


def rebuild(described: PlainGraph) -> tuple[GraphModule, list[torch.Tensor], FakeTensorMode]:
    """Return the graph, and fake inputs for it with their mode."""
    graph = Graph()
    nodes = [graph.placeholder(f"input_{index}") for index in range(len(described.inputs))]

    def value(leaf: Any) -> Any:
        if isinstance(leaf, _Reference):
            return nodes[leaf.place]
        return leaf.find() if isinstance(leaf, _Operator) else leaf

    for index, call in enumerate(described.calls):
        nodes.append(graph.call_function(*tree_map(value, call)))
        if index in described.rounded:
            nodes[-1].meta[ROUNDED] = True
    graph.output(tree_map(value, described.output))
    module = GraphModule(torch.nn.Module(), graph)
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with fake:
        example_inputs = [
            torch.empty_strided(*each[:2], dtype=each.dtype, device=each.device) for each in described.inputs
        ]
    FakeTensorProp(module, fake).propagate_dont_convert_inputs(*example_inputs)
    return module, example_inputs, fake
