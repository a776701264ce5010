"""OpInfos of the elementwise functions that are written in several steps."""

import math
from functools import partial

import torch

from forge.testing.opinfo import FLOATS, INTEGERS
from forge.testing.opinfos.elementwise import BINARY_ERRORS, UNARY, UNARY_ERRORS, binary
from forge.testing.table import Row, detach_args, floats, op, sample, shared_value, t, tolerance, values, wrong
from forge.torch_internals.versions import TORCH

_STEPWISE = tolerance("eager rounds to half precision after each step, and loses the last bits where terms cancel")

_op = partial(op, family=(UNARY, UNARY_ERRORS), dtypes=(*FLOATS, *INTEGERS))
_op("special.bessel_j0 special.bessel_j1", gradient=TORCH >= (2, 15))
_op("special.bessel_y0 special.bessel_y1", domain=(0.2, None), gradient=TORCH >= (2, 15))
_op("special.entr", domain=(0.1, None))
_op("special.erfcx special.i0e special.i1 special.i1e special.log_ndtr")
_op("special.ndtr", directives=(_STEPWISE,))
_op("special.ndtri", dtypes=FLOATS, domain=(0.05, 0.95))
op("sinc", UNARY, sample(values([0, 0])), UNARY_ERRORS, dtypes=(*FLOATS, *INTEGERS))
_P = values([0.0, 0.1, 0.5, 0.95, 1.0, 1.5])
op("logit", UNARY, sample(_P, 0.2), sample(_P, eps=None), UNARY_ERRORS, domain=(0.05, 0.95), directives=(_STEPWISE,))
_LARGE = values([math.inf, -math.inf, 1.0, 100.0])
op("logaddexp logaddexp2", binary(), sample(_LARGE, _LARGE.clone()), BINARY_ERRORS)
op(
    "xlogy special.xlog1py",
    binary(2.0, first=(0.0, 2)),
    sample(values([0, 0, 0]), t(3)),
    BINARY_ERRORS,
    domain=(0.1, None),
)

_op = partial(op, dtypes=FLOATS[:2], domain=(0.5, 4))
_polygamma = partial(
    _op,
    family=(
        *(sample(n, t(2, 3)) for n in (0, 1, 2)),
        sample(1, t()),
        wrong(-1, t(3), match="does not support negative n"),
    ),
)
_polygamma("polygamma")
_polygamma("Tensor.polygamma", op=lambda n, x: x.polygamma(n))
_op("mvlgamma", [sample(t(2, 3), p) for p in (1, 3)], wrong(t(3), 0, match="greater than or equal to 1"), domain=(2, 5))


# torch has a derivative by the second argument alone
_op("igamma igammac", binary(), BINARY_ERRORS, wrap=detach_args(0))
_op("special.zeta", binary(2.5, first=(2.5,)), BINARY_ERRORS, domain=(1.5, 4))

_THREE = [shared_value(t(3)) for _ in range(3)]
_TERNARY: list[Row] = [
    sample(t(5), t(5), t(5)),
    sample(t(2, 3), t(3), t(2, 1)),
    sample(t(), t(), t()),
    sample(t(0, 3), t(3), t(3)),
    sample(*_THREE, value=2),
    floats(sample(*_THREE, value=0.5)),
]
_TERNARY_ERRORS = [wrong(t(3), t(3), t(4), match="must match the size")]
_INTEGERS = t(3, dtype=torch.int64)
op(
    "addcmul",
    _TERNARY,
    _TERNARY_ERRORS,
    dtypes=(*FLOATS, *INTEGERS),
    directives=(
        tolerance(
            "the product is rounded to bfloat16 before it is added, and may cancel what it is added to",
            1.6e-2,
            4e-3,
            dtypes=(torch.bfloat16,),
        ),
    ),
)
op(
    "addcdiv",
    _TERNARY,
    _TERNARY_ERRORS,
    wrong(_INTEGERS, _INTEGERS, _INTEGERS, match="Integer division with addcdiv is no longer supported"),
    domain=(0.5, 3),
)
op(
    "lerp",
    *(sample(t(5), t(5), weight) for weight in (0.3, 0.7, 2)),
    *(sample(t(2, 3), t(3), weight) for weight in (0.3, 0.7, 2)),
    *(sample(t(), t(), weight) for weight in (0.3, 0.7, 2)),
    sample(t(2, 3), t(3), t(2, 3, low=-1, high=2)),
    wrong(t(3), t(3).double(), 0.5, match="expected dtype .* for `end`"),
)
op(
    "aten.logit_backward",
    [sample(t(5), t(5), None), sample(t(5), t(5), 0.2)],
    wrong(t(3), t(4), match="must match"),
    domain=(0.05, 0.95),
    gradient=False,
)
