"""OpInfos of the activation family."""

import math
from functools import partial
from typing import Any

import torch

from forge.testing.opinfo import FLOATS, INTEGERS, NO_COMPLEX_ON_A_GPU, Sample
from forge.testing.opinfos.elementwise import UNARY
from forge.testing.table import Row, floats, op, sample, shared_value, t, tolerance, values, wrong
from forge.torch_internals.functions import nn_elu


def _rows(*options: dict[str, Any], edges: tuple[float, ...] = (0.0, -0.0, math.inf, -math.inf, math.nan)) -> list[Row]:
    """Return rows of several shapes, one for each of `options`, and one of `edges`, where formulas change."""
    return [*UNARY, *(sample(t(8) * 2, **option) for option in options), floats(sample(values(edges)))]


_NOT_A_FLOAT = wrong(t(3, dtype=torch.int64), error=NotImplementedError, match="not implemented for")
_NOT_A_TENSOR = wrong([1.0], error=TypeError, match="must be Tensor|must be a tensor")
_BOOL = wrong(t(3, dtype=torch.bool), match="not supported for")
_FINITE = (0.0, -0.0, 30.0, -30.0)

op("nn.functional.relu", _rows({"inplace": False}), _BOOL, dtypes=(*FLOATS, *INTEGERS))
op("relu_", _rows(), _NOT_A_TENSOR, op=lambda input: torch.relu_(input * 1), symbols=())
op("nn.functional.relu6", _rows(edges=(0.0, 6.0, 7.0, -1.0)), _NOT_A_TENSOR, dtypes=(*FLOATS, *INTEGERS))
op(
    "nn.functional.hardtanh",
    _rows({"min_val": -0.5, "max_val": 2.0}, edges=(1.0, -1.0, 2.0)),
    _BOOL,
    dtypes=(*FLOATS, torch.int64),
)
_op = partial(op, family=[_NOT_A_FLOAT])
_op("nn.functional.leaky_relu", _rows({"negative_slope": 0.2}))
_op("nn.functional.elu", _rows({"alpha": 0.7}))
_op("nn.functional.selu", _rows())
op("nn.functional.celu", _rows({"alpha": 1.3}), _NOT_A_FLOAT, wrong(t(3), alpha=0.0, match="alpha cannot be 0"))
op(
    "nn.functional.gelu",
    _rows({"approximate": "tanh"}, {"approximate": "none"}, edges=_FINITE),
    _NOT_A_FLOAT,
    wrong(t(3), approximate="erf", match="approximate argument must be either none or tanh"),
)
_op("nn.functional.silu nn.functional.mish nn.functional.logsigmoid", _rows(edges=_FINITE))
_op("nn.functional.hardswish nn.functional.hardsigmoid", _rows(edges=(3.0, -3.0, 0.0, 4.0, -4.0)))
_op("nn.functional.softplus", _rows({"beta": 2.0}, {"beta": 0.5, "threshold": 1.0}, edges=(0.0, 25.0)))
_op("nn.functional.hardshrink", _rows({"lambd": 1.0}, edges=(0.5, -0.5, 0.0)))
op(
    "nn.functional.softshrink",
    _rows({"lambd": 1.0}, edges=(0.5, -0.5, 0.0)),
    _NOT_A_FLOAT,
    wrong(t(3), lambd=-1.0, match="lambda must be greater or equal to 0"),
)
op(
    "nn.functional.tanhshrink nn.functional.softsign",
    _rows(edges=_FINITE),
    wrong(t(3), 1, error=TypeError, match="takes 1 positional argument"),
)
_op("_C._nn.elu", sample(t(5)), sample(t(5), 0.7, 1.5, 2.0), sample(t(5), alpha=0.7, input_scale=0.5), op=nn_elu)
op(
    "nn.functional.threshold",
    *(sample(t(*shape), 1, 7) for shape in ((5,), (2, 3), (), (0, 3))),
    sample(t(5), threshold=2, value=3),
    wrong([1.0], 1, 2, error=TypeError, match="must be Tensor|must be a tensor"),
    dtypes=(*FLOATS, *INTEGERS),
)
op(
    "nn.functional.prelu",
    sample(t(5), t(1)),
    sample(t(2, 3), t(3)),
    sample(t(2, 3, 4), t(3)),
    sample(t(2, 3, 4), t(1)),
    sample(t(2, 3), t()),
    sample(t(), t()),
    wrong(t(2, 3), t(4), match="Mismatch of parameter numbers"),
    wrong(t(2, 3), t(1, 3), match="to be a scalar or 1D tensor"),
)
_HALVING = "Halving dimension must be even"
op(
    "nn.functional.glu",
    [sample(t(2, 6)), sample(t(4, 3), 0), sample(t(2, 4, 3), dim=1), sample(t(4, 3).t())],
    [wrong(t(3), match=_HALVING), wrong(t(), match="does not support 0-dim")],
)


# the backward operators


def _backward(names: str, *options: Any, **facts: Any) -> None:
    """Register the gradients of an activation, whose operators take a gradient, a tensor and `options`."""
    rows = [sample(t(*shape), t(*shape), *options) for shape in ((5,), (2, 3), (), (0, 3))]
    op(names, rows, wrong(t(3), t(4), *options, match="must match"), **facts)


_backward("aten.gelu_backward aten.hardswish_backward aten.sigmoid_backward aten.tanh_backward")
# torch differentiates these no further
_backward("aten.hardsigmoid_backward aten.mish_backward", gradient=False)
_backward("aten.silu_backward", gradient=False, directives=(NO_COMPLEX_ON_A_GPU,))
_backward("aten.hardshrink_backward aten.softshrink_backward aten.threshold_backward", 0.5)
_backward("aten.hardtanh_backward", -1.0, 1.0)
_backward("aten.leaky_relu_backward", 0.1, False)
_backward("aten.softplus_backward", 1.0, 20.0)


def _log_sigmoid_row(*shape: int) -> Sample:
    x = shared_value(t(*shape))
    return sample(t(*shape), x, x.abs().then(torch.neg).exp())


op(
    "aten.log_sigmoid_backward",
    [_log_sigmoid_row(*shape) for shape in ((5,), (2, 3), (), (0, 3))],
    wrong(t(3), t(4), t(4), match="must match"),
)
op(
    "aten.elu_backward",
    [sample(t(5), 0.7, 1.5, 2.0, False, t(5)), sample(t(5), 0.7, 1.5, 1.0, True, t(5))],
    wrong(t(3), 1.0, 1, 1, False, t(4), match="must match"),
)
op(
    "aten.glu_backward",
    [sample(t(2, 3), t(2, 6), -1), sample(t(2, 3), t(4, 3), 0)],
    wrong(t(3), t(3), 0, match=_HALVING),
    directives=(tolerance("eager rounds to half precision between its steps", 2e-2, 1e-3),),
)
