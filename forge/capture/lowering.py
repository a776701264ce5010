"""A function of torch's own transforms (torch.vmap, torch.func) as a symbol: its decomposition is the operators that
torch runs for it, and its gradient the operators that torch's autograd runs.

They are found without data, by make_fx; functorch's batching rules and derivatives are torch's, and each operator is
recorded as if the program had called it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge.capture import fake_substitutes
from forge.capture.autograd_functions import run_alone
from forge.compiler.program import Unsupported
from forge.ir import NUMBER_TYPES, Symbol, differentiable, get_grad, needs_grad, put_grad
from forge.ir.checks import in_one_line
from forge.ir.pytree import leaves, tensors, tree_map
from forge.prims.library import empty_like, fake_tensor_mode, quiet
from forge.runtime.torch_state import restore_transforms
from forge.torch_internals.dispatch import DisableTorchFunction, OpOverload, disable_current_modes, schema_of
from forge.torch_internals.fake_tensors import FakeTensor
from forge.torch_internals.tensors import core_aten_decompositions, get_decompositions
from forge.torchlang.opaque import record_pullback, track

aten = torch.ops.aten
Inline = Callable[[GraphModule, tuple], Any]

_COMPOSITE = (aten.native_layer_norm, aten.native_group_norm, aten._softmax, aten._log_softmax)


def symbol_from_function(function: Callable, name: str, inline: Inline) -> Symbol:
    """Return the symbol of a pure function of tensors and numbers; `inline` records a graph of operators.

    Calling it raises Unsupported if its operators depend on data, or if it is random.
    """

    def body(*args: Any) -> Any:
        graph = _operators(function, args)
        return run_alone(lambda *values: inline(graph, values), args, lambda result: ()).result

    def rule(*args: Any) -> Any:
        output = symbol(*args)
        targets = [i for i, argument in enumerate(args) if needs_grad(argument)]
        incoming = [get_grad(each) for each in tensors(output) if differentiable(each)]
        gradient = symbol_from_function(_Gradient(function, targets, len(incoming)), f"gradient of {name}", inline)
        try:
            gradients = gradient(*incoming, *args)
        except Unsupported:
            record_pullback(function, name, args, {}, output, {args[i].name: args[i] for i in targets})
        else:
            for i, grad in zip(targets, gradients, strict=True):
                put_grad(args[i], grad)
        return output

    symbol = Symbol(name.rpartition(".")[2].replace(" ", "_"), name, body=body, rule=rule)
    return symbol


class _Gradient:
    """The gradients of a function's arguments at `targets`, as a function of the gradients of its `count`
    differentiable outputs and of its arguments. None for an argument that no output depends on."""

    def __init__(self, function: Callable, targets: Sequence[int], count: int) -> None:
        self.function = function
        self.targets = targets
        self.count = count

    def __call__(self, *operands: Any) -> tuple:
        incoming, args = operands[: self.count], list(operands[self.count :])
        again = torch.is_grad_enabled() and any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in operands
        )
        with torch.enable_grad():
            for i in self.targets:
                args[i] = track(args[i])
            result = self.function(*args)
        outputs = [leaf for leaf in leaves(result) if differentiable(leaf)]
        pairs = [(output, gradient) for output, gradient in zip(outputs, incoming, strict=True) if output.requires_grad]
        if not pairs:
            return (None,) * len(self.targets)
        flowing, gradients = zip(*pairs, strict=True)
        inputs = [args[i] for i in self.targets]
        return torch.autograd.grad(flowing, inputs, gradients, allow_unused=True, create_graph=again)


def _zeros(size: Sequence[int], *, dtype: Any = None, device: Any = None, **how: Any) -> torch.Tensor:
    """Return zeros with memory for tensors without."""
    return torch.zeros(size, dtype=dtype, device=device)


def _zeros_of_tangent(self: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0) -> torch.Tensor:
    """Return the first tangent of forward-mode differentiation: contiguous, whatever self is."""
    return other.new_zeros((*self.shape[:self_num_batch_dims], *other.shape))


@cache
def _decompositions() -> dict:
    """Return the decompositions of torch's operators for gradients; the other operators are in torchlang."""
    own = {
        aten._efficientzerotensor.default: _zeros,
        aten._new_zeros_with_same_feature_meta.default: _zeros_of_tangent,
    }
    return {**core_aten_decompositions(), **get_decompositions(_COMPOSITE), **own}


def _operators(function: Callable, args: tuple) -> GraphModule:
    """Return the operators that a function runs, each with its result on fake tensors. Raises Unsupported."""
    try:
        with (
            fake_substitutes.without_substitutes(),
            restore_transforms(),
            quiet(),
            disable_current_modes(),
            DisableTorchFunction(),
            fake_tensor_mode(args, allow_non_fake_inputs=True),
            sdpa_kernel(SDPBackend.MATH),
        ):
            graph = make_fx(function, decomposition_table=_decompositions())(*tree_map(empty_like, args))
    except Exception as error:
        raise Unsupported(f"torch does not say without data what it runs: {in_one_line(error)}") from error
    _without_changed_shapes(graph)
    graph.graph.eliminate_dead_code(is_impure_node=acts)
    if {aten._linalg_det.default, aten._linalg_svd.default} <= {node.target for node in graph.graph.nodes}:
        raise Unsupported("torch's derivative of a determinant depends on whether it is 0")
    for node in graph.graph.nodes:
        if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise Unsupported(f"{node.target} draws random numbers")
    as_captured(graph)
    return graph


def as_captured(graph: GraphModule) -> None:
    """Convert a graph of make_fx to be recorded like Dynamo's. Raises Unsupported."""
    for node in graph.graph.nodes:
        if node.target is aten.lift_fresh_copy.default:  # of a tensor in the graph
            node.target = aten.clone.default
        if node.target is aten._to_copy.default and isinstance(node.args[0], NUMBER_TYPES):  # vmap promotes numbers
            node.target = aten.scalar_tensor.default
            node.kwargs = {name: node.kwargs[name] for name in ("dtype", "device") if name in node.kwargs}
        if node.op == "get_attr" and isinstance(getattr(graph, node.target), FakeTensor):
            raise Unsupported("it makes a tensor of numbers that are not known without data")
        node.meta["example_value"] = node.meta.get("val")


def acts(node: Node) -> bool:
    """Return whether a node has side effects, such as `_linalg_check_errors`, which has no results. Before torch 2.13,
    Node.is_impure is False for it."""
    return node.is_impure() or (isinstance(node.target, OpOverload) and not schema_of(node.target).returns)


def _without_changed_shapes(graph: GraphModule) -> None:
    """Replace in-place changes of a tensor's shape (squeeze_) by a new view, which later calls read."""
    for node in graph.graph.nodes:
        if torch.Tag.inplace_view not in getattr(node.target, "tags", ()):
            continue
        packet = getattr(aten, schema_of(node.target).name.removeprefix("aten::").removesuffix("_"))
        signature = [str(each.type) for each in schema_of(node.target).arguments]
        overloads = (getattr(packet, name) for name in packet.overloads())
        node.target = next(
            each for each in overloads if [str(each.type) for each in schema_of(each).arguments] == signature
        )
        later = {each for each in graph.graph.nodes if node < each}
        node.args[0].replace_all_uses_with(node, delete_user_cb=later.__contains__)
