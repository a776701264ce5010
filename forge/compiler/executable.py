"""Executable: the callable that runs in place of a captured graph."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from forge.executors.executor import Executor
from forge.runtime.frozen import FoldedWeights
from forge.runtime.plan import CompiledPlan
from forge.runtime.tiering import TieredProgram, TierResult

OnPromote = Callable[[CompiledPlan, Sequence[Executor]], None]


class SecondTier:
    """The compiler of a program's second tier: larger regions, or CUDA graphs (forge/runtime/tiering.py).

    on_promote: called with the plan of the second tier, and its executors, when it replaces the first.
    hidden_seconds, calls: see TieredProgram.
    """

    def __init__(
        self,
        compile: Callable[["SecondTier", Callable[..., Any]], TierResult],
        hidden_seconds: float,
        calls: int | None = None,
    ) -> None:
        self._compile = compile
        self.hidden_seconds = hidden_seconds
        self.calls = calls
        self.on_promote: OnPromote | None = None

    def compile(self, first: Callable[..., Any]) -> TierResult:
        """Return the compiled successor of the first tier's function."""
        return self._compile(self, first)

    def tiered_program(self) -> TieredProgram:
        """Return the program that runs its first tier until the second is ready."""
        return TieredProgram(self.compile, self.hidden_seconds, self.calls)


class Executable(NamedTuple):
    """A compiled program: call(*inputs) runs it.

    Attributes:
        call: The callable.
        plan: The parts of `call`.
        second_tier: Compiles larger regions or CUDA graphs, or None.
        tiered_program: Runs the first tier until the second is ready, or None.
    """

    call: Callable[..., Any]
    plan: CompiledPlan
    second_tier: SecondTier | None = None
    tiered_program: TieredProgram | None = None

    @property
    def folded_weights(self) -> FoldedWeights | None:
        """The values computed from frozen weights."""
        return self.plan.folded_weights
