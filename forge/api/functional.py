"""forge.trace, forge.vjp, forge.grad, forge.value_and_grad: functions traced directly, without Dynamo.

forge.vjp and forge.grad call the function with proxies each time, as torch.func's call it with tensors: Python's
control flow runs as usual, and nothing that the function reads (a module's mode, a closure, a global) needs a guard.
The code compiled for an earlier program of the same structure is reused.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.api.options import resolve_options
from forge.capture import direct, nested
from forge.capture.python_dispatch import is_dispatched
from forge.compiler import pipeline
from forge.compiler.config import Config
from forge.compiler.executable import Executable
from forge.compiler.program import Program, inline_epilogue
from forge.compiler.report import CompileReport
from forge.executors.executor import Executor
from forge.ir import TensorProxy, Trace, check
from forge.ir.bounded import BoundedDict
from forge.ir.state import state
from forge.ir.structure import structure
from forge.runtime.plan import overlap
from forge.runtime.torch_state import dynamo_disable, modes, preserve_torch_state
from forge.torch_internals.pytree import tensor_leaves, torch_pytree
from forge.torchlang import autocast_mode


@dynamo_disable
def trace(function: Callable, *args: Any, **kwargs: Any) -> Trace:
    """Return the trace of one call of `function`: torch calls as torchlang symbols, with their decompositions.

    Args:
        function: A callable of tensors and Python values.
        args: Positional arguments of the call; only the metadata of tensors matters.
        kwargs: Keyword arguments of the call.

    Returns:
        A trace of named calls, each with its decomposition; it can be printed, transformed and compiled.

    Raises:
        TypeError: For a branch on the value of a tensor.
        NotImplementedError: For a torch function without a torchlang symbol.
    """
    program = direct.record(function, args, kwargs)
    return inline_epilogue(program, program.trace)


Compilation = tuple[Executable, CompileReport]


class Programs:
    """Cache of the `size` most recently used compiled programs, by their structure."""

    def __init__(self, size: int) -> None:
        self._compiled: BoundedDict = BoundedDict(size)

    def compile(self, program: Program, config: Config) -> Compilation:
        """Return a program's compilation; a program of the same structure shares it."""
        parts = [structure(trace) for trace in (program.trace, program.epilogue) if trace is not None]
        key = (*parts, program.grad, tuple(program.mutated), config.executors, *modes().values())
        try:
            hash(key)
        except TypeError:  # the program refers to an unhashable object
            return _compile(program, config)
        compiled = self._compiled.pop(key, None) or _compile(program, config)
        self._compiled[key] = compiled  # least recently used first
        return compiled

    def __len__(self) -> int:
        return len(self._compiled)


_programs = Programs(256)


def _compile(program: Program, config: Config) -> Compilation:
    with preserve_torch_state():
        return pipeline.compile(program, config)


def _call(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Return the function's results, computed by its compiled program. The tensors that it closes over are
    constants."""
    with preserve_torch_state():
        recorded = direct.TracedCall(function, args, kwargs)
    mutated = recorded.program.mutated
    if mutated and overlap(recorded.inputs, mutated):
        return function(*args, **kwargs)
    config = resolve_options()
    if any(map(is_dispatched, recorded.inputs)):
        config = config.in_torch()
    executable, _ = _programs.compile(recorded.program, config)
    return recorded.result(executable.call(*recorded.inputs))


class Direct:
    """`function`, which reads nothing but its arguments, compiled through the direct front end for each new metadata of
    them; the last `size` compilations are cached."""

    def __init__(
        self, function: Callable, executors: Sequence[str | Executor] | None = None, *, size: int = 256
    ) -> None:
        self.function = function
        self.config = resolve_options(executors)
        self.compiled: dict[tuple, Compilation] = BoundedDict(size)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        executable, _ = self.compile(args, kwargs)
        return executable.call(*direct.input_tensors(args, kwargs))

    def compile(self, args: tuple, kwargs: dict) -> Compilation:
        """Return the compilation for these arguments' metadata, from the cache if it has one."""
        leaves, spec = torch_pytree.tree_flatten((args, kwargs))
        key = (spec, torch.is_grad_enabled(), autocast_mode.state(), *[_metadata(leaf) for leaf in leaves])
        compiled = self.compiled.get(key)
        if compiled is None:
            with preserve_torch_state():
                compiled = _compile(direct.record(self.function, args, kwargs), self.config)
            self.compiled[key] = compiled
        return compiled


def _metadata(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, slice):  # hashable only from Python 3.12
        return slice, _metadata(leaf.start), _metadata(leaf.stop), _metadata(leaf.step)
    if isinstance(leaf, float):  # 0.0 and -0.0 differ, nan is itself
        return float, repr(leaf)
    return type(leaf), leaf


@dynamo_disable
def vjp(function: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    """Return (outputs, pullback): `pullback(*cotangents)` computes the gradient of each primal.

    Args:
        function: A callable of tensors.
        primals: The positional arguments, tensors of a floating point dtype.
        has_aux: True if `function` returns (outputs, aux); the result is then (outputs, pullback, aux).

    Returns:
        (outputs, pullback), or (outputs, pullback, aux).

    Shape:
        A cotangent has the shape and dtype of its output, a gradient those of its primal.

    Raises:
        TypeError: For a primal that is not a floating point tensor.

    Source: torch.func.vjp.
    """
    leaves, spec = torch_pytree.tree_flatten(primals)
    for i, leaf in enumerate(leaves):
        check(
            isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()),
            lambda i=i, leaf=leaf: f"forge.vjp: primal {i} is {_describe(leaf)}, but must be a floating point tensor",
            TypeError,
        )
    again = _records_grad(leaves)
    inputs = [_input(leaf, again) for leaf in leaves]
    with torch.enable_grad():
        result = _call(function, torch_pytree.tree_unflatten(inputs, spec), {})
    outputs, *aux = result if has_aux else (result,)

    @dynamo_disable
    def pullback(*cotangents: Any) -> Any:
        pairs = [
            (o, c) for o, c in zip(tensor_leaves(outputs), tensor_leaves(cotangents), strict=True) if o.requires_grad
        ]
        if not pairs:
            gradients = tuple(torch.zeros_like(value) for value in inputs)
        else:
            roots, weights = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(
                roots,
                inputs,
                weights,
                retain_graph=True,
                create_graph=again or _records_grad(weights),
                allow_unused=True,
                materialize_grads=True,
            )
        return torch_pytree.tree_unflatten(list(gradients), spec)

    return (outputs, pullback, *aux) if again else (_detach(outputs), pullback, *_detach(aux))


@dynamo_disable
def value_and_grad(function: Callable, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable:
    """Return a function that computes the value and the gradients of a scalar-valued `function`.

    Args:
        function: A callable that returns a scalar tensor, or (scalar, aux) with `has_aux`.
        argnums: The argument, or sequence of arguments, to differentiate with respect to.
        has_aux: True if `function` returns auxiliary data; the result is then ((value, aux), gradients).

    Returns:
        A function of the same arguments; it returns (value, gradients), with the gradients in the structure of the
        arguments.

    Raises:
        RuntimeError: During a call, if the value is not a scalar.

    Source: jax.value_and_grad.
    """
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def scalar(result: Any) -> Any:
        value = result[0] if has_aux else result
        check(
            isinstance(value, (torch.Tensor, TensorProxy)) and value.ndim == 0,
            lambda: (
                f"forge.grad: {function} returned {_describe(value)}, but must return a 0-d tensor; "
                "use forge.vjp for other outputs"
            ),
            RuntimeError,
        )
        return value

    @dynamo_disable
    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        for position in positions:
            check(
                -len(args) <= position < len(args),
                lambda position=position: f"forge.grad: argnums names argument {position}, but {len(args)} were given",
            )
        if state.trace is not None:  # this function is being traced
            result, grads = nested.value_and_gradients(function, args, kwargs, positions, scalar)
            return result, grads[0] if isinstance(argnums, int) else tuple(grads)
        primals = [args[position] for position in positions]
        leaves, spec = torch_pytree.tree_flatten(primals)
        again = _records_grad(leaves)
        inputs = [_input(leaf, again) for leaf in leaves]
        values = list(args)
        for position, value in zip(positions, torch_pytree.tree_unflatten(inputs, spec), strict=True):
            values[position] = value
        with torch.enable_grad():
            result = _call(function, tuple(values), kwargs)
        value, aux = scalar(result), result[1:] if has_aux else ()
        if value.requires_grad:
            gradients = torch.autograd.grad(
                value, inputs, create_graph=again, allow_unused=True, materialize_grads=True
            )
        else:  # it depends on none of them
            gradients = tuple(map(torch.zeros_like, inputs))
        grads = torch_pytree.tree_unflatten(list(gradients), spec)
        if not again:
            value, aux = value.detach(), _detach(aux)
        output = (value, *aux) if has_aux else value
        return output, grads[0] if isinstance(argnums, int) else tuple(grads)

    return run


@dynamo_disable
def grad(function: Callable, argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable:
    """Return a function that computes the gradient of a scalar-valued `function`.

    Args:
        function: A callable that returns a scalar tensor, or (scalar, aux) with `has_aux`.
        argnums: The argument, or sequence of arguments, to differentiate with respect to.
        has_aux: True if `function` returns auxiliary data; the result is then (gradient, aux).

    Returns:
        A function of the same arguments; its gradients have the structure of the arguments.

    Raises:
        RuntimeError: During a call, if the value is not a scalar.

    Source: torch.func.grad.
    """
    both = value_and_grad(function, argnums, has_aux=has_aux)

    @dynamo_disable
    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, *value[1:]) if has_aux else gradients

    return run


def _records_grad(leaves: Sequence[Any]) -> bool:
    """Return whether torch's autograd records operations on these, so that gradients are differentiable again."""
    return torch.is_grad_enabled() and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _input(leaf: torch.Tensor, again: bool) -> torch.Tensor:
    """Return a separate value to differentiate with respect to; with `again`, it is connected to the leaf."""
    return leaf.view_as(leaf) if again and leaf.requires_grad else leaf.detach().requires_grad_()


def _detach(tree: Any) -> Any:
    return torch_pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    return repr(value)
