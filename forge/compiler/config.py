"""Config: the resolved options of compilation. forge/api/options.py makes it from a user's options."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forge.compiler.claim import Claim, Selection, in_order, is_fused
from forge.executors.executor import (
    Decision,
    Declined,
    Executor,
    FusionExecutor,
    OperatorExecutor,
    ProductExecutor,
    operators_of,
)
from forge.executors.torchex.core import torchex
from forge.ir import BoundSymbol, Trace
from forge.ir.proxies import bytes_of
from forge.ir.pytree import tensors
from forge.transforms.makers import is_view
from forge.transforms.unshards import is_unshard, reshards
from forge.transforms.users import Transform

_ROW = 32  # the fewest elements of a row for which a reduction is saved


class Comparison(Protocol):
    """A claimed trace whose values are compared, as they are computed, with those of a reference (check="eager")."""

    trace: Trace

    def __init__(self, claimed: Trace, claims: Sequence[Claim], reference: Trace, phase: str) -> None: ...

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the generated function of `trace` to run after the reference."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The resolved options of compilation, the same for all programs of a jitted function.

    Attributes:
        executors: in order of priority.
        transforms: the user's.
        strict: a region that fails raises.
        memory: "speed", "balanced" or "smallest".
        cache: programs are written to disk.
        cuda_graphs: True, False or "auto"; records_graphs: programs are recorded as CUDA graphs, requested or not.
        select: "order" or "measured"; selection: which candidates lose a call that they would take.
        checks: a check is on, under which a region that fails raises, too.
        comparison: instruments each claimed trace.
        codegen: returns the function of a final trace, and the trace of its source; None for the trace's own.
    """

    executors: tuple[Executor, ...]
    transforms: tuple[Transform, ...] = ()
    strict: bool = False
    memory: str = "balanced"
    cache: bool = True
    cuda_graphs: bool | str = "auto"
    records_graphs: bool = False
    freeze: bool = False
    select: str = "order"
    numerics: str = "fast"
    checks: bool = False
    selection: Selection = in_order
    comparison: type[Comparison] | None = None
    codegen: Callable[[Trace], tuple[Callable[..., Any], Trace]] | None = None

    def replace(self, **changes: Any) -> "Config":
        """Return the same config with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def operator_executors(self) -> list[OperatorExecutor]:
        """The executors that run single calls; code that runs once is not worth a region."""
        return operators_of(self.executors)

    @property
    def fusion_executors(self) -> list[FusionExecutor]:
        """The executors that compile regions."""
        return [each for each in self.executors if isinstance(each, FusionExecutor)]

    @property
    def product_executors(self) -> list[ProductExecutor]:
        """The executors of matrix products with their consumers; only under select="measured"."""
        return [each for each in self.executors if isinstance(each, ProductExecutor)]

    @property
    def is_plain(self) -> bool:
        """True if programs run as generated: neither compared with a reference nor edited by a user."""
        return self.comparison is None and self.codegen is None

    def prepare(self) -> None:
        """Have the fusion executors start slow work that depends on no program."""
        for each in self.fusion_executors:
            each.prepare()

    @property
    def has_second_tier(self) -> bool:
        """True if a fusion executor can compile larger regions later. CUDA graphs have little call overhead."""
        if self.cuda_graphs is True or not self.is_plain:
            return False
        return any(each.second_tier() is not None for each in self.fusion_executors)

    @property
    def may_record_later(self) -> bool:
        """True if a program that leaves its GPU idle may be recorded as CUDA graphs later."""
        return self.cuda_graphs == "auto" and self.is_plain

    def with_cuda_graphs(self) -> "Config":
        """Return the config of programs that are recorded as CUDA graphs."""
        return self.replace(records_graphs=True)

    def larger_regions(self) -> "Config":
        """Return the config of larger regions, which fusion executors compile in other processes; see `is_ready`."""
        executors = [each for each in self.executors if not isinstance(each, ProductExecutor)]
        executors = [(isinstance(each, FusionExecutor) and each.second_tier()) or each for each in executors]
        return self.replace(executors=tuple(executors))

    def is_ready(self) -> Decision:
        """Return whether all regions that the fusion executors have compiled can be called; Declined if one never
        can."""
        decisions = [each.is_ready() for each in self.fusion_executors]
        return next((each for each in decisions if isinstance(each, Declined)), all(decisions))

    def in_torch(self) -> "Config":
        """Return the config for torch's own functions alone, which accept any tensor subclass."""
        return self._as_generated(executors=(torchex,))

    def for_single_call(self, executors: Collection[Executor], selection: Selection) -> "Config":
        """Return the config of a program of one call that is measured."""
        return self._as_generated(executors=tuple(executors), selection=selection, strict=True)

    def for_standalone(self, executors: Collection[Executor]) -> "Config":
        """Return the config of a part of a program that these executors run by itself."""
        return self._as_generated(executors=tuple(executors), selection=in_order)

    def _as_generated(self, **changes: Any) -> "Config":
        """Return the config of programs that run as generated, with other changes."""
        return self.replace(
            cuda_graphs=False, records_graphs=False, comparison=None, codegen=None, checks=False, **changes
        )

    def can_recompute(self, bound: BoundSymbol) -> bool:
        """Return whether a backward may recompute a call of the forward rather than read its saved result."""
        if is_unshard(bound) and reshards(bound) is not None:
            return bool(reshards(bound))
        if self.memory in ("speed", "smallest"):
            return self.memory == "smallest"
        return is_unshard(bound) or (self.is_fused(bound) and not _reduces_rows_on_cpu(bound))

    def can_split(self, bound: BoundSymbol) -> bool:
        """Return whether a call of the forward may be split into a recomputed part and a saved one."""
        return self.memory != "speed" and self.is_fused(bound)

    def is_fused(self, bound: BoundSymbol) -> bool:
        """Return whether a fusion executor is the first to take a call."""
        return is_fused(bound, self.executors, self.selection)


def _reduces_rows_on_cpu(bound: BoundSymbol) -> bool:
    """Return whether a call reduces long rows on a CPU, where reading its input again costs more than saving the
    small result."""
    outputs = tensors(bound.output)
    if is_view(bound) or not outputs or any(x.device.type != "cpu" for x in outputs):
        return False
    read = max(map(bytes_of, tensors((bound.args, bound.kwargs))), default=0)
    return _ROW * sum(map(bytes_of, outputs)) <= read
