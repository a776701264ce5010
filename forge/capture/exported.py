"""The torch.export front end: turns an ExportedProgram into a program without gradients.

Its graph calls aten operators as Dynamo's graphs call torch's functions, with fake values and symbolic sizes, so that
the same interpreter records it. Dynamo passes sizes as inputs; torch.export does not, so each symbol becomes an
input here.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import GraphModule, Node

from forge.capture import dynamo
from forge.capture.checks import ASSUMES
from forge.capture.inputs import note_weight
from forge.compiler.program import Unsupported
from forge.torch_internals.sympy import record_guards

aten = torch.ops.aten
_TORCHS: dict[Any, Any] = {  # torch's functions with a symbol, for operators without one
    aten.einsum.default: torch.einsum,
    aten.lift_fresh_copy.default: torch.clone,
    aten.split.Tensor: torch.split,
    aten.split_with_sizes.default: torch.split,
}
_WRITES = {OutputKind.BUFFER_MUTATION: "buffers", OutputKind.USER_INPUT_MUTATION: "inputs"}


class ExportedCapture(NamedTuple):
    """A program recorded from an ExportedProgram.

    The program's inputs are the sizes in `symbols`, the tensors in `weights`, and the user's tensors and numbers.
    symbols: name → the symbol as a torch.SymInt. weights: fully qualified name → tensor. results: the leaves of
    the user's result: the index of a program output, a constant in a one-element list, or a torch.SymInt. guards:
    the number of torch.export's guards on the sizes. asserted: the graph's assertions about sizes, as expressions.
    """

    capture: dynamo.Capture
    symbols: dict[str, torch.SymInt]
    weights: dict[str, torch.Tensor]
    results: list[Any]
    guards: int
    asserted: list[sympy.Basic]


def record(exported: ExportedProgram) -> ExportedCapture:
    """Record an ExportedProgram, whose graph is not changed.

    Raises Unsupported for programs that forge cannot compile.
    """
    graph = copy.deepcopy(exported.graph_module)
    _note_examples(graph)
    asserted = _asserted(graph)
    weights = _order_inputs(graph, exported)
    results = _keep_tensors(graph, exported)
    symbols = _add_sizes(graph)
    guards = 0
    for each in symbols.values():  # of one ShapeEnv
        record_guards(each.node.shape_env)
        guards = len(each.node.shape_env.guards)
    with torch.no_grad():
        return ExportedCapture(dynamo.record(graph), symbols, weights, results, guards, asserted)


def _asserted(graph: GraphModule) -> list[sympy.Basic]:
    """Return the conditions on sizes that the graph asserts, because torch.export could not prove them."""
    conditions = [node.args[0] for node in graph.graph.find_nodes(op="call_function", target=ASSUMES)]
    values = [each.meta["val"] for each in conditions if isinstance(each, Node)]
    return [each.node.expr for each in values if isinstance(each, torch.SymBool)]


def _note_examples(graph: GraphModule) -> None:
    """Note the fake values as Dynamo's graphs do, and drop torch.export's assertions about metadata."""
    for node in list(graph.graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
            continue
        if node.target is aten.to.dtype_layout:  # torch's method has no layout argument
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("layout", "pin_memory")}
        node.target = _TORCHS.get(node.target, node.target)
        if "val" in node.meta:
            value = node.meta["val"]
            is_input = node.op == "placeholder" and isinstance(value, torch.Tensor)
            node.meta["example_value"] = value.detach() if is_input else value
    for each in graph.children():
        if isinstance(each, GraphModule):
            _note_examples(each)


def _order_inputs(graph: GraphModule, exported: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the weights, which come first; remove the inputs that are constants."""
    weights: dict[str, torch.Tensor] = {}
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if isinstance(spec.arg, ConstantArgument):
            node.replace_all_uses_with(spec.arg.value)
            graph.graph.erase_node(node)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            tensor = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
            if not isinstance(tensor, torch.Tensor):
                raise Unsupported(f"{spec.target} is a {type(tensor).__name__}, not a tensor")
            weights[spec.target] = tensor.detach()
            note_weight(node, spec.target)
        elif spec.kind is not InputKind.USER_INPUT:
            raise Unsupported(f"input {node.name} is a {spec.kind.name.lower()}")
    return weights


def _keep_tensors(graph: GraphModule, exported: ExportedProgram) -> list[Any]:
    """Return the leaves of the user's result; the graph returns the tensors among them, after it has written to the
    buffers and inputs that torch.export has as results."""
    output: Any = graph.graph.output_node()
    results: list[Any] = []
    tensors: list[Node] = []
    for value, spec in zip(output.args[0], exported.graph_signature.output_specs, strict=True):
        if spec.kind in _WRITES:
            _write_back(graph, exported, spec, value)
        elif spec.kind is not OutputKind.USER_OUTPUT:
            raise Unsupported(f"the program returns a {spec.kind.name.lower()}")
        elif not isinstance(value, Node):
            results.append([value])
        elif isinstance(value.meta["example_value"], torch.Tensor):
            results.append(len(tensors))
            tensors.append(value)
        else:
            results.append(value.meta["example_value"])
    output.args = (tuple(tensors),)
    return results


def _write_back(graph: GraphModule, exported: ExportedProgram, spec: Any, value: Node) -> None:
    specs = exported.graph_signature.input_specs
    (name,) = [each.arg.name for each in specs if spec.target in (each.target, each.arg.name)]
    (target,) = [node for node in graph.graph.find_nodes(op="placeholder") if node.name == name]
    with graph.graph.inserting_before(graph.graph.output_node()):
        node = graph.graph.call_function(aten.copy_.default, (target, value))
    node.meta["example_value"] = target.meta["example_value"]


def _add_sizes(graph: GraphModule) -> dict[str, torch.SymInt]:
    """Return the symbols of the inputs' sizes, by name; each becomes one of the first inputs."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    inputs = [node.meta["example_value"] for node in placeholders]
    sizes = {each.node.expr: each for value in inputs for each in _sizes(value)}
    symbols = sorted({symbol for expression in sizes for symbol in expression.free_symbols}, key=str)
    own = {each.node.expr for each in inputs if isinstance(each, torch.SymInt)}
    result: dict[str, torch.SymInt] = {}
    for symbol in symbols:
        if symbol in own:
            continue
        size = sizes[symbol] if symbol in sizes else _solve(symbol, sizes)
        result[str(symbol)] = size
        with graph.graph.inserting_before(placeholders[0]):
            node = graph.graph.placeholder(f"size_{symbol}")
        node.meta["example_value"] = size
    return result


def _sizes(value: Any) -> Iterator[torch.SymInt]:
    each: Any
    for each in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
        if isinstance(each, torch.SymInt):
            yield each


def _solve(symbol: sympy.Symbol, sizes: dict[sympy.Expr, torch.SymInt]) -> torch.SymInt:
    """Solve for a symbol that occurs only within expressions of inputs' sizes."""
    for expression, size in sizes.items():
        if expression.free_symbols == {symbol}:
            (hint,) = sympy.solve(expression - size.node.hint, symbol)
            return size.node.shape_env.create_symintnode(symbol, hint=int(hint))
    raise Unsupported(f"the length {symbol} is known to no input")
