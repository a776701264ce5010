"""Compiled functions of fused regions: identical regions share one, and a program is lowered again without regions
that failed.

A region's key is its calls with positions for names, and the metadata of its inputs, strides included: the layers of a
model share one artifact.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from forge.compiler.layout import Layouts
from forge.executors.errors import CheckError
from forge.executors.executor import Declined, FusionExecutor, call_checker, decline
from forge.ir import BoundSymbol, Trace, check
from forge.ir.bounded import BoundedDict
from forge.ir.checks import in_one_line
from forge.ir.pytree import proxies
from forge.ir.structure import key_of, settings
from forge.ir.unresolved import UnresolvedSymInt
from forge.support import progress

MAX_ARTIFACTS = 4096  # of one executor

_artifacts: "weakref.WeakKeyDictionary[FusionExecutor, BoundedDict]" = weakref.WeakKeyDictionary()

_log = logging.getLogger("forge.claim")

T = TypeVar("T")


class FusedRegion(NamedTuple):
    """A fused region that a program calls: its executor and its function."""

    fuser: FusionExecutor
    function: Callable[..., Any]


def compile_until_stable(attempt: Callable[[], tuple[T, list[FusedRegion]]]) -> T:
    """Return the result of `attempt` once all fused regions that it compiled, in other processes too, can be called.

    attempt: returns (result, its fused regions). If a region fails to compile, it is declined from then on, and
    `attempt` runs again.
    """
    with progress.display():
        while True:
            result, regions = attempt()
            if not discard_failed(regions):
                return result


def discard_failed(regions: Sequence[FusedRegion]) -> bool:
    """Wait for fused regions, and decline from now on those that cannot be called; return whether there are any."""
    return bool([fuser for fuser in {each.fuser for each in regions} if _discard_failed(fuser, regions)])


def _discard_failed(fuser: FusionExecutor, regions: Sequence[FusedRegion]) -> bool:
    failed = fuser.finish()
    if not failed or not any(each.fuser is fuser and each.function in failed for each in regions):
        return False
    artifacts = _artifacts[fuser]
    artifacts.update((key, failed[function]) for key, function in list(artifacts.items()) if function in failed)
    return True


def compile_once(
    fuser: FusionExecutor, key: tuple[Any, ...], region: Callable[[], Trace], *, strict: bool
) -> tuple[tuple[Any, ...] | None, Callable[..., Any] | Declined]:
    """Return the key of a region, None if it cannot be hashed, and its function, which identical regions share."""
    artifacts = _artifacts.setdefault(fuser, BoundedDict(MAX_ARTIFACTS))
    try:
        function = artifacts.get(key)
    except TypeError:  # an argument of a call is unhashable
        return None, _compile(fuser, region())
    if function is None:
        function = _compile(fuser, region())
        if not (strict and isinstance(function, Declined) and function.error is not None):  # else it is raised
            artifacts[key] = function
    return key, function


def _compile(fuser: FusionExecutor, region: Trace) -> Callable[..., Any] | Declined:
    """Return the function that a fusion executor compiles for a region, or Declined, with the error if it fails.
    Raises TypeError if the executor returns anything else, and CheckError."""

    @functools.wraps(fuser.fuse)
    def fuse(region: Trace) -> Any:
        try:
            return fuser.fuse(region)
        except (UnresolvedSymInt, CheckError):
            raise
        except Exception as error:
            _log.debug("%s failed at\n%s", fuser.name, region)
            return decline(f"fusing a region failed: {in_one_line(error)}", error=error)

    function: Callable[..., Any] | Declined = call_checker(fuse, region)
    check(
        callable(function) or isinstance(function, Declined),
        lambda: f"{fuser.name}: fuse returned {function!r}, but must return a function, or decline with the reason",
        TypeError,
    )
    return function


def region_key(calls: list[BoundSymbol], inputs: list[str], outputs: list[str], layouts: Layouts) -> tuple[Any, ...]:
    """Return the key of a region under torch's settings, with positions for names."""
    position = {name: index for index, name in enumerate(inputs)}
    lines: list[Any] = [settings(), tuple([key_of(layouts.values[name]) for name in inputs])]
    for bound in calls:
        arguments = [key_of(each, lambda proxy: (position[proxy.name],)) for each in (bound.args, bound.kwargs)]
        for name in bound.outputs:
            position[name] = len(position)
        lines.append((bound.symbol, bound.tags, *arguments, *[position[each.name] for each in proxies(bound.output)]))
    return (*lines, tuple([position[name] for name in outputs]))
