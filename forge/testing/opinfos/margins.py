"""OpInfos of the margin losses of several classes."""

import torch

from forge.testing.opinfo import ErrorSample, Sample
from forge.testing.table import index, ints, op, sample, t, values, wrong


def _op(name: str, rows: tuple[Sample, ...], empty: Sample, mistakes: tuple[ErrorSample, ...]) -> None:
    """Register a loss, with every row in each reduction, and one of no elements."""
    rows = tuple(sample(*row.args, **row.kwargs, reduction=how) for row in rows for how in ("none", "mean", "sum"))
    none = sample(*empty.args, reduction="none")  # torch leaves a mean or a sum of nothing undefined
    op(f"nn.functional.{name}", (*rows, none), mistakes, dtypes=(torch.float32, torch.float64))


_op(
    "multi_margin_loss",
    (
        sample(t(4, 5), index(4, high=5)),
        sample(t(5, 4).t(), index(4, high=5), 2, 0.5),
        sample(t(4, 5), index(4, high=5), margin=2.0, p=2),
        sample(t(5), index(high=5)),
        sample(t(5), index(1, high=5)),
        sample(t(4, 1), index(4, high=1)),
    ),
    sample(t(0, 5), index(0, high=5)),
    (
        wrong(t(4, 5), index(4, high=5), 3, error=ValueError, match="only p == 1 and p == 2"),
        wrong(t(4, 5), index(3, high=5), match="inconsistent target size"),
        wrong(t(4, 5), index(4, high=5), weight=t(2, 5), error=ValueError, match="must be one-dimensional"),
        wrong(t(4, 5), index(4, high=5), weight=t(4), match="inconsistent weight size"),
        wrong(t(2, 4, 5), index(2, high=5), match="non-empty vector or matrix"),
    ),
)
_LABELS = values([[3, 0, -1, 1], [-1, 2, 2, 2], [1, 1, 2, 0]], torch.int64)
_op(
    "multilabel_margin_loss",
    (sample(t(3, 4), _LABELS), sample(t(4, 3).t(), _LABELS), sample(t(4), ints(2, 0, -1, 3))),
    sample(t(0, 4), index(0, 4, high=3)),
    (
        wrong(t(3, 4), index(3, 3, high=2), match="inconsistent target size"),
        wrong(t(2, 3, 4), index(2, 3, 4, high=2), match="non-empty vector or matrix"),
    ),
)
