"""Executors, which run the calls of a trace.

The default order of priority is kernels of the process (hubex), Triton, Inductor, torch; nvFuser runs on request.
"""

from typing import TYPE_CHECKING

from forge.executors import cudaex, inductorex, nvfuserex, torchex
from forge.executors.errors import RegionError
from forge.executors.executor import Declined, Executor, FusionExecutor, OperatorExecutor, decline
from forge.executors.registry import register_executor, resolve_executors

if TYPE_CHECKING:  # forge.api adds it: the compiler is above this package
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
