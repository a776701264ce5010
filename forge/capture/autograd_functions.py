"""torch.autograd.Function in a program: its two bodies are programs, and its call is a composite with that rule.

Dynamo captures the graphs of forward and backward; a directly traced function has the methods themselves. Each body is
recorded with its own memory, so that its in-place changes are values like any other; the changes of the forward's
inputs are returned beside its results, and are written to the inputs afterwards.
"""

import itertools
import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule, Node

from forge import prims, torchlang
from forge.compiler.program import Unsupported
from forge.ir import Symbol, Tag, TensorProxy, current_trace, end_grad, get_grad, needs_grad, put_grad, set_language
from forge.ir.memory import Memory
from forge.ir.pytree import leaves, tensors, tree_map
from forge.torch_internals import autograd as torch_autograd
from forge.torch_internals.autograd import set_grad_enabled
from forge.torch_internals.dynamo_functions import find_wrong_gradients
from forge.torchlang import autocast_mode, grad_mode
from forge.transforms.grad import sums_to

_NAME = "torch.autograd.Function.apply"
_OPTIONS = frozenset({"dirty_idx", "non_differentiable_idx", "saved_for_backward_idx"})


class Forward(NamedTuple):
    """Results of a forward: its outputs, the values that it saves for the backward, and the positions of outputs that
    are inputs it changed, or that have no gradient."""

    outputs: tuple
    residuals: Any
    dirty: tuple[int, ...]
    non_differentiable: tuple[int, ...]


class Run(NamedTuple):
    """One run of a body: its result as values; the positions of the arguments that it mutated, with their new values;
    and for each output, the position of the argument or earlier output that it aliases."""

    result: Any
    writes: dict[int, TensorProxy]
    shared: list[int | None]


def run_alone(body: Callable, args: Sequence[Any], outputs: Callable[[Any], tuple], *, follows: bool = False) -> Run:
    """Record a body with its own memory. `outputs` selects the outputs from its result; `follows`: a call in the body
    under no_grad has no gradient, as in a backward that is differentiated."""
    trace = current_trace()
    outer, trace.memory = trace.memory, Memory()
    before, trace.follows_grad_mode = trace.follows_grad_mode, follows
    try:
        with torch.enable_grad(), trace.set_tags(trace.tags):
            result = body(*args)
        memory = trace.memory
        positions = {id(memory.ref(arg).storage): i for i, arg in enumerate(args) if isinstance(arg, TensorProxy)}
        writes = {positions[id(each)]: each.value for each in memory.dirty if id(each) in positions}
        places = dict(positions)
        shared = [_place(places, memory, leaf, len(args) + i) for i, leaf in enumerate(outputs(result))]
        read = tree_map(lambda leaf: memory.read(leaf) if isinstance(leaf, TensorProxy) else leaf, result)
        return Run(read, writes, shared)
    finally:
        trace.memory, trace.follows_grad_mode = outer, before


def _place(places: dict[int, int], memory: Memory, leaf: Any, position: int) -> int | None:
    """Return the position of the first value that aliases this one, which is at `position`."""
    if not isinstance(leaf, TensorProxy):
        return None
    first = places.setdefault(id(memory.ref(leaf).storage), position)
    return None if first == position else first


class FunctionCall:
    """One call of an autograd.Function: `forward(*inputs)` returns a Forward, `backward(residuals, gradients)` the
    gradients of the inputs; `once` if the backward cannot be differentiated."""

    def __init__(
        self,
        forward: Callable[..., Forward],
        backward: Callable[[Any, tuple], Sequence[Any]],
        *,
        once: bool,
    ) -> None:
        self.forward = autocast_mode.Under(forward) if autocast_mode.is_enabled() else forward  # the rule runs it later
        self.backward = backward
        self.tags = frozenset({Tag.ONCE_DIFFERENTIABLE} if once else ())
        self.last_forward = Forward((), None, (), ())  # of the last run
        self.writes: list[int] = []
        self.shared: list[int | None] = []

    def body(self, *inputs: Any) -> tuple:
        """Return (outputs, the new values of the inputs that it mutates)."""
        run = run_alone(self.forward, inputs, lambda result: result.outputs)
        self.last_forward, self.writes, self.shared = run.result, sorted(run.writes), run.shared
        used_names = {each.name for each in inputs if isinstance(each, TensorProxy)}
        own = []
        for output in self.last_forward.outputs:
            # an output that is an input, or another output, becomes an alias of it
            if isinstance(output, TensorProxy) and output.name in used_names:
                output = prims.detach(output)
            used_names.update(tensor.name for tensor in tensors(output))
            own.append(output)
        return tuple(own), tuple(run.writes[i] for i in self.writes)

    def rule(self, *inputs: Any) -> tuple:
        """Return the gradient rule: the Function's own backward."""
        outputs, new_values = self.body(*inputs)
        gradients = tuple(self._gradient(i, output) for i, output in enumerate(outputs))
        residuals = list(leaves(self.last_forward.residuals))
        backward = lambda *args: self.backward(self.last_forward.residuals, gradients)
        run = run_alone(backward, (*gradients, *residuals), lambda result: (), follows=True)
        if any(position >= len(gradients) for position in run.writes):
            raise Unsupported("the backward of a torch.autograd.Function changes a tensor that it did not make")
        for argument, gradient in zip(inputs, run.result, strict=True):
            if gradient is None:
                end_grad(argument)
            else:
                put_grad(argument, gradient)
        return outputs, new_values

    def _gradient(self, index: int, output: Any) -> Any:
        if not isinstance(output, TensorProxy):
            return None
        if _is_differentiable(output) and index not in self.last_forward.non_differentiable:
            return get_grad(output)
        return prims.full(output.shape, 0, output.dtype, output.device)

    def record(self, args: tuple) -> tuple:
        """Return the outputs of the call: mutated arguments are written, and aliases may not be mutated later."""
        memory = current_trace().memory
        grad_mode.note(current_trace())
        values = memory.read_all(args)
        symbol = Symbol("autograd_function", _NAME, body=self.body, rule=self.rule, tags=self.tags)
        outputs, new_values = symbol(*values)
        dirty = {place: i for i in self.last_forward.dirty if (place := self.shared[i]) is not None}
        for changed, new in zip(self.writes, new_values, strict=True):
            if changed not in dirty:  # without mark_dirty, the history stays
                torchlang.write(args[changed], prims.with_data(values[changed], new), memory, _NAME)
        for changed, i in dirty.items():
            torchlang.write(args[changed], outputs[i], memory, _NAME)
        everything = [*args, *outputs]
        handles = []
        for output, position in zip(outputs, self.shared, strict=True):
            if position is not None and position in dirty:
                output = args[position]
            elif position is not None:
                memory.share(output, everything[position], _NAME)
            handles.append(output)
        return tuple(handles)


# checks of a backward's results


@find_wrong_gradients.provide
def wrong_gradients(name: str, inputs: Sequence[Any], needs: Sequence[bool], gradients: Any) -> str | None:
    """Return torch's error for the result of a Function's backward with these inputs, tensors and others; None if torch
    accepts it. `needs`: which inputs need a gradient."""
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    surplus = any(each is not None for each in gradients[len(inputs) :])
    if len(gradients) < len(inputs) or surplus:
        expected = f"(expected {len(inputs)}, got {len(gradients)})"
        return f"function {name}Backward returned an incorrect number of gradients {expected}"
    index = -1  # among the tensors
    for position, (argument, gradient) in enumerate(zip(inputs, gradients, strict=False)):
        index += _is_tensor(argument)
        if gradient is None:
            continue
        if not _is_tensor(argument):
            return (
                f"function {name}Backward returned a gradient different than None at position {position + 1}, but the "
                "corresponding forward input was not a Variable"
            )
        if not _is_tensor(gradient):
            return f"expected Variable or None (got {type(gradient).__name__})"
        problem = _mismatch(argument, gradient) if needs[position] else None
        if problem is not None:
            return f"Function {name}Backward returned an invalid gradient at index {index} - {problem}"
    return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (TensorProxy, torch.Tensor))


def _mismatch(tensor: Any, gradient: Any) -> str | None:
    """Return why autograd rejects a tensor's gradient."""
    if not sums_to(gradient.shape, tensor.shape):
        return f"got {list(gradient.shape)} but expected shape compatible with {list(tensor.shape)}"
    if gradient.dtype.is_complex and not tensor.dtype.is_complex:
        return f"got {gradient.dtype} but expected a real dtype, as of the input, {tensor.dtype}"
    if gradient.device != tensor.device and gradient.ndim:
        return f"expected device {tensor.device} but got {gradient.device}"
    return None


def _outer_mode(graph: GraphModule) -> list[Node]:
    """Return the nodes by which Dynamo turns gradients off in all of a backward: in torch they are on under
    create_graph."""
    modes = [node for node in graph.graph.nodes if node.target is set_grad_enabled]
    return [modes[0], modes[-1]] if modes and modes[0].args[0] is False else []


_ONCE = next(code for code in once_differentiable.__code__.co_consts if getattr(code, "co_name", "") == "wrapper")
_ONCE_LINES = re.compile(
    rf'File "{re.escape(_ONCE.co_filename)}", line ({"|".join(str(line) for *_, line in _ONCE.co_lines() if line)}),'
)


def _once_differentiable(backward: GraphModule) -> bool:
    """Return whether a backward was recorded through @once_differentiable, of which only the executed lines are
    left."""
    return any(_ONCE_LINES.search(node.meta.get("stack_trace") or "") for node in backward.graph.nodes)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in forward\n')
_FORWARD = re.compile(r"\s*def forward\(")


def _calls_functions(backward: GraphModule) -> bool:
    """Return whether a backward calls another torch.autograd.Function: Dynamo inlines its forward without its backward,
    which only a second differentiation would need."""
    frames = {frame for node in backward.graph.nodes for frame in _FRAME.findall(node.meta.get("stack_trace") or "")}
    return any(_is_static_forward(path, int(line)) for path, line in frames)


def _is_static_forward(path: str, line: int) -> bool:
    """Return whether a line is from a static method `forward`, which a module's is not."""
    above = linecache.getlines(path)[:line]
    start = next((i for i in range(len(above) - 1, -1, -1) if _FORWARD.match(above[i])), 0)
    decorators = itertools.takewhile(lambda text: text.strip().startswith("@"), reversed(above[:start]))
    return any(text.strip() == "@staticmethod" for text in decorators)


def is_once_differentiable(backward: GraphModule) -> bool:
    """Return whether the lines of a backward's graph show that it cannot be differentiated."""
    return _once_differentiable(backward) or _calls_functions(backward)


def from_graphs(
    inline: Callable[..., Any], forward: GraphModule, backward: GraphModule, options: dict[str, Any]
) -> FunctionCall:
    """Return the call of a Function that Dynamo captured. Raises Unsupported for options of other torch versions."""
    if not options.keys() <= _OPTIONS:
        raise Unsupported(f"torch.autograd.Function with {', '.join(sorted(options.keys() - _OPTIONS))}")

    def run_forward(*inputs: Any) -> Forward:
        outputs, residuals = inline(forward, inputs)
        return Forward(
            outputs, residuals, tuple(options.get("dirty_idx", ())), tuple(options["non_differentiable_idx"])
        )

    def run_backward(residuals: tuple, gradients: tuple) -> Any:
        return inline(backward, (*gradients, *residuals), _outer_mode(backward))

    return FunctionCall(run_forward, run_backward, once=is_once_differentiable(backward))


# traced directly


class Context:
    """The ctx of a directly traced Function, with the members of torch.autograd.function.FunctionCtx."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()
        self.dirty: tuple = ()
        self.non_differentiable: tuple = ()
        self.materialize_grads = True

    def save_for_backward(self, *saved: Any) -> None:
        self.saved_tensors = saved

    def mark_dirty(self, *dirty: Any) -> None:
        self.dirty = dirty

    def mark_non_differentiable(self, *outputs: Any) -> None:
        self.non_differentiable = outputs

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


@torch_autograd.record_apply.provide
def from_class(function: type[torch.autograd.Function], args: tuple) -> Any:
    """Record Function.apply(*args) of a directly traced Function."""
    single = False

    def forward(*inputs: Any) -> Forward:
        nonlocal single
        ctx = Context(tuple(isinstance(each, TensorProxy) and _is_differentiable(each) for each in inputs))
        with traced_directly():
            if function.setup_context is torch.autograd.Function.setup_context:
                output = function.forward(ctx, *inputs)
            else:
                output = function.forward(*inputs)
                function.setup_context(ctx, inputs, output)
        single = not isinstance(output, tuple)
        outputs = (output,) if single else output
        if not ctx.materialize_grads and sum(map(_is_differentiable, tensors(outputs))) > 1:
            raise Unsupported(f"{function.__name__}: set_materialize_grads(False) with several outputs; use forge.jit")
        memory = current_trace().memory
        for name, value in vars(ctx).items():
            read = tree_map(lambda leaf: memory.read(leaf) if isinstance(leaf, TensorProxy) else leaf, value)
            setattr(ctx, name, read) if name not in ("dirty", "non_differentiable") else None
        return Forward(outputs, ctx, _positions(outputs, ctx.dirty), _positions(outputs, ctx.non_differentiable))

    def backward(ctx: Context, gradients: tuple) -> Sequence[Any]:
        with traced_directly():
            result = function.backward(ctx, *gradients)
        problem = wrong_gradients(function.__name__, args, [needs_grad(each) for each in args], result)
        if problem is not None:
            raise RuntimeError(problem)
        return (result if isinstance(result, tuple) else (result,))[: len(args)]

    once = getattr(function.backward, "__code__", None) is _ONCE
    outputs = FunctionCall(forward, backward, once=once).record(args)
    return outputs[0] if single else outputs


def _positions(outputs: tuple, subset: tuple) -> tuple[int, ...]:
    return tuple(i for i, output in enumerate(outputs) if any(output is each for each in subset))


@torch_autograd.is_recorded.provide
def _has_proxies(args: tuple) -> bool:
    return any(isinstance(each, TensorProxy) for each in args)


def _is_differentiable(proxy: TensorProxy) -> bool:
    return proxy.dtype.is_floating_point or proxy.dtype.is_complex


@contextmanager
def traced_directly() -> Iterator[None]:
    """Record torch code that runs on proxies in this context as torchlang, Function.apply included."""
    with set_language(torchlang.language), torchlang.RecordFactories(), torch_autograd.apply_patch:
        yield
