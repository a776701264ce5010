"""Opaque calls: torch functions without a torchlang symbol, run by torch and differentiated by torch's autograd.

In training an opaque call runs once, under enable_grad on detached inputs; its graph is kept, and the backward calls
torch.autograd.grad.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge.ir import (
    BoundSymbol,
    Proxy,
    Symbol,
    Tag,
    TensorProxy,
    current_trace,
    differentiable,
    get_grad,
    needs_grad,
    put_grad,
)
from forge.ir.pytree import leaves, proxies, tensors, tree_map


def opaque_symbol(
    function: Callable, name: str, output: Callable[[], Any] | None = None, *, tags: Iterable[Tag] = ()
) -> Symbol:
    """Return the symbol of an opaque call of `function`; `output` makes its result, if it may be called again (a
    view)."""
    meta = _no_meta if output is None else lambda *args, **kwargs: output()
    return Symbol(
        name.rpartition(".")[2], f"opaque.{name}", meta=meta, op=function, tags=frozenset({Tag.OPAQUE, *tags})
    )


def _no_meta(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the metadata of an opaque call comes from Dynamo's fake tensors")


def opaque_rule(bound: BoundSymbol) -> Callable | None:
    """Return the gradient rule of one opaque call; None for other calls."""
    if Tag.OPAQUE not in bound.symbol.tags:
        return None
    function = bound.symbol.op
    assert function is not None, f"{bound.symbol.id} is opaque, but runs nothing"

    def rule(*args: Any, **kwargs: Any) -> Any:
        trace = current_trace()
        output = tree_map(lambda leaf: _fresh(trace, leaf), bound.output)
        keep_graph(function, args, kwargs, output)
        return output

    return rule


def repeated_rule(bound: BoundSymbol) -> Callable | None:
    """Return the gradient rule of an opaque call that reruns in the backward; None for other calls.

    Its backward, a function of the call's arguments and of gradients that runs torch.autograd.grad, is an opaque call
    too.
    """
    if Tag.OPAQUE not in bound.symbol.tags:
        return None
    symbol, function = bound.symbol, bound.symbol.op
    assert function is not None, f"{symbol.id} is opaque, but runs nothing"

    def rule(*args: Any, **kwargs: Any) -> Any:
        trace = current_trace()
        targets = {argument.name: argument for argument in tensors([args, kwargs]) if needs_grad(argument)}
        output = tree_map(lambda leaf: _fresh(trace, leaf), bound.output)
        trace.record(BoundSymbol(symbol, args, kwargs, output))
        record_pullback(function, symbol.id.removeprefix("opaque."), args, kwargs, output, targets)
        return output

    return rule


def record_pullback(
    function: Callable, name: str, args: tuple, kwargs: dict, output: Any, targets: Mapping[str, TensorProxy]
) -> None:
    """Record, in a gradient rule, an opaque call that reruns a function and computes the gradients of `targets`, its
    arguments by name."""
    trace = current_trace()
    positions = {name: i for i, name in enumerate(getattr(leaf, "name", None) for leaf in leaves([args, kwargs]))}
    pullback = Pullback(function, tuple(positions[name] for name in targets))
    results = tuple(trace.tensor(each.shape, each.dtype, each.device) for each in targets.values())
    gradients = tuple(get_grad(leaf) for leaf in tensors(output) if differentiable(leaf))
    backward = opaque_symbol(pullback, f"gradient of {name}")
    trace.record(BoundSymbol(backward, (gradients, args, kwargs), {}, results))
    for argument, gradient in zip(targets.values(), results, strict=True):
        put_grad(argument, gradient)


class Pullback:
    """The gradients of the leaves at `positions` of a function's arguments, as a function of the gradients of its
    outputs and of the arguments. torch's autograd can differentiate it again."""

    def __init__(self, function: Callable, positions: tuple[int, ...]) -> None:
        self.function = function
        self.positions = positions
        self.__name__ = "gradient"

    def __call__(self, gradients: tuple, args: tuple, kwargs: dict) -> tuple:
        again = torch.is_grad_enabled()
        flat = list(leaves([args, kwargs]))
        with torch.enable_grad():
            # each position is a separate value, through which gradients flow to the argument if it requires them
            fresh = {i: track(flat[i]) for i in self.positions}
            by_id = {id(flat[i]): value for i, value in fresh.items()}
            args, kwargs = tree_map(lambda leaf: by_id.get(id(leaf), leaf), (args, kwargs))
            output = self.function(*args, **kwargs)
        outputs = [leaf for leaf in leaves(output) if differentiable(leaf)]
        return _gradients(outputs, list(fresh.values()), gradients, create_graph=again)


def track(value: torch.Tensor) -> torch.Tensor:
    """Return the value as a separate tensor, through which gradients flow to the original if it requires them."""
    return value.view_as(value) if value.requires_grad else value.detach().requires_grad_()


class GraphProxy(Proxy):
    """A proxy of an OpaqueGraph. Other proxies without data, such as the state that attention saves, are not of this
    class."""

    __slots__ = ()


def keeps_graph(bound: BoundSymbol) -> bool:
    """Return whether a call of a forward keeps torch's graph for its backward."""
    return any(isinstance(proxy, GraphProxy) for proxy in proxies(bound.output))


def record_with_graph(
    symbols: tuple[Symbol, Symbol], call: tuple, output: Any, targets: Mapping[str, TensorProxy]
) -> None:
    """Record a call that keeps its autograd graph, and its backward.

    symbols: operators that run `run_opaque_forward` and `run_opaque_backward`. call: the function, its args and its
    kwargs. targets: the arguments to differentiate, by the names of the values that the function gets for them.
    """
    forward, backward = symbols
    trace = current_trace()
    graph = GraphProxy(trace.fresh_name("graph"))
    flat = list(leaves([*call[1:]]))
    positions = tuple(i for i, leaf in enumerate(flat) if getattr(leaf, "name", None) in targets)
    trace.record(BoundSymbol(forward, (*call, positions), {}, (output, graph)))
    gradients = tuple(get_grad(leaf) for leaf in tensors(output) if differentiable(leaf))
    arguments = [targets[name] for name in dict.fromkeys(flat[i].name for i in positions)]
    results = tuple(trace.tensor(each.shape, each.dtype, each.device) for each in arguments)
    trace.record(BoundSymbol(backward, (graph, gradients), {}, results))
    for argument, gradient in zip(arguments, results, strict=True):
        put_grad(argument, gradient)


def keep_graph(function: Callable, args: tuple, kwargs: dict, output: Any) -> None:
    """Record a call of a function of torch, whose gradients torch's autograd computes from the graph of this run."""
    targets = {argument.name: argument for argument in tensors([args, kwargs]) if needs_grad(argument)}
    record_with_graph((_forward, _backward), (function, args, kwargs), output, targets)


def _fresh(trace: Any, leaf: Any) -> Any:
    return trace.tensor(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, TensorProxy) else leaf


@dataclass(slots=True, eq=False)
class OpaqueGraph:
    """An opaque call's state for its backward: its detached inputs and its outputs, with torch's graph between.

    random: whether the call drew random numbers, so that it cannot be rerun. unreached: the inputs that the running
    backward assumes to have no gradient; None if it gets zeros for them.
    """

    function: Callable
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    random: bool
    unreached: frozenset[int] | None = None


class UnreachedInputs(Exception):
    """The error when the inputs without a gradient differ from the graph's `unreached`, which is updated."""


def _generators(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's default generators from which a call on a device may draw."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def run_opaque_forward(function: Callable, args: tuple, kwargs: dict, positions: tuple[int, ...]) -> tuple:
    """Run `function` with the leaves at `positions` as new leaves of torch's graph; return (outputs, graph)."""
    flat = list(leaves([args, kwargs]))
    fresh: dict[int, torch.Tensor] = {}
    for position in positions:
        value = flat[position]
        if id(value) not in fresh:
            fresh[id(value)] = value.detach().requires_grad_()
    if sum(id(leaf) in fresh for leaf in flat) == sum(id(each) in fresh for each in args):  # none is in a container
        args = tuple(fresh.get(id(each), each) for each in args)
    else:
        args, kwargs = tree_map(lambda leaf: fresh.get(id(leaf), leaf), (args, kwargs))
    device = flat[positions[0]].device
    before = _generators(device)
    with torch.enable_grad():
        output = function(*args, **kwargs)
    random = not all(map(torch.equal, before, _generators(device)))
    outputs = [leaf for leaf in leaves(output) if differentiable(leaf)]
    detached = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)
    return detached, OpaqueGraph(function, list(fresh.values()), outputs, random)


def run_opaque_backward(graph: OpaqueGraph, gradients: tuple) -> tuple:
    """Return the gradients of the inputs, with zeros for None.

    Raises UnreachedInputs if other gradients are None than assumed, because the program depends on that.
    """
    pairs = [(o, g) for o, g in zip(graph.outputs, gradients, strict=True) if o.requires_grad]
    grads: tuple[torch.Tensor | None, ...] = (None,) * len(graph.inputs)
    if pairs:
        flowing, incoming = zip(*pairs, strict=True)
        grads = torch.autograd.grad(flowing, graph.inputs, incoming, allow_unused=True, retain_graph=True)
    unreached = frozenset(i for i, gradient in enumerate(grads) if gradient is None)
    if graph.unreached is not None and unreached != graph.unreached:
        graph.unreached = unreached
        raise UnreachedInputs
    if not unreached:
        return grads
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(graph.inputs, grads, strict=True))


def _gradients(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], gradients: tuple, **how: bool
) -> tuple[torch.Tensor, ...]:
    pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if output.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(value) for value in inputs)
    flowing, incoming = zip(*pairs, strict=True)
    return torch.autograd.grad(flowing, inputs, incoming, allow_unused=True, materialize_grads=True, **how)


_forward = Symbol(
    "run_opaque_forward", "opaque.forward", meta=_no_meta, op=run_opaque_forward, tags=frozenset({Tag.OPAQUE})
)
_backward = Symbol(
    "run_opaque_backward", "opaque.backward", meta=_no_meta, op=run_opaque_backward, tags=frozenset({Tag.OPAQUE})
)
