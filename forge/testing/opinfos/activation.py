"""OpInfos of the activation family."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import (
    FLOATS,
    INTEGERS,
    NO_COMPLEX_ON_A_GPU,
    Directive,
    ErrorGenerator,
    ErrorSample,
    OpInfo,
    Sample,
    SampleGenerator,
    register_opinfo,
    sample,
)
from forge.torch_internals.functions import nn_elu

aten = torch.ops.aten


def _samples(
    *options: dict[str, Any], edges: tuple[float, ...] = (0.0, -0.0, math.inf, -math.inf, math.nan)
) -> SampleGenerator:
    """Several shapes without options, one for each of `options`, and `edges`, where formulas change."""

    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for shape in ((5,), (2, 3), (), (0, 3)):
            yield sample(info.tensor(shape, device, dtype))
        yield sample(info.tensor((3, 4), device, dtype).t())
        for option in options:
            yield sample(info.tensor((8,), device, dtype) * 2, **option)
        if dtype.is_floating_point:
            yield sample(torch.tensor(edges, device=device, dtype=dtype))

    return samples


def _float_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, dtype=torch.int64, device=device)
    yield ErrorSample(sample(x), NotImplementedError, "not implemented for")


def _number_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample([1.0]), TypeError, "must be Tensor|must be a tensor")


def _bool_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, dtype=torch.bool, device=device)), RuntimeError, "not supported for")


def _and(errors: ErrorGenerator, wrong: dict[str, Any], match: str) -> ErrorGenerator:
    """`errors`, and a RuntimeError for a wrong option."""

    def generate(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
        yield from errors(info, device)
        yield ErrorSample(sample(torch.ones(3, device=device), **wrong), RuntimeError, match)

    return generate


def _register(name: str, op: Callable, samples: SampleGenerator, errors: ErrorGenerator, **known: Any) -> None:
    register_opinfo(OpInfo(f"nn.functional.{name}", op, samples, errors, **known))


_finite = (0.0, -0.0, 30.0, -30.0)

_register("relu", F.relu, _samples({"inplace": False}), _bool_errors, dtypes=(*FLOATS, *INTEGERS))
register_opinfo(OpInfo("relu_", lambda input: torch.relu_(input * 1), _samples(), _number_errors))
_register("relu6", F.relu6, _samples(edges=(0.0, 6.0, 7.0, -1.0)), _number_errors, dtypes=(*FLOATS, *INTEGERS))
_register(
    "hardtanh",
    F.hardtanh,
    _samples({"min_val": -0.5, "max_val": 2.0}, edges=(1.0, -1.0, 2.0)),
    _bool_errors,
    dtypes=(*FLOATS, torch.int64),
)
_register("leaky_relu", F.leaky_relu, _samples({"negative_slope": 0.2}), _float_errors)
_register("elu", F.elu, _samples({"alpha": 0.7}), _float_errors)
_register("selu", F.selu, _samples(), _float_errors)
_register("celu", F.celu, _samples({"alpha": 1.3}), _and(_float_errors, {"alpha": 0.0}, "alpha cannot be 0"))
_register(
    "gelu",
    F.gelu,
    _samples({"approximate": "tanh"}, {"approximate": "none"}, edges=_finite),
    _and(_float_errors, {"approximate": "erf"}, "approximate argument must be either none or tanh"),
)
_register("silu", F.silu, _samples(edges=_finite), _float_errors)
_register("mish", F.mish, _samples(edges=_finite), _float_errors)
_register("hardswish", F.hardswish, _samples(edges=(3.0, -3.0, 0.0, 4.0, -4.0)), _float_errors)
_register("hardsigmoid", F.hardsigmoid, _samples(edges=(3.0, -3.0, 0.0, 4.0, -4.0)), _float_errors)
_register(
    "softplus", F.softplus, _samples({"beta": 2.0}, {"beta": 0.5, "threshold": 1.0}, edges=(0.0, 25.0)), _float_errors
)
_register("logsigmoid", F.logsigmoid, _samples(edges=_finite), _float_errors)
_register("hardshrink", F.hardshrink, _samples({"lambd": 1.0}, edges=(0.5, -0.5, 0.0)), _float_errors)
_register(
    "softshrink",
    F.softshrink,
    _samples({"lambd": 1.0}, edges=(0.5, -0.5, 0.0)),
    _and(_float_errors, {"lambd": -1.0}, "lambda must be greater or equal to 0"),
)


def _arity_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device), 1), TypeError, "takes 1 positional argument")


_register("tanhshrink", F.tanhshrink, _samples(edges=_finite), _arity_errors)
_register("softsign", F.softsign, _samples(edges=_finite), _arity_errors)


def _scaled_elu_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield sample(info.tensor((5,), device, dtype))
    yield sample(info.tensor((5,), device, dtype), 0.7, 1.5, 2.0)
    yield sample(info.tensor((5,), device, dtype), alpha=0.7, input_scale=0.5)


register_opinfo(OpInfo("_C._nn.elu", nn_elu, _scaled_elu_samples, _float_errors))


def _threshold_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((5,), (2, 3), (), (0, 3)):
        yield sample(info.tensor(shape, device, dtype), 1, 7)
    yield sample(info.tensor((5,), device, dtype), threshold=2, value=3)


def _threshold_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample([1.0], 1, 2), TypeError, "must be Tensor|must be a tensor")


_register("threshold", F.threshold, _threshold_samples, _threshold_errors, dtypes=(*FLOATS, *INTEGERS))


def _prelu_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape, weights in (((5,), (1,)), ((2, 3), (3,)), ((2, 3, 4), (3,)), ((2, 3, 4), (1,)), ((2, 3), ()), ((), ())):
        yield sample(info.tensor(shape, device, dtype), info.tensor(weights, device, dtype))


def _prelu_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(2, 3, device=device)
    yield ErrorSample(sample(x, torch.ones(4, device=device)), RuntimeError, "Mismatch of parameter numbers")
    yield ErrorSample(sample(x, torch.ones(1, 3, device=device)), RuntimeError, "to be a scalar or 1D tensor")


_register("prelu", F.prelu, _prelu_samples, _prelu_errors)


def _glu_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield sample(info.tensor((2, 6), device, dtype))
    yield sample(info.tensor((4, 3), device, dtype), 0)
    yield sample(info.tensor((2, 4, 3), device, dtype), dim=1)
    yield sample(info.tensor((4, 3), device, dtype).t())


def _glu_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(sample(torch.ones(3, device=device)), RuntimeError, "Halving dimension must be even")
    yield ErrorSample(sample(torch.ones((), device=device)), RuntimeError, "does not support 0-dim")


_register("glu", F.glu, _glu_samples, _glu_errors)


# the backward operators

_ONCE = ("hardsigmoid_backward", "mish_backward", "silu_backward")  # torch differentiates these no further


def _backward(*options: Any, **named: Any) -> SampleGenerator:
    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for shape in ((5,), (2, 3), (), (0, 3)):
            yield sample(info.tensor(shape, device, dtype), info.tensor(shape, device, dtype), *options, **named)

    return samples


def _backward_errors(*options: Any) -> ErrorGenerator:
    def errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
        x = torch.ones(3, device=device)
        yield ErrorSample(sample(x, torch.ones(4, device=device), *options), RuntimeError, "must match")

    return errors


for _name, _options in {
    "gelu_backward": (),
    "hardshrink_backward": (0.5,),
    "hardsigmoid_backward": (),
    "hardswish_backward": (),
    "hardtanh_backward": (-1.0, 1.0),
    "leaky_relu_backward": (0.1, False),
    "mish_backward": (),
    "sigmoid_backward": (),
    "silu_backward": (),
    "softplus_backward": (1.0, 20.0),
    "softshrink_backward": (0.5,),
    "tanh_backward": (),
    "threshold_backward": (0.5,),
}.items():
    _operator = getattr(aten, _name).default
    register_opinfo(
        OpInfo(
            f"aten.{_name}",
            _operator,
            _backward(*_options),
            _backward_errors(*_options),
            gradient=_name not in _ONCE,
            directives=(NO_COMPLEX_ON_A_GPU,) if _name == "silu_backward" else (),
        )
    )


def _log_sigmoid_backward_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for each in _backward()(info, device, dtype):
        yield sample(*each.args, torch.exp(-each.args[1].abs()))


def _log_sigmoid_backward_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x, torch.ones(4, device=device), torch.ones(4, device=device)), RuntimeError, "must match")


register_opinfo(
    OpInfo(
        "aten.log_sigmoid_backward",
        aten.log_sigmoid_backward.default,
        _log_sigmoid_backward_samples,
        _log_sigmoid_backward_errors,
    )
)


def _elu_backward_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for is_result in (False, True):
        g, x = info.tensor((5,), device, dtype), info.tensor((5,), device, dtype)
        yield sample(g, 0.7, 1.5, 2.0 if not is_result else 1.0, is_result, x)


def _elu_backward_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x, 1.0, 1, 1, False, torch.ones(4, device=device)), RuntimeError, "must match")


register_opinfo(OpInfo("aten.elu_backward", aten.elu_backward.default, _elu_backward_samples, _elu_backward_errors))


def _glu_backward_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield sample(info.tensor((2, 3), device, dtype), info.tensor((2, 6), device, dtype), -1)
    yield sample(info.tensor((2, 3), device, dtype), info.tensor((4, 3), device, dtype), 0)


def _glu_backward_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x, x, 0), RuntimeError, "Halving dimension must be even")


register_opinfo(
    OpInfo(
        "aten.glu_backward",
        aten.glu_backward.default,
        _glu_backward_samples,
        _glu_backward_errors,
        directives=(
            Directive(
                "tolerance",
                "eager rounds to half precision between its steps",
                executors=("torch-prims",),
                dtypes=(torch.float16, torch.bfloat16),
                tolerance=(2e-2, 1e-3),
            ),
        ),
    )
)
