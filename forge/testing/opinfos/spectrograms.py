"""OpInfos of the short-time Fourier transforms."""

from typing import Any

import torch

from forge.testing.table import Value, op, sample, t, wrong

_DTYPES = (torch.float32, torch.float64)


def _positive(length: int) -> Value:
    """Return a window that is nowhere near 0."""
    return t(length, low=0.5, high=1.5)


op(
    "stft",
    sample(t(2, 20), 8, return_complex=True),
    sample(t(20), 8, 3, 6, _positive(6), return_complex=True),
    sample(t(2, 20), 7, hop_length=2, win_length=5, onesided=False, return_complex=True),
    sample(t(2, 20), 8, center=False, normalized=True, return_complex=True),
    sample(t(2, 20), 8, pad_mode="constant", window=_positive(8), return_complex=True),
    sample(t(20, 2).t(), 8, 4, return_complex=True),
    wrong(t(2, 20), 8, match="requires the return_complex"),
    wrong(t(2, 2, 20), 8, return_complex=True, match="expected a 1D or 2D"),
    wrong(t(20), 8, 0, return_complex=True, match="hop_length"),
    wrong(t(20), 8, win_length=9, return_complex=True, match="win_length"),
    wrong(t(20), 8, window=t(7), return_complex=True, match="1D window"),
    wrong(t(20), 30, center=False, return_complex=True, match="expected 0 < n_fft"),
    wrong(t(20, dtype=torch.int64), 8, center=False, return_complex=True, match="floating point or complex"),
    wrong(t(20, dtype=torch.complex64), 8, center=False, onesided=True, match="onesided"),
    dtypes=_DTYPES,
)


def _back(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return torch.istft of complex numbers made of real ones."""
    return torch.istft(torch.complex(x, x.flip(-1)), *args, **kwargs)


op(
    "istft",
    sample(t(2, 5, 4), 8, window=_positive(8)),
    sample(t(5, 4), 8, 3, window=_positive(8)),
    sample(t(2, 5, 6), 8, hop_length=2, win_length=6, window=_positive(6), length=10),
    sample(t(2, 7, 6), 7, 2, 5, onesided=False, normalized=True),
    sample(t(2, 5, 4), 8, 2, window=_positive(8), center=False),
    sample(t(2, 8, 4), 8, 2, window=_positive(8), return_complex=True, onesided=False),
    sample(t(2, 5, 4), 8, 2, window=_positive(8), length=40),
    wrong(t(2, 6, 4), 8, match="match n_fft|frequency dimension"),
    wrong(t(2, 2, 5, 4), 8, match="dimensions|3D"),
    wrong(t(5, 4), 8, 0, match="hop_length"),
    wrong(t(5, 4), 8, win_length=9, match="win_length"),
    wrong(t(5, 4), 8, window=t(7), match="1D window|window overlap"),
    wrong(t(5, 0), 8, match="cannot be empty"),
    dtypes=_DTYPES,
    op=_back,
)
