"""OpInfos of the operators behind functions of torch.nn.functional."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from forge.ir import TensorProxy
from forge.testing.opinfo import Directive, OpInfo, register_opinfo, sample
from forge.testing.opinfos.cases import cases
from forge.testing.opinfos.cases import errors as case_errors
from forge.testing.opinfos.specs import Spec, calls, errors, t, wrong

aten = torch.ops.aten

_ONCE = (torch.float32, torch.float64)


def _register(name: str, op: Callable, samples: tuple, mistakes: tuple, **known: Any) -> None:
    register_opinfo(OpInfo(name, op, calls(*samples), errors(*mistakes), **known))


_MASKED = Spec((2, 3), values=[[-math.inf] * 3, [1.0, -math.inf, 0.5]])
_register(
    "aten._safe_softmax",
    aten._safe_softmax.default,
    (
        sample(t(2, 3), 1),
        sample(_MASKED, -1),
        sample(_MASKED, 0),
        sample(t(2, 3, 4, swapped=True), 1),
        sample(_MASKED, 1, torch.float64),
        sample(t(0, 3), 0),
    ),
    (wrong(t(2, 3), 2, error=IndexError, match="out of range"),),
)
_register(
    "aten.native_dropout_backward",
    aten.native_dropout_backward.default,
    (
        sample(t(2, 3), t(2, 3, dtype=torch.bool), 2.0),
        sample(t(3, 4, swapped=True), t(3, 4, dtype=torch.bool), 1.25),
        sample(t(), t(dtype=torch.bool), scale=0.0),
    ),
    (wrong(t(3), t(4, dtype=torch.bool), 2.0, match="size|broadcast"),),
)


def _pooled_places(make: Any, *how: Any) -> torch.Tensor:
    return F.max_pool2d(torch.rand(2, 3, 6, 6, device=make.device), *how, return_indices=True)[1]


register_opinfo(
    OpInfo(
        "aten.max_pool2d_with_indices_backward",
        aten.max_pool2d_with_indices_backward.default,
        cases(
            lambda make: sample(
                make(2, 3, 3, 3), make(2, 3, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, _pooled_places(make, 2)
            ),
            lambda make: sample(make(2, 3, 3, 3), make(2, 3, 6, 6), [2], [], [0], [1], False, _pooled_places(make, 2)),
            lambda make: sample(
                make(2, 3, 4, 4),
                make(2, 3, 6, 6),
                [3, 3],
                [2, 2],
                [1, 1],
                [1, 1],
                True,
                _pooled_places(make, 3, 2, 1, 1, True),
            ),
        ),
        case_errors(
            (
                lambda make: sample(
                    make(2, 3, 3, 2), make(2, 3, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, _pooled_places(make, 2)
                ),
                RuntimeError,
                "of shape|Expected a tensor|size",
            )
        ),
        dtypes=_ONCE,
    )
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
_register("grid_sampler", torch.grid_sampler, (*_grids[:3], *_volumes[:2]), (_batches,), dtypes=_ONCE)
_register("grid_sampler_2d", torch.grid_sampler_2d, _grids, (_batches,), dtypes=_ONCE)
_register(
    "grid_sampler_3d",
    torch.grid_sampler_3d,
    _volumes,
    (wrong(_IMAGE, _GRID, 0, 0, False, match="5D"),),
    dtypes=_ONCE,
)


def _upsample_bilinear(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The function as Dynamo hands it over; called directly, it calls interpolate."""
    if isinstance(input, TensorProxy):
        return input.__torch_function__(F.upsample_bilinear, (TensorProxy,), (input, *args), kwargs)
    return F.upsample_bilinear(input, *args, **kwargs)


_register(
    "nn.functional.upsample_bilinear",
    _upsample_bilinear,
    (sample(t(2, 3, 4, 5), 8), sample(t(2, 3, 4, 5), scale_factor=2.0), sample(t(2, 3, 4, 5), (2, 7))),
    (wrong(t(2, 3, 4, 5), error=ValueError, match="should be defined"),),
    symbols=("torch.nn.functional.upsample_bilinear",),
    directives=(
        Directive(
            "tolerance",
            "torch rounds to half precision at other places",
            dtypes=(torch.bfloat16, torch.float16),
            tolerance=(2e-2, 2e-2),
        ),
    ),
)
for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _register(
        f"aten.{_name}",
        getattr(aten, _name).default,
        (
            sample(t(2, 3, 6, 5), [3, 4], False),
            sample(t(2, 3, 6, 5), [8, 9], True),
            sample(t(2, 3, 6, 6), [3, 3], False, 0.5, 0.5),
            sample(t(2, 3, 6, 6), [3, 3], False, scales_h=0.5, scales_w=None),
        ),
        (wrong(t(2, 3, 6, 5), [3, 4, 5], False, match="output_size"),),
        dtypes=_ONCE,
    )
    _register(
        f"aten.{_name}.vec",
        getattr(aten, _name).vec,
        (sample(t(2, 3, 6, 5), [3, 4], False, None), sample(t(2, 3, 6, 6), None, True, [0.5, 1.5])),
        (wrong(t(2, 3, 6, 5), None, False, None, match="exactly one of"),),
        dtypes=_ONCE,
    )
