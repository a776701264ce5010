"""Parts of a Dynamo graph that are more than one call: scopes between markers."""

import operator
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from forge.compiler.program import Unsupported
from forge.ir.pytree import leaves
from forge.ir.source import Source
from forge.runtime.torch_state import LevelRestoringCall
from forge.torch_internals.autograd import saved_tensors_hooks_disable, saved_tensors_hooks_enable
from forge.torch_internals.dispatch import find_schema
from forge.torch_internals.dynamo import register_hook_op as REGISTER_HOOK
from forge.torch_internals.functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    level_markers,
    predispatch_vmap_increment_nesting,
)
from forge.torch_internals.tensors import storage_id

_OPENERS, _CLOSERS = level_markers("increment_nesting"), level_markers("decrement_nesting")
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_FORBID_HOOKS = saved_tensors_hooks_disable
_ALLOW_HOOKS = saved_tensors_hooks_enable
STARTS = frozenset({*_OPENERS, _FORBID_HOOKS})
_INPLACE = frozenset(
    getattr(operator, name)
    for name in (
        *"iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split(),
        *"setitem delitem".split(),
    )
)


def hooks_first(graph: Graph) -> None:
    """Move each hook on a value's gradient to the value's definition, and route all its readers through the hook, which
    thus sees the whole gradient, including that of calls before it was registered.

    Raises Unsupported for a hook that reads other tensors, which may be computed later.
    """
    for node in list(graph.nodes):
        if REGISTER_HOOK is None or node.target is not REGISTER_HOOK:
            continue
        value, hook, *others = node.args
        if not all(map(_is_size, others)):
            raise Unsupported("a hook on a value's gradient reads other tensors")
        last = next(each for each in reversed(graph.nodes) if each.op == "placeholder")
        after = last if value.op == "placeholder" else value
        after.append(hook)
        hook.append(node)
        value.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: user is not node)


def _is_size(node: Node) -> bool:
    """Return whether a node is a size among the graph's inputs: Dynamo passes it to hooks on values of that size."""
    return node.op == "placeholder" and isinstance(node.meta.get("example_value"), torch.SymInt)


class TransformScope:
    """The nodes of a torch.func transform as a function: `function(*inputs)` returns the values of `outputs`, a tuple.

    changed: the positions of the inputs that it mutates.
    """

    changed: Sequence[int] = ()

    def __init__(self, name: str, function: Callable, inputs: list[Node], outputs: list[Node]) -> None:
        self.name = name
        self.function = function
        self.inputs = inputs
        self.outputs = outputs

    @property
    def example(self) -> tuple[Any, ...]:
        """Dynamo's fake values of the outputs."""
        return tuple(node.meta["example_value"] for node in self.outputs)


def transform_scope(graph: GraphModule, start: Node, following: Iterator[Node]) -> TransformScope:
    """Return the nodes from the start of a torch.func transform to the end of all that are open then: inside, values
    have levels that only functorch knows. If a value outlives its level (as torch.func.vjp's), the scope extends to
    its last use.
    """
    inside: list[Node] = []
    depth, forbidden = 0, False
    for node in chain([start], following):
        if node.op == "output":
            break
        inside.append(node)
        depth += (node.target in _OPENERS) - (node.target in _CLOSERS)
        forbidden = (forbidden or node.target is _FORBID_HOOKS) and node.target is not _ALLOW_HOOKS
        if depth or forbidden:
            continue
        scope = _extract(graph, inside)
        if not any(_is_wrapped(leaf) for leaf in leaves(scope.example)):
            scope.changed = _mutated_inputs(scope, inside)
            return scope
    raise Unsupported("a torch.func transform, or a value of one, outlives the graph")


def runnable(graph: GraphModule) -> Callable:
    """Return the graph as torch runs it; if it fails, all levels that it opened are closed, and the error has the
    user's line as a note."""
    opens = any(node.target in STARTS for node in graph.graph.nodes)
    call = _AnnotatedCall(_with_checkpoints(graph))
    return LevelRestoringCall(call) if opens else call


def _with_checkpoints(graph: GraphModule) -> GraphModule:
    """Return the graph with torch's checkpoints in place of Dynamo's operator, which leaves it to the compiler to
    repeat the same dropout."""
    if not graph.graph.find_nodes(op="call_function", target=_CHECKPOINT):
        return graph
    copied = Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    for node in copied.find_nodes(op="call_function", target=_CHECKPOINT):
        node.target = _checkpoint
    return GraphModule(graph, copied)


def _checkpoint(body: GraphModule, *args: Any, **options: Any) -> Any:
    contexts = body.meta.get("_checkpoint_context_fn")
    if contexts is not None:
        options["context_fn"] = contexts
    return checkpoint(_with_checkpoints(body), *args, **{**options, "use_reentrant": False})


class _AnnotatedCall:
    """A graph's forward, without the hooks of a module's call; errors have the user's line as a note."""

    def __init__(self, graph: GraphModule) -> None:
        self.function = graph

    def __call__(self, *inputs: Any) -> Any:
        _ = self.function.code  # generates the forward of a class without one
        try:
            return self.function.forward(*inputs)
        except Exception as error:
            _note_line(error, self.function)
            raise


def _note_line(error: Exception, graph: GraphModule) -> None:
    code = graph.forward.__code__.co_filename
    frame = next((each for each in traceback.extract_tb(error.__traceback__) if each.filename == code), None)
    statement = (frame and frame.line) or ""
    nodes = {node.name: node for node in graph.graph.nodes}
    node = nodes.get(re.split(r"\W", statement, maxsplit=1)[0])
    line = None if node is None else Source.of(node).line
    if node is not None and line is not None:
        error.add_note(f"at {line}, in {statement.partition(';')[0].removeprefix(f'{node.name} = ')}")


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value)


def _mutated_inputs(scope: TransformScope, inside: list[Node]) -> list[int]:
    memory = _memory([_example((node.args[:1], node.kwargs.get("out"))) for node in inside if writes(node)])
    examples = [node.meta.get("example_value") for node in scope.inputs]
    return [i for i, example in enumerate(examples) if not memory.isdisjoint(_memory(example))]


def _example(tree: Any) -> Any:
    return [node.meta.get("example_value") for node in leaves(tree) if isinstance(node, Node)]


def writes(node: Node) -> bool:
    """Return whether a node mutates its first argument, or `out`."""
    if node.target in _INPLACE or "out" in node.kwargs:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    schema = find_schema(node.target)
    if schema is not None:
        return schema.is_mutable
    return name.endswith("_") and not name.endswith("__")


def _memory(tree: Any) -> set[int]:
    """Return the storages of a pytree's tensors, under all levels."""
    storages = set()
    for leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor):
            while _is_wrapped(leaf):
                leaf = get_unwrapped(leaf)
            storages.add(storage_id(leaf))
    return storages


def _extract(graph: GraphModule, inside: list[Node]) -> TransformScope:
    members = set(inside)
    inputs = list(dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in members))
    outputs = [node for node in inside if any(user not in members for user in node.users)]
    part = Graph()
    env = {node: part.placeholder(node.name) for node in inputs}
    for node in inside:
        env[node] = part.node_copy(node, env.__getitem__)
    part.output(tuple(env[node] for node in outputs))
    name = "torch.vmap" if inside[0].target is predispatch_vmap_increment_nesting else "torch.func"
    return TransformScope(name, runnable(GraphModule(graph, part)), inputs, outputs)
