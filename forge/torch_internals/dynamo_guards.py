"""Patch of Dynamo: the measurement of its guards, which flushes the processor's caches after each capture."""

import logging
from typing import Any

from forge.torch_internals.dynamo import dynamo_guards
from forge.torch_internals.patch import patch


@patch(
    dynamo_guards,
    "profile_guard_manager",
    why="a capture ends with a flush of the processor's caches, tens of milliseconds, for a line of the log of guards",
    issue="not reported: torch's comment beside it names the cost",
    upstream="torch/_dynamo/guards.py:4357@2.13.0, CheckFunctionManager.__init__",
)
def _measure(*guards: Any) -> float:
    """Return the time that guards take, in µs: 0 where nobody reads it."""
    return _measure.original(*guards) if dynamo_guards.guards_log.isEnabledFor(logging.DEBUG) else 0.0
