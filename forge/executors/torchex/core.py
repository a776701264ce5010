"""The torch executors and the registration functions of their families.

`torch` runs torchlang symbols by the torch functions that they represent, so that eager's fused kernels are used, and
prims and clang symbols, in which gradients and decompositions are written, by the tables of each family.
`torch-prims` runs prims only: every decomposition is executed as written.
"""

from collections.abc import Callable
from typing import Any

from forge.executors.executor import OperatorExecutor
from forge.executors.registry import register_executor
from forge.ir import Symbol
from forge.torchlang import torch_function_of

torchex = register_executor(OperatorExecutor("torch"))
torch_prims = register_executor(OperatorExecutor("torch-prims"))


def run_prims(table: dict[Symbol, Callable]) -> None:
    """Register functions that take a prim's arguments unchanged."""
    for prim, function in table.items():
        torchex.register_implementation(prim, function)
        torch_prims.register_implementation(prim, function)


def run_prim(prim: Symbol, **how: Any) -> Callable[[Callable], Callable]:
    """Register the decorated function as the implementation of `prim`."""

    def register(function: Callable) -> Callable:
        torchex.register_implementation(prim, function, **how)
        torch_prims.register_implementation(prim, function, **how)
        return function

    return register


def run_clang(table: dict[Symbol, Callable]) -> None:
    """Register torch functions with the broadcasting and dtype promotion of their clang symbols."""
    for symbol, function in table.items():
        torchex.register_implementation(symbol, function)


def run_torchlang(
    symbol: Symbol,
    function: Callable | None = None,
    *,
    checker: Callable | None = None,
    grad_transform: Callable | None = None,
) -> None:
    """Register a torchlang symbol that needs more than its torch function: another function, a checker, or a gradient
    rule that uses torch's backward operators."""
    torchex.register_implementation(
        symbol, function or torch_function_of(symbol), checker=checker, grad_transform=grad_transform
    )


# symbols whose torch function is Python code around others, which run
composites: set[Symbol] = set()
