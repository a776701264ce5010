"""OpInfos of the operators behind functions of torch.nn.functional."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from forge.ir import TensorProxy
from forge.testing.table import Value, op, sample, t, tolerance, values, wrong

aten = torch.ops.aten

_ONCE = (torch.float32, torch.float64)


_MASKED = values([[-math.inf] * 3, [1.0, -math.inf, 0.5]])
op(
    "aten._safe_softmax",
    sample(t(2, 3), 1),
    sample(_MASKED, -1),
    sample(_MASKED, 0),
    sample(t(4, 3, 2).transpose(0, -1), 1),
    sample(_MASKED, 1, torch.float64),
    sample(t(0, 3), 0),
    wrong(t(2, 3), 2, error=IndexError, match="out of range"),
)
op(
    "aten.native_dropout_backward",
    sample(t(2, 3), t(2, 3, dtype=torch.bool), 2.0),
    sample(t(4, 3).t(), t(3, 4, dtype=torch.bool), 1.25),
    sample(t(), t(dtype=torch.bool), scale=0.0),
    wrong(t(3), t(4, dtype=torch.bool), 2.0, match="size|broadcast"),
)


def _pooled_indices(*how: Any) -> Value:
    return Value(
        lambda target: F.max_pool2d(torch.rand(2, 3, 6, 6, device=target.device), *how, return_indices=True)[1]
    )


op(
    "aten.max_pool2d_with_indices_backward",
    sample(t(2, 3, 3, 3), t(2, 3, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, _pooled_indices(2)),
    sample(t(2, 3, 3, 3), t(2, 3, 6, 6), [2], [], [0], [1], False, _pooled_indices(2)),
    sample(t(2, 3, 4, 4), t(2, 3, 6, 6), [3, 3], [2, 2], [1, 1], [1, 1], True, _pooled_indices(3, 2, 1, 1, True)),
    wrong(
        t(2, 3, 3, 2),
        t(2, 3, 6, 6),
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
        _pooled_indices(2),
        match="of shape|Expected a tensor|size",
    ),
    dtypes=_ONCE,
)
_GRID = t(2, 4, 5, 2, low=-1.2, high=1.2)
_VOLUME = t(2, 2, 4, 5, 3, low=-1.2, high=1.2)
_IMAGE, _BLOCK = t(2, 3, 6, 5), t(2, 3, 4, 6, 5)
_grids = tuple(
    sample(_IMAGE, _GRID, mode, padding, corners)
    for mode in (0, 1, 2)
    for padding in (0, 1, 2)
    for corners in (True, False)
)
_volumes = tuple(
    sample(_BLOCK, _VOLUME, mode, padding, corners)
    for mode in (0, 1)
    for padding in (0, 1, 2)
    for corners in (True, False)
)
_batches = wrong(t(3, 3, 6, 5), _GRID, 0, 0, False, match="same batch size")
op("grid_sampler", _grids[:3], _volumes[:2], _batches, dtypes=_ONCE)
op("grid_sampler_2d", _grids, _batches, dtypes=_ONCE)
op("grid_sampler_3d", _volumes, wrong(_IMAGE, _GRID, 0, 0, False, match="5D"), dtypes=_ONCE)


def _upsample_bilinear(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call the function as Dynamo hands it over; called directly, it calls interpolate."""
    if isinstance(input, TensorProxy):
        return input.__torch_function__(F.upsample_bilinear, (TensorProxy,), (input, *args), kwargs)
    return F.upsample_bilinear(input, *args, **kwargs)


op(
    "nn.functional.upsample_bilinear",
    [sample(t(2, 3, 4, 5), 8), sample(t(2, 3, 4, 5), scale_factor=2.0), sample(t(2, 3, 4, 5), (2, 7))],
    wrong(t(2, 3, 4, 5), error=ValueError, match="should be defined"),
    directives=(tolerance("torch rounds to half precision at other places", executors=None),),
    op=_upsample_bilinear,
)
for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    op(
        f"aten.{_name}",
        sample(t(2, 3, 6, 5), [3, 4], False),
        sample(t(2, 3, 6, 5), [8, 9], True),
        sample(t(2, 3, 6, 6), [3, 3], False, 0.5, 0.5),
        sample(t(2, 3, 6, 6), [3, 3], False, scales_h=0.5, scales_w=None),
        wrong(t(2, 3, 6, 5), [3, 4, 5], False, match="output_size"),
        dtypes=_ONCE,
    )
    op(
        f"aten.{_name}.vec",
        [sample(t(2, 3, 6, 5), [3, 4], False, None), sample(t(2, 3, 6, 6), None, True, [0.5, 1.5])],
        wrong(t(2, 3, 6, 5), None, False, None, match="exactly one of"),
        dtypes=_ONCE,
        op=getattr(aten, _name).vec,
    )
