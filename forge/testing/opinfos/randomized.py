"""OpInfos of the random functions that torch's library draws as a whole: under one seed, eager's bits."""

from functools import partial

from forge.testing.opinfo import REAL
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
