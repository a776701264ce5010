"""Which inputs of a Dynamo graph are parameters or buffers of modules.

Dynamo says so only while its backend runs. It is noted in the graph, which may be recorded once more, later.
"""

from typing import NamedTuple

import torch
from torch._dynamo.source import UnspecializedParamBufferSource
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forge.ir.source import Source, text_of

_NOTE = "forge_weight"  # in the meta of nodes


class Weight(NamedTuple):
    """A parameter or buffer of a module. path: in the jitted module; None or "" where it is in none. versioned: whether
    a version tells when it changes."""

    path: str | None
    versioned: bool


def note_weights(graph: GraphModule) -> None:
    """Note the weights among the inputs of a graph that Dynamo's backend is given."""
    for node in graph.graph.find_nodes(op="placeholder"):
        weight = _weight(node)
        if weight is not None:
            node.meta[_NOTE] = weight


def weight_of(node: Node) -> Weight | None:
    """Return what was noted of an input; None where it is no weight."""
    return node.meta.get(_NOTE)


def _weight(node: Node) -> Weight | None:
    given = node.meta.get("grapharg")
    if not isinstance(getattr(given and given.source, "base", None), UnspecializedParamBufferSource):
        return None
    value = given.example
    versioned = isinstance(value, torch.Tensor) and not value.is_inference()
    path = Source(owner=text_of(given.source)).module
    return Weight(path, versioned and not is_traceable_wrapper_subclass(value))
