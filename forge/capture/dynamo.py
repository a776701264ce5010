"""The Dynamo front end: turns a graph of torch calls, with fake values for aliasing and metadata, into a program."""

import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from forge import prims, torchlang
from forge.capture import fake_values, higher_order, inline_python, layers
from forge.capture.aliasing import Pair, pairs, reconcile
from forge.capture.checks import ASSUMES, Check
from forge.capture.effects import Effects, Functional, effects
from forge.capture.fields import DataclassCall, Fields, is_constructor, plain
from forge.capture.inputs import display_name, gains_history, weight_of
from forge.capture.lowering import symbol_from_function
from forge.capture.markers import MARKERS
from forge.capture.metadata_calls import normalize, read_metadata
from forge.capture.numbers import RuntimeNumbers
from forge.compiler.kernel_strides import in_no_suggested_order
from forge.compiler.program import EagerFallback, Program, Unsupported, finish
from forge.ir import (
    BoundSymbol,
    NumberProxy,
    Symbol,
    Tag,
    TensorProxy,
    Trace,
    current_trace,
    differentiable,
    recording,
)
from forge.ir.memory import Ambiguous
from forge.ir.pytree import leaves, tensors, tree_map
from forge.ir.source import Source
from forge.ir.strides import contiguous, same
from forge.prims.library import operator_symbol
from forge.runtime.flex_attention import FLEX_ATTENTION, CompiledFlexAttention
from forge.torch_internals.autograd import get_data_attr, set_grad_enabled
from forge.torch_internals.dispatch import OpOverload
from forge.torch_internals.tensors import data_descriptor
from forge.torchlang import autocast_casts, autocast_mode, grad_mode
from forge.torchlang.opaque import opaque_symbol


class Capture(NamedTuple):
    """A program recorded from a graph.

    opaque_calls: the names of the graph's functions without torchlang symbols, in order. graph_constants: tensors in
    the graph itself, which the program takes as its last inputs.
    """

    program: Program
    opaque_calls: list[str]
    graph_constants: list[torch.Tensor]


def record(graph: GraphModule, parameters: Sequence[str] = ()) -> Capture:
    """Record a Dynamo graph. `parameters` are the user's names for Dynamo's args[0], args[1], ...

    Raises Unsupported for a graph that has to run in eager, EagerFallback for a call that torch may reject, too.
    """
    trace = Trace("computation", stage="recorded from Dynamo")
    trace.follows_grad_mode = True
    modes = graph.graph.find_nodes(op="call_function", target=set_grad_enabled)
    trace.memory.has_history |= any(node.args[0] is True for node in modes)
    interpreter = _Interpreter(graph, trace, parameters)
    grad = torch.is_grad_enabled()
    with recording(trace, torchlang.language), interpreter.modes():
        result = interpreter.run()
        try:
            program = finish(trace, result, grad=grad)
        except Ambiguous as reason:
            raise Unsupported(str(reason)) from reason
    program.weights, program.unversioned = interpreter.weights, interpreter.unversioned
    return Capture(program, interpreter.opaque_calls, [tensor for tensor, _ in interpreter.graph_constants.values()])


class _Interpreter:
    def __init__(self, graph: GraphModule, trace: Trace, parameters: Sequence[str] = ()) -> None:
        self.graph = graph
        self.parameters = parameters
        self.trace = trace
        self.env: dict[Node, Any] = {}
        self.opaque_calls: list[str] = []
        self.scopes: list[Any] = []
        self.graph_constants: dict[int, tuple[torch.Tensor, TensorProxy]] = {}
        self.misplaced: set[Node] = set()  # nodes whose fake tensors have other strides than torch's tensors
        self.skipped: Collection[Node] = ()
        self.native = False  # True if opaque calls are rejected
        self.arguments: Iterator[Any] | None = None  # the values of the inputs of a nested graph
        self.weights: list[int] = []  # positions of inputs that are parameters or buffers of modules
        self.unversioned: list[int] = []
        self.numbers = RuntimeNumbers(graph.graph, trace, self.env, set())
        self.paths: dict[str, str] = {}  # of inputs that are parameters or buffers, in their modules

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Close the scopes (of torch.autocast, of inference mode) that the graph leaves open, and restore the grad
        mode."""
        with grad_mode.preserve():
            try:
                yield
            finally:
                for scope in reversed(self.scopes):
                    scope.__exit__(None, None, None)

    def run(self) -> Any:
        higher_order.hooks_first(self.graph.graph)
        replaced = layers.replaced_nodes(self.graph.graph)
        self.numbers.add_checks()
        nodes = iter(self.graph.graph.nodes)
        for node in nodes:
            self.trace.source = Source.of(node)
            if node.op == "output":
                return self.look_up(node.args[0])
            if node in self.skipped or node in replaced:
                continue
            try:
                if node.target in higher_order.STARTS:
                    self.run_transform(higher_order.transform_scope(self.graph, node, nodes))
                else:
                    self.env[node] = getattr(self, node.op)(node)
            except Unsupported as reason:
                reason.at(self.trace.source)
                raise
            except (RuntimeError, TypeError, ValueError, LookupError) as reason:
                self.name_weights(reason)
                raise EagerFallback(reason, self.trace.source) from reason
        raise AssertionError("a graph without an output")

    def name_weights(self, error: Exception) -> None:
        """Replace the names of inputs in the error by the paths of their parameters or buffers in the module."""
        if len(error.args) == 1 and isinstance(error.args[0], str):
            path_of = lambda match: self.paths.get(match[0], match[0])
            error.args = (_METADATA_OF.sub(path_of, error.args[0]),)

    def run_transform(self, scope: higher_order.TransformScope) -> None:
        """Record a torch.func transform as the operators that torch runs for it, else as one opaque call."""
        args, operands = self.look_up(tuple(scope.inputs)), pairs(self.env, scope.inputs)
        function = grad_mode.InMode(scope.function)
        grad_mode.note(self.trace)
        changed = [args[i] for i in scope.changed]
        self.check_apart(changed, scope.name, args)
        places = [i for i, leaf in enumerate(leaves((args, {}))) if any(leaf is each for each in changed)]
        try:
            output = self.call_transform(function, scope.name, args, places)
        except Unsupported as reason:
            does = Effects(places, frozenset(), [])
            output = self.opaque(function, f"{scope.name} ({reason})", args, {}, operands, scope.example, does)
        output = reconcile(self.trace.memory, operands, output, scope.example, scope.name)
        for node, value in zip(scope.outputs, output, strict=True):
            self.env[node] = value
            self.note(node, value, node.meta["example_value"])

    def call_transform(self, function: Callable, name: str, args: tuple, changed: list[int]) -> tuple:
        """Return the results of a function of torch's transforms that mutates some of its arguments."""
        values, flat = self.trace.memory.read_all(args), list(leaves((args, {})))
        if not changed:
            return symbol_from_function(function, name, self.inline_operators)(*values)
        result, new_values = symbol_from_function(Functional(function, changed), name, self.inline_operators)(*values)
        for place, new in zip(changed, new_values, strict=True):
            torchlang.write(flat[place], new, self.trace.memory, name)
        return result

    def layer(self, node: Node) -> Any:
        """Return the result of a module's call at its end: its own forward's, or the selected layer's."""
        own, *args = node.args
        site = node.meta.get(layers.SITE)
        if site is None or site.take is None:
            return self.look_up(own)
        grad_mode.note(self.trace)
        output = site.take(*self.trace.memory.read_all(tuple(self.look_up(args))))
        for proxy, example in zip(tensors(output), fake_values.fake_tensors(node.meta["example_value"]), strict=True):
            proxy.strides = tuple(example.stride())
        return output

    def inline(self, graph: GraphModule, args: tuple, skipped: Collection[Node] = (), *, native: bool = False) -> Any:
        """Inline a nested graph on values of this one. native: raises Unsupported instead of an opaque call."""
        inner = _Interpreter(graph, current_trace())
        inner.native = native
        inner.skipped = skipped
        inner.scopes, inner.graph_constants, inner.paths = self.scopes, self.graph_constants, self.paths
        if inner.trace is self.trace:  # else a gradient rule runs it once more
            inner.opaque_calls, inner.numbers.read = self.opaque_calls, self.numbers.read
        inner.arguments = iter(args)
        return inner.run()

    def inline_operators(self, graph: GraphModule, args: tuple) -> Any:
        """Inline a nested graph whose calls are all known. Raises Unsupported if one is not."""
        return self.inline(graph, args, native=True)

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
        if self.arguments is not None:
            return next(self.arguments)
        value = node.meta["example_value"]
        name = self.trace.fresh_name(display_name(node.name, self.parameters))
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_quantized or value.is_nested:
                raise Unsupported(f"input {name} is {value.layout}, quantized or nested")
            self.weigh(node, name)
            proxy = self.trace.add_input(fake_values.tensor_proxy(name, value))
            proxy.requires_grad = value.requires_grad and not gains_history(node)
            return proxy
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            size_symbol = str(value.node.expr)
            if size_symbol.isidentifier() and size_symbol not in self.trace.names:  # else they come from other inputs
                name = size_symbol
            self.trace.add_input(NumberProxy(name, value))
            return value
        raise Unsupported(f"input {name} is a {type(value).__name__}")

    def weigh(self, node: Node, name: str) -> None:
        """Record whether the next input is a parameter or buffer of a module."""
        weight = weight_of(node)
        if weight is None:
            return
        if weight.path:
            self.paths[name] = weight.path
        listed = self.weights if weight.versioned else self.unversioned
        listed.append(len(self.trace.inputs))

    def get_attr(self, node: Node) -> Any:
        value = operator.attrgetter(str(node.target))(self.graph)
        if not isinstance(value, torch.Tensor):
            return value
        if self.native:  # made from numbers while the operators were found; `fold_constants` makes it once
            return prims.tensor(value.tolist(), value.dtype, value.device)
        if id(value) not in self.graph_constants:
            proxy = self.trace.add_input(
                fake_values.tensor_proxy(self.trace.fresh_name(display_name(node.name)), value)
            )
            self.graph_constants[id(value)] = value, proxy
        return self.graph_constants[id(value)][1]

    def call_module(self, node: Node) -> Any:
        raise Unsupported(f"the graph calls the module {node.target}")

    def call_method(self, node: Node) -> Any:
        return self.call(node, node.target, self.look_up(node.args), self.look_up(node.kwargs))

    def call_function(self, node: Node) -> Any:
        target: Any = node.target
        if target is layers.layer_call:
            return self.layer(node)
        if target is ASSUMES:
            return None  # already recorded, unless it is of a number that no value defines
        if isinstance(target, Check):
            return self.numbers.add_check(node)
        args, kwargs = self.look_up(node.args), self.look_up(node.kwargs)
        if is_constructor(target):
            return Fields(target, kwargs)
        if any(isinstance(leaf, Fields) for leaf in map(self.env.get, node.all_input_nodes)):
            constructing = DataclassCall(target, (args, kwargs))
            return self.call(node, constructing, *plain((args, kwargs)))
        special = MARKERS.get(target)
        if special is not None:
            result = special(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.call(node, target, args, kwargs)

    def call(self, node: Node, target: Callable | str, args: tuple, kwargs: dict) -> Any:
        """Record a call of torch, and return its result. A call that reads only metadata is not recorded."""
        example: Any = node.meta.get("example_value")
        result = read_metadata(self.numbers, node, target, args, kwargs, example)
        if result is not NotImplemented:
            return result
        operands = pairs(self.env, (node.args, node.kwargs))
        target, args, kwargs = normalize(self.numbers, node, target, args, kwargs, operands)
        callee, target = target, torchlang.overload_of(target, args, kwargs)
        name = torchlang.function_name(callee if torchlang.has_one_overload(callee) else target)
        try:
            aliased = fake_values.shares_memory(node, example)
            output = torchlang.call(target, args, kwargs, memory=self.trace.memory, aliased=aliased)
        except (autocast_casts.ReachesInside, Ambiguous) as reason:
            raise Unsupported(str(reason)) from reason
        except NotImplementedError:
            function = getattr(torch.Tensor, target) if isinstance(target, str) else target
            output = inline_python.record(function, args, kwargs)
            if output is NotImplemented:
                output = self.opaque(
                    function, name, args, kwargs, operands, example, effects(function, name, args, kwargs)
                )
        self.numbers.read_offset(operands, example)
        if target in _DATA and isinstance(output, TensorProxy):
            self.trace.memory.ref(output).chain[-1].versioned = False
        call = name if kwargs.get("out") is None else ""
        output = self.without_gradients(
            reconcile(self.trace.memory, operands, output, example, call), example, operands
        )
        if isinstance(output, TensorProxy) and getattr(example, "requires_grad", False):
            self.trace.memory.gain(output)
        self.note(node, output, example)
        if self.numbers.checks:
            self.numbers.read_lengths(output, example)
        return output

    def note(self, node: Node, output: Any, example: Any) -> None:
        """Give a new value the user's name and Dynamo's strides; several values, their strides."""
        if isinstance(output, TensorProxy):
            self.note_strides(node, output, example)
            if output.name.startswith("t") and output.name[1:].isdigit() and not _AUTOMATIC.fullmatch(node.name):
                self.rename(output, node.name)
        elif isinstance(output, (tuple, list)) and isinstance(example, (tuple, list)):
            for item, expected in zip(output, example, strict=True):
                if isinstance(item, TensorProxy):
                    self.note_strides(node, item, expected)

    def note_strides(self, node: Node, output: TensorProxy, example: Any) -> None:
        """Record the strides of an example, unless fake tensors are laid out differently from torch's kernel here, or
        in one of its operands' producers."""
        if not isinstance(example, torch.Tensor):
            return
        copied = self.copied_argument(node, output, example)
        if copied is not None:
            if not same(tuple(copied.stride()), tuple(example.stride())):
                self.misplaced.add(node)
            return
        strides: tuple[Any, ...] = tuple(example.stride())
        otherwise = fake_values.is_laid_out_by_kernel(node, example)
        if not otherwise:
            fake_values.compare_meta(node, output, example)
        if otherwise or not self.misplaced.isdisjoint(node.all_input_nodes):
            self.misplaced.add(node)
            return
        if fake_values.is_batch_norm(node) and example.device.type == "cpu" and in_no_suggested_order(example):
            self.misplaced.add(node)
            strides = contiguous(tuple(example.shape))
        output.strides, output.offset = strides, example.storage_offset()
        value = self.trace.memory.current_value(output)
        if value is not None and value.strides is None:  # a write's, which keeps the layout of its target
            value.strides = output.strides

    def copied_argument(self, node: Node, output: TensorProxy, example: torch.Tensor) -> torch.Tensor | None:
        """Return the fake tensor of the argument that a call returns as it is, if Dynamo's result is a copy, which need
        not have the same strides: dropout in evaluation."""
        memory = fake_values.memory_of(example)
        for handle, fake in pairs(self.env, (node.args, node.kwargs)):
            if handle is output and fake_values.memory_of(fake) != memory:
                return fake
        return None

    def rename(self, proxy: TensorProxy, name: str) -> None:
        before = proxy.name
        self.trace.rename(proxy, name)
        self.trace.memory.rename(before, proxy.name)

    # opaque calls

    def opaque(
        self,
        function: Callable,
        name: str,
        args: tuple,
        kwargs: dict,
        operands: list[Pair],
        example: Any,
        side_effects: Effects,
    ) -> Any:
        """Run a function without a torchlang symbol by torch, on copies of its mutated arguments.

        Raises Unsupported if the size of its result depends on the arguments' values."""
        if self.native:
            return self.by_operator(function, name, args, kwargs)
        grad_mode.note(self.trace)
        if function is FLEX_ATTENTION:
            function = CompiledFlexAttention()
        else:
            self.opaque_calls.append(f"{name} under torch.autocast" if autocast_mode.is_enabled() else name)
        if autocast_mode.is_enabled():
            function = autocast_mode.Under(function)
        read_args, read_kwargs = self.trace.memory.read_all((args, kwargs))
        if not side_effects.changed:
            floats = any(map(differentiable, leaves(example))) and not fake_values.ends_gradients(
                function, operands, example
            )
            tags = side_effects.tags if floats else side_effects.tags | {Tag.NOT_DIFFERENTIABLE}
            symbol = opaque_symbol(function, name, lambda: fake_values.fresh(example), tags=tags)
            output = symbol(*read_args, **read_kwargs)
            self.reinterpret(symbol, output, example, args, kwargs)
            self.numbers.read_lengths(output, example)
            self.numbers.must_know_lengths(name, example)
            return output
        flat = list(leaves((args, kwargs)))
        changed = [flat[i] for i in side_effects.changed]
        self.check_apart(changed, name, flat)
        own = {id(fake) for handle, fake in operands if any(handle is each for each in changed)}
        result = fake_values.fresh(tree_map(lambda leaf: None if id(leaf) in own else leaf, example))
        new_values = tuple(self.trace.tensor(x.shape, x.dtype, x.device, strides=x.strides) for x in changed)
        symbol = opaque_symbol(Functional(function, side_effects.changed), name, tags=side_effects.tags)
        self.trace.record(BoundSymbol(symbol, read_args, read_kwargs, (result, new_values)))
        for position, handle, new in zip(side_effects.changed, changed, new_values, strict=True):
            with torch.set_grad_enabled(torch.is_grad_enabled() and position not in side_effects.silently):
                grad_mode.note(self.trace)
                torchlang.write(handle, new, self.trace.memory, name)
        return result

    def by_operator(self, function: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """Return a call of an operator without a torchlang symbol, in a program that torch differentiates."""
        symbol = operator_symbol(function) if isinstance(function, OpOverload) else None
        if symbol is None:
            raise Unsupported(f"torchlang does not have {name}")
        args, kwargs = self.trace.memory.read_all((args, kwargs))
        return symbol(*args, **kwargs)

    def check_apart(self, changed: list[TensorProxy], name: str, flat: list[Any]) -> None:
        """Raise Unsupported if a tensor that a function mutates aliases another argument."""
        memory = self.trace.memory
        storages = [id(memory.ref(leaf).storage) for leaf in flat if isinstance(leaf, TensorProxy)]
        if any(storages.count(id(memory.ref(handle).storage)) > 1 for handle in changed):
            raise Unsupported(f"{name} changes a tensor that shares memory with another one that it is given")

    def without_gradients(self, output: Any, example: Any, operands: list[Pair]) -> Any:
        """Return the results of a call with those that torch does not differentiate (the statistics of a norm) as
        constants. A view has the gradients of its base, and an argument its own."""
        if not isinstance(example, (tuple, list)) or not any(getattr(leaf, "requires_grad", False) for leaf in example):
            return output
        memory, arguments = self.trace.memory, {id(handle) for handle, _ in operands}
        results = [
            prims.detach(ours)
            if differentiable(theirs)
            and not theirs.requires_grad
            and not memory.ref(ours).chain
            and id(ours) not in arguments
            else ours
            for ours, theirs in zip(output, example, strict=True)
        ]
        return output if all(map(operator.is_, results, output)) else type(output)(results)

    def reinterpret(self, symbol: Symbol, output: Any, example: Any, args: tuple, kwargs: dict) -> None:
        """Record a view that reinterprets memory (view_as_real, conj) by its symbol: strides do not express it."""
        base = args[0] if args else None
        if not isinstance(output, TensorProxy) or not isinstance(base, TensorProxy):
            return
        if output.dtype != base.dtype or example.is_conj() or example.is_neg():
            step = torchlang.scatter_step(symbol, args[1:], kwargs, None)
            self.trace.memory.alias(output, base, step)  # if it is none, the fake tensors show that


_DATA = (data_descriptor.__get__, get_data_attr)  # a tensor with its own version counter


# names

_AUTOMATIC = re.compile(r"(getitem|add|sub|mul|truediv|t|to|view|iadd|imul|neg|matmul|call|float|contiguous)(_\d+)?")
_METADATA_OF = re.compile(r"\w+(?=: \w+\[)")  # the name of a tensor in front of `: f32[2, 3]`
