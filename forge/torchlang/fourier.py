"""The functions of torch.fft: discrete Fourier transforms over one, two or several dims, and their helpers."""

from collections.abc import Callable, Sequence

import torch

from forge import clang, prims
from forge.ir import Dim, Symbol, TensorProxy, check
from forge.prims.core import check_dim, statically_true, torch_check
from forge.torch_internals.versions import WRONG_KIND
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol
from forge.torchlang.creation import FACTORY, canonical_device, with_options

_NONE, _BY_ROOT, _BY_COUNT = 0, 1, 2


def _normalization(norm: str | None, forward: bool) -> int:
    """Return torch's code of a norm in a direction."""
    scales = {"forward": forward, "backward": not forward}.get(norm or "backward")
    torch_check(norm == "ortho" or scales is not None, lambda: f'Invalid normalization mode: "{norm}"')
    if norm == "ortho":
        return _BY_ROOT
    return _BY_COUNT if scales else _NONE


def _real_input(op: str, x: TensorProxy) -> TensorProxy:
    """Return x as floating point. Raises WRONG_KIND for complex numbers."""
    check(
        not x.dtype.is_complex,
        lambda: f"{op} expects a real input tensor, but got {x}; only floating-point dtypes are supported",
        WRONG_KIND,
    )
    return clang.convert(x, clang.compute_dtype(x, kind=clang.Promotion.INT_TO_FLOAT))


def _complex_input(x: TensorProxy) -> TensorProxy:
    if x.dtype.is_complex:
        return x
    return clang.convert(x, clang.compute_dtype(x, kind=clang.Promotion.INT_TO_FLOAT).to_complex())


def _check_count(op: str, count: Dim) -> None:
    torch_check(not statically_true(count < 1), lambda: f"{op}: Invalid number of data points ({count}) specified")


def _resize(x: TensorProxy, dims: Sequence[int], lengths: Sequence[Dim]) -> TensorProxy:
    """Return x cropped, or padded with zeros, at the end of these dims."""
    padding: list[tuple[Dim, Dim]] = [(0, 0)] * x.ndim
    for dim, size in zip(dims, lengths, strict=True):
        padding[dim] = (0, size - x.shape[dim])
    return x if all(statically_true(after == 0) for _, after in padding) else prims.pad(x, tuple(padding), 0)


# one dim


def _check_dim(op: str, x: TensorProxy, dim: int) -> int:
    check(x.ndim > 0, lambda: f"{op}: Dimension specified as {dim} but tensor has no dimensions", IndexError)
    return check_dim(op, dim, x.ndim)


def _full(name: str, forward: bool) -> Symbol:
    def body(input: TensorProxy, n: Dim | None = None, dim: int = -1, norm: str | None = None) -> TensorProxy:
        dim = _check_dim(name, input, dim)
        count = input.shape[dim] if n is None else n
        _check_count(name, count)
        how = _normalization(norm, forward)
        if input.dtype.is_complex:
            return prims.fft_c2c(_resize(input, [dim], [count]), [dim], how, forward)
        out = prims.fft_r2c(_resize(_real_input(name, input), [dim], [count]), [dim], how, False)
        return out if forward else prims.conj(out)

    body.__name__ = name
    body.__doc__ = f"The discrete Fourier transform over `dim`, {_DIRECTION[forward]}; n: of so many points."
    return torchsymbol(getattr(torch.fft, name))(body)


_DIRECTION = {True: "forwards", False: "backwards"}

fft, ifft = _full("fft", True), _full("ifft", False)


# several dims


def _dims_and_sizes(
    op: str, x: TensorProxy, s: Lengths | None, dim: int | Sequence[int] | None
) -> tuple[list[int], list[Dim | None]]:
    """Return the dims, and the length of the transform over each; None is x's own."""
    sizes = None if s is None else list(clang.as_tuple(s))
    torch_check(
        dim is None or sizes is None or len(clang.as_tuple(dim)) == len(sizes),
        lambda: f"{op}: When given, dim and shape arguments must have the same length: {dim} and {sizes}",
    )
    if dim is None:
        count = x.ndim if sizes is None else len(sizes)
        torch_check(
            count <= x.ndim,
            lambda: f"{op}: Got shape with {count} values but input tensor only has {x.ndim} dimensions.",
        )
        dims = list(range(x.ndim - count, x.ndim))
    else:
        dims = [_check_dim(op, x, each) for each in clang.as_tuple(dim)]
        torch_check(len(set(dims)) == len(dims), lambda: f"{op}: FFT dims must be unique, but are {dims}")
    return dims, [None if size is None or statically_true(size == -1) else size for size in sizes or [None] * len(dims)]


def _counts(op: str, x: TensorProxy, dims: list[int], sizes: list[Dim | None]) -> list[Dim]:
    counts = [x.shape[dim] if size is None else size for dim, size in zip(dims, sizes, strict=True)]
    for count in counts:
        _check_count(op, count)
    return counts


def _check_some(op: str, dims: list[int]) -> None:
    torch_check(bool(dims), lambda: f"{op} must transform at least one axis")


def _full_of(
    op: str, forward: bool, x: TensorProxy, s: Lengths | None, dim: int | Sequence[int] | None, norm: str | None
) -> TensorProxy:
    x = _complex_input(x)
    dims, sizes = _dims_and_sizes(op, x, s, dim)
    x = _resize(x, dims, _counts(op, x, dims, sizes))
    how = _normalization(norm, forward)
    return prims.fft_c2c(x, dims, how, forward) if dims else prims.clone(x)


def _half_of(
    op: str, forward: bool, x: TensorProxy, s: Lengths | None, dim: int | Sequence[int] | None, norm: str | None
) -> TensorProxy:
    x = _real_input(op, x)
    dims, sizes = _dims_and_sizes(op, x, s, dim)
    _check_some(op, dims)
    x = _resize(x, dims, _counts(op, x, dims, sizes))
    how = _normalization(norm, forward)
    if forward:
        return prims.fft_r2c(x, dims, how, True)
    out = prims.conj(prims.fft_r2c(x, dims[-1:], how, True))
    return prims.fft_c2c(out, dims[:-1], how, False) if dims[:-1] else out


def _real_of(
    op: str, forward: bool, x: TensorProxy, s: Lengths | None, dim: int | Sequence[int] | None, norm: str | None
) -> TensorProxy:
    x = _complex_input(x)
    dims, sizes = _dims_and_sizes(op, x, s, dim)
    _check_some(op, dims)
    last = (x.shape[dims[-1]] - 1) * 2 if sizes[-1] is None else sizes[-1]
    _check_count(op, last)
    x = _resize(x, dims, _counts(op, x, dims, [*sizes[:-1], last // 2 + 1]))
    how = _normalization(norm, forward)
    if not forward:
        return prims.fft_c2r(x, dims, how, last)
    if dims[:-1]:
        x = prims.fft_c2c(x, dims[:-1], how, True)
    return prims.fft_c2r(prims.conj(x), dims[-1:], how, last)


def _over_one(name: str, transform: Callable[..., TensorProxy], forward: bool, meaning: str) -> Symbol:
    def body(input: TensorProxy, n: Dim | None = None, dim: int = -1, norm: str | None = None) -> TensorProxy:
        if n is not None:
            _check_count(name, n)
        return transform(name, forward, input, None if n is None else (n,), (dim,), norm)

    body.__name__, body.__doc__ = name, f"{meaning}, {_DIRECTION[forward]}."
    return torchsymbol(getattr(torch.fft, name))(body)


_HALF = "Return the first half of the transform of real numbers over `dim`"
_REAL = "Return the real transform over `dim` of what is given by its first half"
rfft, ihfft = _over_one("rfft", _half_of, True, _HALF), _over_one("ihfft", _half_of, False, _HALF)
hfft, irfft = _over_one("hfft", _real_of, True, _REAL), _over_one("irfft", _real_of, False, _REAL)


def _over(
    name: str, transform: Callable[..., TensorProxy], forward: bool, default: tuple[int, ...] | None, which: str
) -> Symbol:
    def body(
        input: TensorProxy, s: Lengths | None = None, dim: int | Sequence[int] | None = default, norm: str | None = None
    ) -> TensorProxy:
        return transform(name, forward, input, s, dim, norm)

    body.__name__, body.__doc__ = name, f"{name[:-1]} over {which} by default."
    return torchsymbol(getattr(torch.fft, name))(body)


for _name, _transform, _forward in (
    ("fft", _full_of, True),
    ("ifft", _full_of, False),
    ("rfft", _half_of, True),
    ("ihfft", _half_of, False),
    ("hfft", _real_of, True),
    ("irfft", _real_of, False),
):
    globals()[f"{_name}n"] = _over(f"{_name}n", _transform, _forward, None, "several dims, all")
    globals()[f"{_name}2"] = _over(f"{_name}2", _transform, _forward, (-2, -1), "two dims, the last")


# the order of frequencies


def _shift(name: str, rounding: int) -> Symbol:
    def body(input: TensorProxy, dim: int | Sequence[int] | None = None) -> TensorProxy:
        dims = range(input.ndim) if dim is None else clang.as_tuple(dim)
        torch_check(bool(dims), lambda: f"{name}: `shifts` required: {input} has no dims")
        out = input
        for each in dims:
            out = clang.roll(out, (out.shape[check_dim(name, each, out.ndim)] + rounding) // 2, each)
        return out

    body.__name__ = name
    body.__doc__ = f"The frequency 0 {'in front' if rounding else 'in the middle'} of each dim."
    return torchsymbol(getattr(torch.fft, name))(body)


fftshift, ifftshift = _shift("fftshift", 0), _shift("ifftshift", 1)


def _frequencies(name: str, onesided: bool) -> Symbol:
    @with_options(*FACTORY)
    def body(
        n: Dim, d: float = 1.0, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> TensorProxy:
        dtype = dtype or torch.get_default_dtype()
        check(
            dtype.is_floating_point,
            lambda: f"{name} requires a floating point or complex dtype, but got {dtype}",
            NotImplementedError if dtype.is_complex else RuntimeError,
        )
        torch_check(not statically_true(n < 0), lambda: f"{name}: Trying to create tensor with negative dimension {n}")
        place = prims.iota(n // 2 + 1 if onesided else n, 0, 1, torch.int64, canonical_device(device))
        if not onesided:
            place = clang.where(place < (n + 1) // 2, place, place - n)
        return clang.convert(place, dtype) / (n * d)

    body.__name__, body.__doc__ = name, "The frequencies of a transform of n points that are d apart, in its order."
    return torchsymbol(getattr(torch.fft, name), factory=True)(body)


fftfreq, rfftfreq = _frequencies("fftfreq", False), _frequencies("rfftfreq", True)
