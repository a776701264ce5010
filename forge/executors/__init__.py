"""Executors, which run the calls of a trace.

`registry.py` has the default order of priority: kernels of the process ("hub"), Inductor, CUDA's own attention kernels,
torch. nvFuser runs on request.
"""

import importlib
from typing import TYPE_CHECKING, Any

from forge.executors import cudaex, inductorex, nvfuserex, torchex
from forge.executors.errors import RegionError
from forge.executors.executor import Declined, Executor, FusionExecutor, OperatorExecutor, decline
from forge.executors.registry import register_executor, resolve_executors

if TYPE_CHECKING:
    from forge.compiler.standalone import claim

__all__ = [
    "Declined",
    "Executor",
    "FusionExecutor",
    "OperatorExecutor",
    "RegionError",
    "claim",
    "decline",
    "register_executor",
    "resolve_executors",
]


def __getattr__(name: str) -> Any:
    if name != "claim":  # part of the compiler, which is above this package
        raise AttributeError(f"module 'forge.executors' has no attribute {name!r}")
    return importlib.import_module("forge.compiler.standalone").claim
