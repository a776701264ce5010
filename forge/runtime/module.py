"""A jitted module remains a module: a generated subclass of its class that shares its `__dict__`."""

import copy
import functools
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from forge.runtime.decoding_loop import CompileStep, decoding_loop, loop_methods


def _is_lazy(module: torch.nn.Module) -> bool:
    """Return whether a parameter or buffer gets its shape at the first call."""
    return any(map(is_lazy, chain(module.parameters(), module.buffers())))


def _is_fully_sharded(kind: type) -> bool:
    """Return whether modules of a class are FSDP2's: `fully_shard` gives a module a new class."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, fsdp.FSDPModule)


_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")


def _is_redirected(module: torch.nn.Module) -> bool:
    """Return whether Lightning calls another method through this forward, which it replaces for one call: under a
    strategy that wraps the module, `training_step` runs so. It stays Python; `self(x)` in it is compiled."""
    forward: Any = vars(module).get("forward")
    return getattr(forward, "__name__", "") == "wrapped_forward" and forward.__module__.startswith(_LIGHTNING)


def _has_own_forward(module: torch.nn.Module) -> bool:
    """Return whether the forward is not that of the class. Lightning leaves the latter in the `__dict__`."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


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
        module: The module to jit.
        compiled: Its compiled call.
        compile_forward: Returns its compiled forward, which runs no hooks.
        rejit: forge.jit with the options given: deep copies and unpickled modules are jitted again with it.
        compile_step: Compiles a function of the module and of tensors with these options, for a loop in place of
            transformers' (`decoding_loop`); None: transformers' loop stays.
    """
    original = type(module)
    loop = None if compile_step is None else decoding_loop(original, module, compile_step)
    jitted: torch.nn.Module = object.__new__(_jitted_class(original, has_loop=loop is not None))
    parts = {
        "__dict__": module.__dict__,
        "_forge_module": module,
        "_forge_compiled": compiled,
        "_forge_compiled_forward": functools.cache(compile_forward),
        "_forge_rejit": rejit,
        "_forge_is_lazy": _is_lazy(module),
        "_forge_loop": loop,
    }
    for name, value in parts.items():
        object.__setattr__(jitted, name, value)
    return jitted


_SLOTS = (
    "_forge_module",
    "_forge_compiled",
    "_forge_compiled_forward",
    "_forge_rejit",
    "_forge_is_lazy",
    "_forge_loop",
)


def _jitted_class(original: Any, *, has_loop: bool) -> type:
    """Return the subclass of a class whose objects are jitted modules: one for all of them, and one for those with
    a decoding loop.

    Engines look for the modules of a class to shard them one by one (Accelerate's `transformer_cls_names_to_wrap`), and
    `fully_shard` has a table of classes for the lifetime of the process: per-module state is in slots, since the
    `__dict__` is the original's.
    """
    subclasses: list[type] = type.__subclasses__(original)
    for each in subclasses:
        if "_forge_compiled" in vars(each) and ("_sample" in vars(each)) is has_loop:
            return each

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self._forge_module
        if torch.compiler.is_compiling():  # inside a larger compiled program, which inlines it
            return module(*args, **kwargs)
        if self._forge_is_lazy:  # tracing would initialise it with other random numbers
            result = module(*args, **kwargs)
            object.__setattr__(self, "_forge_is_lazy", _is_lazy(module))
            return result
        if _is_redirected(module) or (_is_fully_sharded(type(self)) and not _has_own_forward(self)):
            return original.__call__(self, *args, **kwargs)
        return self._forge_compiled(module, *args, **kwargs)

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _is_fully_sharded(type(self)):
            return self._forge_compiled_forward()(self._forge_module, *args, **kwargs)
        return original.forward(self, *args, **kwargs)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Return a module of the original class, not jitted: a module may construct its own class, for a slice say."""
        return original(*args, **kwargs)

    def __deepcopy__(self: Any, memo: dict) -> torch.nn.Module:
        return self._forge_rejit(copy.deepcopy(self._forge_module, memo))

    def __copy__(self: Any) -> torch.nn.Module:
        return self._forge_rejit(copy.copy(self._forge_module))

    def __reduce_ex__(self: Any, protocol: Any) -> tuple:
        return self._forge_rejit, (self._forge_module,)

    members = {
        "__call__": __call__,
        "forward": forward,
        "__new__": __new__,
        "__deepcopy__": __deepcopy__,
        "__copy__": __copy__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "__slots__": _SLOTS,
    }
    if hasattr(original, "get_compiled_call"):  # the method by which transformers' generate calls torch.compile
        members["get_compiled_call"] = lambda self, config: self.__call__
    if has_loop:
        members |= loop_methods(original)
    return type(original.__name__, (original,), members)
