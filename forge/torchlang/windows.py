"""The windows of signals. Those of torch.signal.windows are torch's own Python (forge/capture/inline_python.py)."""

import math
from collections.abc import Callable, Sequence

import torch

from forge import clang, prims
from forge.ir import Dim, Symbol, TensorProxy, check
from forge.prims.core import statically_true, torch_check
from forge.torchlang.core import torchsymbol
from forge.torchlang.creation import FACTORY, Device, Dtype, canonical_device, with_options

# A window is a function of the positions 0, 1, … and the length of the period.
Values = Callable[[TensorProxy, Dim], TensorProxy]


def _cosines(coefficients: Sequence[float]) -> Values:
    """Return a0 - a1 cos(x) + a2 cos(2x) - …, where x goes from 0 to 2 pi in a period."""

    def values(place: TensorProxy, period: Dim) -> TensorProxy:
        angle = place * (2 * math.pi / period)
        total = prims.full(place.shape, coefficients[0], place.dtype, place.device)
        for i, coefficient in enumerate(coefficients[1:], 1):
            total = total + clang.cos(angle * i) * ((-1) ** i * coefficient)
        return total

    return values


def _triangle(place: TensorProxy, period: Dim) -> TensorProxy:
    return 1 - clang.abs(place * (2 / period) - 1)


def _bessel(beta: float) -> Values:
    """Return i0(beta sqrt(1 - x^2)) / i0(beta), where x goes from -1 to 1 in a period."""

    def values(place: TensorProxy, period: Dim) -> TensorProxy:
        x = clang.widen(place) * (2 / period) - 1
        arch = clang.sqrt(clang.maximum(1 - x * x, 0.0)) * beta
        return clang.convert(clang.i0(arch) / clang.i0(prims.full((), beta, x.dtype, x.device)), place.dtype)

    return values


_HANN, _BLACKMAN = (0.5, 0.5), (0.42, 0.5, 0.08)


def _make_window(length: Dim, periodic: bool, values: Values, dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """Return a window, symmetric unless periodic. A window of length 1 is 1."""
    if statically_true(length <= 1):
        return prims.full((length,), 1, dtype, device)
    place = clang.convert(prims.iota(length, 0, 1, torch.int64, device), dtype)
    return values(place, length if periodic else length - 1)


def _older(name: str, length: Dim, periodic: bool, values: Values, dtype: Dtype, device: Device) -> TensorProxy:
    dtype = dtype or torch.get_default_dtype()
    check(
        dtype.is_floating_point,
        lambda: f"{name} expects floating point dtypes, got: {dtype}",
        NotImplementedError if dtype.is_complex else RuntimeError,
    )
    torch_check(
        not statically_true(length < 0),
        lambda: f"{name} requires non-negative window_length, got window_length={length}",
    )
    return _make_window(length, periodic, values, dtype, canonical_device(device))


def _older_form(name: str, values: Values, meaning: str) -> Symbol:
    @with_options(*FACTORY)
    def body(window_length: Dim, periodic: bool = True, *, dtype: Dtype = None, device: Device = None) -> TensorProxy:
        return _older(name, window_length, periodic, values, dtype, device)

    body.__name__, body.__doc__ = name, f"{meaning}; periodic, else symmetric."
    return torchsymbol(getattr(torch, name), factory=True)(body)


bartlett_window = _older_form("bartlett_window", _triangle, "Bartlett's triangular window")
blackman_window = _older_form("blackman_window", _cosines(_BLACKMAN), "Blackman's window of three cosines")
hann_window = _older_form("hann_window", _cosines(_HANN), "Hann's window")


@torchsymbol(torch.hamming_window, factory=True)
@with_options(*FACTORY)
def hamming_window(
    window_length: Dim,
    periodic: bool = True,
    alpha: float = 0.54,
    beta: float = 0.46,
    *,
    dtype: Dtype = None,
    device: Device = None,
) -> TensorProxy:
    """Return Hamming's window: alpha - beta cos; symmetric unless periodic."""
    return _older("hamming_window", window_length, periodic, _cosines((alpha, beta)), dtype, device)


@torchsymbol(torch.kaiser_window, factory=True)
@with_options(*FACTORY)
def kaiser_window(
    window_length: Dim, periodic: bool = True, beta: float = 12.0, *, dtype: Dtype = None, device: Device = None
) -> TensorProxy:
    """Return Kaiser's window; symmetric unless periodic."""
    return _older("kaiser_window", window_length, periodic, _bessel(beta), dtype, device)
