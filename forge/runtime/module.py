"""A jitted module is still the module: a generated subclass of its class that shares its `__dict__`."""

import copy
import functools
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from forge.runtime.decoding_loop import CompileStep, decoding_loop


def _is_lazy(module: torch.nn.Module) -> bool:
    """Return whether a parameter or buffer waits for the first call to learn its shape."""
    return any(map(is_lazy, chain(module.parameters(), module.buffers())))


def _is_fully_sharded(kind: type) -> bool:
    """Return whether modules of a class are FSDP2's: `fully_shard` gives a module a class of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, fsdp.FSDPModule)


def jitted_module(
    module: torch.nn.Module,
    compiled: Callable,
    compile_forward: Callable[[], Callable],
    rejit: Callable,
    compile_step: CompileStep | None,
) -> torch.nn.Module:
    """Return an object of a subclass of module's class, sharing its state, whose call is `compiled(module, *args)`.

    FSDP2 gathers parameters in hooks of the module, which Dynamo does not capture: they would break the graph twice.
    They run around the compiled forward, as with torch.compile.

    Args:
        module: What a user jits.
        compiled: Its compiled call.
        compile_forward: Returns its compiled forward, which runs no hook.
        rejit: forge.jit with the options given: deep copies and unpickled modules are jitted again with it.
        compile_step: Compiles a function of the module and of tensors with these options, for a loop in the place of
            transformers' (`decoding_loop`); None: transformers' loop stays.
    """
    original = type(module)
    lazy = _is_lazy(module)
    is_sharded = _is_fully_sharded(original)
    compiled_forward = functools.cache(compile_forward)

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal lazy
        if torch.compiler.is_compiling():  # inside a larger compiled program: part of that one
            return module(*args, **kwargs)
        if lazy:  # tracing would initialise it with other random numbers
            result = module(*args, **kwargs)
            lazy = _is_lazy(module)
            return result
        if (is_sharded or _is_fully_sharded(type(self))) and "forward" not in vars(module):
            return original.__call__(self, *args, **kwargs)
        return compiled(module, *args, **kwargs)

    @functools.wraps(original.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (is_sharded or _is_fully_sharded(type(self))) and not torch.compiler.is_compiling():
            return compiled_forward()(module, *args, **kwargs)
        return original.forward(self, *args, **kwargs)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Return a module of the original class, not jitted: a module constructs its own class for a slice, say."""
        return original(*args, **kwargs)

    def __deepcopy__(self: torch.nn.Module, memo: dict) -> torch.nn.Module:
        return rejit(copy.deepcopy(module, memo))

    def __copy__(self: torch.nn.Module) -> torch.nn.Module:
        return rejit(copy.copy(module))

    def __reduce_ex__(self: torch.nn.Module, protocol: Any) -> tuple:
        return rejit, (module,)

    members = {
        "__call__": __call__,
        "forward": forward,
        "__new__": __new__,
        "__deepcopy__": __deepcopy__,
        "__copy__": __copy__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "_forge_compiled": staticmethod(compiled),
        "_forge_module": property(lambda self: module),
    }
    if hasattr(original, "get_compiled_call"):  # by which transformers' generate has torch.compile compile a model
        members["get_compiled_call"] = lambda self, config: self.__call__
    if compile_step is not None:
        members |= decoding_loop(original, module, compile_step)
    subclass = type(original.__name__, (original,), members)
    jitted: torch.nn.Module = object.__new__(subclass)
    object.__setattr__(jitted, "__dict__", module.__dict__)
    return jitted
