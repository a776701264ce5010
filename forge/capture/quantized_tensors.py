"""Linear layers whose weights are torchao's quantized tensors become calls of forge's operators on their parts.

torchao's tensors are subclasses: a weight of 8 bits and its scales, which dispatch in Python. Such an input of
Dynamo's graph becomes two inputs, and torch.nn.functional.linear becomes linear_int8 or linear_fp8. Dynamo guards the
class and the other attributes of the subclass. With other uses of such a tensor in the graph, and with quantized
activations, the tensor stays as it is: the graph runs by torch's own functions, which call torchao.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from forge import torchlang
from forge.capture.dtensors import LocalGraph
from forge.torchlang.nn.quantized import OPERATORS

_OPERATORS = {"Int8Tensor": "linear_int8", "Float8Tensor": "linear_fp8"}  # by torchao's classes
_PARTS = ("qdata", "scale")
_ATTRIBUTES = ("act_quant_kwargs", "act_pre_scale")  # preprocessing of a linear layer's input


class _Linear(NamedTuple):
    """A call of linear: its input, weight and bias."""

    input: Any
    weight: Any
    bias: Any = None


def to_plain_graph(graph: GraphModule) -> LocalGraph | None:
    """Return the graph with the parts of quantized weights as inputs, None if it has no such weights."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None  # torchao's function decides the conversions
    inputs = graph.graph.find_nodes(op="placeholder")
    operators = {node: name for node in inputs if (name := _operator_of(node)) is not None}
    if not operators:
        return None
    new = Graph()
    env: dict[Any, Any] = {}
    for node in graph.graph.nodes:
        if node in operators:
            env[node] = [_part(new, node, name) for name in _PARTS]
            continue
        call = _linear_of(node)
        name = None if call is None else operators.get(call.weight)
        if call is None or name is None:
            env[node] = new.node_copy(node, env.__getitem__)
            continue
        weight, scale = env[call.weight]
        product = new.call_function(
            OPERATORS[name],
            (env[call.input], weight, _per_row(new, scale, weight), env.get(call.bias)),
        )
        product.meta = dict(node.meta)
        env[node] = product
    return LocalGraph(GraphModule(graph, new), _unpacking([node in operators for node in inputs]))


def _operator_of(node: Node) -> str | None:
    """Return the operator that replaces linear for an input, None for one that stays."""
    value: Any = node.meta.get("example_value")
    name = _OPERATORS.get(type(value).__name__)
    if name is None or not type(value).__module__.startswith("torchao.") or value.requires_grad:
        return None
    if any(getattr(value, each, None) is not None for each in _ATTRIBUTES):
        return None
    weight, scale = (getattr(value, each) for each in _PARTS)
    if weight.ndim != 2 or scale.ndim != 2 or scale.shape[0] not in (1, weight.shape[0]):
        return None
    calls = [_linear_of(user) for user in node.users]
    if not all(call is not None and call.weight is node and node not in (call.input, call.bias) for call in calls):
        return None
    return name


def _linear_of(node: Node) -> _Linear | None:
    is_one = node.op == "call_function" and torchlang.find(node.target) is torchlang.linear
    return _Linear(*node.args, **node.kwargs) if is_one else None


def _part(graph: Graph, node: Node, name: str) -> Node:
    """Add an input that is a part of a quantized tensor."""
    grapharg = node.meta.get("grapharg")
    part = graph.placeholder(f"{node.name}{name}")
    part.meta = {**node.meta, "example_value": getattr(node.meta["example_value"], name)}
    if grapharg is not None:
        part.meta["grapharg"] = SimpleNamespace(example=getattr(grapharg.example, name), source=grapharg.source)
    return part


def _per_row(graph: Graph, scale: Node, weight: Node) -> Node:
    """Return the scales of a weight's rows: a single one is expanded."""
    value, rows = scale.meta["example_value"], weight.meta["example_value"].shape[0]
    if value.shape[0] == rows:
        return scale
    result = graph.call_method("expand", (scale, rows, value.shape[1]))
    result.meta = {**scale.meta, "example_value": value.expand(rows, value.shape[1])}
    return result


def _unpacking(quantized: list[bool]) -> Callable[[Callable], Callable]:
    """Return a wrapper that passes the parts of torchao's tensors to a call."""

    def wrap(call: Callable) -> Callable:
        def of_tensors(*inputs: Any) -> Any:
            parts: list[Any] = []
            for is_quantized, value in zip(quantized, inputs, strict=True):
                parts += (value.qdata, value.scale) if is_quantized else (value,)
            return call(*parts)

        return of_tensors

    return wrap
