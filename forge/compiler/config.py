"""What a program is compiled with: what forge.jit was asked for."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any, ClassVar

from forge.compiler.claim import Selection, in_order, is_fused
from forge.executors.executor import (
    Decision,
    Declined,
    Executor,
    FusionExecutor,
    operators_of,
    resolve_executors,
)
from forge.executors.torchex.core import torchex
from forge.ir import BoundSymbol, Trace, check
from forge.ir.checks import check_flag, check_list
from forge.patterns import replace_patterns
from forge.transforms.users import Transform

MEMORY = ("speed", "balanced", "smallest")
SELECT = ("order", "measured")
CHECK = (None, "eager", "regions")
NUMERICS = ("fast", "eager")
CHECK_VARIABLE = "FORGE_CHECK"


def default_check(check: str | None) -> str | None:
    """Return the kind of check that is asked for: `check`, or else the environment's FORGE_CHECK, or None."""
    return os.environ.get(CHECK_VARIABLE) or None if check is None else check


@dataclass(frozen=True)
class Options:
    """How programs are compiled, as forge.jit was asked to.

    executors: names or Executor objects, all available ones for None; the objects once it is made, in the order in
    which they are asked, after those of `first`. Raises as resolve_executors does; ValueError for an unknown `memory`,
    `select` or `numerics`, and for a fusion executor that has no regions of such numerics.
    """

    executors: Sequence[str | Executor] | None = None
    transforms: Sequence[Transform] = ()
    strict: bool = False
    memory: str = "balanced"
    cache: bool = True
    cuda_graphs: bool = False
    freeze: bool = False
    select: str = "order"
    check: str | None = None
    edit: str | os.PathLike[str] | None = None
    numerics: str = "fast"
    first: InitVar[Sequence[Executor]] = ()

    selection: ClassVar[Selection] = staticmethod(in_order)

    def __post_init__(self, first: Sequence[Executor]) -> None:
        object.__setattr__(self, "check", default_check(self.check))
        named = (("memory", MEMORY), ("select", SELECT), ("check", CHECK), ("numerics", NUMERICS))
        for name, known in named:
            given = getattr(self, name)
            check(
                given in known,
                lambda name=name, known=known, given=given: (
                    f"forge.jit: {name} is {given!r}, but must be one of {', '.join(map(str, known))}"
                ),
            )
        check(
            isinstance(self.edit, (str, os.PathLike, type(None))),
            lambda: f"forge.jit: edit is {self.edit!r}, but must be a folder's path",
            TypeError,
        )
        for name in ("strict", "cache", "cuda_graphs", "freeze"):
            check_flag(getattr(self, name), f"forge.jit: {name}")
        check_list(self.transforms, "forge.jit: transforms", "functions from a Trace to a Trace")
        for transform in self.transforms:
            check(
                callable(transform),
                lambda transform=transform: f"forge.jit: a transform is {transform!r}, but must be a function",
                TypeError,
            )
        executors = (*first, *resolve_executors(self.executors))
        if self.numerics == "eager":
            executors = tuple(map(_rounding, executors))
        if self.check == "regions":
            executors = tuple(each.checking() if isinstance(each, FusionExecutor) else each for each in executors)
        object.__setattr__(self, "executors", executors)
        object.__setattr__(self, "transforms", tuple(self.transforms))

    @property
    def compares(self) -> bool:
        """Whether each value is compared with eager's."""
        return self.check == "eager"

    @property
    def operator_executors(self) -> list[Executor]:
        """Those that run single calls: what runs once is not worth a region."""
        return operators_of(self.executors)

    def prepare(self) -> None:
        """Has the fusion executors begin what takes long and depends on no program."""
        for each in self.executors:
            if isinstance(each, FusionExecutor):
                each.prepare()

    @property
    def has_later(self) -> bool:
        """Whether a fusion executor can make larger regions later."""
        if self.cuda_graphs or self.compares or self.edit is not None:  # calls cost next to nothing, or what they like
            return False
        return any(isinstance(each, FusionExecutor) and each.later() is not None for each in self.executors)

    def later(self) -> "Options":
        """The same, with fusion executors that make larger regions elsewhere; `ready` when those are there."""
        executors = [(isinstance(each, FusionExecutor) and each.later()) or each for each in self.executors]
        return dataclasses.replace(self, executors=executors, first=())

    def ready(self) -> Decision:
        """Whether all that the fusion executors have made can be called; Declined where some of it never can."""
        decisions = [each.ready() for each in self.executors if isinstance(each, FusionExecutor)]
        return next((each for each in decisions if isinstance(each, Declined)), all(decisions))

    def in_torch(self) -> "Options":
        """The same with torch's own functions alone, which run on whatever torch calls a tensor."""
        return dataclasses.replace(self, executors=[torchex], cuda_graphs=False, check=None, edit=None, first=())

    def may_run_again(self, bound: BoundSymbol) -> bool:
        """Whether a backward may run a call of the forward again, rather than read what it saved."""
        return self.memory == "smallest" or is_fused(bound, self.executors, self.selection)

    def find_patterns(self, trace: Trace) -> Trace:
        """The trace with the patterns of the executors' kernels found in it."""
        patterns = [pattern for executor in self.executors for pattern in executor.patterns]
        return replace_patterns(trace, patterns)[0] if patterns else trace


def _rounding(executor: Executor) -> Executor:
    """Return the executor for numerics="eager". Raises ValueError for one that cannot round as eager does."""
    if not isinstance(executor, FusionExecutor):
        return executor
    found = executor.rounding()
    check(
        found is not None,
        lambda: f"forge.jit: numerics is 'eager', but executor {executor.name} has no regions that round as eager does",
    )
    return found


@dataclass(frozen=True)
class Selecting(Options):
    """Options with who does not get a call that it would take."""

    selection: Selection = in_order


def selecting(options: Options, selection: Selection, **changes: Any) -> Options:
    """The same options, with who does not get a call that it would take."""
    given = {each.name: getattr(options, each.name) for each in fields(Options)}
    return Selecting(**{**given, **changes}, selection=selection)
