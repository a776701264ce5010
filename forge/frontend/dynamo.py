"""The Dynamo front end: a graph of torch calls, with fake values that tell aliasing and metadata, becomes a program."""

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.predispatch
from torch.fx import GraphModule, Node

from forge import prims, torchlang
from forge.frontend import higher_order
from forge.frontend.functions import from_graphs
from forge.frontend.program import Program, Unsupported, finish
from forge.ir import (
    NUMBER_TYPES,
    BoundSymbol,
    NumberProxy,
    Tag,
    TensorProxy,
    Trace,
    current_trace,
    recording,
)
from forge.ir.memory import Ambiguous
from forge.ir.pytree import tensors, tree_map
from forge.torchlang import autocast, grad_mode
from forge.transforms.opaque import opaque_symbol


class Capture:
    """A program recorded from a graph, and what the graph held that torchlang does not have (names, in order)."""

    def __init__(self, program: Program, opaque_calls: list[str]) -> None:
        self.program = program
        self.opaque_calls = opaque_calls


CHECK_META = False  # compare every value's metadata with Dynamo's fake value: an oracle for tests and for debugging


def record(graph: GraphModule, parameters: Sequence[str] = ()) -> Capture:
    """Records a Dynamo graph. `parameters` are the user's names of what Dynamo calls args[0], args[1], ...

    Raises Unsupported for a graph that has to run in eager.
    """
    interpreter = _Interpreter(graph, parameters)
    interpreter.trace.follows_grad_mode = True
    grad = torch.is_grad_enabled()
    with recording(interpreter.trace, torchlang.language), interpreter.modes():
        result = interpreter.run()
        program = finish(interpreter.trace, result, grad=grad)
    return Capture(program, interpreter.opaque_calls)


class _Interpreter:
    def __init__(self, graph: GraphModule, parameters: Sequence[str] = ()) -> None:
        self.graph = graph
        self.parameters = parameters
        self.trace = Trace("computation", stage="recorded from Dynamo")
        self.env: dict[Node, Any] = {}
        self.opaque_calls: list[str] = []
        self.regions: list[Any] = []
        self.numbers: set[str] = set()  # read from tensors so far

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Ends the regions (of torch.autocast, of inference mode) that the graph leaves open, and restores the grad
        mode."""
        with grad_mode.kept():
            try:
                yield
            finally:
                for region in reversed(self.regions):
                    region.__exit__(None, None, None)

    def run(self) -> Any:
        nodes = iter(self.graph.graph.nodes)
        for node in nodes:
            self.trace.source = node.meta.get("stack_trace")
            if node.op == "output":
                return self.look_up(node.args[0])
            if node.target is higher_order.VMAP_START:
                self.run_region(higher_order.vmap_region(self.graph, node, nodes))
            else:
                self.env[node] = getattr(self, node.op)(node)
        raise AssertionError("a graph without an output")

    def run_region(self, region: higher_order.Region) -> None:
        """Nodes that only make sense together run as one opaque call."""
        args = self.look_up(tuple(region.inputs))
        output = self.opaque(region.module, args, {}, region.example, name="torch.vmap")
        self.env.update(zip(region.outputs, output, strict=True))

    def inline(self, graph: GraphModule, args: tuple) -> Any:
        """Runs a nested graph on values of this one."""
        inner = _Interpreter(graph)
        inner.trace, inner.regions = current_trace(), self.regions
        if inner.trace is self.trace:  # else a gradient rule runs it once more
            inner.opaque_calls, inner.numbers = self.opaque_calls, self.numbers
        given = iter(args)
        inner.placeholder = lambda node: next(given)
        return inner.run()

    def look_up(self, tree: Any) -> Any:
        if isinstance(tree, Node):
            return self.env[tree]
        if isinstance(tree, (tuple, list)):
            return type(tree)(self.look_up(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self.look_up(item) for key, item in tree.items()}
        if isinstance(tree, slice):
            return slice(self.look_up(tree.start), self.look_up(tree.stop), self.look_up(tree.step))
        return tree

    # nodes

    def placeholder(self, node: Node) -> Any:
        value = node.meta["example_value"]
        name = self.trace.fresh_name(friendly(node.name, self.parameters))
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_quantized or value.is_nested:
                raise Unsupported(f"input {name} is {value.layout}, quantized or nested")
            return self.trace.add_input(_tensor_proxy(name, value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            symbol = str(value.node.expr)
            if symbol.isidentifier() and symbol not in self.trace.names:  # else its symbols come from other inputs
                name = symbol
            self.trace.add_input(NumberProxy(name, value))
            return value
        raise Unsupported(f"input {name} is a {type(value).__name__}")

    def get_attr(self, node: Node) -> Any:
        value = operator.attrgetter(node.target)(self.graph)
        if isinstance(value, torch.Tensor):
            return self.trace.add_constant(value, friendly(node.name))
        return value

    def call_module(self, node: Node) -> Any:
        raise Unsupported(f"the graph calls the module {node.target}")

    def call_method(self, node: Node) -> Any:
        return self.call(node, node.target, self.look_up(node.args), self.look_up(node.kwargs))

    def call_function(self, node: Node) -> Any:
        args, kwargs = self.look_up(node.args), self.look_up(node.kwargs)
        special = _SPECIAL.get(node.target)
        if special is not None:
            result = special(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.call(node, node.target, args, kwargs)

    def call(self, node: Node, target: Callable | str, args: tuple, kwargs: dict) -> Any:
        example = node.meta.get("example_value")
        found = tensors([args, kwargs])
        if not found and not _makes_tensors(example):
            return _on_numbers(target, args, kwargs, example)
        if target in ("item", "__int__", "__float__", "__bool__") and isinstance(example, NUMBER_TYPES):
            return self.item(args[0], example)
        if target in (
            "size",
            "dim",
            "numel",
            "element_size",
            "stride",
            "storage_offset",
            "is_contiguous",
            "get_device",
        ):
            return _ask(self, target, node, args, kwargs, example)
        if target is operator.getitem and not isinstance(args[0], TensorProxy):
            return args[0][args[1]]
        if target is getattr:
            target, args = self.attribute(args)
        try:
            aliased = _shares_memory(node, example)
            output = torchlang.call(target, args, kwargs, memory=self.trace.memory, aliased=aliased)
        except (autocast.ReachesInside, Ambiguous) as reason:
            raise Unsupported(str(reason)) from reason
        except NotImplementedError:
            shared = _shares_memory(node, example)
            output = self.opaque(target, args, kwargs, example, name=torchlang.function_name(target), shared=shared)
        self.note(node, output, example)
        return output

    def attribute(self, args: tuple) -> tuple[Any, tuple]:
        getter = getattr(torch.Tensor, args[1], None)
        if getter is None:
            raise Unsupported(f"attribute {args[1]} of a tensor")
        return getter.__get__, (args[0],)

    def item(self, x: TensorProxy, example: Any) -> Any:
        if not isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return example
        number = NumberProxy(str(example.node.expr), example)
        if number.name not in self.numbers:
            self.numbers.add(number.name)
            self.trace.names.add(number.name)
            self.trace.record(BoundSymbol(prims.item, (self.trace.memory.read(x),), {}, number))
        return example

    def note(self, node: Node, output: Any, example: Any) -> None:
        """Gives a new value the user's name and the strides that Dynamo saw."""
        if isinstance(output, TensorProxy):
            if isinstance(example, torch.Tensor):
                output.strides = tuple(example.stride())
                if CHECK_META:
                    compare_meta(node, output, example)
            if output.name.startswith("t") and output.name[1:].isdigit() and not _AUTOMATIC.fullmatch(node.name):
                self.rename(output, node.name)
        elif CHECK_META and isinstance(output, (tuple, list)) and isinstance(example, (tuple, list)):
            for item, expected in zip(output, example, strict=True):
                if isinstance(item, TensorProxy):
                    compare_meta(node, item, expected)

    def rename(self, proxy: TensorProxy, name: str) -> None:
        before = proxy.name
        self.trace.rename(proxy, name)
        self.trace.memory.rename(before, proxy.name)

    # opaque calls

    def opaque(
        self, target: Callable | str, args: tuple, kwargs: dict, example: Any, *, name: str, shared: bool | None = None
    ) -> Any:
        """Runs a function that torchlang does not have, by torch; `shared`: its output views its first argument."""
        grad_mode.note(self.trace)
        function = getattr(torch.Tensor, target) if isinstance(target, str) else target
        mutated = mutated_arguments(function, name, args, kwargs)
        self.opaque_calls.append(f"{name} under torch.autocast" if autocast.is_enabled() else name)
        memory = self.trace.memory
        if mutated is None:
            raise Unsupported(f"{name} may change its arguments in a way that forge cannot follow")
        read_args, read_kwargs = memory.read_all(args), memory.read_all(kwargs)
        if mutated:
            return self.opaque_mutation(function, name, args, read_args, read_kwargs, mutated, example)
        if autocast.is_enabled():
            function = autocast.Under(function)
        symbol = opaque_symbol(function, name, lambda: self.fresh(example))
        output = symbol(*read_args, **read_kwargs)
        if shared and args and isinstance(args[0], TensorProxy):
            single = isinstance(output, TensorProxy)
            for index, view in enumerate([output] if single else output):
                memory.alias(view, args[0], torchlang.scatter_step(symbol, args[1:], kwargs, None if single else index))
        return output

    def fresh(self, example: Any) -> Any:
        def make(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self.trace.tensor(leaf.shape, leaf.dtype, leaf.device, strides=tuple(leaf.stride()))
            return leaf

        return tree_map(make, example)

    def opaque_mutation(
        self, function: Callable, name: str, args: tuple, read: tuple, kwargs: dict, mutated: list[int], example: Any
    ) -> Any:
        pure = Functional(autocast.Under(function) if autocast.is_enabled() else function, mutated)
        written = tuple(
            self.trace.tensor(args[i].shape, args[i].dtype, args[i].device, strides=args[i].strides) for i in mutated
        )
        returns_argument = isinstance(example, torch.Tensor) and isinstance(function, type(torch.Tensor.add_))
        result = None if returns_argument else self.fresh(example)
        self.trace.record(BoundSymbol(opaque_symbol(pure, name), read, kwargs, (result, written)))
        for position, new in zip(mutated, written, strict=True):
            torchlang.write(args[position], new, self.trace.memory, name)
        return args[mutated[0]] if returns_argument else result


class Functional:
    """A mutating function as a pure one: runs on clones of what it changes, returns (result, the changed clones)."""

    def __init__(self, function: Callable, mutated: list[int]) -> None:
        self.function = function
        self.mutated = mutated

    def __call__(self, *args: Any, **kwargs: Any) -> tuple:
        copies = {i: args[i].clone() for i in self.mutated}
        result = self.function(*[copies.get(i, arg) for i, arg in enumerate(args)], **kwargs)
        own = any(result is copy for copy in copies.values())
        return (None if own else result), tuple(copies.values())


def mutated_arguments(function: Callable, name: str, args: tuple, kwargs: dict) -> list[int] | None:
    """The positions of the arguments that a function changes; None where that cannot be told."""
    schema = getattr(function, "_schema", None)
    if schema is not None:
        positions = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        fits = all(i < len(args) and isinstance(args[i], TensorProxy) for i in positions)
        return positions if fits else None
    if "out" in kwargs or name.rpartition(".")[2] in _RESHAPERS:
        return None
    if function is operator.setitem:
        return [0]
    if name.endswith("_") and not name.endswith("__"):
        return [0] if args and isinstance(args[0], TensorProxy) else None
    return []


# they change their tensor's shape, which a handle cannot
_RESHAPERS = frozenset(
    "as_strided_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split()
)


# values


def _tensor_proxy(name: str, value: torch.Tensor) -> TensorProxy:
    return TensorProxy(
        name,
        tuple(value.shape),
        value.dtype,
        value.device,
        requires_grad=value.requires_grad,
        strides=tuple(value.stride()),
    )


def _makes_tensors(example: Any) -> bool:
    if isinstance(example, (tuple, list)):
        return any(_makes_tensors(item) for item in example)
    return isinstance(example, torch.Tensor)


def _on_numbers(target: Callable | str, args: tuple, kwargs: dict, example: Any) -> Any:
    """A call on numbers alone runs now; symbolic ones stay expressions."""
    if isinstance(example, NUMBER_TYPES):
        return example
    return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)


def _ask(interpreter: _Interpreter, question: str, node: Node, args: tuple, kwargs: dict, example: Any) -> Any:
    """A question about a tensor's metadata."""
    if question in ("size", "dim", "numel", "element_size"):
        return getattr(args[0], question)(*args[1:], **kwargs)
    return getattr(node.args[0].meta["example_value"], question)(*args[1:], **kwargs)


def _shares_memory(node: Node, example: Any) -> bool | None:
    """Whether the first output's memory is the first argument's, from Dynamo's fake tensors."""
    first = example[0] if isinstance(example, (tuple, list)) and example else example
    base = node.args[0].meta.get("example_value") if node.args and isinstance(node.args[0], Node) else None
    if not isinstance(first, torch.Tensor) or not isinstance(base, torch.Tensor):
        return None
    return first.untyped_storage()._cdata == base.untyped_storage()._cdata


def compare_meta(node: Node, proxy: TensorProxy, example: torch.Tensor) -> None:
    """Raises AssertionError where forge's metadata differs from Dynamo's."""
    ours = (tuple(map(str, proxy.shape)), proxy.dtype, proxy.device)
    theirs = (tuple(map(str, example.shape)), example.dtype, example.device)
    assert ours == theirs, f"{node.format_node()}: forge says {ours}, Dynamo says {theirs}"


# names

_AUTOMATIC = re.compile(r"(getitem|add|sub|mul|truediv|t|to|view|iadd|imul|neg|matmul|call|float|contiguous)(_\d+)?")
_POSITIONAL = re.compile(r"_?l_args_(\d+)(?=_)")
_NOISE = re.compile(r"^_?l_(self_)?|(^|_)(module|modules|parameters|buffers|kwargs|args)_(?=.)")


def friendly(name: str, parameters: Sequence[str] = ()) -> str:
    """Dynamo's name of an input as the user knows it: 'l_self_modules_fc_parameters_weight_' is 'fc_weight', and
    'l_args_0_' the first of `parameters`."""
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


# nodes that are markers, not calls


def _nothing(interpreter: _Interpreter, *args: Any, **kwargs: Any) -> None:
    return None


def _enter_autocast(interpreter: _Interpreter, *args: Any) -> Any:
    return _enter(interpreter, torch.autocast(*args))


def _enter_inference_mode(interpreter: _Interpreter, mode: bool) -> Any:
    return _enter(interpreter, torch.inference_mode(mode))


def _enter(interpreter: _Interpreter, region: Any) -> Any:
    """A region of the graph: while its calls are recorded, this thread is in it."""
    region.__enter__()
    interpreter.regions.append(region)
    return region


def _exit(interpreter: _Interpreter, region: Any) -> None:
    interpreter.regions.remove(region)
    region.__exit__(None, None, None)


def _checkpoint(interpreter: _Interpreter, body: GraphModule, *args: Any, **options: Any) -> Any:
    """The body inlined, its calls tagged: the backward computes them again instead of saving."""
    trace = interpreter.trace
    with trace.tagged(trace.tags | {Tag.RECOMPUTE}):
        return interpreter.inline(body, args)


def _autograd_function(
    interpreter: _Interpreter, forward: GraphModule, backward: GraphModule, *args: Any, **options: Any
) -> Any:
    return from_graphs(interpreter.inline, forward, backward, options).record(args)


_SPECIAL: dict[Any, Callable] = {
    torch.ops.higher_order.autograd_function_apply: _autograd_function,
    torch.ops.higher_order.tag_activation_checkpoint: _checkpoint,
    torch._functorch.predispatch.lazy_load_decompositions: _nothing,
    torch._C._set_grad_enabled: lambda interpreter, mode: torch._C._set_grad_enabled(mode),
    torch.autograd.grad_mode._enter_inference_mode: _enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode: _exit,
    torch._C._log_api_usage_once: _nothing,
    torch.amp.autocast_mode._enter_autocast: _enter_autocast,
    torch.amp.autocast_mode._exit_autocast: _exit,
}
