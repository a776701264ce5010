"""Opaque calls: torch functions that torchlang does not have, run by torch and differentiated by torch's autograd.

In training an opaque call runs once, under enable_grad on detached inputs; its graph is kept, and the backward asks
torch.autograd.grad for the gradients.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from forge.ir import BoundSymbol, Proxy, Symbol, Tag, TensorProxy, current_trace, get_grad, needs_grad, put_grad
from forge.ir.pytree import leaves, tensors, tree_map


def opaque_symbol(
    function: Callable, name: str, output: Callable[[], Any] | None = None, *, tags: Iterable[Tag] = ()
) -> Symbol:
    """The symbol of an opaque call of `function`; `output` makes its result, where it may be called again (a view)."""
    meta = _no_meta if output is None else lambda *args, **kwargs: output()
    return Symbol(name.rpartition(".")[2], f"opaque.{name}", meta=meta, op=function, tags={Tag.OPAQUE, *tags})


def _no_meta(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the metadata of an opaque call comes from Dynamo's fake tensors")


def opaque_rule(bound: BoundSymbol) -> Callable | None:
    """The gradient rule of one opaque call; None for other calls."""
    if Tag.OPAQUE not in bound.symbol.tags:
        return None
    function = bound.symbol.op

    def rule(*args: Any, **kwargs: Any) -> Any:
        trace = current_trace()
        wanted = {argument.name: argument for argument in tensors([args, kwargs]) if needs_grad(argument)}
        output = tree_map(lambda leaf: _fresh(trace, leaf), bound.output)
        record_with_graph((_forward, _backward), (function, args, kwargs), output, wanted)
        return output

    return rule


def record_with_graph(
    symbols: tuple[Symbol, Symbol], call: tuple, output: Any, wanted: Mapping[str, TensorProxy]
) -> None:
    """Records a call whose autograd graph is kept, and its backward.

    symbols: operators that run `run_opaque_forward` and `run_opaque_backward`. call: the function, its args and its
    kwargs. wanted: the arguments whose gradients torch is asked for, by the name of what the function is given in
    their place.
    """
    forward, backward = symbols
    trace = current_trace()
    graph = Proxy(trace.fresh_name("graph"))
    given = list(leaves([*call[1:]]))
    positions = tuple(i for i, leaf in enumerate(given) if getattr(leaf, "name", None) in wanted)
    trace.record(BoundSymbol(forward, (*call, positions), {}, (output, graph)))
    gradients = tuple(get_grad(leaf) for leaf in tensors(output) if _differentiable(leaf))
    arguments = [wanted[name] for name in dict.fromkeys(given[i].name for i in positions)]
    results = tuple(trace.tensor(each.shape, each.dtype, each.device) for each in arguments)
    trace.record(BoundSymbol(backward, (graph, gradients), {}, results))
    for argument, gradient in zip(arguments, results, strict=True):
        put_grad(argument, gradient)


def _differentiable(leaf: TensorProxy | torch.Tensor) -> bool:
    return leaf.dtype.is_floating_point or leaf.dtype.is_complex


def _fresh(trace: Any, leaf: Any) -> Any:
    return trace.tensor(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, TensorProxy) else leaf


class OpaqueGraph:
    """What the backward of an opaque call needs: its detached inputs and its outputs, with torch's graph between."""

    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.inputs = inputs
        self.outputs = outputs


def run_opaque_forward(function: Callable, args: tuple, kwargs: dict, positions: tuple[int, ...]) -> tuple:
    """(outputs, graph): runs `function` with the leaves at `positions` as fresh leaves of torch's graph."""
    flat = list(leaves([args, kwargs]))
    fresh: dict[int, torch.Tensor] = {}
    for position in positions:
        value = flat[position]
        if id(value) not in fresh:
            fresh[id(value)] = value.detach().requires_grad_()
    args, kwargs = tree_map(lambda leaf: fresh.get(id(leaf), leaf), (args, kwargs))
    with torch.enable_grad():
        output = function(*args, **kwargs)
    outputs = [leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor) and _differentiable(leaf)]
    detached = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)
    return detached, OpaqueGraph(list(fresh.values()), outputs)


def run_opaque_backward(graph: OpaqueGraph, gradients: tuple) -> tuple:
    """The gradients of the inputs; zeros for one that no output depends on."""
    pairs = [
        (output, gradient) for output, gradient in zip(graph.outputs, gradients, strict=True) if output.requires_grad
    ]
    if not pairs:
        return tuple(torch.zeros_like(value) for value in graph.inputs)
    outputs, incoming = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, graph.inputs, incoming, allow_unused=True, retain_graph=True)
    return tuple(
        torch.zeros_like(value) if gradient is None else gradient
        for value, gradient in zip(graph.inputs, found, strict=True)
    )


_forward = Symbol(
    "run_opaque_forward", "opaque.forward", meta=_no_meta, op=run_opaque_forward, tags=frozenset({Tag.OPAQUE})
)
_backward = Symbol(
    "run_opaque_backward", "opaque.backward", meta=_no_meta, op=run_opaque_backward, tags=frozenset({Tag.OPAQUE})
)
