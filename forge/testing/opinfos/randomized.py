"""OpInfos of the random functions that torch's library draws as a whole: under one seed, eager's bits."""

from functools import partial

from forge.testing.opinfo import FLOATS, REAL
from forge.testing.table import on_a_clone, op, sample, t, unary, wrong

_fill = partial(op, wrap=on_a_clone)
_fill(
    "Tensor.cauchy_",
    unary((2, 3), (), (0, 3)),
    [sample(t(4), 1.0, 2.0), sample(t(4), sigma=3)],
    wrong(t(3), 0, -1.0, match="sigma > 0"),
)
_fill(
    "Tensor.geometric_",
    unary((2, 3), (), (0, 3), p=0.3),
    sample(t(4), 0.9),
    wrong(t(3), 2.0, match="expects p to be in"),
    dtypes=REAL,
)
_fill(
    "Tensor.log_normal_",
    unary((2, 3), (), (0, 3)),
    [sample(t(4), 0.0, 0.5), sample(t(4), std=3)],
    wrong(t(3), 0, -1.0, match="std > 0"),
)
_no_tensor = wrong("x", error=TypeError, match="must be Tensor")
op("poisson", unary((2, 3), (), (0, 3)), _no_tensor, domain=(0, 9))
op("_standard_gamma", unary((2, 3), (), (0, 3)), _no_tensor, domain=(0.5, 9))
op(
    "_sample_dirichlet",
    unary((2, 3), (4,), (0, 3)),
    _no_tensor,
    domain=(0.5, 9),
    gradient=False,
    dtypes=FLOATS[:2],
)
op(
    "_dirichlet_grad",
    [sample(t(2, 3, low=0.1, high=0.9), t(2, 3, low=1, high=4), t(2, 1, low=3, high=12).expand(2, 3))],
    wrong("x", t(2), t(2), error=TypeError, match="must be Tensor"),
    gradient=False,
    dtypes=FLOATS[:2],
)
op(
    "binomial",
    [sample(t(2, 3, low=1, high=9), t(2, 3, low=0, high=1)), sample(t(0, 3), t(0, 3))],
    wrong("x", t(2), error=TypeError, match="must be Tensor"),
    gradient=False,
    dtypes=FLOATS[:2],
)
_crossed = wrong(t(3), 0.5, 0.1, match="Lower bound should be less")
op(
    "nn.functional.rrelu rrelu",
    unary((2, 3), (), (0, 3)),
    [sample(t(20), training=True), sample(t(4, 5), 0.2, 0.4, True), sample(t(4), 0.2, 0.6)],
    _crossed,
)
op(
    "nn.functional.gumbel_softmax",
    unary((2, 3), (4,), (0, 3)),
    [sample(t(3, 4), tau=0.5, dim=0), sample(t(3, 4), 2.0, hard=True), sample(t(2, 3, 4), hard=True, dim=1)],
    wrong(t(3), dim=2, error=IndexError, match="out of range"),
)
