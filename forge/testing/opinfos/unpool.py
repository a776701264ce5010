"""OpInfos of max_unpool: indices are places that differ within each channel."""

import math
from typing import Any

import torch

from forge.testing.opinfo import Sample
from forge.testing.table import Value, index, op, sample, t, wrong


def _row(count: int, *before: int, kernel: int = 2, **how: Any) -> Sample:
    """Return the row of a pooled tensor and of different places in each of its channels."""
    lengths = (3, 2, 2)[:count]
    size = how.get("output_size") or [(length - 1) * how.get("stride", kernel) + kernel for length in lengths]
    shape, pooled, places = (*before, *lengths), math.prod(lengths), math.prod(size[-count:])
    indices = Value(lambda target: torch.rand(*before, places, device=target.device).argsort(-1)[..., :pooled])
    return sample(t(*shape), indices.reshape(shape), kernel, **how)


for _count in (1, 2, 3):
    _lengths = (3, 2, 2)[:_count]
    _x, _places = t(2, 3, *_lengths), index(2, 3, *_lengths, high=4)
    op(
        f"nn.functional.max_unpool{_count}d",
        _row(_count, 2, 3),
        _row(_count, 3),
        _row(_count, 0, 3),
        _row(_count, 2, 3, kernel=3, stride=2),
        _row(_count, 2, 3, output_size=[2 * length + 1 for length in _lengths]),
        _row(_count, 2, 3, output_size=[2, 3, *[2 * length for length in _lengths]]),
        wrong(_x, _x, 2, match="should be type int64"),
        wrong(_x, index(2, 4, *_lengths, high=4), 2, match="Expected shape of indices"),
        wrong(_x, _places, 2, output_size=[99] * len(_lengths), error=ValueError, match="invalid output_size"),
        wrong(
            _x,
            _places,
            2,
            output_size=[9] * (len(_lengths) + 1),
            error=ValueError,
            match="should be a sequence containing",
        ),
        dtypes=(torch.float32, torch.float64),
    )
