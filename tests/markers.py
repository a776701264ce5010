"""Parameters of tests that `make test` leaves to `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(names: Iterable[str], *quick: str) -> list[Any]:
    """Return parameters of pytest.mark.parametrize, of which all but the quick ones have the marker `slow`.

    Raises ValueError for a quick one that is none of them.
    """
    names = list(names)
    if not {*quick} <= {*names}:
        raise ValueError(f"{', '.join(sorted({*quick} - {*names}))} is none of {', '.join(names)}")
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def in_both_modes(names: Iterable[str], trained: Collection[str], evaluated: Collection[str]) -> list[Any]:
    """Return parameters (name, training) for models in training and in inference.

    All have the marker `slow` but the `trained` and the `evaluated`.
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
