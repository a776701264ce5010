"""OpInfos of complex numbers: made of two real ones, and views of their parts."""

from collections.abc import Callable, Iterator

import torch

from forge.testing.opinfo import FLOATS, OpInfo, Sample, register_opinfo, sample
from forge.testing.opinfos.cases import method, register_computed
from forge.testing.opinfos.specs import calls, errors, t, wrong
from forge.torch_internals.versions import WRONG_KIND

_REAL = (torch.float32, torch.float64)
_NOT_A_TENSOR = wrong([1.0], error=TypeError, match="must be Tensor")

_PAIRS = (
    sample(t(5), t(5)),
    sample(t(2, 3), t(3)),
    sample(t(), t()),
    sample(t(0, 3), t(3)),
    sample(t(4, 3, swapped=True), t(4, 3)),
)
_PAIR_MISTAKES = (
    wrong(t(3), 1.0, error=TypeError, match="must be Tensor"),
    wrong(t(3), t(3, dtype=torch.float64), match="scalar type"),
    wrong(t(3, dtype=torch.int64), t(3, dtype=torch.int64), match="Half, Float or Double"),
    wrong(t(3), t(4), match="must match the size"),
)
register_opinfo(OpInfo("complex", torch.complex, calls(*_PAIRS), errors(*_PAIR_MISTAKES), dtypes=_REAL))
register_opinfo(OpInfo("polar", torch.polar, calls(*_PAIRS), errors(*_PAIR_MISTAKES), dtypes=_REAL))

_ANY = (sample(t(5)), sample(t(2, 3)), sample(t()), sample(t(0, 3)), sample(t(4, 3, swapped=True)))
for _name in ("conj", "real", "resolve_conj", "resolve_neg"):
    register_opinfo(
        OpInfo(
            _name,
            getattr(torch, _name),
            calls(*_ANY),
            errors(_NOT_A_TENSOR),
            dtypes=(*FLOATS, torch.int64, torch.bool),
        )
    )


def _complex_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Of complex numbers alone, whose parts have the dtype."""
    yield from calls(*_ANY)(info, device, dtype.to_complex())


for _name in ("imag", "view_as_real"):
    register_opinfo(
        OpInfo(
            _name,
            getattr(torch, _name),
            _complex_samples,
            errors(_NOT_A_TENSOR, wrong(t(3), error=WRONG_KIND, match="complex")),
            dtypes=_REAL,
        )
    )
register_opinfo(
    OpInfo(
        "view_as_complex",
        torch.view_as_complex,
        calls(sample(t(2)), sample(t(3, 2)), sample(t(2, 3, 2)), sample(t(0, 2))),
        errors(
            _NOT_A_TENSOR,
            wrong(t(3, 2, dtype=torch.int64), match="half, float and double"),
            wrong(t(2, 3), match="last dimension of size 2"),
            wrong(t(), match="dimension"),
        ),
        dtypes=_REAL,
    )
)
for _name in ("chalf", "cfloat", "cdouble"):
    register_opinfo(
        OpInfo(
            f"Tensor.{_name}",
            method(_name),
            calls(*_ANY),
            errors(wrong(t(3), 1, 2, 3, error=TypeError, match="takes|argument")),
            dtypes=(*_REAL, torch.int64, torch.bool),
            symbols=(f"torch.Tensor.{_name}",),
        )
    )
register_computed(["conj", "real", "imag", "view_as_real", "view_as_complex"])


def _conjugated(function: Callable) -> Callable:
    """A function of a tensor that torch conjugates where it is read."""
    return lambda x: function(torch.conj(x))


for _name in ("imag", "conj", "resolve_conj"):
    register_opinfo(
        OpInfo(
            f"{_name}.conjugated",
            _conjugated(getattr(torch, _name)),
            _complex_samples,
            errors(_NOT_A_TENSOR),
            dtypes=_REAL,
            symbols=(f"torch.{_name}",),
        )
    )
