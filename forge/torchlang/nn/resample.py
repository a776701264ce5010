"""Interpolation, padding, grid sampling, and pixel shuffles."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, Number, TensorProxy, check
from forge.prims import Upsampling
from forge.prims.core import same, statically_true, torch_check
from forge.torch_internals.functions import nn_pad
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn.pooling import adaptive_mean

Scales = float | Sequence[float]

# (mode, rank of the resized dims, antialias) -> the resizing function
_MODES = {
    **{(mode, rank, False): Upsampling(mode) for mode in ("nearest", "nearest-exact") for rank in (1, 2, 3)},
    ("linear", 1, False): Upsampling.LINEAR,
    ("bilinear", 2, False): Upsampling.LINEAR,
    ("trilinear", 3, False): Upsampling.LINEAR,
    ("bicubic", 2, False): Upsampling.CUBIC,
    ("bilinear", 2, True): Upsampling.LINEAR_ANTIALIAS,
    ("bicubic", 2, True): Upsampling.CUBIC_ANTIALIAS,
}


@torchsymbol(F.interpolate, F.upsample, F.upsample_nearest)
def interpolate(
    input: TensorProxy,
    size: Lengths | None = None,
    scale_factor: Scales | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> TensorProxy:
    """Resize the dims after the channels to `size`, or by `scale_factor`.

    Shapes: input (N, C, *lengths). Raises: like torch, ValueError for incompatible options.
    """
    _check_options(input, size, scale_factor, mode, align_corners, bool(recompute_scale_factor), antialias)
    rank = input.ndim - 2
    output_size, scales = resize(input, size, scale_factor)
    if mode == "area":
        return adaptive_mean("interpolate", input, output_size, rank)
    kind = _MODES.get((mode, rank, antialias))
    if kind is None:
        raise NotImplementedError(f"interpolate: mode {mode!r} does not go with {input} and antialias={antialias}")
    scales = (None,) * rank if recompute_scale_factor else scales
    return prims.upsample(input, kind.value, output_size, bool(align_corners), scales)


def _check_options(
    input: TensorProxy,
    size: Lengths | None,
    scale_factor: Scales | None,
    mode: str,
    align_corners: bool | None,
    recompute_scale_factor: bool,
    antialias: bool,
) -> None:
    check(
        align_corners is None or mode not in ("nearest", "area", "nearest-exact"),
        lambda: (
            "interpolate: align_corners option can only be set with the interpolating modes: "
            f"linear | bilinear | bicubic | trilinear, but mode is {mode!r}"
        ),
    )
    check(
        size is None or scale_factor is None,
        lambda: f"interpolate: only one of size or scale_factor should be defined, but they are {size}, {scale_factor}",
    )
    check(
        size is not None or scale_factor is not None,
        lambda: "interpolate: either size or scale_factor should be defined",
    )
    for name, value in (("size", size), ("scale_factor", scale_factor)):
        check(
            not isinstance(value, (tuple, list)) or len(value) == input.ndim - 2,
            lambda name=name, value=value: (
                f"interpolate: Input and {name} must have the same number of spatial "
                f"dimensions, but got {input} and {name}={value}"
            ),
        )
    check(
        not recompute_scale_factor or size is None,
        lambda: "interpolate: recompute_scale_factor is not meaningful with an explicit size.",
    )
    check(
        not antialias or (mode in ("bilinear", "bicubic", "lanczos") and input.ndim == 4),
        lambda: (
            "interpolate: Anti-alias option is restricted to bilinear, bicubic, and lanczos modes and requires a "
            f"4-D tensor as input, but mode is {mode!r} and input is {input}"
        ),
    )


def resize(
    input: TensorProxy, size: Lengths | None, scale_factor: Scales | None
) -> tuple[tuple[Dim, ...], tuple[float | None, ...]]:
    """Return the output's lengths, and the user's scales."""
    rank = input.ndim - 2
    if size is not None:
        sizes = tuple(size) if isinstance(size, Sequence) else (size,) * rank
        return sizes, (None,) * rank
    assert scale_factor is not None
    scales = tuple(scale_factor) if isinstance(scale_factor, Sequence) else (scale_factor,) * rank
    lengths = tuple(torch.sym_int(length * scale) for length, scale in zip(input.shape[2:], scales, strict=True))
    return lengths, tuple(float(scale) for scale in scales)


# padding


@torchsymbol(nn_pad, F.pad)
def pad(input: TensorProxy, pad: Sequence[Dim], mode: str = "constant", value: Number | None = None) -> TensorProxy:
    """Pad the input (or crop it, by negative amounts) at the ends of its last dims.

    pad: (before, after) of the last dim, then of the one before it, …
    mode: "constant" pads with value, "reflect", "replicate" and "circular" with elements of the input.
    """
    torch_check(len(pad) % 2 == 0, lambda: f"pad: Padding length must be divisible by 2, but pad is {pad}")
    torch_check(
        len(pad) <= 2 * input.ndim,
        lambda: (
            f"pad: Padding length should be less than or equal to two times the input dimension, but pad is {pad} "
            f"and input is {input}"
        ),
    )
    if mode == "constant":
        pairs = [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
        return prims.pad(input, ((0, 0),) * (input.ndim - len(pairs)) + tuple(pairs), 0 if value is None else value)
    torch_check(
        value is None or value == 0,
        lambda: f'pad: Padding mode "{mode}" doesn\'t take in value argument, but value is {value}',
    )
    check(
        mode in ("reflect", "replicate", "circular") and input.ndim - len(pad) // 2 in (1, 2) and 2 <= len(pad) <= 6,
        lambda: (
            f"pad: Only 2D, 3D, 4D, 5D padding with non-constant padding are supported, but pad is {pad}, mode is "
            f"{mode!r} and input is {input}"
        ),
        NotImplementedError,
    )
    return _pad_circular(input, pad) if mode == "circular" else prims.pad_edges(input, tuple(pad), mode)


def _pad_circular(x: TensorProxy, pad: Sequence[Dim]) -> TensorProxy:
    """Pad each dim with elements from its other end."""
    for i in range(len(pad) // 2):
        dim, before, after = x.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        size = x.shape[dim]
        torch_check(
            not (statically_true(before > size) or statically_true(after > size)),
            lambda x=x, before=before, after=after: (
                f"pad: Padding value causes wrapping around more than once: ({before}, {after}) of {x}"
            ),
        )
        if statically_true(before < 0) or statically_true(after < 0):
            x = clang.slice_in_dim(x, dim, torch.sym_max(-before, 0), size - torch.sym_max(-after, 0))
            size = x.shape[dim]
        pieces = [x]
        if statically_true(before > 0) or not statically_true(before <= 0):
            pieces.insert(0, clang.slice_in_dim(x, dim, size - before, size))
        if statically_true(after > 0) or not statically_true(after <= 0):
            pieces.append(clang.slice_in_dim(x, dim, 0, after))
        x = prims.cat(pieces, dim) if len(pieces) > 1 else x
    return x


# grids

_INTERPOLATION = {"bilinear": 0, "nearest": 1, "bicubic": 2}
_OUTSIDE = {"zeros": 0, "border": 1, "reflection": 2}


@torchsymbol(F.grid_sample)
def grid_sample(
    input: TensorProxy,
    grid: TensorProxy,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> TensorProxy:
    """Return the input's values at the grid's coordinates, in [-1, 1] from edge to edge.

    Shapes: input (N, C, *lengths), grid (N, *out lengths, rank); out (N, C, *out lengths).
    """
    check(
        mode in _INTERPOLATION,
        lambda: f"grid_sample: expected mode to be 'bilinear', 'nearest' or 'bicubic', but got: {mode!r}",
    )
    check(
        padding_mode in _OUTSIDE,
        lambda: (
            f"grid_sample: expected padding_mode to be 'zeros', 'border', or 'reflection', but got: {padding_mode!r}"
        ),
    )
    return prims.grid_sampler(input, grid, _INTERPOLATION[mode], _OUTSIDE[padding_mode], bool(align_corners))


@torchsymbol(F.affine_grid)
def affine_grid(theta: TensorProxy, size: Sequence[Dim], align_corners: bool | None = None) -> TensorProxy:
    """Return the grid of an output of `size`, mapped by affine transformations."""
    check(
        theta.is_floating_point(), lambda: f"affine_grid: Expected theta to have floating point type, but got {theta}"
    )
    check(
        len(size) in (4, 5),
        lambda: f"affine_grid only supports 4D and 5D sizes, for 2D and 3D affine transforms. Got size {size}.",
        NotImplementedError,
    )
    rank = len(size) - 2
    check(
        theta.ndim == 3 and same(theta.shape[1], rank) and same(theta.shape[2], rank + 1),
        lambda: (
            f"affine_grid: Expected a batch of affine matrices of shape Nx{rank}x{rank + 1} for size {size}. "
            f"Got {theta}."
        ),
    )
    return prims.affine_grid(theta, tuple(size), bool(align_corners))


# channels


def _check_image(op: str, input: TensorProxy, factor: int) -> None:
    torch_check(input.ndim >= 3, lambda: f"{op} expects input to have at least 3 dimensions, but got {input}")
    torch_check(factor > 0, lambda: f"{op} expects a positive factor, but got {factor}")


@torchsymbol(torch.pixel_shuffle)
def pixel_shuffle(input: TensorProxy, upscale_factor: int) -> TensorProxy:
    """Reshape (*, C * r * r, H, W) to (*, C, H * r, W * r), with factor r."""
    r = upscale_factor
    _check_image("pixel_shuffle", input, r)
    *batch, channels, height, width = input.shape
    torch_check(
        same(channels % (r * r), 0),
        lambda: (
            f"pixel_shuffle expects its input's 'channel' dimension to be divisible by the square of "
            f"upscale_factor, but got {input} and {r}"
        ),
    )
    count, n = channels // (r * r), len(batch)
    apart = clang.reshape(input, (*batch, count, r, r, height, width))
    together = clang.permute(apart, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return clang.reshape(together, (*batch, count, height * r, width * r))


@torchsymbol(torch.pixel_unshuffle)
def pixel_unshuffle(input: TensorProxy, downscale_factor: int) -> TensorProxy:
    """Reshape (*, C, H * r, W * r) to (*, C * r * r, H, W), with factor r."""
    r = downscale_factor
    _check_image("pixel_unshuffle", input, r)
    *batch, channels, height, width = input.shape
    torch_check(
        same(height % r, 0) and same(width % r, 0),
        lambda: (
            f"pixel_unshuffle expects height and width to be divisible by downscale_factor, but got {input} and {r}"
        ),
    )
    n = len(batch)
    apart = clang.reshape(input, (*batch, channels, height // r, r, width // r, r))
    together = clang.permute(apart, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return clang.reshape(together, (*batch, channels * r * r, height // r, width // r))


@torchsymbol(torch.channel_shuffle, torch.native_channel_shuffle)
def channel_shuffle(input: TensorProxy, groups: int) -> TensorProxy:
    """Interleave the channels of the groups: one channel from each group in turn. Shapes: input (N, C, *)."""
    torch_check(
        input.ndim > 2,
        lambda: f"channel_shuffle expects input with > 2 dims, but got input with sizes {list(input.shape)}",
    )
    torch_check(groups > 0, lambda: f"channel_shuffle: groups is {groups}, but must be positive")
    batch, channels, *rest = input.shape
    torch_check(
        same(channels % groups, 0),
        lambda: (
            f"channel_shuffle: Number of channels must be divisible by groups. Got {channels} channels and "
            f"{groups} groups."
        ),
    )
    apart = clang.reshape(input, (batch, groups, channels // groups, *rest))
    return clang.reshape(clang.transpose(apart, 1, 2), input.shape)
