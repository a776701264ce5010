"""OpInfos of the discrete Fourier transforms."""

import torch

from forge.testing.table import op, sample, t, wrong
from forge.torch_internals.versions import WRONG_KIND

_DTYPES = (torch.float32, torch.float64, torch.int64)  # on a CPU, torch transforms no half precision

_ONE = (
    sample(t(2, 5)),
    sample(t(6)),
    sample(t(4, 3), 6, 0),
    sample(t(4, 5), n=3, dim=-1, norm="ortho"),
    sample(t(3, 2, 4), norm="forward"),
    sample(t(3, 2, 4), dim=1, norm="backward"),
    sample(t(3, 4).t()),
    sample(t(2, 3), 1),
)
_ONE_MISTAKES = (
    wrong([1.0], error=TypeError, match="must be Tensor"),
    wrong(t(), error=IndexError, match="tensor has no dimensions"),
    wrong(t(3), 0, match="Invalid number of data points"),
    wrong(t(3), None, 3, error=IndexError, match="out of range"),
    wrong(t(3), norm="half", match="Invalid normalization mode"),
)
_TWO = (
    sample(t(4, 5)),
    sample(t(2, 4, 3), (3, 5)),
    sample(t(4, 3, 2), s=(2, -1), dim=(0, 2), norm="ortho"),
    sample(t(4, 5), dim=(1, 0), norm="forward"),
    sample(t(4, 5), None, (0,), "backward"),
    sample(t(4, 5).t()),
)
_SEVERAL = (*_TWO[:4], sample(t(3, 2, 4)), sample(t(3, 2, 4), (5,)), sample(t(3, 4, 2), dim=-2), sample(t(6)))
_SEVERAL_MISTAKES = (
    wrong([1.0], error=TypeError, match="must be Tensor"),
    wrong(t(3, 4), dim=(0, 0), match="must be unique"),
    wrong(t(3, 4), (3,), (0, 1), match="must have the same length"),
    wrong(t(3, 4), (0, 3), match="Invalid number of data points"),
    wrong(t(3, 4), dim=(0, 5), error=IndexError, match="out of range"),
    wrong(t(3, 4), norm="half", match="Invalid normalization mode"),
)
_NO_DIMS = wrong(t(3, 4), dim=(), match="must transform at least one axis")
_TOO_MANY = wrong(t(3, 4), (2, 2, 2), match="only has 2 dimensions")
_COMPLEX = wrong(t(3, 3, dtype=torch.complex64), error=WRONG_KIND, match="expects a real input")

for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    _to_half = _name in ("rfft", "ihfft")
    _refused = (_COMPLEX,) if _to_half else ()
    _whole = _name in ("fft", "ifft")
    for _suffix, _samples, _mistakes in (
        ("", _ONE, _ONE_MISTAKES),
        ("2", _TWO, _SEVERAL_MISTAKES if _whole else (*_SEVERAL_MISTAKES, _NO_DIMS)),
        ("n", (*_SEVERAL, sample(t()), sample(t(3), dim=())) if _whole else _SEVERAL, (*_SEVERAL_MISTAKES, _TOO_MANY)),
    ):
        _function = getattr(torch.fft, f"{_name}{_suffix}")
        op(f"fft.{_name}{_suffix}", _samples, _mistakes, _refused, dtypes=_DTYPES, op=_function)

for _function in (torch.fft.fftshift, torch.fft.ifftshift):
    _name = _function.__name__.removeprefix("fft_")
    op(
        f"fft.{_name}",
        sample(t(5)),
        sample(t(4, 3)),
        sample(t(4, 3, 2), 1),
        sample(t(4, 3, 2), dim=(0, -1)),
        sample(t(3, 4).t()),
        sample(t(0, 3)),
        wrong([1.0], error=TypeError, match="must be Tensor"),
        wrong(t(3), 1, error=IndexError, match="out of range"),
        wrong(t(), match="required"),
        dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool),
        op=_function,
    )


def _frequencies(name: str) -> None:
    def function(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return getattr(torch.fft, name)(*args, **kwargs, dtype=x.dtype, device=x.device) + x[0]

    op(
        f"fft.{name}",
        [sample(t(1), 5), sample(t(1), 8, 0.5), sample(t(1), n=1, d=2.0), sample(t(1), 0)],
        wrong(t(1, dtype=torch.int64), 3, match="floating point"),
        dtypes=(torch.float32, torch.float64),
        symbols=(f"torch.fft.{name}",),
        op=function,
    )


_frequencies("fftfreq")
_frequencies("rfftfreq")
