"""OpInfos of what reads memory as it lies."""

import torch

from forge.testing.opinfo import ALL, OpInfo, register_opinfo, sample
from forge.testing.opinfos.cases import cases, errors, method, register_computed

_DTYPES = (*ALL, torch.complex64)
_mistakes = errors(
    (lambda make: sample(make(3), (2,), (1, 1)), RuntimeError, "mismatch in length of strides and shape"),
    (lambda make: sample(make(3), (2,), (-1,)), RuntimeError, "[Nn]egative strides"),
)
_samples = cases(
    lambda make: sample(make(3, 4), (2, 2), (1, 2)),
    lambda make: sample(make(3, 4), (2, 2), (1, 2), 3),
    lambda make: sample(make(6), (4, 3), (1, 1)),
    lambda make: sample(make(4, 3).t(), (3,), (2,), storage_offset=1),
    lambda make: sample(make(3), (), ()),
    lambda make: sample(make(3), (0, 2), (1, 1)),
)
for _name, _op in {
    "as_strided": torch.as_strided,
    "Tensor.as_strided": method("as_strided"),
    "as_strided_copy": torch.as_strided_copy,
}.items():
    _symbol = f"torch.{_name.removeprefix('Tensor.')}"
    register_opinfo(OpInfo(_name, _op, _samples, _mistakes, dtypes=_DTYPES, symbols=(_symbol,)))

register_computed(["as_strided"])
