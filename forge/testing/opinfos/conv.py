"""OpInfos of the conv family."""

from typing import Any

import torch

from forge.testing.opinfo import Directive, Sample
from forge.testing.table import op, sample, t, wrong

_LENGTHS = (6, 5, 4)
_KERNEL = (3, 2, 2)
_NO_ORDER = Directive(
    "tolerance",
    "on a GPU cuDNN adds up in another order from call to call",
    test="test_printing",
    devices=("cuda",),
    tolerance=(1.3e-6, 1e-5),
)


def _samples(count: int) -> tuple[Sample, ...]:
    """Return rows of every option, with and without batch and bias."""
    lengths, kernel = _LENGTHS[:count], _KERNEL[:count]
    x, weight = t(2, 4, *lengths), t(6, 4, *kernel)
    return (
        sample(x, weight),
        sample(x, weight, t(6)),
        sample(t(4, *lengths), weight, t(6)),
        sample(x, t(6, 2, *kernel), t(6), 2, 1, 1, 2),
        sample(x, weight, None, (2,) * count, (1,) * count, (2,) * count),
        sample(x, t(4, 1, *kernel), groups=4, stride=2),
        sample(x, weight, t(6), padding="same"),
        sample(x, weight, padding="valid", stride=2),
        sample(t(0, 4, *lengths), weight),
        sample(t(2, 0, *lengths), t(6, 0, *kernel)),
    )


def _transposed_samples(count: int) -> tuple[Sample, ...]:
    lengths, kernel = _LENGTHS[:count], _KERNEL[:count]
    x, weight = t(2, 4, *lengths), t(4, 3, *kernel)
    return (
        sample(x, weight),
        sample(x, weight, t(3)),
        sample(t(4, *lengths), weight, t(3)),
        sample(x, weight, t(6), 2, 1, 1, 2),
        sample(x, weight, None, (2,) * count, (1,) * count, (0,) * count, 1, (2,) * count),
    )


def _errors(count: int) -> tuple:
    def image(channels: int, length: int) -> Any:
        return t(1, channels, *(length,) * count)

    def weight(channels: int, length: int) -> Any:
        return t(2, channels, *(length,) * count)

    return (
        wrong(image(3, 4), weight(2, 2), match="to have|expects"),
        wrong(t(3), weight(2, 2), match=f"Expected {count + 1}D .unbatched. or {count + 2}D"),
        wrong(image(2, 3), weight(2, 3), t(3), match="bias"),
        wrong(image(2, 3), t(2, 2, *(2,) * count, dtype=torch.float64), match="one dtype"),
    )


for _count in (1, 2, 3):
    _ones = (1,) * _count
    op(
        f"nn.functional.conv{_count}d",
        _samples(_count),
        _errors(_count),
        wrong(t(1, 2, *(3,) * _count), t(2, 2, *(4,) * _count), match="greater than actual input size"),
        wrong(t(1, 2, *_ones), t(2, 2, *_ones), None, 0, match="non-positive stride"),
        wrong(t(1, 2, *_ones), t(2, 2, *_ones), None, 2, "same", match="strided convolutions"),
        wrong(t(1, 2, *_ones), t(2, 2, *_ones), None, 1, "sam", match="Invalid padding string"),
    )
    op(
        f"nn.functional.conv_transpose{_count}d",
        _transposed_samples(_count),
        _errors(_count)[1:2],
        wrong(t(1, 3, *_ones), t(2, 2, *_ones), match="to have|expects"),
        directives=(_NO_ORDER,) if _count == 3 else (),
    )

op(
    "convolution",
    sample(t(2, 4, 6, 5), t(6, 4, 3, 2), t(6), [1, 1], [0, 1], [1, 1], False, [0, 0], 1),
    sample(t(2, 4, 6, 5), t(4, 3, 3, 2), None, [2, 1], [0, 1], [1, 1], True, [1, 0], 1),
    wrong(t(2, 3, 6), t(6, 4, 3), None, [1], [0], [1], False, [0], 1, match="channels"),
)
