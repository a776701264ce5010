"""Executors: who runs the calls of a trace."""

from forge.compiler.claim import claim
from forge.executors import inductorex, nvfuserex, torchex
from forge.executors.errors import RegionError
from forge.executors.executor import (
    Declined,
    Executor,
    FusionExecutor,
    OperatorExecutor,
    decline,
    register_executor,
    resolve_executors,
)

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
