"""OpInfos of complex numbers: made of two real ones, and views of their parts."""

from collections.abc import Callable

import torch

from forge.testing.opinfo import FLOATS
from forge.testing.table import Value, op, register_computed, sample, t, wrong
from forge.torch_internals.versions import WRONG_KIND

_REAL = (torch.float32, torch.float64)
_NOT_A_TENSOR = wrong([1.0], error=TypeError, match="must be Tensor")

op(
    "complex polar",
    [sample(t(5), t(5)), sample(t(2, 3), t(3)), sample(t(), t()), sample(t(0, 3), t(3)), sample(t(3, 4).t(), t(4, 3))],
    wrong(t(3), 1.0, error=TypeError, match="must be Tensor"),
    wrong(t(3), t(3, dtype=torch.float64), match="scalar type"),
    wrong(t(3, dtype=torch.int64), t(3, dtype=torch.int64), match="Half, Float or Double"),
    wrong(t(3), t(4), match="must match the size"),
    dtypes=_REAL,
)

_ANY = (sample(t(5)), sample(t(2, 3)), sample(t()), sample(t(0, 3)), sample(t(3, 4).t()))
op("conj real resolve_conj resolve_neg", _ANY, _NOT_A_TENSOR, dtypes=(*FLOATS, torch.int64, torch.bool))


def _complex(*shape: int) -> Value:
    """Return complex numbers whose parts have the tested dtype."""
    return Value(lambda target: target.info.tensor(shape, target.device, target.dtype.to_complex()))


_COMPLEX = [
    sample(_complex(5)),
    sample(_complex(2, 3)),
    sample(_complex()),
    sample(_complex(0, 3)),
    sample(_complex(3, 4).t()),
]
op("imag view_as_real", _COMPLEX, _NOT_A_TENSOR, wrong(t(3), error=WRONG_KIND, match="complex"), dtypes=_REAL)
op(
    "view_as_complex",
    [sample(t(2)), sample(t(3, 2)), sample(t(2, 3, 2)), sample(t(0, 2))],
    _NOT_A_TENSOR,
    wrong(t(3, 2, dtype=torch.int64), match="half, float and double"),
    wrong(t(2, 3), match="last dimension of size 2"),
    wrong(t(), match="dimension"),
    dtypes=_REAL,
)
op(
    "Tensor.chalf Tensor.cfloat Tensor.cdouble",
    _ANY,
    wrong(t(3), 1, 2, 3, error=TypeError, match="takes|argument"),
    dtypes=(*_REAL, torch.int64, torch.bool),
)
register_computed(["conj", "real", "imag", "view_as_real", "view_as_complex"])


def _of_conjugate(function: Callable) -> Callable:
    """Return a function of a tensor that torch conjugates where it is read."""
    return lambda x: function(torch.conj(x))


op("imag.conjugated conj.conjugated resolve_conj.conjugated", _COMPLEX, _NOT_A_TENSOR, dtypes=_REAL, wrap=_of_conjugate)
