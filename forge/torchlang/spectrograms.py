"""The short-time Fourier transforms, of a window that moves along a signal, and their inverses."""

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import Dim, TensorProxy, check
from forge.prims.core import same, same_shape, statically_true, torch_check
from forge.torch_internals.versions import WRONG_KIND
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn import pad

_BY_ROOT, _BY_COUNT = 1, 2


def _window(
    op: str, x: TensorProxy, window: TensorProxy | None, n_fft: Dim, win_length: Dim | None
) -> TensorProxy | None:
    """Return the window padded with zeros on both sides to n_fft; None if it is 1 everywhere."""
    length = n_fft if win_length is None else win_length
    torch_check(
        not statically_true(length <= 0) and not statically_true(length > n_fft),
        lambda: f"{op}: expected 0 < win_length <= n_fft, but got win_length={length}",
    )
    torch_check(
        window is None or same_shape(window.shape, (length,)),
        lambda: f"{op}: expected a 1D window tensor of size equal to win_length={length}, but got {window}",
    )
    if window is None:
        if statically_true(length == n_fft):
            return None
        window = prims.full((length,), 1, prims.real_dtype(x.dtype), x.device)
    left = (n_fft - length) // 2
    return window if statically_true(length == n_fft) else prims.pad(window, ((left, n_fft - length - left),), 0)


def _check_hop(op: str, hop: Dim) -> None:
    torch_check(not statically_true(hop <= 0), lambda: f"{op}: expected hop_length > 0, but got hop_length={hop}")


@torchsymbol(torch.stft, Tensor.stft)
def stft(
    input: TensorProxy,
    n_fft: Dim,
    hop_length: Dim | None = None,
    win_length: Dim | None = None,
    window: TensorProxy | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> TensorProxy:
    """Return transforms of n_fft points of a signal times a window, in steps of hop_length: [batch, frequency, time].

    center: frames are centered, and the signal is padded for them. onesided: only the first half of the frequencies.
    return_complex: if false, both parts are in a last dim.
    """
    check(
        align_to_window is None,
        lambda: "stft: align_to_window is not supported; see forge/torchlang",
        NotImplementedError,
    )
    complex_given = input.dtype.is_complex or (window is not None and window.dtype.is_complex)
    return_complex = _returns_complex(return_complex, complex_given)
    _check_signal(input, complex_given, onesided)
    x = input if input.ndim == 2 else clang.unsqueeze(input, 0)
    if center:
        half = n_fft // 2
        x = clang.squeeze(pad(clang.unsqueeze(x, 1), (half, half), pad_mode), (1,))
    torch_check(
        not statically_true(n_fft <= 0) and not statically_true(n_fft > x.shape[1]),
        lambda: f"stft: expected 0 < n_fft <= {x.shape[1]}, but got n_fft={n_fft}",
    )
    hop = n_fft // 4 if hop_length is None else hop_length
    _check_hop("stft", hop)
    shape = _window("stft", x, window, n_fft, win_length)
    frames = prims.windows(x, 1, n_fft, hop)
    frames = frames if shape is None else frames * shape
    how = _BY_ROOT if normalized else 0
    if frames.dtype.is_complex:
        out = prims.fft_c2c(frames, [2], how, True)
    else:
        out = prims.fft_r2c(frames, [2], how, not complex_given if onesided is None else onesided)
    out = clang.transpose(out, 1, 2)
    out = out if input.ndim == 2 else clang.squeeze(out, (0,))
    return out if return_complex else clang.stack([prims.real(out), prims.imag(out)], -1)


def _returns_complex(return_complex: bool | None, complex_given: bool) -> bool:
    torch_check(
        return_complex is not None or complex_given,
        lambda: "stft requires the return_complex parameter be given for real inputs; give return_complex=True",
    )
    return True if return_complex is None else return_complex


def _check_signal(x: TensorProxy, complex_given: bool, onesided: bool | None) -> None:
    torch_check(
        x.dtype.is_floating_point or x.dtype.is_complex,
        lambda: f"stft: expected a tensor of floating point or complex values, but got {x}",
    )
    torch_check(x.ndim in (1, 2), lambda: f"stft: expected a 1D or 2D tensor, but got {x}")
    torch_check(
        not (onesided and complex_given), lambda: "stft: Cannot have onesided output if window or input is complex"
    )


@torchsymbol(torch.istft, Tensor.istft)
def istft(
    input: TensorProxy,
    n_fft: Dim,
    hop_length: Dim | None = None,
    win_length: Dim | None = None,
    window: TensorProxy | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Dim | None = None,
    return_complex: bool = False,
) -> TensorProxy:
    """Return the signal of an stft, by least squares: the sum of windowed frames divided by the sum of squared windows.

    Source: Griffin and Lim, Signal estimation from modified short-time Fourier transform (1984). torch's own function
    checks at run time that windows cover every position, because that depends on values.
    """
    onesided = _check_spectrogram(input, n_fft, onesided, return_complex)
    hop = n_fft // 4 if hop_length is None else hop_length
    _check_hop("istft", hop)
    torch_check(
        window is None or return_complex or not window.dtype.is_complex,
        lambda: "istft: Complex windows are incompatible with return_complex=False",
    )
    shape = _window("istft", input, window, n_fft, win_length)
    if shape is None:
        shape = prims.full((n_fft,), 1, prims.real_dtype(input.dtype), input.device)
    x = clang.transpose(input if input.ndim == 3 else clang.unsqueeze(input, 0), 1, 2)
    frames = _frames(x, n_fft, normalized, onesided, return_complex) * shape
    count = n_fft + hop * (x.shape[1] - 1)
    squares = clang.expand(shape * shape, (1, x.shape[1], n_fft))
    start = n_fft // 2 if center else 0
    stop = count - start if length is None else start + length
    parts = [
        clang.slice_in_dim(prims.windows_backward(each, (each.shape[0], count), 1, n_fft, hop), 1, start, stop)
        for each in (frames, squares)
    ]
    out = parts[0] / parts[1]
    missing = stop - count
    if not statically_true(missing <= 0):
        out = prims.pad(out, ((0, 0), (0, missing if statically_true(missing > 0) else torch.sym_max(missing, 0))), 0)
    return out if input.ndim == 3 else clang.squeeze(out, (0,))


def _check_spectrogram(x: TensorProxy, n_fft: Dim, onesided: bool | None, return_complex: bool) -> bool:
    """Return whether the input has only one half of the frequencies."""
    check(
        x.dtype.is_complex,
        lambda: f"istft requires a complex-valued input tensor matching the output from stft, but got {x}",
        WRONG_KIND,
    )
    torch_check(
        not any(statically_true(each == 0) for each in x.shape), lambda: f"istft: input tensor cannot be empty: {x}"
    )
    torch_check(x.ndim in (2, 3), lambda: f"istft: expected a tensor with 2 or 3 dimensions, but got {x}")
    size = x.shape[-2]
    onesided = not same(size, n_fft) if onesided is None else onesided
    expected = n_fft // 2 + 1 if onesided else n_fft
    torch_check(
        same(size, expected),
        lambda: f"istft: expected the frequency dimension (3rd to the last) of {x} to match n_fft, with {expected}",
    )
    torch_check(not (onesided and return_complex), lambda: "istft: cannot have onesided input with return_complex=True")
    return onesided


def _frames(x: TensorProxy, n_fft: Dim, normalized: bool, onesided: bool, return_complex: bool) -> TensorProxy:
    how = _BY_ROOT if normalized else _BY_COUNT
    if return_complex:
        return prims.fft_c2c(x, [2], how, False)
    x = x if onesided else clang.slice_in_dim(x, 2, 0, n_fft // 2 + 1)
    return prims.fft_c2r(x, [2], how, n_fft)
