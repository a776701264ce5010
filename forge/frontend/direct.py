"""The direct front end: a function is called with proxies, and torch calls on them are recorded."""

import inspect
from collections.abc import Callable

import torch
from torch.utils import _pytree

from forge import torchlang
from forge.frontend import functions
from forge.frontend.program import Program, finish
from forge.ir import Trace, recording
from forge.torchlang import grad_mode


def record(function: Callable, args: tuple, kwargs: dict, *, name: str = "computation") -> Program:
    """The program that `function(*args, **kwargs)` runs. Tensors among the arguments become inputs, in pytree order;
    numbers and other arguments are part of the program.

    Raises TypeError for a branch on a tensor's value; NotImplementedError naming a torch function without a symbol.
    """
    trace = Trace(name, stage="recorded")
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    names = _argument_names(function, args, kwargs)
    stand_ins = []
    trace.follows_grad_mode = True
    grad = torch.is_grad_enabled()
    with recording(trace, torchlang.language), grad_mode.kept():
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                proxy = trace.tensor(
                    leaf.shape,
                    leaf.dtype,
                    leaf.device,
                    name=names[i] if i < len(names) else f"x{i}",
                    requires_grad=leaf.requires_grad,
                    strides=tuple(leaf.stride()),
                )
                leaf = trace.add_input(proxy)
            stand_ins.append(leaf)
        proxy_args, proxy_kwargs = _pytree.tree_unflatten(stand_ins, spec)
        with functions.traced_directly():
            result = function(*proxy_args, **proxy_kwargs)
        return finish(trace, result, grad=grad)


def _argument_names(function: Callable, args: tuple, kwargs: dict) -> list[str]:
    """A name for each leaf: the parameter's, numbered where it holds several."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return []
    names = []
    for parameter, value in bound.arguments.items():
        count = len(_pytree.tree_leaves(value))
        names += [parameter] if count == 1 else [f"{parameter}{i}" for i in range(count)]
    return names


def input_tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that `record` makes inputs of, in order."""
    return [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
