"""A compiler for PyTorch whose programs can be read as Python.

A name loads its module when it is first used (PEP 562), so that the command line answers without torch. Type checkers
read __init__.pyi.
"""

import functools
import importlib
import sys
from importlib.util import find_spec
from typing import Any

from forge.support import startup  # before all that imports torch

# isort: split
from forge.version import __version__

_MODULES = {  # as in __init__.pyi
    "CheckError": "forge.executors.errors",
    "Difference": "forge.debug.bisection",
    "EditError": "forge.debug.edited",
    "EntryPoint": "forge.api.export",
    "Explanation": "forge.debug.report",
    "ExportError": "forge.aot.errors",
    "Exported": "forge.aot.exported",
    "KernelExtension": "forge.executors.hubex",
    "LoadedKernel": "forge.api.load_kernel",
    "ModuleTransform": "forge.runtime.module_transforms",
    "Pattern": "forge.patterns",
    "StrictError": "forge.compiler.program",
    "bisect": "forge.debug.bisection",
    "bundle": "forge.api.bundle",
    "distributed": "forge.distributed",
    "explain": "forge.debug.report",
    "export": "forge.api.export",
    "finish_compiling": "forge.api.jit",
    "grad": "forge.api.functional",
    "jit": "forge.api.jit",
    "kernel": "forge.executors.hubex",
    "kernels": "forge.executors.hubex.registry",
    "last_backward_traces": "forge.api.jit",
    "last_traces": "forge.api.jit",
    "load": "forge.aot.loaded",
    "load_kernel": "forge.api.load_kernel",
    "optim": "forge.optim",
    "original_state_dict": "forge.runtime.module_transforms",
    "pattern": "forge.patterns",
    "quantize": "forge.quantize",
    "refold": "forge.api.jit",
    "register_kernel": "forge.executors.hubex",
    "repro": "forge.debug.repro",
    "trace": "forge.api.functional",
    "use_kernels": "forge.executors.hubex",
    "value_and_grad": "forge.api.functional",
    "vjp": "forge.api.functional",
}

__all__ = [*_MODULES]
del startup  # no name of the package


def __getattr__(name: str) -> Any:
    own = f"{__name__}.{name}"
    place = _MODULES.get(name) or (own if not name.startswith("_") and find_spec(own) is not None else None)
    if place is None:
        raise AttributeError(f"module 'forge' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    _warn_of_untested_torch()
    module = _import(place)
    value = module if place == own else getattr(module, name)
    globals()[name] = value
    return value


def _import(place: str) -> Any:
    if place in sys.modules:
        return importlib.import_module(place)  # which waits where another thread is importing it
    from forge.torch_internals.replaced import torchs_functions  # which imports torch

    with torchs_functions():
        return importlib.import_module(place)


@functools.cache
def _warn_of_untested_torch() -> None:
    from forge.torch_internals import versions  # which imports torch

    versions.warn_if_untested()


def __dir__() -> list[str]:
    own = [name for name in globals() if name.startswith("__") or f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *own})
