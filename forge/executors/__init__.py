"""Executors: who runs the calls of a trace."""

from forge.executors.claim import claim
from forge.executors.executor import (
    Declined,
    Executor,
    FusionExecutor,
    OperatorExecutor,
    decline,
    register_executor,
    resolve_executors,
)
from forge.executors.torchex import torch_prims, torchex

__all__ = [
    "Declined",
    "Executor",
    "FusionExecutor",
    "OperatorExecutor",
    "claim",
    "decline",
    "register_executor",
    "resolve_executors",
    "torch_prims",
    "torchex",
]
