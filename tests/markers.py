"""Parameters of tests that run in `make test-all` only."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(names: Iterable[str], *quick: str) -> list[Any]:
    """Return parameters of pytest.mark.parametrize, all with the marker `slow` except the quick ones.

    Raises ValueError for a quick name that is not among them.
    """
    names = list(names)
    if not {*quick} <= {*names}:
        raise ValueError(f"{', '.join(sorted({*quick} - {*names}))} is none of {', '.join(names)}")
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def in_both_modes(names: Iterable[str], trained: Collection[str], evaluated: Collection[str]) -> list[Any]:
    """Return parameters (name, training) for models in training and in inference.

    All but the `trained` and the `evaluated` have the marker `slow`.
    """
    return [
        pytest.param(
            name,
            training,
            marks=[] if name in (trained if training else evaluated) else [pytest.mark.slow],
            id=f"{name}-{'train' if training else 'eval'}",
        )
        for name in names
        for training in (True, False)
    ]
