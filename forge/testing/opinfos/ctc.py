"""OpInfos of ctc_loss."""

from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import OpInfo, Sample, register_opinfo, sample
from forge.testing.opinfos.specs import Spec, calls, classes, errors, given, t, wrong


def _labels(*shape: int) -> Spec:
    return Spec(shape, dtype=torch.int64, low=1, high=5)


def _lengths(*values: int) -> Spec:
    return given(*values, dtype=torch.int64)


def _samples(**how: Any) -> tuple[Sample, ...]:
    x = t(6, 2, 5, low=-3, high=-0.1)
    return (
        sample(x, _labels(2, 3), _lengths(6, 5), _lengths(3, 2), **how),
        sample(x, _labels(2, 3), (6, 6), (3, 2), blank=0, **how),
        sample(x, _labels(5), _lengths(6, 6), _lengths(3, 2), **how),
        sample(t(6, 5, low=-3, high=-0.1), _labels(3), (6,), (3,), **how),
        sample(x, _labels(2, 7), _lengths(6, 6), _lengths(7, 2), zero_infinity=True, **how),
    )


_wrong = (t(6, 2, 5), classes(2, 3, count=5), (6, 6), (3, 2))
_mistakes = (
    wrong(*_wrong, 7, match="blank must be in label range"),
    wrong(t(2, 6, 2, 5), *_wrong[1:], match="must have 2 or 3 dims|dims|dim"),
)
register_opinfo(
    OpInfo(
        "nn.functional.ctc_loss",
        F.ctc_loss,
        calls(*(call for how in ("mean", "none", "sum") for call in _samples(reduction=how))),
        errors(*_mistakes, wrong(*_wrong, reduction="half", error=ValueError, match="not a valid value")),
        dtypes=(torch.float32, torch.float64),
    )
)
register_opinfo(
    OpInfo(
        "ctc_loss",
        torch.ctc_loss,
        calls(*_samples(), *_samples(reduction=1)),
        errors(*_mistakes),
        dtypes=(torch.float32, torch.float64),
    )
)
