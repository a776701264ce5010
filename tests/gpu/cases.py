"""The table of the cases of `python -m tests.gpu`, by name."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SKIPPED = "skipped"


class Skipped(Exception):
    """The reason why a case does not apply here: torch itself does not run it."""


@dataclass(frozen=True)
class Case:
    """A case: `run(device)` returns the result of measure.judge, or raises; `seconds` is its time limit."""

    run: Callable[[torch.device], tuple[str, str]]
    seconds: float = 120.0


def all_cases() -> dict[str, Case]:
    """Return every case by name, the most productive ones first."""
    from tests.gpu import attention, flex, models, numerics, operations, programs, reductions

    kinds = (attention.cases, flex.cases, operations.cases, models.cases, programs.cases)
    first = {**models.cases(first=True), **reductions.cases(), **numerics.cases()}
    return first | {name: case for cases in kinds for name, case in cases().items()}


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
