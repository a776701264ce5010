"""A function of tensors as two graphs of operators: those that torch runs for it, and those for its gradient.

They are found without data, by make_fx, and replace the function in a graph as a torch.autograd.Function does. All
of them are calls of the program: nothing runs twice, and the backward reads the forward's random draws.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from forge import torchlang
from forge.capture import fake_substitutes
from forge.capture.autograd_functions import Forward, FunctionCall
from forge.capture.lowering import acts, as_captured
from forge.ir import differentiable
from forge.ir.pytree import leaves
from forge.prims.library import operator_symbol, quiet, symbolic_dispatch
from forge.runtime.torch_state import restore_transforms
from forge.torch_internals.dispatch import DisableTorchFunction, OpOverload, disable_current_modes
from forge.torchlang.opaque import track


class OperatorGraphs(NamedTuple):
    """The graphs of a function: forward(*args) returns its results and the backward's residuals, backward(*gradients,
    *residuals) the gradients of the arguments, None for one that has none. constant: positions of the results without
    a gradient."""

    forward: GraphModule
    backward: GraphModule
    constant: tuple[int, ...]


def operator_graphs(function: Callable, args: Sequence[Any]) -> OperatorGraphs | None:
    """Return the graphs of a function of fake tensors, each with a gradient if it requires one; None if its operators
    depend on data, or if one is unknown to torchlang."""
    targets = [i for i, each in enumerate(args) if each.requires_grad]
    plain = [each.detach() for each in args]
    with _tracing(args):
        try:
            outputs = _results(function, plain, targets)[0]
            flowing = [i for i, each in enumerate(outputs) if each.requires_grad]
            incoming = [torch.empty_like(outputs[i]) for i in flowing]
            graph = make_fx(_Joint(function, targets, flowing))(plain, incoming)
        except Exception:
            return None
    graph.graph.eliminate_dead_code(is_impure_node=acts)
    if not all(map(_is_known, graph.graph.nodes)):
        return None
    as_captured(graph)
    constant = tuple(i for i in range(len(outputs)) if i not in flowing)
    return _split(graph, slice(len(plain), len(plain) + len(incoming)), len(outputs), constant)


@contextmanager
def _tracing(args: Sequence[Any]) -> Iterator[None]:
    symbolic = any(isinstance(size, torch.SymInt) for each in args for size in each.shape)
    with (
        fake_substitutes.without_substitutes(),
        restore_transforms(),
        quiet(),
        disable_current_modes(),
        DisableTorchFunction(),
        args[0].fake_mode,
        symbolic_dispatch(symbolic),
    ):
        yield


def _results(function: Callable, args: Sequence[Any], targets: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Return the function's results with torch's graph of them, and the arguments at which it starts."""
    inputs = list(args)
    with torch.set_grad_enabled(bool(targets)):
        for i in targets:
            inputs[i] = track(inputs[i])
        return list(leaves(function(*inputs))), [inputs[i] for i in targets]


class _Joint:
    """A function's results and then the gradients of its `targets` arguments, as a function of the arguments and of the
    gradients of the results at `flowing`. The arguments are first: a graph reads a size from the first that has it.
    """

    def __init__(self, function: Callable, targets: Sequence[int], flowing: Sequence[int]) -> None:
        self.function = function
        self.targets = targets
        self.flowing = flowing

    def __call__(self, args: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        outputs, inputs = _results(self.function, args, self.targets)
        result: list[Any] = [None] * len(args)
        if self.flowing:
            gradients = torch.autograd.grad([outputs[i] for i in self.flowing], inputs, incoming, allow_unused=True)
            for i, gradient in zip(self.targets, gradients, strict=True):
                result[i] = gradient
        return outputs, result


def _is_known(node: Node) -> bool:
    """Return whether torchlang knows a node's function, or records it as one of torch's operators."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return True
    return torchlang.find(node.target) is not None or operator_symbol(node.target) is not None


def _split(joint: GraphModule, incoming: slice, results: int, constant: tuple[int, ...]) -> OperatorGraphs:
    """Return the graph before the first node that reads a gradient, and the rest."""
    *nodes, output = joint.graph.nodes
    gradients = nodes[incoming]
    others = nodes[: incoming.start] + nodes[incoming.stop :]
    start = next((i for i, node in enumerate(others) if not set(gradients).isdisjoint(node.all_input_nodes)), None)
    before, behind = others[:start], others[start:] if start is not None else []
    outputs, grads = output.args[0][:results], output.args[0][results:]
    own = {*behind, *gradients}
    read = [*(each for node in behind for each in node.all_input_nodes), *(x for x in grads if isinstance(x, Node))]
    residuals = [each for each in dict.fromkeys(read) if each not in own]
    forward = _graph_of(joint, [], before, (tuple(outputs), tuple(residuals)))
    return OperatorGraphs(forward, _graph_of(joint, [*gradients, *residuals], behind, tuple(grads)), constant)


def _graph_of(joint: GraphModule, inputs: Sequence[Node], nodes: Sequence[Node], result: Any) -> GraphModule:
    """Return a part of a graph, with these nodes as its inputs."""
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(map_arg(result, env.__getitem__))
    return GraphModule(joint, graph)


# in a graph


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: GraphModule, backward: GraphModule, constant: Sequence[int], *args: Any) -> Any:
        outputs, residuals = forward(*args)
        ctx.save_for_backward(*residuals)
        ctx.backward_graph, ctx.flowing = backward, [i for i, each in enumerate(outputs) if differentiable(each)]
        ctx.flowing = [i for i in ctx.flowing if i not in constant]
        ctx.mark_non_differentiable(*[each for i, each in enumerate(outputs) if i not in ctx.flowing])
        return outputs

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        gradients = ctx.backward_graph(*[incoming[i] for i in ctx.flowing], *ctx.saved_tensors)
        return None, None, None, *gradients


def run_graphs(forward: GraphModule, backward: GraphModule, constant: Sequence[int], *args: Any) -> tuple:
    """Return the results of OperatorGraphs for these arguments, a tuple."""
    return _Run.apply(forward, backward, constant, *args)


def record_graphs(
    inline: Callable[..., Any], forward: GraphModule, backward: GraphModule, constant: Sequence[int], args: tuple
) -> tuple:
    """Record `run_graphs`; `inline` records a graph of operators."""

    def run_forward(*inputs: Any) -> Forward:
        outputs, residuals = inline(forward, inputs)
        return Forward(outputs, residuals, (), tuple(constant))

    def run_backward(residuals: tuple, gradients: tuple) -> Any:
        flowing = [each for i, each in enumerate(gradients) if i not in constant and each is not None]
        return inline(backward, (*flowing, *residuals))

    return FunctionCall(run_forward, run_backward, once=False).record(args)
