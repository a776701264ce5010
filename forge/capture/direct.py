"""The direct front end: a function is called with proxies, and its torch calls are traced."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge import torchlang
from forge.capture import autograd_functions
from forge.capture.fake_values import tensor_proxy
from forge.compiler.program import Program, finish
from forge.ir import TensorProxy, Trace, recording, strides_of
from forge.ir.pytree import tree_map
from forge.torch_internals.pytree import tensor_leaves, torch_pytree
from forge.torchlang import grad_mode


def record(function: Callable, args: tuple, kwargs: dict, *, name: str = "computation") -> Program:
    """Return the program that `function(*args, **kwargs)` runs. Tensors among the arguments become inputs, in pytree
    order; numbers and other arguments are constants of the program, as are the tensors that the function closes over.

    Raises TypeError for a branch on a tensor's value; NotImplementedError naming a torch function without a symbol.
    """
    trace = _new_trace(name)
    grad = torch.is_grad_enabled()
    with recording(trace, torchlang.language), grad_mode.preserve():
        result = _run(trace, function, args, kwargs)
        return finish(trace, result, grad=grad)


class TracedCall:
    """One call of a function, traced into a program that depends only on its inputs.

    `program` maps `inputs`, the tensors among the arguments and then those that the function closes over, to the
    tensors of its result; `result` restores the structure of the result.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        trace = _new_trace("computation")
        grad = torch.is_grad_enabled()
        tensors: list[TensorProxy] = []

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, TensorProxy):
                return leaf
            tensors.append(leaf)
            return _Place(len(tensors) - 1)

        with recording(trace, torchlang.language), grad_mode.preserve():
            self._tree = tree_map(place, _run(trace, function, args, kwargs))
            captured = [_as_input(trace, name) for name in list(trace.constants)]
            self.program = finish(trace, tuple(tensors), grad=grad)
        self.inputs = [*input_tensors(args, kwargs), *captured]

    def result(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the function's result, with the program's tensors substituted for its proxies."""
        return tree_map(lambda leaf: outputs[leaf.position] if isinstance(leaf, _Place) else leaf, self._tree)


class _Place:
    """The position of a tensor in a result."""

    def __init__(self, position: int) -> None:
        self.position = position


def _new_trace(name: str) -> Trace:
    trace = Trace(name, stage="recorded")
    trace.follows_grad_mode = True
    return trace


def _as_input(trace: Trace, name: str) -> torch.Tensor:
    """Make a tensor that the trace closed over an input of the trace, under its name, and return it detached."""
    value = trace.constants.pop(name)
    trace.add_input(TensorProxy(name, tuple(value.shape), value.dtype, value.device, strides=strides_of(value)))
    return value.detach()


def _run(trace: Trace, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Return the function's result for proxies of the tensors among its arguments, which become inputs."""
    leaves, spec = torch_pytree.tree_flatten((args, kwargs))
    names = _argument_names(function, args, kwargs)
    stand_ins = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            name = trace.fresh_name(names[i] if i < len(names) else f"x{i}")
            leaf = trace.add_input(tensor_proxy(name, leaf))
        stand_ins.append(leaf)
    proxy_args, proxy_kwargs = torch_pytree.tree_unflatten(stand_ins, spec)
    with autograd_functions.traced_directly():
        try:
            return function(*proxy_args, **proxy_kwargs)
        except (TypeError, ValueError) as error:
            if TensorProxy.__name__ in str(error):
                error.add_note(
                    f"TensorProxy stands for a tensor while forge records {torchlang.function_name(function)}. What "
                    "takes tensors only, as the transforms of torch.func do, is compiled by forge.jit, not by "
                    "forge.trace, forge.grad or forge.vjp."
                )
            raise


def _argument_names(function: Callable, args: tuple, kwargs: dict) -> list[str]:
    """Return a name for each leaf: the parameter's, numbered if it holds several."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return []
    names = []
    for parameter, value in bound.arguments.items():
        count = len(torch_pytree.tree_leaves(value))
        names += [parameter] if count == 1 else [f"{parameter}{i}" for i in range(count)]
    return names


def input_tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that `record` makes inputs of, in order."""
    return tensor_leaves((args, kwargs))
