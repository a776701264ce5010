"""Fallbacks: run the calls of a fused region whose compilation or function fails."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from forge.executors.errors import OverwrittenArgumentError
from forge.ir import BoundSymbol, Proxy, Trace
from forge.ir.checks import in_one_line
from forge.ir.printing import Code, compile_function, location_of
from forge.ir.source import Source, warn
from forge.transforms.lifetimes import delete_last_used
from forge.transforms.split import free_names

NAME = "fallback"  # of the generated functions
# errors after which unfused calls would need more memory, or would read changed arguments
_RAISED = (torch.OutOfMemoryError, MemoryError, OverwrittenArgumentError)
_log = logging.getLogger("forge.claim")


class Fallback:
    """The calls of fused regions that share a function, run by the executors after the fuser.

    A program calls it with the function's error and its arguments: regions are pure, so their calls can run after a
    failed function. An error of these calls is the program's own. Otherwise they run from then on, with one warning;
    under `strict`, the function's error is raised.

    regions: the names of the regions in their program. executor: the one that runs the calls. code: returns the
    function to generate. reason: why they run; None while the region's function works.
    """

    def __init__(self, executor: str, code: Callable[[], Code], *, strict: bool, regions: Iterable[str] = ()) -> None:
        self.regions = list(regions)
        self.executor = executor
        self.code = code
        self.strict = strict
        self.reason: str | None = None
        self._function: Callable[..., Any] | None = None

    def __call__(self, error: Exception, *args: Any) -> tuple[Callable[..., Any], Any]:
        """Return the function to run from now on, and its results. Raises `error` in strict mode or if torch's calls
        cannot run after it, and their own error if they fail too."""
        if isinstance(error, _RAISED):
            raise error
        self._function = self._function or compile_function(NAME, self.code())
        try:
            results = self._function(*args)
        except Exception as own:
            raise own from None
        if self.strict:
            raise error
        if self.reason is None:
            self._fall_back_for_good(error)
        return self._function, results

    def _fall_back_for_good(self, error: Exception) -> None:
        self.reason = f"its region failed: {in_one_line(error)}"
        sources, _ = location_of(error) or ([], "")
        warn_of_fallback(f"{self.regions[0]} failed", self.executor, error, *sources[:1])


def warn_of_fallback(what: str, executor: str, error: Exception, source: Source | None = None) -> None:
    """Warn at `source` of a region's failure with `error`; `executor` runs its calls."""
    _log.debug("%s", what, exc_info=error)
    warn(f"{what}, {executor} runs its calls from now on: {in_one_line(error)}", source)


def fallback_for(
    calls: list[BoundSymbol], inputs: list[Proxy], outputs: tuple[Proxy, ...], *, boxed: bool, strict: bool
) -> Fallback | None:
    """Return the fallback of a region: claimed calls that compute `outputs` from `inputs`, passed as one list if
    `boxed`. None if they read other values."""
    trace = Trace(NAME)
    trace.inputs, trace.output, trace.boxed = inputs, outputs, boxed
    trace.bound_symbols.extend(calls)
    if free_names(trace, set()):
        return None
    code = delete_last_used(trace).python_source()
    return Fallback(runners(calls), lambda: code, strict=strict)


def runners(calls: Iterable[BoundSymbol]) -> str:
    """Return the names of the executors that run claimed calls."""
    return ", ".join(dict.fromkeys(getattr(bound.symbol.executor, "name", "torch") for bound in calls))
