"""OpInfos of tensors of unspecified values with strides of their own."""

import torch

from forge.testing.opinfo import ALL, OpInfo, register_opinfo, sample
from forge.testing.opinfos.cases import cases, errors, method

_DTYPES = (*ALL, torch.complex64)

register_opinfo(
    OpInfo(
        "empty_permuted",
        torch.empty_permuted,
        cases(
            lambda make: sample((2, 3, 4), (2, 0, 1), dtype=make.dtype, device=make.device),
            lambda make: sample((2, 3), (0, 1), device=make.device),
            lambda make: sample((), (), dtype=make.dtype, device=make.device),
            lambda make: sample((0, 3), (1, 0), dtype=make.dtype, device=make.device),
        ),
        errors(
            (lambda make: sample((2,), (0, 1)), RuntimeError, "does not match the length"),
            (lambda make: sample((2,), (3,)), RuntimeError, "Dimension out of range"),
            (lambda make: sample((2, 3), (0, 0)), RuntimeError, "Duplicate dim not allowed"),
        ),
        dtypes=_DTYPES,
        gradient=False,
    )
)
_mistakes = (((2, 3), (1,), "must match dimensionality"), ((2,), (-1,), "Negative strides|strides must be"))
register_opinfo(
    OpInfo(
        "empty_strided",
        torch.empty_strided,
        cases(
            lambda make: sample((2, 3), (1, 2), dtype=make.dtype, device=make.device),
            lambda make: sample((2, 3), (7, 8), device=make.device),
            lambda make: sample((), (), dtype=make.dtype, device=make.device),
        ),
        errors(
            *[
                (lambda make, size=size, stride=stride: sample(size, stride), RuntimeError, match)
                for size, stride, match in _mistakes
            ]
        ),
        dtypes=_DTYPES,
        gradient=False,
    )
)
register_opinfo(
    OpInfo(
        "Tensor.new_empty_strided",
        method("new_empty_strided"),
        cases(
            lambda make: sample(make.places(1), (2, 3), (1, 2), dtype=make.dtype),
            lambda make: sample(make.places(1), (2, 3), (7, 8), dtype=torch.float64),
            lambda make: sample(make.places(1), (), ()),
        ),
        errors(
            *[
                (lambda make, size=size, stride=stride: sample(make(1), size, stride), RuntimeError, match)
                for size, stride, match in _mistakes
            ]
        ),
        dtypes=_DTYPES,
        gradient=False,
        symbols=("torch.Tensor.new_empty_strided",),
    )
)
