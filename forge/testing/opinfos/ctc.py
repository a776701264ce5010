"""OpInfos of ctc_loss."""

from typing import Any

import torch

from forge.testing.opinfo import Sample
from forge.testing.table import Value, index, ints, op, sample, t, wrong


def _labels(*shape: int) -> Value:
    return index(*shape, low=1, high=5)


def _lengths(*values: int) -> Value:
    return ints(*values)


def _samples(**how: Any) -> tuple[Sample, ...]:
    x = t(6, 2, 5, low=-3, high=-0.1)
    return (
        sample(x, _labels(2, 3), _lengths(6, 5), _lengths(3, 2), **how),
        sample(x, _labels(2, 3), (6, 6), (3, 2), blank=0, **how),
        sample(x, _labels(5), _lengths(6, 6), _lengths(3, 2), **how),
        sample(t(6, 5, low=-3, high=-0.1), _labels(3), (6,), (3,), **how),
        sample(x, _labels(2, 7), _lengths(6, 6), _lengths(7, 2), zero_infinity=True, **how),
    )


_wrong = (t(6, 2, 5), index(2, 3, high=5), (6, 6), (3, 2))
_mistakes = (
    wrong(*_wrong, 7, match="blank must be in label range"),
    wrong(t(2, 6, 2, 5), *_wrong[1:], match="must have 2 or 3 dims|dims|dim"),
)
op(
    "nn.functional.ctc_loss",
    *(call for how in ("mean", "none", "sum") for call in _samples(reduction=how)),
    _mistakes,
    wrong(*_wrong, reduction="half", error=ValueError, match="not a valid value"),
    dtypes=(torch.float32, torch.float64),
)
op("ctc_loss", _samples(), _samples(reduction=1), _mistakes, dtypes=(torch.float32, torch.float64))
