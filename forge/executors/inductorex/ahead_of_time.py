"""Whole programs as AOTInductor packages, which C++ and Python run with torch alone."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forge import prims
from forge.compiler.claim import ClaimedCall
from forge.compiler.layout import Layouts
from forge.executors.executor import Declined, decline
from forge.executors.inductorex import isa_probe
from forge.executors.inductorex.aten_graph import changes, exclusive, graph_of_program
from forge.executors.inductorex.lower import compile_package
from forge.executors.torchex.core import torchex
from forge.ir import NumberProxy, Tag, TensorProxy, Trace, check
from forge.ir.checks import in_one_line
from forge.torch_internals.dispatch import OpOverload

aten = torch.ops.aten
_log = logging.getLogger("forge.inductor")
_NEVER = {
    Tag.RANDOM: "draws random numbers in the order of the program",
    Tag.SYNCHRONIZING: "reads values back to Python",
    Tag.EFFECT: "has an effect",
}
_NAMESPACES = ("aten", "prims", "prim", "_operator", "math")


def _find_obstacle(claimed: Sequence[ClaimedCall]) -> Declined | None:
    """Return why a program cannot be a package: a call that torch alone does not run; None if it can."""
    for each in claimed:
        if each.fuser is not None or each.bound.symbol is prims.copy_:  # as for writes to inputs and buffers
            continue
        for call in each.calls:
            tag = next((tag for tag in _NEVER if tag in call.all_tags), None)
            if tag is not None:
                return decline(f"{each.bound.symbol.id} {_NEVER[tag]}")
            if Tag.OPAQUE in call.symbol.tags:
                if not _is_torchs(call.symbol.op):
                    return decline(f"{each.bound.symbol.id} is no operator of torch's")
            elif call.symbol.executor is not torchex:
                name = getattr(call.symbol.executor, "name", "a function")
                return decline(f"{each.bound.symbol.id} is run by {name}")
    return None


def _is_torchs(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in _NAMESPACES
    return (getattr(target, "__module__", None) or "").split(".")[0] in _NAMESPACES


def compile_program(
    program: Trace,
    claimed: Sequence[ClaimedCall],
    weights: Mapping[str, torch.Tensor],
    *,
    alone: bool,
    eager_numerics: bool,
) -> list[str] | Declined:
    """Return the paths of the files of the package, or Declined with the reason if there is none.

    weights: by name, the inputs that become constants. alone: the package holds them. eager_numerics: each value of
    half precision is rounded to its dtype.
    """
    obstacle = _find_obstacle(claimed)
    if obstacle is not None:
        return obstacle
    layouts = Layouts(program.inputs, shared=False)
    isa_probe.wait()
    try:
        with exclusive():
            graph, example_inputs = graph_of_program(program, claimed, layouts, eager_numerics=eager_numerics)
            _check_operators(graph)
            example_inputs = _bind_inputs(graph, program, example_inputs, weights)
            return compile_package(graph, example_inputs, layouts.fake, {"aot_inductor.package_constants_in_so": alone})
    except Exception as error:
        _log.debug("%s", program, exc_info=True)
        reason = isinstance(error, NotImplementedError) and str(error)
        return decline(str(error) if reason else f"AOTInductor failed: {in_one_line(error)}", error=error)


def _check_operators(graph: torch.fx.GraphModule) -> None:
    """Raise NotImplementedError for an operator that torch alone does not have, or that writes to its arguments."""
    for node in graph.graph.nodes:
        if node.op == "call_function":
            check(_is_torchs(node.target), lambda node=node: f"{node.target} is not torch's", NotImplementedError)
            writes = changes(node.target) and not _writes_to_input(node)
            check(not writes, lambda node=node: f"{node.target} writes to its argument", NotImplementedError)


def _writes_to_input(node: torch.fx.Node) -> bool:
    """Return whether a node writes an input's final value."""
    destination = node.args[0]
    return (
        node.target is aten.copy_.default and isinstance(destination, torch.fx.Node) and destination.op == "placeholder"
    )


def _bind_inputs(
    graph: torch.fx.GraphModule, program: Trace, example_inputs: list[Any], weights: Mapping[str, torch.Tensor]
) -> list[Any]:
    """Make weights attributes of the graph, and read sizes from its tensors; return the remaining fake inputs."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    inputs = list(zip(placeholders, program.inputs, example_inputs, strict=True))
    remainder = [each for _, proxy, each in inputs if proxy.name not in weights and not isinstance(proxy, NumberProxy)]
    tensors = [node for node, proxy, _ in inputs if isinstance(proxy, TensorProxy) and proxy.name not in weights]
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for node, proxy, example in inputs:
        if proxy.name in weights:
            graph.register_buffer(proxy.name, weights[proxy.name])
            with graph.graph.inserting_before(first):
                new = graph.graph.get_attr(proxy.name)
        elif isinstance(proxy, NumberProxy):
            with graph.graph.inserting_before(first):
                new = graph.graph.call_function(aten.sym_size.int, _place_of(example, tensors))
        else:
            continue
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    return remainder


def _place_of(size: torch.SymInt, tensors: Sequence[torch.fx.Node]) -> tuple[torch.fx.Node, int]:
    """Return the input, and its dim, that has a size."""
    for node in tensors:
        for dim, each in enumerate(node.meta["val"].shape):
            if isinstance(each, torch.SymInt) and each.node.expr == size.node.expr:
                return node, dim
    raise NotImplementedError(f"the length {size} is the size of no input")
