"""OpInfos of the elementwise functions that are written in several steps."""

import math
from collections.abc import Callable, Iterator

import torch

from forge.testing.opinfo import (
    FLOATS,
    INTEGERS,
    Directive,
    ErrorSample,
    OpInfo,
    Sample,
    make_tensor,
    register_opinfo,
    sample,
)
from forge.testing.opinfos.elementwise import binary_errors, binary_samples, unary_errors, unary_samples
from forge.torch_internals.versions import TORCH

_SPECIAL = {
    "bessel_j0": ((None, None), TORCH >= (2, 15)),
    "bessel_j1": ((None, None), TORCH >= (2, 15)),
    "bessel_y0": ((0.2, None), TORCH >= (2, 15)),
    "bessel_y1": ((0.2, None), TORCH >= (2, 15)),
    "entr": ((0.1, None), True),
    "erfcx": ((None, None), True),
    "i0e": ((None, None), True),
    "i1": ((None, None), True),
    "i1e": ((None, None), True),
    "log_ndtr": ((None, None), True),
    "ndtr": ((None, None), True),
    "ndtri": ((0.05, 0.95), True),
}

_STEPWISE = Directive(
    "tolerance",
    "eager rounds to half precision after each step, and loses the last bits where terms cancel",
    executors=("torch-prims",),
    dtypes=(torch.bfloat16, torch.float16),
    tolerance=(2e-2, 2e-2),
)

for _name, (_domain, _gradient) in _SPECIAL.items():
    register_opinfo(
        OpInfo(
            f"special.{_name}",
            getattr(torch.special, _name),
            unary_samples,
            unary_errors,
            dtypes=FLOATS if _name == "ndtri" else (*FLOATS, *INTEGERS),
            domain=_domain,
            gradient=_gradient,
            directives=(_STEPWISE,) if _name == "ndtr" else (),
        )
    )


def _sinc_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from unary_samples(info, device, dtype)
    yield sample(torch.zeros(2, device=device, dtype=dtype))


register_opinfo(OpInfo("sinc", torch.sinc, _sinc_samples, unary_errors, dtypes=(*FLOATS, *INTEGERS)))


def _logit_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from unary_samples(info, device, dtype)
    x = torch.tensor([0.0, 0.1, 0.5, 0.95, 1.0, 1.5], device=device, dtype=dtype)
    yield sample(x, 0.2)
    yield sample(x, eps=None)


register_opinfo(
    OpInfo("logit", torch.logit, _logit_samples, unary_errors, domain=(0.05, 0.95), directives=(_STEPWISE,))
)


def _log_add_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from binary_samples()(info, device, dtype)
    values = torch.tensor([math.inf, -math.inf, 1.0, 100.0], device=device, dtype=dtype)
    yield sample(values, values.clone())


for _name in ("logaddexp", "logaddexp2"):
    register_opinfo(OpInfo(_name, getattr(torch, _name), _log_add_samples, binary_errors))


def _times_log_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from binary_samples(2.0, first=(0.0, 2))(info, device, dtype)
    zeros = torch.zeros(3, device=device, dtype=dtype)
    yield sample(zeros, info.tensor((3,), device, dtype))


register_opinfo(OpInfo("xlogy", torch.xlogy, _times_log_samples, binary_errors, domain=(0.1, None)))
register_opinfo(OpInfo("special.xlog1py", torch.special.xlog1py, _times_log_samples, binary_errors, domain=(0.1, None)))


def _polygamma_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for n in (0, 1, 2):
        yield sample(n, info.tensor((2, 3), device, dtype))
    yield sample(1, info.tensor((), device, dtype))


def _polygamma_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(-1, torch.ones(3, device=device)), RuntimeError, "does not support negative n")


register_opinfo(
    OpInfo("polygamma", torch.polygamma, _polygamma_samples, _polygamma_errors, dtypes=FLOATS[:2], domain=(0.5, 4))
)
register_opinfo(
    OpInfo(
        "Tensor.polygamma",
        lambda n, x: x.polygamma(n),
        _polygamma_samples,
        _polygamma_errors,
        dtypes=FLOATS[:2],
        domain=(0.5, 4),
        symbols=("torch.Tensor.polygamma",),
    )
)


def _mvlgamma_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for p in (1, 3):
        yield sample(info.tensor((2, 3), device, dtype), p)


def _mvlgamma_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device), 0), RuntimeError, "greater than or equal to 1")


register_opinfo(
    OpInfo("mvlgamma", torch.mvlgamma, _mvlgamma_samples, _mvlgamma_errors, dtypes=FLOATS[:2], domain=(2, 5))
)


def _of_constant_order(function: Callable) -> Callable:
    """torch has a derivative of the incomplete gamma functions by their second argument alone."""
    return lambda input, other: function(input.detach(), other)


for _function in (torch.igamma, torch.igammac):
    register_opinfo(
        OpInfo(
            _function.__name__,
            _of_constant_order(_function),
            binary_samples(),
            binary_errors,
            dtypes=FLOATS[:2],
            domain=(0.5, 4),
            symbols=(f"torch.{_function.__name__}",),
        )
    )
register_opinfo(
    OpInfo(
        "special.zeta",
        torch.special.zeta,
        binary_samples(2.5, first=(2.5,)),
        binary_errors,
        dtypes=FLOATS[:2],
        domain=(1.5, 4),
    )
)


def _ternary_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shapes in (((5,), (5,), (5,)), ((2, 3), (3,), (2, 1)), ((), (), ()), ((0, 3), (3,), (3,))):
        yield sample(*(info.tensor(shape, device, dtype) for shape in shapes))
    tensors = [info.tensor((3,), device, dtype) for _ in range(3)]
    yield sample(*tensors, value=2)
    if dtype.is_floating_point:
        yield sample(*tensors, value=0.5)


def _ternary_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x, x, torch.ones(4, device=device)), RuntimeError, "must match the size")


def _addcdiv_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from _ternary_errors(info, device)
    x = torch.ones(3, dtype=torch.int64, device=device)
    yield ErrorSample(sample(x, x, x), RuntimeError, "Integer division with addcdiv is no longer supported")


_SUM_CANCELS = Directive(
    "tolerance",
    "the product is rounded to bfloat16 before it is added, and may cancel what it is added to",
    executors=("torch-prims",),
    dtypes=(torch.bfloat16,),
    tolerance=(1.6e-2, 4e-3),
)
register_opinfo(
    OpInfo(
        "addcmul",
        torch.addcmul,
        _ternary_samples,
        _ternary_errors,
        dtypes=(*FLOATS, *INTEGERS),
        directives=(_SUM_CANCELS,),
    )
)
register_opinfo(OpInfo("addcdiv", torch.addcdiv, _ternary_samples, _addcdiv_errors, domain=(0.5, 3)))


def _lerp_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shapes in (((5,), (5,)), ((2, 3), (3,)), ((), ())):
        for number in (0.3, 0.7, 2):
            yield sample(*(info.tensor(shape, device, dtype) for shape in shapes), number)
    weight = make_tensor((2, 3), device, dtype, low=-1, high=2)
    yield sample(info.tensor((2, 3), device, dtype), info.tensor((3,), device, dtype), weight)


def _lerp_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x, x.double(), 0.5), RuntimeError, "expected dtype .* for `end`")


register_opinfo(OpInfo("lerp", torch.lerp, _lerp_samples, _lerp_errors))


def _logit_backward_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for eps in (None, 0.2):
        yield sample(info.tensor((5,), device, dtype), info.tensor((5,), device, dtype), eps)


def _logit_backward_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device), torch.ones(4, device=device)), RuntimeError, "must match")


register_opinfo(
    OpInfo(
        "aten.logit_backward",
        torch.ops.aten.logit_backward.default,
        _logit_backward_samples,
        _logit_backward_errors,
        domain=(0.05, 0.95),
        gradient=False,
    )
)
