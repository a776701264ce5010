"""OpInfos of softmax and its kin."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from forge.testing.opinfo import FLOATS, Directive, ErrorSample, OpInfo, Sample, register_opinfo, sample

aten = torch.ops.aten


def _samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape, dim in (((5,), 0), ((2, 3), -1), ((2, 3), 0), ((2, 3, 4), 1), ((), 0), ((0, 3), 1), ((3, 0), 1)):
        yield sample(info.tensor(shape, device, dtype), dim)
    yield sample(info.tensor((3, 4), device, dtype).t(), 1)
    yield sample(info.tensor((2, 3), device, dtype), dim=1)
    yield sample(info.tensor((2, 3), device, dtype) * 1000, -1)
    yield sample(info.tensor((2, 3), device, dtype), 1, dtype=torch.float32)
    yield sample(info.tensor((2, 3), device, dtype), 1, dtype=torch.float64)


def _integer_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from _samples(info, device, dtype)
    yield sample(torch.arange(6, device=device).view(2, 3), 1, dtype=torch.float32)


def _errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device), 5), IndexError, "Dimension out of range")
    yield ErrorSample(
        sample(torch.ones(3, dtype=torch.int64, device=device), 0), NotImplementedError, "not implemented"
    )


_LAST_PLACE = Directive(
    "tolerance",
    "one unit in the last place of float16, which eager's vectorized sum may round the other way",
    executors=("torch-prims",),
    dtypes=(torch.float16,),
    tolerance=(2e-3, 1e-3),
)

_CANCELS = Directive(
    "tolerance",
    "x and the logarithm of the sum cancel: what is left has the last place of bfloat16 of theirs",
    executors=("torch-prims",),
    dtypes=(torch.bfloat16,),
    tolerance=(1.6e-2, 8e-3),
)
_DIRECTIVES = {"softmax": (_LAST_PLACE,), "log_softmax": (_LAST_PLACE, _CANCELS)}


def _errors_of_dim(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from _errors(info, device)
    yield ErrorSample(sample(torch.ones(3, device=device)), TypeError, 'missing .* "dim"')


for _name, _directives in _DIRECTIVES.items():
    register_opinfo(OpInfo(_name, getattr(torch, _name), _integer_samples, _errors_of_dim, directives=_directives))


def _functional_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from _samples(info, device, dtype)
    yield sample(info.tensor((2, 3), device, dtype), 1, 5)
    yield sample(info.tensor((2, 3), device, dtype), -1, 3, torch.float32)


for _name in ("softmax", "log_softmax", "softmin"):
    _directives = _DIRECTIVES.get(_name, (_LAST_PLACE,))
    register_opinfo(
        OpInfo(f"nn.functional.{_name}", getattr(F, _name), _functional_samples, _errors, directives=_directives)
    )


def _backward_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape, dim in (((5,), 0), ((2, 3), -1), ((2, 3, 4), 1), ((), 0)):
        yield sample(info.tensor(shape, device, dtype), info.tensor(shape, device, dtype), dim, dtype)


def _backward_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x, x, 5, x.dtype), IndexError, "Dimension out of range")


_ROUNDED_PRODUCT = Directive(
    "tolerance",
    "torch's kernel for a GPU rounds the products with the gradient before it adds them up, which may cancel",
    executors=("torch-prims",),
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    tolerance=(1.6e-2, 3e-2),
)
for _name, _directives in {
    "_softmax_backward_data": (_ROUNDED_PRODUCT,),
    "_log_softmax_backward_data": (),
}.items():
    register_opinfo(
        OpInfo(
            f"aten.{_name}",
            getattr(aten, _name).default,
            _backward_samples,
            _backward_errors,
            dtypes=FLOATS,
            directives=_directives,
        )
    )
