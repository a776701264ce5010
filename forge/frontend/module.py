"""A jitted module is still the module: a generated subclass of its class that shares its `__dict__`."""

import copy
from collections.abc import Callable
from typing import Any

import torch


def jitted_module(module: torch.nn.Module, compiled: Callable, rejit: Callable) -> torch.nn.Module:
    """An object of a subclass of module's class, sharing its state, whose call is `compiled(module, *args)`.

    `rejit` is forge.jit with the options given: deep copies and unpickled modules are jitted again with it.
    """
    original = type(module)

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a larger compiled program: part of that one
            return module(*args, **kwargs)
        return compiled(module, *args, **kwargs)

    def __deepcopy__(self: torch.nn.Module, memo: dict) -> torch.nn.Module:
        return rejit(copy.deepcopy(module, memo))

    def __copy__(self: torch.nn.Module) -> torch.nn.Module:
        return rejit(copy.copy(module))

    def __reduce_ex__(self: torch.nn.Module, protocol: Any) -> tuple:
        return rejit, (module,)

    members = {
        "__call__": __call__,
        "__deepcopy__": __deepcopy__,
        "__copy__": __copy__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "_forge_compiled": staticmethod(compiled),
        "_forge_module": property(lambda self: module),
    }
    subclass = type(original.__name__, (original,), members)
    jitted = object.__new__(subclass)
    object.__setattr__(jitted, "__dict__", module.__dict__)
    return jitted
