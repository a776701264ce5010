"""OpInfos of embedding_bag."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import OpInfo, register_opinfo, sample
from forge.testing.opinfos.cases import Case, cases, errors


def _shortened(indices: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """On a clone of the table, which it returns, too."""
    weight = weight.clone()
    return F.embedding_bag(indices, weight, *args, **kwargs), weight


def _to_last(indices: torch.Tensor, weight: torch.Tensor, offsets: list[int], mode: str) -> torch.Tensor:
    """With the number of indices as the last offset."""
    given = torch.tensor(offsets, device=indices.device)
    return F.embedding_bag(indices, weight, given, mode=mode, include_last_offset=True)


def _of_mode(mode: str) -> Iterator[Case]:
    """Each option; of frequencies, one index alone: torch divides the gradients of others by it, too."""
    yield lambda make: sample(make.index((2, 3), 5), make(5, 4), mode=mode)
    yield lambda make: sample(make.index((2, 3), 5), make(4, 5).t(), mode=mode)
    yield lambda make: sample(make.places(1, 4, 1, 2, 3), make(5, 4), make.places(0, 2, 2), mode=mode)
    yield lambda make: sample(make.places(1, 1, 0, 1), make(5, 4), make.places(0, 2), mode=mode, padding_idx=1)
    yield lambda make: sample(make.index((2, 3), 5).int(), make(5, 4), mode=mode, padding_idx=-1)
    yield lambda make: sample(make.places().reshape(0), make(5, 4), make.places(0, 0), mode=mode)
    if mode != "max":
        yield lambda make: sample(make.places(1, 1, 1, 1), make(5, 4), make.places(0, 3), None, 2, True, mode)


register_opinfo(
    OpInfo(
        "nn.functional.embedding_bag",
        F.embedding_bag,
        cases(
            *(case for mode in ("sum", "mean", "max") for case in _of_mode(mode)),
            lambda make: sample(make.index((2, 3), 5), make(5, 4), mode="sum", per_sample_weights=make(2, 3)),
            lambda make: sample(
                make.places(1, 4, 1), make(5, 4), make.places(0, 2), mode="sum", per_sample_weights=make(3)
            ),
        ),
        errors(
            (lambda make: sample(make.index((2, 3), 5), make(4)), ValueError, "weight has to be a 2D"),
            (lambda make: sample(make.index((2, 2, 3), 5), make(5, 4)), ValueError, "1D or 2D"),
            (lambda make: sample(make.index((3,), 5), make(5, 4)), ValueError, "offsets has to be a 1D"),
            (lambda make: sample(make.index((2, 3), 5), make(5, 4), mode="min"), ValueError, "one of sum, mean or max"),
            (
                lambda make: sample(make.index((2, 3), 5), make(5, 4), scale_grad_by_freq=True, mode="max"),
                ValueError,
                "does not support scaling",
            ),
            (
                lambda make: sample(make.index((2, 3), 5), make(5, 4), per_sample_weights=make(2, 3)),
                NotImplementedError,
                "only supported for mode='sum'",
            ),
            (
                lambda make: sample(make.index((2, 3), 5), make(5, 4), mode="sum", per_sample_weights=make(3)),
                ValueError,
                "must have the same shape",
            ),
        ),
        dtypes=(torch.float32, torch.float64),
    )
)
register_opinfo(
    OpInfo(
        "nn.functional.embedding_bag.include_last_offset",
        _to_last,
        cases(
            lambda make: sample(make.places(1, 4, 1, 2, 3), make(5, 4), [0, 2, 5], "sum"),
            lambda make: sample(make.places(1, 4, 1, 2, 3), make(5, 4), [0, 0, 3, 5], "mean"),
            lambda make: sample(make.places(1, 4, 1, 2, 3), make(5, 4), [0, 4, 5], "max"),
        ),
        errors((lambda make: sample(make.index((3,), 5), make(5, 4), [0, 3], "min"), ValueError, "one of sum")),
        dtypes=(torch.float32, torch.float64),
        symbols=("torch.nn.functional.embedding_bag",),
    )
)
register_opinfo(
    OpInfo(
        "nn.functional.embedding_bag.max_norm",
        _shortened,
        cases(
            lambda make: sample(make.index((2, 3), 5), make(5, 4), max_norm=1.0),
            lambda make: sample(make.places(1, 4, 1), make(5, 4), make.places(0, 2), 0.5, 1.0, mode="sum"),
        ),
        errors(
            (lambda make: sample(make.index((2, 3), 5), make(5, 4), max_norm=1.0, mode="min"), ValueError, "one of sum")
        ),
        dtypes=(torch.float32, torch.float64),
        symbols=("torch.nn.functional.embedding_bag",),
    )
)
