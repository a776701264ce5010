"""OpInfos of max_unpool: indices are places that differ within each channel."""

from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import OpInfo, Sample, register_opinfo, sample
from forge.testing.opinfos.cases import Case, Maker, cases, errors


def _places(make: Maker, shape: tuple[int, ...], count: int, places: int) -> torch.Tensor:
    """Different numbers below `places` in each channel."""
    channels, each = shape[: len(shape) - count], 1
    for length in shape[len(shape) - count :]:
        each *= length
    drawn = torch.rand(*channels, places, device=make.device).argsort(-1)[..., :each]
    return drawn.reshape(shape)


def _case(count: int, *before: int, kernel: int = 2, **how: Any) -> Case:
    lengths = (3, 2, 2)[:count]
    size = how.get("output_size") or [(length - 1) * how.get("stride", kernel) + kernel for length in lengths]
    places = 1
    for length in size[-count:]:
        places *= length

    def build(make: Maker) -> Sample:
        shape = (*before, *lengths)
        return sample(make(*shape), _places(make, shape, count, places), kernel, **how)

    return build


for _count in (1, 2, 3):
    _lengths = (3, 2, 2)[:_count]
    register_opinfo(
        OpInfo(
            f"nn.functional.max_unpool{_count}d",
            getattr(F, f"max_unpool{_count}d"),
            cases(
                _case(_count, 2, 3),
                _case(_count, 3),
                _case(_count, 0, 3),
                _case(_count, 2, 3, kernel=3, stride=2),
                _case(_count, 2, 3, output_size=[2 * length + 1 for length in _lengths]),
                _case(_count, 2, 3, output_size=[2, 3, *[2 * length for length in _lengths]]),
            ),
            errors(
                (
                    lambda make, lengths=_lengths: sample(make(2, 3, *lengths), make(2, 3, *lengths), 2),
                    RuntimeError,
                    "should be type int64",
                ),
                (
                    lambda make, lengths=_lengths: sample(make(2, 3, *lengths), make.index((2, 4, *lengths), 4), 2),
                    RuntimeError,
                    "Expected shape of indices",
                ),
                (
                    lambda make, lengths=_lengths: sample(
                        make(2, 3, *lengths), make.index((2, 3, *lengths), 4), 2, output_size=[99] * len(lengths)
                    ),
                    ValueError,
                    "invalid output_size",
                ),
                (
                    lambda make, lengths=_lengths: sample(
                        make(2, 3, *lengths), make.index((2, 3, *lengths), 4), 2, output_size=[9] * (len(lengths) + 1)
                    ),
                    ValueError,
                    "should be a sequence containing",
                ),
            ),
            dtypes=(torch.float32, torch.float64),
        )
    )
