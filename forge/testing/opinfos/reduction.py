"""OpInfos of the reduction family."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from forge.testing.opinfo import (
    ALL,
    FLOATS,
    INTEGERS,
    REAL,
    Directive,
    ErrorSample,
    OpInfo,
    Sample,
    SampleGenerator,
    register_opinfo,
    sample,
)
from forge.testing.opinfos.elementwise import method
from forge.torch_internals.versions import TORCH

SHAPES = ((5,), (2, 3), (2, 3, 4), ())


_STEPWISE = Directive(
    "tolerance",
    "eager rounds to half precision after each step, and loses the last bits where terms cancel",
    executors=("torch-prims",),
    dtypes=(torch.bfloat16, torch.float16),
    tolerance=(2e-2, 2e-2),
)


def _over_dims(*options: dict[str, Any], all_by_default: bool = True, empty: bool = True) -> SampleGenerator:
    """No dim, one, several and all, kept or not, and one call for each of `options`."""

    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for shape in SHAPES:
            if all_by_default:
                yield sample(info.tensor(shape, device, dtype))
            yield sample(info.tensor(shape, device, dtype), -1)
        x = info.tensor((2, 3, 4), device, dtype)
        for dims, keepdim in (((0, 2), False), ((0, -1), True), (1, True), ((0, 1, 2), False)):
            yield sample(x, dims, keepdim)
        yield sample(x, dim=1, keepdim=True)
        yield sample(x, axis=1)
        yield sample(info.tensor((3, 4), device, dtype).t(), 0)
        if empty:
            yield sample(info.tensor((0, 3), device, dtype), 0)
        yield sample(info.tensor((0, 3), device, dtype), 1)
        for option in options:
            yield sample(x, **option)

    return samples


def _over_dim(*options: dict[str, Any], all_by_default: bool = False, axis: bool = True) -> SampleGenerator:
    """One dim, kept or not, and one call for each of `options`."""

    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for shape in SHAPES:
            if all_by_default:
                yield sample(info.tensor(shape, device, dtype))
            yield sample(info.tensor(shape, device, dtype), 0)
        x = info.tensor((2, 3, 4), device, dtype)
        yield sample(x, 1, True)
        yield sample(x, dim=-1, keepdim=True)
        if axis:
            yield sample(x, axis=1)
        yield sample(info.tensor((3, 4), device, dtype).t(), 0)
        for option in options:
            yield sample(x, **option)

    return samples


def _dim_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    """A dim out of range."""
    yield ErrorSample(sample(torch.ones(2, 3, device=device), 3), IndexError, "Dimension out of range")


def _dims_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    """A dim out of range, and one named twice."""
    yield from _dim_errors(info, device)
    yield ErrorSample(sample(torch.ones(2, 3, device=device), (0, 0)), RuntimeError, "twice|multiple times")


def _mean_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from _dims_errors(info, device)
    x = torch.ones(3, dtype=torch.int64, device=device)
    yield ErrorSample(sample(x), RuntimeError, "could not infer output dtype")


def _empty_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from _dims_errors(info, device)
    yield ErrorSample(sample(torch.ones(0, 3, device=device), 0), IndexError, "to have non-zero size")


_dtypes = ({"dtype": torch.float64}, {"dim": (0, 1), "dtype": torch.float32})

register_opinfo(OpInfo("sum", torch.sum, _over_dims(*_dtypes, {"dim": ()}), _dims_errors, dtypes=ALL))
register_opinfo(OpInfo("mean", torch.mean, _over_dims(*_dtypes, {"dim": ()}), _mean_errors))


def _nan_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from _over_dims(*_dtypes)(info, device, dtype)
    if dtype.is_floating_point:
        values = torch.tensor([[1.0, math.nan, 2.0], [math.nan, 3.0, 4.0]], device=device, dtype=dtype)
        yield sample(values)
        yield sample(values, 0)


register_opinfo(OpInfo("nansum", torch.nansum, _nan_samples, _dims_errors, dtypes=REAL))
register_opinfo(OpInfo("nanmean", torch.nanmean, _nan_samples, _dims_errors))
register_opinfo(OpInfo("amax", torch.amax, _over_dims({"dim": ()}, empty=False), _empty_errors, dtypes=ALL))
register_opinfo(OpInfo("amin", torch.amin, _over_dims({"dim": ()}, empty=False), _empty_errors, dtypes=ALL))
register_opinfo(OpInfo("any", torch.any, _over_dims({"dim": ()}), _dims_errors, dtypes=ALL, gradient=False))
register_opinfo(OpInfo("all", torch.all, _over_dims({"dim": ()}), _dims_errors, dtypes=ALL, gradient=False))


def _prod_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from _over_dim({"dtype": torch.float64}, {"dim": 1, "dtype": torch.float32}, all_by_default=True)(
        info, device, dtype
    )
    zeros = torch.tensor([[1, 0, 2], [0, 3, 0], [1, 2, 3]], device=device).to(dtype)
    yield sample(zeros)
    yield sample(zeros, 1)
    yield sample(info.tensor((0, 3), device, dtype), 0)


register_opinfo(
    OpInfo("prod", torch.prod, _prod_samples, _dim_errors, dtypes=ALL, domain=(-2, 2), directives=(_STEPWISE,))
)


def _count_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    x = torch.tensor([[1, 0, 2], [0, 3, 0]], device=device).to(dtype)
    for dim in (None, 0, (0, 1)):
        yield sample(x, dim)
    yield sample(x, dim=1)


register_opinfo(OpInfo("count_nonzero", torch.count_nonzero, _count_samples, _dims_errors, dtypes=ALL, gradient=False))


def _logsumexp_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from _over_dims(all_by_default=False)(info, device, dtype)
    if dtype.is_floating_point:
        values = [[math.inf, 1.0], [-math.inf, -math.inf], [1000.0, 1000.0]]
        yield sample(torch.tensor(values, device=device, dtype=dtype), 1)


register_opinfo(
    OpInfo(
        "logsumexp",
        torch.logsumexp,
        _logsumexp_samples,
        _dims_errors,
        dtypes=(*FLOATS, torch.int64),
        directives=(_STEPWISE,),
    )
)


def _sum_to_size_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    x = info.tensor((2, 3, 4), device, dtype)
    yield sample(x, 3, 1)
    yield sample(x, (2, 1, 4))
    yield sample(x, (1,))
    yield sample(x * 1, 2, 3, 4)
    yield sample(info.tensor((), device, dtype), ())


def _sum_to_size_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(2, 3, device=device), (2,)), RuntimeError, "is not expandable to size")


register_opinfo(
    OpInfo(
        "Tensor.sum_to_size",
        method("sum_to_size"),
        _sum_to_size_samples,
        _sum_to_size_errors,
        symbols=("torch.Tensor.sum_to_size",),
    )
)


# variance


def _variance_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((5,), (2, 3), (2, 3, 4)):
        x = info.tensor(shape, device, dtype)
        yield sample(x)
        yield sample(x, False)
        yield sample(x, 0)
        yield sample(x, dim=-1, keepdim=True)
    x = info.tensor((3, 4), device, dtype)
    yield sample(x, 0, False)
    yield sample(x, 1, True, True)
    yield sample(x, (0, 1), correction=0)
    yield sample(x, dim=1, unbiased=False)
    yield sample(x, correction=2, dim=0, keepdim=True)
    yield sample(x, axis=1)
    yield sample(x.t(), 0)


def _variance_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from _dim_errors(info, device)
    x = torch.ones(3, dtype=torch.int64, device=device)
    yield ErrorSample(sample(x), RuntimeError, "only support floating point and complex dtypes")


_HALF_VARIANCE = Directive(
    "tolerance",
    "torch sums half precision in another order; one unit in the last place of bfloat16",
    dtypes=(torch.bfloat16, torch.float16),
    tolerance=(2e-2, 1e-2),
)
for _name in ("var", "std", "var_mean", "std_mean"):
    register_opinfo(
        OpInfo(_name, getattr(torch, _name), _variance_samples, _variance_errors, directives=(_HALF_VARIANCE,))
    )


# extremes with their places


def _extremum_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from _over_dim(all_by_default=True)(info, device, dtype)
    x = info.tensor((2, 3), device, dtype)
    yield sample(x, info.tensor((3,), device, dtype))
    yield sample(x, other=info.tensor((2, 1), device, dtype))
    ties = torch.tensor([[1, 1, 0], [0, 1, 1]], device=device).to(dtype)
    yield sample(ties)
    if dtype.is_floating_point:
        yield sample(torch.tensor([[1.0, math.nan], [3.0, 2.0]], device=device, dtype=dtype), 1)


def _extremum_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from _dim_errors(info, device)
    yield ErrorSample(sample(torch.ones(0, device=device)), RuntimeError, "Expected reduction dim to be specified")
    yield ErrorSample(sample(torch.ones(0, 3, device=device), 0), IndexError, "to have non-zero size")


register_opinfo(OpInfo("max", torch.max, _extremum_samples, _extremum_errors, dtypes=ALL))
register_opinfo(OpInfo("min", torch.min, _extremum_samples, _extremum_errors, dtypes=ALL))


def _aminmax_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in SHAPES:
        yield sample(info.tensor(shape, device, dtype))
        yield sample(info.tensor(shape, device, dtype), dim=0)
    yield sample(info.tensor((2, 3), device, dtype), dim=1, keepdim=True)


def _aminmax_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(2, 3, device=device)
    yield ErrorSample(Sample((x,), {"dim": 3}), IndexError, "Dimension out of range")
    wide = torch.ones((), device=device, dtype=torch.float64)
    yield ErrorSample(Sample((x,), {"out": (wide, wide.clone())}), RuntimeError, "Expected out tensor to have dtype")


register_opinfo(
    OpInfo(
        "aminmax",
        torch.aminmax,
        _aminmax_samples,
        _aminmax_errors,
        dtypes=ALL,
        gradient=TORCH >= (2, 12),  # torch's derivative came then
    )
)


def _arg_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from _dim_errors(info, device)
    yield ErrorSample(sample(torch.ones(0, device=device)), IndexError, "Expected reduction dim to be specified")


for _name in ("argmax", "argmin"):
    register_opinfo(
        OpInfo(
            _name,
            getattr(torch, _name),
            _over_dim({"keepdim": True}, all_by_default=True),
            _arg_errors,
            dtypes=REAL,
            gradient=False,
        )
    )


def _middle_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from _over_dim(all_by_default=True)(info, device, dtype)
    if dtype.is_floating_point:
        values = torch.tensor([[1.0, math.nan, 2.0], [5.0, 3.0, 4.0]], device=device, dtype=dtype)
        yield sample(values)
        yield sample(values, 1)
        yield sample(torch.tensor([2.0, 2.0, 2.0, 1.0], device=device, dtype=dtype))


def _of_contiguous(function: Callable) -> Callable:
    """torch.median along a dim of an expanded tensor reads memory that it has not written (torch 2.13)."""
    return lambda input, *args, **kwargs: function(input.contiguous(), *args, **kwargs)


for _middle in (torch.median, torch.nanmedian):
    register_opinfo(
        OpInfo(
            _middle.__name__, _middle, _middle_samples, _dim_errors, reference=_of_contiguous(_middle), dtypes=FLOATS
        )
    )
register_opinfo(OpInfo("mode", torch.mode, _over_dim({}, axis=False), _dim_errors, dtypes=FLOATS))


def _kthvalue_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    x = info.tensor((3, 4), device, dtype)
    yield sample(x, 2)
    yield sample(x, 1, 0)
    yield sample(x, k=3, dim=1, keepdim=True)
    yield sample(info.tensor((), device, dtype), 1)


def _k_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(2, 3, device=device)
    yield ErrorSample(sample(x, 5), RuntimeError, "out of range")
    yield ErrorSample(sample(x, 1, 4), IndexError, "Dimension out of range")


register_opinfo(OpInfo("kthvalue", torch.kthvalue, _kthvalue_samples, _k_errors, dtypes=FLOATS))


# sorting


def _distinct(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Values without ties, whose order is unspecified."""
    count = math.prod(shape)
    return torch.randperm(count, device=device).reshape(shape).to(dtype)


def _topk_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    x = _distinct((3, 4), device, dtype)
    for k in (0, 1, 3):
        yield sample(x, k)
    yield sample(x, 2, 0, False)
    yield sample(x, k=4, dim=-1, largest=True, sorted=True)
    yield sample(_distinct((), device, dtype), 1)


register_opinfo(OpInfo("topk", torch.topk, _topk_samples, _k_errors, dtypes=(*FLOATS, *INTEGERS)))


def _sort_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    x = _distinct((3, 4), device, dtype)
    yield sample(x)
    yield sample(x, 0, True)
    yield sample(x, dim=1, descending=True)
    yield sample(info.tensor((5,), device, dtype), stable=True)
    yield sample(_distinct((), device, dtype))
    yield sample(x.t(), -1)


register_opinfo(OpInfo("sort", torch.sort, _sort_samples, _dim_errors, dtypes=REAL))
register_opinfo(OpInfo("argsort", torch.argsort, _sort_samples, _dim_errors, dtypes=REAL, gradient=False))


def _msort_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((5,), (3, 4)):
        yield sample(_distinct(shape, device, dtype))


def _msort_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample([1.0]), TypeError, "must be Tensor")


register_opinfo(OpInfo("msort", torch.msort, _msort_samples, _msort_errors, dtypes=REAL))


# scans


def _scan_samples(*options: dict[str, Any]) -> SampleGenerator:
    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for shape, dim in (((5,), 0), ((2, 3), 1), ((2, 3), -2), ((), 0), ((0, 3), 0)):
            yield sample(info.tensor(shape, device, dtype), dim)
        yield sample(info.tensor((3, 4), device, dtype).t(), dim=1)
        if dtype.is_complex:  # torch's gradient of a complex cumprod in a real dtype is wrong
            return
        for option in options:
            yield sample(info.tensor((2, 3), device, dtype), 1, **option)

    return samples


_scanned = ({"dtype": torch.float64}, {"dtype": torch.float32})
register_opinfo(OpInfo("cumsum", torch.cumsum, _scan_samples(*_scanned), _dim_errors, dtypes=ALL))
register_opinfo(OpInfo("cumprod", torch.cumprod, _scan_samples(*_scanned), _dim_errors, dtypes=ALL, domain=(-2, 2)))
register_opinfo(OpInfo("logcumsumexp", torch.logcumsumexp, _scan_samples(), _dim_errors, dtypes=FLOATS))
register_opinfo(OpInfo("cummax", torch.cummax, _scan_samples(), _dim_errors, dtypes=ALL))
register_opinfo(OpInfo("cummin", torch.cummin, _scan_samples(), _dim_errors, dtypes=ALL))


def _histc_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield sample(info.tensor((20,), device, dtype), 5)
    yield sample(info.tensor((4, 5), device, dtype), bins=4, min=-1, max=2)


def _histc_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device), 0), RuntimeError, "bins must be > 0")


register_opinfo(OpInfo("histc", torch.histc, _histc_samples, _histc_errors, dtypes=FLOATS[:2], gradient=False))
