"""Inputs that are results of collectives under way become plain tensors, for which the program's call waits.

Where a tensor parallel layer runs in eager before a program, as around blocks that are jitted one by one, its result is
an AsyncCollectiveTensor: a subclass that waits at its first use. What torch.compile does, too.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from forge.capture.dtensors import DTensor, LocalGraph
from forge.torch_internals.distributed import is_async, local_tensor, wait, waited
from forge.torch_internals.pytree import torch_pytree


def to_waited_graph(graph: GraphModule) -> LocalGraph | None:
    """Return the graph on tensors that are there, None where no input is a result of a collective."""
    inputs = graph.graph.find_nodes(op="placeholder")
    places = [i for i, node in enumerate(inputs) if is_async(node.meta.get("example_value"))]
    if not places:
        return None
    new = Graph()  # Dynamo reads the captured one again
    env: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        copied = env[node] = new.node_copy(node, env.__getitem__)
        if "example_value" in node.meta:  # a view of such a tensor is one
            value = torch_pytree.tree_map_only(torch.Tensor, _inside, node.meta["example_value"])
            copied.meta["example_value"] = value
    for i in places:
        _wait_for_example(env[inputs[i]])
    return LocalGraph(GraphModule(graph, new), _waiting(places))


def _inside(fake: Any) -> Any:
    if not is_async(fake):
        return fake
    inside = fake.elem.detach()
    return inside.requires_grad_() if fake.requires_grad else inside


def _wait_for_example(node: Node) -> None:
    """Replace the value at capture of an input."""
    given = node.meta.get("grapharg")
    if given is not None:
        example = local_tensor(given.example) if isinstance(given.example, DTensor) else given.example
        node.meta["grapharg"] = SimpleNamespace(example=wait(example), source=given.source)


def _waiting(places: list[int]) -> Callable[[Callable], Callable]:
    """Return a function that makes a call on results of collectives of one on plain tensors."""

    def wrap(call: Callable) -> Callable:
        def of_results(*inputs: Any) -> Any:
            tensors: list[torch.Tensor] = list(inputs)
            for i in places:
                tensors[i] = waited(inputs[i])
            return call(*tensors)

        return of_results

    return wrap
