"""The torch executor's implementations of prims that check tensor values."""

import builtins
from collections.abc import Callable
from typing import Any

import torch

from forge import prims
from forge.executors.torchex.core import run_prim


@run_prim(prims.require)
def require(
    condition: torch.Tensor | bool,
    message: str | Callable[..., str] | None,
    error: str | type[Exception],
    *values: Any,
) -> None:
    """Check a condition; on a GPU this synchronizes, as in eager."""
    if not condition:
        prims.fail(getattr(builtins, error) if isinstance(error, str) else error, message, *values)
