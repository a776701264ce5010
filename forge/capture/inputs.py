"""Facts about a Dynamo graph's inputs that Dynamo knows only while its backend runs: which are parameters or buffers of
modules, and which required grad before the program changed them; and their names.

They are stored in the graph, which may be recorded again later.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from forge.ir.source import Source, text_of
from forge.torch_internals.dispatch import is_traceable_wrapper_subclass
from forge.torch_internals.dynamo import UnspecializedParamBufferSource

_WEIGHT, _GAINS_HISTORY = "forge_weight", "forge_gains_history"  # in the meta of nodes
_POSITIONAL = re.compile(r"_?l_args_(\d+)(?=_)")
_NOISE = re.compile(r"^_?l_(self_)?|(^|_)(module|modules|parameters|buffers|kwargs|args)_(?=.)")


class Weight(NamedTuple):
    """A parameter or buffer of a module. path: in the jitted module; None or "" if it is outside. versioned: whether
    a version counter records its changes."""

    path: str | None
    versioned: bool


def note_inputs(graph: GraphModule) -> None:
    """Note the facts about the inputs of a graph passed to Dynamo's backend."""
    for node in graph.graph.find_nodes(op="placeholder"):
        grapharg = node.meta.get("grapharg")
        value = grapharg and grapharg.example
        if isinstance(getattr(grapharg and grapharg.source, "base", None), UnspecializedParamBufferSource):
            versioned = isinstance(value, torch.Tensor) and not value.is_inference()
            path = Source(owner=text_of(grapharg.source)).module
            node.meta[_WEIGHT] = Weight(path, versioned and not is_traceable_wrapper_subclass(value))
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            node.meta[_GAINS_HISTORY] = node.meta["example_value"].requires_grad


def forget_examples(graph: GraphModule) -> None:
    """Delete the values at capture of the inputs of a rewritten graph, as Dynamo does with its own: the compiled
    program may keep the graph, and torch.utils.swap_tensors rejects parameters with weak references."""
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta.pop("grapharg", None)


def note_weight(node: Node, path: str) -> None:
    """Note that an input is the parameter or buffer at a path in the module."""
    node.meta[_WEIGHT] = Weight(path, versioned=True)


def weight_of(node: Node) -> Weight | None:
    """Return the Weight record of an input; None if it is not a weight."""
    return node.meta.get(_WEIGHT)


def gains_history(node: Node) -> bool:
    """Return whether an input, like its fake tensor, requires grad only since the program mutated it."""
    return node.meta.get(_GAINS_HISTORY, False)


def display_name(name: str, parameters: Sequence[str] = ()) -> str:
    """Return the user's name of an input: 'fc_weight' for Dynamo's 'l_self_modules_fc_parameters_weight_', and the
    first of `parameters` for 'l_args_0_'."""
    short = name.lower() if name.startswith("L_") else name
    positional = _POSITIONAL.match(short)
    if positional and int(positional[1]) < len(parameters):
        short = parameters[int(positional[1])] + short[positional.end() :]
    while True:
        shorter = _NOISE.sub("_", short).strip("_")
        if shorter == short or not shorter:
            break
        short = shorter
    return short if short.isidentifier() else f"x_{short}"
