"""Inputs that are results of pending collectives become plain tensors, for which the program's call waits.

If a tensor parallel layer runs in eager before a program, as around blocks that are jitted one by one, its result is
an AsyncCollectiveTensor, or a DTensor of one: a subclass that waits at its first use. torch.compile does the same.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from forge.capture.dtensor_placements import DTensor
from forge.capture.dtensors import LocalGraph
from forge.torch_internals.distributed import is_async, waited, without_wait
from forge.torch_internals.pytree import torch_pytree


def to_waited_graph(graph: GraphModule) -> LocalGraph | None:
    """Return the graph on tensors that were waited for, None if no input is a result of a collective."""
    inputs = graph.graph.find_nodes(op="placeholder")
    results = [i for i, node in enumerate(inputs) if is_async(node.meta.get("example_value"))]
    if not results:
        return None
    new = Graph()  # Dynamo reads the captured one again
    env: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        env[node] = new.node_copy(node, env.__getitem__)
    bodies = [each.graph for each in graph.modules() if isinstance(each, GraphModule) and each is not graph]
    for each in (new, *bodies):
        _replace_examples(each)
    of_dtensors = [i for i in results if isinstance(inputs[i].meta["example_value"], DTensor)]
    plain = [i for i in results if i not in of_dtensors]  # those of DTensors are waited for when they are unwrapped
    for i in plain:
        _wait_for_example(env[inputs[i]])
    return LocalGraph(GraphModule(graph, new), _waiting(plain))


def _replace_examples(graph: Graph) -> None:
    """Replace the fake values of a graph, including views of results."""
    for node in graph.nodes:
        if "example_value" in node.meta:
            value = torch_pytree.tree_map_only(torch.Tensor, without_wait, node.meta["example_value"])
            node.meta["example_value"] = value


def _wait_for_example(node: Node) -> None:
    """Replace an input's value at capture."""
    grapharg = node.meta.get("grapharg")
    if grapharg is not None:
        with torch.no_grad():
            node.meta["grapharg"] = SimpleNamespace(example=waited(grapharg.example), source=grapharg.source)


def _waiting(places: list[int]) -> Callable[[Callable], Callable]:
    """Return a wrapper that waits for results of collectives and passes plain tensors on."""

    def wrap(call: Callable) -> Callable:
        def of_results(*inputs: Any) -> Any:
            tensors: list[torch.Tensor] = list(inputs)
            for i in places:
                tensors[i] = waited(inputs[i])
            return call(*tensors)

        return of_results if places else call

    return wrap
