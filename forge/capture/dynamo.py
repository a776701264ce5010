"""The Dynamo front end: a graph of torch calls, with fake values that tell aliasing and metadata, becomes a program."""

import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from forge import prims, torchlang
from forge.capture import higher_order, inline_python, layers
from forge.capture.aliasing import Pair, pairs, reconcile
from forge.capture.autograd_functions import from_graphs, run_alone
from forge.capture.checks import ASSUMES, Check, GraphNumbers, checks_of
from forge.capture.effects import Effects, Functional, effects
from forge.capture.fields import Constructing, Fields, is_constructor, plain
from forge.capture.inputs import gains_history, weight_of
from forge.capture.lowering import symbol_from_function
from forge.compiler.kernel_strides import in_no_suggested_order, in_row_major_order
from forge.compiler.program import EagerFallback, Program, Unsupported, finish
from forge.ir import (
    NUMBER_TYPES,
    BoundSymbol,
    NumberProxy,
    Symbol,
    Tag,
    TensorProxy,
    Trace,
    current_trace,
    differentiable,
    get_grad,
    put_grad,
    recording,
    short_type,
    strides_of,
)
from forge.ir.memory import Ambiguous
from forge.ir.pytree import leaves, names, tensors, tree_map
from forge.ir.source import Source
from forge.ir.strides import contiguous, is_expanded
from forge.prims.library import operator_symbol
from forge.prims.recurrent import KINDS
from forge.torch_internals.autograd import (
    enter_autocast,
    enter_dual_level,
    enter_inference_mode,
    exit_autocast,
    exit_inference_mode,
    get_data_attr,
    set_grad_enabled,
)
from forge.torch_internals.dispatch import OpOverload, OpOverloadPacket
from forge.torch_internals.functions import nn_pad
from forge.torch_internals.functorch import lazy_load_decompositions, predispatch
from forge.torch_internals.sympy import SymT, symbol_is_type
from forge.torch_internals.tensors import log_api_usage_once
from forge.torchlang import autocast_casts, autocast_mode, grad_mode
from forge.torchlang.opaque import opaque_symbol


class Capture:
    """A program recorded from a graph.

    opaque_calls: the names of what the graph held that torchlang does not have, in order. held: tensors that the graph
    holds itself, which the program takes as its last inputs.
    """

    def __init__(self, program: Program, opaque_calls: list[str], held: list[torch.Tensor]) -> None:
        self.program = program
        self.opaque_calls = opaque_calls
        self.held = held


ACTS = frozenset({Tag.EFFECT, Tag.RANDOM})
CHECK_META = False  # compare every value's metadata with Dynamo's fake value: an oracle for tests and for debugging


def record(graph: GraphModule, parameters: Sequence[str] = ()) -> Capture:
    """Record a Dynamo graph. `parameters` are the user's names of what Dynamo calls args[0], args[1], ...

    Raises Unsupported for a graph that has to run in eager, Refused for a call that torch refuses, too, or may.
    """
    interpreter = _Interpreter(graph, parameters)
    interpreter.trace.follows_grad_mode = True
    grad = torch.is_grad_enabled()
    with recording(interpreter.trace, torchlang.language), interpreter.modes():
        result = interpreter.run()
        try:
            program = finish(interpreter.trace, result, grad=grad)
        except Ambiguous as reason:
            raise Unsupported(str(reason)) from reason
    program.weights, program.unversioned = interpreter.weights, interpreter.unversioned
    return Capture(program, interpreter.opaque_calls, [tensor for tensor, _ in interpreter.held.values()])


class _Interpreter:
    def __init__(self, graph: GraphModule, parameters: Sequence[str] = ()) -> None:
        self.graph = graph
        self.parameters = parameters
        self.trace = Trace("computation", stage="recorded from Dynamo")
        modes = graph.graph.find_nodes(op="call_function", target=set_grad_enabled)
        self.trace.memory.has_history |= any(node.args[0] is True for node in modes)
        self.env: dict[Node, Any] = {}
        self.opaque_calls: list[str] = []
        self.regions: list[Any] = []
        self.numbers: set[str] = set()  # read from tensors so far
        self.held: dict[int, tuple[torch.Tensor, TensorProxy]] = {}
        self.misplaced: set[Node] = set()  # whose fake tensors have other strides than torch's tensors
        self.skipped: Collection[Node] = ()
        self.native = False  # whether opaque calls are refused
        self.weights: list[int] = []  # positions of inputs that are parameters or buffers of modules
        self.unversioned: list[int] = []
        self.checks = checks_of(graph.graph)  # that are not recorded yet
        self.asked = GraphNumbers()
        self.paths: dict[str, str] = {}  # of inputs that are parameters or buffers, in their modules

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Close the regions (of torch.autocast, of inference mode) that the graph leaves open, and restore the grad
        mode."""
        with grad_mode.kept():
            try:
                yield
            finally:
                for region in reversed(self.regions):
                    region.__exit__(None, None, None)

    def run(self) -> Any:
        higher_order.hooks_first(self.graph.graph)
        left_out = layers.left_out(self.graph.graph)
        self.add_checks()
        nodes = iter(self.graph.graph.nodes)
        for node in nodes:
            self.trace.source = Source.of(node)
            if node.op == "output":
                return self.look_up(node.args[0])
            if node in self.skipped or node in left_out:
                continue
            try:
                if node.target in higher_order.STARTS:
                    self.run_region(higher_order.transform_region(self.graph, node, nodes))
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
        """Replace the names of inputs in the error by the paths in the module of their parameters or buffers."""
        if len(error.args) == 1 and isinstance(error.args[0], str):
            named = lambda found: self.paths.get(found[0], found[0])
            error.args = (_METADATA_OF.sub(named, error.args[0]),)

    def run_region(self, region: higher_order.Region) -> None:
        """Nodes that only make sense together: the operators that torch runs for them, else one opaque call."""
        args, given = self.look_up(tuple(region.inputs)), pairs(self.env, region.inputs)
        function = grad_mode.InMode(region.function)
        grad_mode.note(self.trace)
        changed = [args[i] for i in region.changed]
        self.check_apart(changed, region.name, args)
        places = [i for i, leaf in enumerate(leaves((args, {}))) if any(leaf is each for each in changed)]
        try:
            output = self.call_transform(function, region.name, args, places)
        except Unsupported as reason:
            does = Effects(places, frozenset(), [])
            output = self.opaque(function, f"{region.name} ({reason})", args, {}, given, region.example, does)
        output = reconcile(self.trace.memory, given, output, region.example, region.name)
        for node, value in zip(region.outputs, output, strict=True):
            self.env[node] = value
            self.note(node, value, node.meta["example_value"])

    def call_transform(self, function: Callable, name: str, args: tuple, changed: list[int]) -> tuple:
        """Return the results of a function of torch's transforms that changes some of its arguments."""
        values, flat = self.trace.memory.read_all(args), list(leaves((args, {})))
        if not changed:
            return symbol_from_function(function, name, self.inline_operators)(*values)
        result, written = symbol_from_function(Functional(function, changed), name, self.inline_operators)(*values)
        for place, new in zip(changed, written, strict=True):
            torchlang.write(flat[place], new, self.trace.memory, name)
        return result

    def layer(self, node: Node) -> Any:
        """Return the end of a module's call: what its own forward gave, or what the layer gives that was decided on."""
        own, *given = node.args
        site = node.meta.get(layers.SITE)
        if site is None or site.take is None:
            return self.look_up(own)
        grad_mode.note(self.trace)
        output = site.take(*self.trace.memory.read_all(tuple(self.look_up(given))))
        for proxy, example in zip(tensors(output), _real_tensors(node.meta["example_value"]), strict=True):
            proxy.strides = tuple(example.stride())
        return output

    def inline(self, graph: GraphModule, args: tuple, skipped: Collection[Node] = (), *, native: bool = False) -> Any:
        """Run a nested graph on values of this one. native: raises Unsupported for what would be an opaque call."""
        inner = _Interpreter(graph)
        inner.native = native
        inner.skipped = skipped
        inner.trace, inner.regions, inner.held = current_trace(), self.regions, self.held
        inner.paths = self.paths
        if inner.trace is self.trace:  # else a gradient rule runs it once more
            inner.opaque_calls, inner.numbers = self.opaque_calls, self.numbers
        given = iter(args)
        inner.placeholder = lambda node: next(given)
        return inner.run()

    def inline_operators(self, graph: GraphModule, args: tuple) -> Any:
        """As `inline`, a graph of which every call is known. Raises Unsupported where one is not."""
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
        value = node.meta["example_value"]
        name = self.trace.fresh_name(friendly(node.name, self.parameters))
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_quantized or value.is_nested:
                raise Unsupported(f"input {name} is {value.layout}, quantized or nested")
            self.weigh(node, name)
            proxy = self.trace.add_input(_tensor_proxy(name, value))
            proxy.requires_grad = value.requires_grad and not gains_history(node)
            return proxy
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            symbol = str(value.node.expr)
            if symbol.isidentifier() and symbol not in self.trace.names:  # else its symbols come from other inputs
                name = symbol
            self.trace.add_input(NumberProxy(name, value))
            return value
        raise Unsupported(f"input {name} is a {type(value).__name__}")

    def weigh(self, node: Node, name: str) -> None:
        """Note that the next input is a parameter or buffer of a module, where it is one."""
        weight = weight_of(node)
        if weight is None:
            return
        if weight.path:
            self.paths[name] = weight.path
        listed = self.weights if weight.versioned else self.unversioned
        listed.append(len(self.trace.inputs))

    def get_attr(self, node: Node) -> Any:
        value = operator.attrgetter(node.target)(self.graph)
        if not isinstance(value, torch.Tensor):
            return value
        if self.native:  # made of numbers while the operators were found; `hoist` makes it once
            return prims.tensor(value.tolist(), value.dtype, value.device)
        if id(value) not in self.held:
            proxy = self.trace.add_input(_tensor_proxy(self.trace.fresh_name(friendly(node.name)), value))
            self.held[id(value)] = value, proxy
        return self.held[id(value)][1]

    def call_module(self, node: Node) -> Any:
        raise Unsupported(f"the graph calls the module {node.target}")

    def call_method(self, node: Node) -> Any:
        return self.call(node, node.target, self.look_up(node.args), self.look_up(node.kwargs))

    def call_function(self, node: Node) -> Any:
        if node.target is layers.layer_call:
            return self.layer(node)
        if node.target is ASSUMES:
            return None  # recorded before, unless it is of a number that no value tells
        if isinstance(node.target, Check):
            return self.add_check(node)
        args, kwargs = self.look_up(node.args), self.look_up(node.kwargs)
        if is_constructor(node.target):
            return Fields(node.target, kwargs)
        if any(isinstance(leaf, Fields) for leaf in map(self.env.get, node.all_input_nodes)):
            constructing = Constructing(node.target, (args, kwargs))
            return self.call(node, constructing, *plain((args, kwargs)))
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
        if target in _LENGTHS:
            return example
        if target is operator.getitem and not isinstance(args[0], TensorProxy):
            return args[0][args[1]]
        given = pairs(self.env, (node.args, node.kwargs))
        if target is getattr:
            target, args = self.attribute(args)
        if target in _SIZED and tensors(args[1:]) and all(isinstance(length, int) for length in example.shape):
            args = (args[0], *example.shape)  # a size in a 0-d tensor, as torch.div of sizes gives
        if target in _STRIDED and tensors([args[1:], kwargs]):
            args, kwargs = _as_strided_args(example, *args, **kwargs)
        if target in _PADS and tensors([args[1:], kwargs]):
            args, kwargs = self.replace_item_numbers(given, (args, kwargs))
        called, target = target, torchlang.overload_of(target, args, kwargs)
        name = torchlang.function_name(called if torchlang.has_one_overload(called) else target)
        try:
            aliased = _shares_memory(node, example)
            output = torchlang.call(target, args, kwargs, memory=self.trace.memory, aliased=aliased)
        except (autocast_casts.ReachesInside, Ambiguous) as reason:
            raise Unsupported(str(reason)) from reason
        except NotImplementedError:
            function = getattr(torch.Tensor, target) if isinstance(target, str) else target
            output = inline_python.record(function, args, kwargs)
            if output is NotImplemented:
                output = self.opaque(
                    function, name, args, kwargs, given, example, effects(function, name, args, kwargs)
                )
        self.read_offset(given, example)
        if target in _DATA and isinstance(output, TensorProxy):
            self.trace.memory.ref(output).chain[-1].versioned = False
        made = name if kwargs.get("out") is None else ""
        output = self.without_gradients(reconcile(self.trace.memory, given, output, example, made), example, given)
        if isinstance(output, TensorProxy) and getattr(example, "requires_grad", False):
            self.trace.memory.gain(output)
        self.note(node, output, example)
        if self.checks:
            self.read_lengths(output, example)
        return output

    def attribute(self, args: tuple) -> tuple[Any, tuple]:
        getter = getattr(torch.Tensor, args[1], None)
        if getter is None:
            raise Unsupported(f"attribute {args[1]} of a tensor")
        return getter.__get__, (args[0],)

    def item(self, x: TensorProxy, example: Any) -> Any:
        if not isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return example
        self.number(prims.item, (self.trace.memory.read(x),), example)
        return example

    def number(self, symbol: Symbol, args: tuple, value: Any) -> None:
        """Record the reading of a number that is known when the program runs."""
        (symbol_of,) = value.node._expr.free_symbols  # whatever Dynamo has learnt of it; a bool is one that is 1
        number = NumberProxy(str(symbol_of), value)
        if number.name not in self.numbers:
            self.numbers.add(number.name)
            self.trace.names.add(number.name)
            self.trace.record(BoundSymbol(symbol, args, {}, number))
            self.add_checks()

    def add_checks(self) -> None:
        """Record the checks that the program can make by now: before what is computed of their numbers."""
        for node in list(self.checks):
            if all(map(self.is_known, node.all_input_nodes)):
                self.add_check(node)

    def is_known(self, node: Node) -> bool:
        if not isinstance(node.meta.get("example_value"), NUMBER_TYPES):
            return node in self.env
        return self.trace.names.issuperset(names(self.asked.number(node)))

    def add_check(self, node: Node) -> None:
        """Record a check, once."""
        if node not in self.checks:
            return
        self.checks.remove(node)
        condition, *values = self.trace.memory.read_all(tree_map(self.as_asked, node.args))
        if isinstance(node.target, Check):
            prims.require(condition, node.target.message, node.target.error, *values)
        else:
            prims.require(condition, *values, RuntimeError if self.has_acted() else prims.Violated)

    def as_asked(self, value: Any) -> Any:
        """Return a node's value; a number as the graph computes it."""
        return self.env[value] if isinstance(value, Node) and value in self.env else self.asked.number(value)

    def has_acted(self) -> bool:
        """Return whether the program has done by now what it may not do again."""
        calls = (bound for bound in self.trace.bound_symbols if bound.symbol is not prims.require)
        return any(not ACTS.isdisjoint(bound.all_tags) for bound in calls)

    def read_lengths(self, output: Any, example: Any) -> None:
        """Record what values decide of how long the results of a call are: numbers that the results tell."""
        for made, fake in zip(leaves(output), leaves(example), strict=True):
            for dim, count in enumerate(fake.shape if isinstance(fake, torch.Tensor) else ()):
                if _is_read(count):
                    self.number(prims.length, (made, dim), count)

    def must_know_lengths(self, name: str, example: Any) -> None:
        """Raise Unsupported for results that are as long as values decide that nothing tells."""
        if not self.trace.names.issuperset(map(str, free_unbacked_symbols(_real_tensors(example)))):
            raise Unsupported(
                f"how long the result of {name} is depends on the values that it is given",
                "compute on the mask (torch.where, x * mask) or take torch.nonzero_static: their lengths are known",
            )

    def replace_item_numbers(self, given: list[Pair], arguments: Any) -> Any:
        """Return the arguments with a number where an integer in a 0-d tensor was read as one."""
        numbers = {}
        for handle, fake in given:
            number = getattr(fake, "item_memo", None)
            if isinstance(number, torch.SymInt):
                numbers[handle.name] = self.item(handle, number)
        return tree_map(lambda leaf: numbers.get(leaf.name, leaf) if isinstance(leaf, TensorProxy) else leaf, arguments)

    def read_offset(self, given: list[Pair], example: Any) -> None:
        """Where a value begins in memory may be an index in a 0-d tensor: a symbol, whose tensor is read."""
        offset = example.storage_offset() if isinstance(example, torch.Tensor) else 0
        if not isinstance(offset, torch.SymInt):
            return
        symbols = set(map(str, offset.node.expr.free_symbols)) - set(self.trace.names)
        for handle, fake in given:
            number = getattr(fake, "item_memo", None)
            if isinstance(number, torch.SymInt) and str(number.node.expr) in symbols:
                self.item(handle, number)

    def note(self, node: Node, output: Any, example: Any) -> None:
        """Give a new value the user's name and the strides that Dynamo saw; several values, their strides."""
        if isinstance(output, TensorProxy):
            self.note_strides(node, output, example)
            if output.name.startswith("t") and output.name[1:].isdigit() and not _AUTOMATIC.fullmatch(node.name):
                self.rename(output, node.name)
        elif isinstance(output, (tuple, list)) and isinstance(example, (tuple, list)):
            for item, expected in zip(output, example, strict=True):
                if isinstance(item, TensorProxy):
                    self.note_strides(node, item, expected)

    def note_strides(self, node: Node, output: TensorProxy, example: Any) -> None:
        """Note the strides of an example, unless fake tensors are laid out otherwise than by torch's kernel here, or
        where one of those that it was computed from was made."""
        if not isinstance(example, torch.Tensor):
            return
        strides = tuple(example.stride())
        otherwise = _is_laid_out_by_kernel(node, example)
        if not otherwise:
            compare_meta(node, output, example)
        if otherwise or not self.misplaced.isdisjoint(node.all_input_nodes):
            self.misplaced.add(node)
            return
        if _is_batch_norm(node) and example.device.type == "cpu" and in_no_suggested_order(example):
            self.misplaced.add(node)
            strides = contiguous(tuple(example.shape))
        output.strides, output.offset = strides, example.storage_offset()
        value = self.trace.memory.current_value(output)
        if value is not None and value.strides is None:  # a write's, which keeps the layout of what it changes
            value.strides = output.strides

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
        given: list[Pair],
        example: Any,
        found: Effects,
    ) -> Any:
        """Run a function that torchlang does not have, by torch, on copies of what it changes.

        Raises Unsupported where the values that it is given decide how long its result is."""
        if self.native:
            return self.by_operator(function, name, args, kwargs)
        grad_mode.note(self.trace)
        self.opaque_calls.append(f"{name} under torch.autocast" if autocast_mode.is_enabled() else name)
        if autocast_mode.is_enabled():
            function = autocast_mode.Under(function)
        read_args, read_kwargs = self.trace.memory.read_all((args, kwargs))
        if not found.changed:
            floats = any(map(differentiable, leaves(example))) and not _ends_gradients(function, given, example)
            tags = found.tags if floats else found.tags | {Tag.NOT_DIFFERENTIABLE}
            symbol = opaque_symbol(function, name, lambda: fresh(example), tags=tags)
            output = symbol(*read_args, **read_kwargs)
            self.reinterpret(symbol, output, example, args, kwargs)
            self.read_lengths(output, example)
            self.must_know_lengths(name, example)
            return output
        flat = list(leaves((args, kwargs)))
        changed = [flat[i] for i in found.changed]
        self.check_apart(changed, name, flat)
        own = {id(fake) for handle, fake in given if any(handle is each for each in changed)}
        result = fresh(tree_map(lambda leaf: None if id(leaf) in own else leaf, example))
        written = tuple(self.trace.tensor(x.shape, x.dtype, x.device, strides=x.strides) for x in changed)
        symbol = opaque_symbol(Functional(function, found.changed), name, tags=found.tags)
        self.trace.record(BoundSymbol(symbol, read_args, read_kwargs, (result, written)))
        for position, handle, new in zip(found.changed, changed, written, strict=True):
            with torch.set_grad_enabled(torch.is_grad_enabled() and position not in found.silently):
                grad_mode.note(self.trace)
                torchlang.write(handle, new, self.trace.memory, name)
        return result

    def by_operator(self, function: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """Return a call of an operator that torchlang does not have, in a program that torch differentiates."""
        symbol = operator_symbol(function) if isinstance(function, OpOverload) else None
        if symbol is None:
            raise Unsupported(f"torchlang does not have {name}")
        args, kwargs = self.trace.memory.read_all((args, kwargs))
        return symbol(*args, **kwargs)

    def check_apart(self, changed: list[TensorProxy], name: str, flat: list[Any]) -> None:
        """Raise Unsupported where a tensor that a function changes shares memory with another one it is given."""
        memory = self.trace.memory
        storages = [id(memory.ref(leaf).storage) for leaf in flat if isinstance(leaf, TensorProxy)]
        if any(storages.count(id(memory.ref(handle).storage)) > 1 for handle in changed):
            raise Unsupported(f"{name} changes a tensor that shares memory with another one that it is given")

    def without_gradients(self, output: Any, example: Any, given: list[Pair]) -> Any:
        """Return results of a call of which torch differentiates only others (the statistics of a norm) as constants. A
        view has the gradients of what it shows, and an argument its own."""
        if not isinstance(example, (tuple, list)) or not any(getattr(leaf, "requires_grad", False) for leaf in example):
            return output
        memory, arguments = self.trace.memory, {id(handle) for handle, _ in given}
        found = [
            prims.detach(ours)
            if differentiable(theirs)
            and not theirs.requires_grad
            and not memory.ref(ours).chain
            and id(ours) not in arguments
            else ours
            for ours, theirs in zip(output, example, strict=True)
        ]
        return output if all(map(operator.is_, found, output)) else type(output)(found)

    def reinterpret(self, symbol: Symbol, output: Any, example: Any, args: tuple, kwargs: dict) -> None:
        """Say how a view that reads memory differently (view_as_real, conj) is shown and inverted: strides do not."""
        base = args[0] if args else None
        if not isinstance(output, TensorProxy) or not isinstance(base, TensorProxy):
            return
        if output.dtype != base.dtype or example.is_conj() or example.is_neg():
            step = torchlang.scatter_step(symbol, args[1:], kwargs, None)
            self.trace.memory.alias(output, base, step)  # where it is none, the fake tensors say so


def _is_read(length: Any) -> bool:
    """Return whether a length is a symbol of what values decide, whatever Dynamo has learnt of it."""
    expression = length.node._expr if isinstance(length, torch.SymInt) else None
    return isinstance(expression, sympy.Symbol) and symbol_is_type(expression, SymT.UNBACKED_INT)


def fresh(example: Any) -> Any:
    """Proxies for the tensors of a nest of fake ones."""

    def make(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return current_trace().tensor(leaf.shape, leaf.dtype, leaf.device, strides=tuple(leaf.stride()))
        return leaf

    return tree_map(make, example)


# values

# torch's kernels lay their results out otherwise than its functions for tensors without values say, whatever they are
# given, and where they are given what is not in row-major order
_LAID_OUT_BY_KERNELS = frozenset((*KINDS, "log_sigmoid", "isin", "normal", "poisson", "rrelu"))
_TURNED_BY_KERNELS = frozenset(
    "_log_softmax_backward_data binary_cross_entropy channel_shuffle hardsigmoid_backward hardswish_backward "
    "hardtanh_backward index_fill max_pool1d max_unpool2d native_dropout one_hot softplus_backward".split()
)
# methods whose sizes are the shape that they give
_SIZED = frozenset("expand new_empty new_ones new_zeros reshape view".split())
_STRIDED = frozenset(("as_strided", torch.as_strided))

# functions whose lengths may be integers in 0-d tensors
_PADS = (nn_pad, torch.nn.functional.pad)


# what lowered graphs ask of a shape, whose answer is an expression of the lengths that the program has
_LENGTHS = tuple(getattr(torch.ops.aten, f"sym_{name}") for name in ("size", "stride", "numel", "storage_offset"))
_LENGTHS = frozenset(getattr(packet, overload) for packet in _LENGTHS for overload in packet.overloads())

_DATA = (torch.Tensor.data.__get__, get_data_attr)  # a tensor with a version of its own


def _as_strided_args(example: torch.Tensor, input: Any, size: Any, stride: Any, storage_offset: Any = None) -> tuple:
    """Return the arguments of as_strided with the numbers that it was given as 0-d tensors."""
    return (input, tuple(example.shape), tuple(example.stride())), {"storage_offset": storage_offset}


def _tensor_proxy(name: str, value: torch.Tensor) -> TensorProxy:
    return TensorProxy(
        name,
        tuple(value.shape),
        value.dtype,
        value.device,
        requires_grad=value.requires_grad,
        strides=strides_of(value),
        offset=value.storage_offset(),
    )


def _is_laid_out_by_kernel(node: Node, example: torch.Tensor) -> bool:
    """Return whether torch's kernel may give a result other strides than fake tensors have: it is one of those known,
    an index is no contiguous tensor, or a result in row-major order was computed from an expanded tensor and from one
    that is in another order."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _LAID_OUT_BY_KERNELS:
        return True
    read = [each.meta.get("example_value") for each in node.all_input_nodes]
    given = [each for each in read if isinstance(each, torch.Tensor)]
    if all(map(in_row_major_order, given)):
        return False
    if name.partition(".")[0] in _TURNED_BY_KERNELS:
        return True
    if name == "getitem":
        return any(not each.is_contiguous() for each in given[1:])
    return (
        any(map(is_expanded, given))
        and in_row_major_order(example)
        and any(not is_expanded(each) and not in_row_major_order(each) for each in given)
    )


def _is_batch_norm(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "batch_norm"


def _ends_gradients(function: Any, given: Sequence[Pair], example: Any) -> bool:
    """Return whether a function of Python gives results without a history of arguments that have one. Of an operator
    only its kernel knows: the fake implementation has no part in autograd."""
    if isinstance(function, (OpOverload, OpOverloadPacket)) or not torch.is_grad_enabled():
        return False
    results = [leaf for leaf in leaves(example) if isinstance(leaf, torch.Tensor)]
    return any(fake.requires_grad for _, fake in given) and not any(each.requires_grad for each in results)


def _makes_tensors(example: Any) -> bool:
    if isinstance(example, (tuple, list)):
        return any(_makes_tensors(item) for item in example)
    return isinstance(example, torch.Tensor)


def _real_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def _on_numbers(target: Callable | str, args: tuple, kwargs: dict, example: Any) -> Any:
    """Return a call on numbers alone runs now; symbolic ones stay expressions."""
    if isinstance(example, NUMBER_TYPES):
        return example
    return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)


def _ask(interpreter: _Interpreter, question: str, node: Node, args: tuple, kwargs: dict, example: Any) -> Any:
    """Return a question about a tensor's metadata."""
    if question in ("size", "dim", "numel", "element_size"):
        return getattr(args[0], question)(*args[1:], **kwargs)
    return getattr(node.args[0].meta["example_value"], question)(*args[1:], **kwargs)


def _shares_memory(node: Node, example: Any) -> bool | None:
    """Return whether the first output's memory is the first argument's, from Dynamo's fake tensors."""
    first = example[0] if isinstance(example, (tuple, list)) and example else example
    base = node.args[0].meta.get("example_value") if node.args and isinstance(node.args[0], Node) else None
    if not isinstance(first, torch.Tensor) or not isinstance(base, torch.Tensor):
        return None
    return first.untyped_storage()._cdata == base.untyped_storage()._cdata


def compare_meta(node: Node, proxy: TensorProxy, example: torch.Tensor) -> None:
    """Raise Unsupported where forge's meta function gives other known lengths than torch's, Refused where it gives
    another dtype: Dynamo may have written its own into the graph (`y.to(x.dtype)`), so the frame is to run in eager.

    With CHECK_META, lengths that are not known and the device are compared too (AssertionError)."""
    lengths = zip(proxy.shape, example.shape, strict=False)
    known = all(ours == theirs for ours, theirs in lengths if type(ours) is type(theirs) is int)
    if not known or proxy.ndim != example.ndim or proxy.dtype != example.dtype:
        ours, theirs = short_type(proxy), short_type(example)
        reason = f"{torchlang.function_name(node.target)} gives {theirs}, but forge's symbol {ours}"
        unsupported = Unsupported(reason, "correct the symbol's meta function or decomposition")
        raise unsupported if proxy.dtype == example.dtype else EagerFallback(unsupported, Source.of(node))
    if CHECK_META:
        ours, theirs = (short_type(proxy), proxy.device), (short_type(example), example.device)
        assert ours == theirs, f"{node.format_node()}: forge says {ours}, Dynamo says {theirs}"


# names

_AUTOMATIC = re.compile(r"(getitem|add|sub|mul|truediv|t|to|view|iadd|imul|neg|matmul|call|float|contiguous)(_\d+)?")
_METADATA_OF = re.compile(r"\w+(?=: \w+\[)")  # the name of a tensor in front of `: f32[2, 3]`
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
    """Return a region of the graph: while its calls are recorded, this thread is in it."""
    region.__enter__()
    interpreter.regions.append(region)
    return region


def _exit(interpreter: _Interpreter, region: Any) -> None:
    interpreter.regions.remove(region)
    region.__exit__(None, None, None)


def _checkpoint(interpreter: _Interpreter, body: GraphModule, *args: Any, **options: Any) -> Any:
    """Return the body inlined, its calls tagged: the backward recomputes what they make."""
    trace = interpreter.trace
    with trace.tagged(trace.tags | {Tag.RECOMPUTE}):
        return interpreter.inline(body, args)


def _inline(interpreter: _Interpreter, body: GraphModule, *args: Any) -> Any:
    return interpreter.inline(body, args)


def _autograd_function(
    interpreter: _Interpreter, forward: GraphModule, backward: GraphModule, *args: Any, **options: Any
) -> Any:
    return from_graphs(interpreter.inline, forward, backward, options).record(args)


def _register_hook(interpreter: _Interpreter, x: TensorProxy, hook: GraphModule, *sizes: Any) -> Any:
    """Return a hook on a value's gradient: a second handle, which all calls take, and whose gradient the hook
    changes."""
    memory = interpreter.trace.memory

    def body(x: TensorProxy, *sizes: Any) -> TensorProxy:
        return prims.alias(x)

    def rule(x: TensorProxy, *sizes: Any) -> TensorProxy:
        out = prims.alias(x)
        given = get_grad(out)
        run = run_alone(lambda g: interpreter.inline(hook, (g, *sizes)), (given,), lambda result: ())
        found = run.result[0] if isinstance(run.result, tuple) else run.result
        put_grad(x, _hook_result(given, found))
        return out

    output = Symbol("register_hook", "torch.Tensor.register_hook", body=body, rule=rule)(memory.read(x), *sizes)
    memory.share(output, x, "register_hook")
    return output


def _hook_result(given: TensorProxy, found: TensorProxy | None) -> TensorProxy:
    """Return a gradient after a hook: None leaves it as it is. Raises Unsupported for one that autograd does not
    accept."""
    if found is None:
        return given
    alike = (found.ndim, found.dtype, found.device) == (given.ndim, given.dtype, given.device)
    if not alike or any(prims.known(a != b) for a, b in zip(found.shape, given.shape, strict=True)):
        raise Unsupported("a hook changes the shape, dtype or device of a gradient")
    return found


def _enter_dual_level(interpreter: _Interpreter) -> None:
    raise Unsupported("the graph differentiates in forward mode")


_SPECIAL: dict[Any, Callable] = {
    torch.ops.higher_order.autograd_function_apply: _autograd_function,
    torch.ops.higher_order.tag_activation_checkpoint: _checkpoint,
    torch.ops.higher_order.wrap: _inline,
    torch.ops.higher_order.invoke_subgraph: lambda interpreter, body, name, *args: interpreter.inline(body, args),
    torch.ops.higher_order.hints_wrapper: lambda interpreter, body, args, kwargs, hints: interpreter.inline(body, args),
    lazy_load_decompositions: _nothing,
    getattr(predispatch, "_enter_dual_level", enter_dual_level): _enter_dual_level,
    set_grad_enabled: lambda interpreter, mode: set_grad_enabled(mode),
    enter_inference_mode: _enter_inference_mode,
    exit_inference_mode: _exit,
    log_api_usage_once: _nothing,
    enter_autocast: _enter_autocast,
    exit_autocast: _exit,
}
if higher_order.REGISTER_HOOK is not None:
    _SPECIAL[higher_order.REGISTER_HOOK] = _register_hook
