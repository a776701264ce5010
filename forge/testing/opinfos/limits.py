"""OpInfos of the limits of values."""

import math
from collections.abc import Iterator

import torch

from forge.testing.opinfo import ALL, REAL, ErrorSample, OpInfo, Sample, register_opinfo, sample
from forge.testing.opinfos.elementwise import binary_errors, binary_samples, extremum_samples


def _clamp_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for limits in ((-1, 2), (None, 1), (0, None), (2, -1)):
        yield sample(info.tensor((3, 5), device, dtype), *limits)
    yield sample(info.tensor((), device, dtype), min=0, max=1)
    yield sample(info.tensor((0, 2), device, dtype), 0)
    if dtype != torch.uint8:
        yield sample(info.tensor((5,), device, dtype), -0.5, 2.5)
    low, high = info.tensor((5,), device, dtype), info.tensor((3, 1), device, dtype)
    yield sample(info.tensor((3, 5), device, dtype), low, high)
    yield sample(info.tensor((3, 5), device, dtype), max=high)
    if dtype.is_floating_point:
        yield sample(torch.tensor([-1.0, 2.0, math.nan, math.inf], device=device, dtype=dtype), -1, 2)


def _clamp_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x), RuntimeError, "At least one of 'min' or 'max' must not be None")
    yield ErrorSample(sample(x, torch.ones(4, device=device)), RuntimeError, "must match the size")


register_opinfo(OpInfo("clamp", torch.clamp, _clamp_samples, _clamp_errors, dtypes=REAL))
for _name in ("clamp_min", "clamp_max"):
    register_opinfo(OpInfo(_name, getattr(torch, _name), binary_samples(1, 0), binary_errors, dtypes=REAL))
for _name in ("fmax", "fmin"):
    register_opinfo(OpInfo(_name, getattr(torch, _name), extremum_samples, binary_errors, dtypes=ALL))
