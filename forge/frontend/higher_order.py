"""Parts of a Dynamo graph that are more than one call: regions between markers."""

from collections.abc import Iterator
from typing import Any

import torch._functorch.predispatch as predispatch
from torch.fx import Graph, GraphModule, Node

from forge.frontend.program import Unsupported

try:  # torch 2.12 and later; an earlier one gives the graph an input that has to run in eager
    from torch._higher_order_ops.register_hook import register_hook_op as REGISTER_HOOK
except ImportError:
    REGISTER_HOOK = None

VMAP_START = predispatch._vmap_increment_nesting
VMAP_END = predispatch._vmap_decrement_nesting


def hooks_first(graph: Graph) -> None:
    """Moves each hook on a value's gradient to where the value is made, and gives it to all that reads the value: a
    hook sees the whole gradient, also what comes from calls before it was registered.

    Raises Unsupported for a hook that reads other tensors, which may be made later.
    """
    for node in list(graph.nodes):
        if REGISTER_HOOK is None or node.target is not REGISTER_HOOK:
            continue
        value, hook, *others = node.args
        if others:
            raise Unsupported("a hook on a value's gradient reads other tensors")
        last = next(each for each in reversed(graph.nodes) if each.op == "placeholder")
        after = last if value.op == "placeholder" else value
        after.append(hook)
        hook.append(node)
        value.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: user is not node)


class Region:
    """Neighbouring nodes as a module of their own: `module(*inputs)` returns the values of `outputs`, in a tuple."""

    def __init__(self, module: GraphModule, inputs: list[Node], outputs: list[Node]) -> None:
        self.module = module
        self.inputs = inputs
        self.outputs = outputs

    @property
    def example(self) -> tuple[Any, ...]:
        """Dynamo's fake values of the outputs."""
        return tuple(node.meta["example_value"] for node in self.outputs)


def vmap_region(graph: GraphModule, start: Node, following: Iterator[Node]) -> Region:
    """The nodes from a vmap's start to its end: inside, values carry a batch dim that only functorch knows."""
    inside, depth = [start], 1
    while depth:
        node = next(following)
        inside.append(node)
        depth += (node.target is VMAP_START) - (node.target is VMAP_END)
    return _extract(graph, inside)


def _extract(graph: GraphModule, inside: list[Node]) -> Region:
    members = set(inside)
    inputs = list(dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in members))
    outputs = [node for node in inside if any(user not in members for user in node.users)]
    part = Graph()
    env = {node: part.placeholder(node.name) for node in inputs}
    for node in inside:
        env[node] = part.node_copy(node, env.__getitem__)
    part.output(tuple(env[node] for node in outputs))
    return Region(GraphModule(graph, part), inputs, outputs)
