"""The torch._foreach functions: one call for each tensor of the lists."""

from collections.abc import Callable
from typing import Any

import torch

from forge.ir import TensorProxy

_PREFIX = "_foreach_"
# the functions that they call, if the name is not that of a tensor's method
_OTHERS: dict[str, str | Callable] = {
    "maximum": "clamp_min",
    "maximum_": "clamp_min_",
    "minimum": "clamp_max",
    "minimum_": "clamp_max_",
    "norm": torch.linalg.vector_norm,
}
_CALLED: dict[Any, str | Callable] = {
    getattr(torch, name): _OTHERS.get(op, op)
    for name in dir(torch)
    if (op := name.removeprefix(_PREFIX)) != name and (op in _OTHERS or hasattr(torch.Tensor, op))
}
_OPTIONS = {"alpha", "dtype", "memory_format", "non_blocking", "ord", "value"}  # keywords of both functions
_WITH_VALUE = {"addcdiv", "addcdiv_", "addcmul", "addcmul_"}  # the fourth argument is a keyword argument of the method


def each_call(function: Any, args: tuple, kwargs: dict) -> list[tuple[str | Callable, tuple, dict]] | None:
    """Return the calls that a torch._foreach function makes, in order: a list holds an argument for each call, other
    arguments are shared.

    None for other functions, for lists by name, and for a tensor that holds a number for each call.
    """
    callee = _CALLED.get(function)
    if callee is None or not kwargs.keys() <= _OPTIONS:
        return None
    if callee in _WITH_VALUE and len(args) == 4:
        args, kwargs = args[:-1], {**kwargs, "value": args[-1]}
    count = next((len(value) for value in args if isinstance(value, (list, tuple))), None)
    if count is None or isinstance(kwargs.get("value"), TensorProxy):
        return None

    def pick(value: Any, index: int) -> Any:
        return value[index] if isinstance(value, (list, tuple)) else value

    return [
        (callee, tuple(pick(value, index) for value in args), {name: pick(kwargs[name], index) for name in kwargs})
        for index in range(count)
    ]


def returns_arguments(function: Any) -> bool:
    """Return whether a torch._foreach function returns the list to which it writes its results."""
    return function.__name__.endswith("_")
