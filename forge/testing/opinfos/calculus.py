"""OpInfos of numerical calculus."""

import torch

from forge.testing.opinfo import FLOATS
from forge.testing.table import op, sample, t, tolerance, values, wrong

_DTYPES = (*FLOATS, torch.int64, torch.complex64)
_POINTS = (0, 1, 3, 4)
_TRAPEZOIDS = (
    sample(t(3, 4)),
    sample(t(3, 4), dx=2, dim=0),
    sample(t(3, 4), dx=0.25),
    sample(t(3, 4), values(_POINTS)),
    sample(t(3, 4).t(), t(3)),
    sample(t(2, 3, 4), t(3, 1), dim=-2),
    sample(t(3, 1)),
    sample(t(0, 3)),
)
_MISTAKES = (
    wrong(t(3), t(4), match="one `x` value for each sample point"),
    wrong(t(3, dtype=torch.bool), match="bool is not supported"),
    wrong(t(2, 3), t(4, 3), match="must match"),
    wrong(t(), error=IndexError, match="no dimensions"),
)
op("trapezoid trapz", _TRAPEZOIDS, sample(t(3, 0)), _MISTAKES, dtypes=_DTYPES)
op("cumulative_trapezoid", _TRAPEZOIDS, _MISTAKES, dtypes=_DTYPES)
op(
    "gradient",
    sample(t(3, 4)),
    sample(t(4, 3).t(), spacing=2.0),
    sample(t(3, 4), spacing=2, dim=0),
    sample(t(3, 4), spacing=[0.5, 2.0]),
    sample(t(3, 4, 5), dim=(2, 0), edge_order=2),
    sample(t(3, 4), spacing=[2.0, 3.0], dim=(-1, 0)),
    sample(t(3, 4), spacing=[values(_POINTS)], dim=1),
    sample(t(3, 4), spacing=[values(_POINTS)], dim=1, edge_order=2),
    sample(t(3, 4).t(), spacing=(values(_POINTS), values([*_POINTS[:3]])), edge_order=2),
    sample(t(2, 0), dim=0),
    wrong(t(1), match=r"at least edge_order\+1"),
    wrong(t(2), edge_order=2, match=r"at least edge_order\+1"),
    wrong(t(3), edge_order=3, match="only supports edge_order=1 and edge_order=2"),
    wrong(t(3, 3), spacing=[1.0, 2.0, 3.0], match="expected spacing to be unspecified"),
    wrong(t(3, 3), spacing=[t(3, 1)], dim=1, match="to have one dimension"),
    wrong(t(3, 3), dim=(0, 0), match="twice|multiple times"),
    wrong(t(3, 3), dim=2, error=IndexError, match="out of range"),
    wrong(t(3, dtype=torch.uint8), match="does not support uint8"),
    dtypes=_DTYPES,
    directives=(
        tolerance("the three terms at an edge cancel, and are rounded to half precision in another order than eager's"),
    ),
)
