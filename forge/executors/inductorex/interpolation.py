"""Interpolation of images as calls that Inductor lowers to loops.

torch's own decompositions return a row-major image and copy it if it is channels-last. Values read here have the
strides of the image, and nothing is copied.

Source: aten/src/ATen/native/UpSample.h.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.ir import Dim

aten = torch.ops.aten
Taps = list[tuple[torch.Tensor, torch.Tensor]]  # the indices in a dim that contribute to a value, each with its weight
_A = -0.75  # of the cubic convolution


def linear(x: torch.Tensor, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> torch.Tensor:
    """Return an image (N, C, *dims) interpolated linearly to (N, C, *size). Source: aten.upsample_bilinear2d."""
    return _interpolate(x, size, align_corners, scales, _linear_taps)


def cubic(x: torch.Tensor, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> torch.Tensor:
    """Return an image (N, C, H, W) interpolated cubically to (N, C, *size). Source: aten.upsample_bicubic2d."""
    return _interpolate(x, size, align_corners, scales, _cubic_taps)


def _interpolate(
    x: torch.Tensor,
    size: Sequence[Any],
    align_corners: bool,
    scales: Sequence[float | None],
    taps_of: Callable[[torch.Tensor, Any], Taps],
) -> torch.Tensor:
    if x.device.type != "cpu" and all(before == after for before, after in zip(x.shape[2:], size, strict=True)):
        return x.clone()  # as torch's kernels for a GPU do, whatever the scales
    dims = x.ndim - 2
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    taps = []
    for dim, (before, after, scale) in enumerate(zip(x.shape[2:], size, scales or [None] * dims, strict=True)):
        places = torch.arange(after, device=x.device).to(dtype)
        if before == after and x.device.type == "cpu" and taps_of is _linear_taps:
            taps_of_dim = _own_taps(places)
        else:
            positions = _source_positions(places, _scale(before, after, align_corners, scale), align_corners)
            taps_of_dim = taps_of(positions, before)
        behind = [1] * (dims - 1 - dim)
        taps.append([(at, weight, behind) for at, weight in taps_of_dim])

    def value(indices: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of weighted values over the dims that `indices` does not cover."""
        if len(indices) == dims:
            return _read(x, indices).to(dtype)
        total: torch.Tensor | None = None
        for at, weight, behind in taps[len(indices)]:
            part = value([*indices, at.reshape(-1, *behind)]) * weight.reshape(-1, *behind)
            total = part if total is None else total + part
        assert total is not None
        return total

    return value([]).to(x.dtype)


def _read(x: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    """Return the elements of an image at `indices` of its dims, in channels-last if the image is."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.ndim not in formats or x.is_contiguous() or not x.is_contiguous(memory_format=formats[x.ndim]):
        return aten._unsafe_index(x, [None, None, *indices])
    rows = aten._unsafe_index(x.permute(0, *range(2, x.ndim), 1), [None, *indices])
    return rows.permute(0, -1, *range(1, x.ndim - 1))


def _scale(before: Any, after: Any, align_corners: bool, scale: float | None) -> float:
    if align_corners:
        return (before - 1) / (after - 1) if after > 1 else 0.0
    return 1.0 / scale if scale is not None and scale > 0 else before / after


def _source_positions(places: torch.Tensor, scale: float, align_corners: bool) -> torch.Tensor:
    return places * scale if align_corners else (places + 0.5) * scale - 0.5


def _own_taps(places: torch.Tensor) -> Taps:
    """Return the taps of a dim that keeps its size: torch's kernels for a CPU ignore its scale, and add each value,
    times zero, to itself, which is NaN for an infinite one."""
    at = places.to(torch.int64)
    return [(at, torch.ones_like(places)), (at, torch.zeros_like(places))]


def _linear_taps(positions: torch.Tensor, size: Any) -> Taps:
    positions = positions.clamp(min=0.0)
    first = positions.to(torch.int64).clamp(max=size - 1)
    weight = (positions - first).clamp(0.0, 1.0)
    return [(first, 1 - weight), ((first + 1).clamp(max=size - 1), weight)]


def _cubic_taps(positions: torch.Tensor, size: Any) -> Taps:
    floor = positions.floor()
    t = (positions - floor).clamp(0.0, 1.0)
    weights = [_far_weight(t + 1), _near_weight(t), _near_weight(1 - t), _far_weight(2 - t)]
    first = floor.to(torch.int64)
    return [((first + shift).clamp(0, size - 1), weight) for shift, weight in zip((-1, 0, 1, 2), weights, strict=True)]


def _near_weight(distance: torch.Tensor) -> torch.Tensor:
    """Return the weight of a value at most 1 away."""
    return ((_A + 2) * distance - (_A + 3)) * distance * distance + 1


def _far_weight(distance: torch.Tensor) -> torch.Tensor:
    """Return the weight of a value from 1 to 2 away."""
    return ((_A * distance - 5 * _A) * distance + 8 * _A) * distance - 4 * _A
