"""OpInfos of embedding_bag."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import Sample
from forge.testing.table import index, ints, op, sample, t, wrong

_INDICES, _TABLE = index(2, 3, high=5), t(5, 4)


def _with_table(indices: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Return the bags by a clone of the table, and the clone."""
    weight = weight.clone()
    return F.embedding_bag(indices, weight, *args, **kwargs), weight


def _to_last(indices: torch.Tensor, weight: torch.Tensor, offsets: list[int], mode: str) -> torch.Tensor:
    """Return the bags with the number of indices as the last offset."""
    places = torch.tensor(offsets, device=indices.device)
    return F.embedding_bag(indices, weight, places, mode=mode, include_last_offset=True)


def _of_mode(mode: str) -> Iterator[Sample]:
    """Yield a row of each option; of frequencies, one index alone: torch divides the gradients of others by it, too."""
    yield sample(_INDICES, _TABLE, mode=mode)
    yield sample(index(2, 3, high=5), t(4, 5).t(), mode=mode)
    yield sample(ints(1, 4, 1, 2, 3), t(5, 4), ints(0, 2, 2), mode=mode)
    yield sample(ints(1, 1, 0, 1), t(5, 4), ints(0, 2), mode=mode, padding_idx=1)
    yield sample(index(2, 3, high=5).int(), t(5, 4), mode=mode, padding_idx=-1)
    yield sample(ints().reshape(0), t(5, 4), ints(0, 0), mode=mode)
    if mode != "max":
        yield sample(ints(1, 1, 1, 1), t(5, 4), ints(0, 3), None, 2, True, mode)


op(
    "nn.functional.embedding_bag",
    *(case for mode in ("sum", "mean", "max") for case in _of_mode(mode)),
    sample(_INDICES, _TABLE, mode="sum", per_sample_weights=t(2, 3)),
    sample(ints(1, 4, 1), t(5, 4), ints(0, 2), mode="sum", per_sample_weights=t(3)),
    wrong(index(2, 3, high=5), t(4), error=ValueError, match="weight has to be a 2D"),
    wrong(index(2, 2, 3, high=5), t(5, 4), error=ValueError, match="1D or 2D"),
    wrong(index(3, high=5), t(5, 4), error=ValueError, match="offsets has to be a 1D"),
    wrong(_INDICES, _TABLE, mode="min", error=ValueError, match="one of sum, mean or max"),
    wrong(_INDICES, _TABLE, scale_grad_by_freq=True, mode="max", error=ValueError, match="does not support scaling"),
    wrong(
        _INDICES, _TABLE, per_sample_weights=t(2, 3), error=NotImplementedError, match="only supported for mode='sum'"
    ),
    wrong(_INDICES, _TABLE, mode="sum", per_sample_weights=t(3), error=ValueError, match="must have the same shape"),
    dtypes=(torch.float32, torch.float64),
)
op(
    "nn.functional.embedding_bag.include_last_offset",
    sample(ints(1, 4, 1, 2, 3), t(5, 4), [0, 2, 5], "sum"),
    sample(ints(1, 4, 1, 2, 3), t(5, 4), [0, 0, 3, 5], "mean"),
    sample(ints(1, 4, 1, 2, 3), t(5, 4), [0, 4, 5], "max"),
    wrong(index(3, high=5), t(5, 4), [0, 3], "min", error=ValueError, match="one of sum"),
    dtypes=(torch.float32, torch.float64),
    op=_to_last,
)
op(
    "nn.functional.embedding_bag.max_norm",
    [sample(_INDICES, _TABLE, max_norm=1.0), sample(ints(1, 4, 1), t(5, 4), ints(0, 2), 0.5, 1.0, mode="sum")],
    wrong(_INDICES, _TABLE, max_norm=1.0, mode="min", error=ValueError, match="one of sum"),
    dtypes=(torch.float32, torch.float64),
    op=_with_table,
)
