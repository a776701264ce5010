"""The table of cases: what `python -m tests.gpu` runs, by name."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SKIPPED = "skipped"


class Skipped(Exception):
    """A case that says nothing here, with the reason: torch itself does not run it."""


@dataclass(frozen=True)
class Case:
    """`run(device)` gives what measure.judge gives, or raises; `seconds` is the most that it may take."""

    run: Callable[[torch.device], tuple[str, str]]
    seconds: float = 120.0


def all_cases() -> dict[str, Case]:
    """Every case by name, those first that find most."""
    from tests.gpu import attention, flex, models, numerics, operations, programs, reductions

    kinds = (attention.cases, flex.cases, operations.cases, models.cases, programs.cases)
    first = {**models.cases(first=True), **reductions.cases(), **numerics.cases()}
    return first | {name: case for cases in kinds for name, case in cases().items()}


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
