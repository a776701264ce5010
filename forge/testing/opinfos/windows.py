"""OpInfos of the windows of signals, which take no tensor: what each gives is added to one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from forge.testing.table import op, sample, t, tolerance, wrong


def _beside(function: Callable) -> Callable:
    def window(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x + function(*args, **{"dtype": x.real.dtype, "device": x.device, **kwargs})

    return window


_LENGTHS = (sample(t(1), 7), sample(t(1), 8, False), sample(t(1), 1), sample(t(1), 0), sample(t(1), 6, periodic=True))
_ROUNDED = tolerance("both round to half precision after each step, and the terms of a window cancel near its ends")
_ERRORS = [
    wrong(t(1), -1, match="non-negative window_length"),
    wrong(t(1), 3, dtype=torch.int64, match="floating point dtypes"),
]
_op = partial(op, family=_ERRORS, wrap=_beside, directives=(_ROUNDED,))
_op("bartlett_window blackman_window hann_window", _LENGTHS)
_op("hamming_window", [*_LENGTHS, sample(t(1), 6, True, 0.6, 0.3)])
_op("kaiser_window", [*_LENGTHS, sample(t(1), 6, False, 3.0), sample(t(1), 6, True, beta=0.0)])
