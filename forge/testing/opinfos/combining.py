"""OpInfos of functions that lay out tensors in one, and of unsafe splits."""

from collections.abc import Callable
from typing import Any

import torch

from forge.testing.opinfo import ALL, ErrorGenerator, OpInfo, SampleGenerator, register_opinfo, sample
from forge.testing.opinfos.cases import cases, errors, method, of_input, register_computed
from forge.torch_internals.functions import torch_chunk_cat

_DTYPES = (*ALL, torch.complex64)


def _register(name: str, op: Callable, samples: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    register_opinfo(OpInfo(name, op, samples, wrong, dtypes=_DTYPES, **known))


_register(
    "block_diag",
    torch.block_diag,
    cases(
        lambda make: sample(make(2, 3), make(3, 1)),
        lambda make: sample(make(2), make(), make(3, 2).t(), make(0), make(0, 2)),
        lambda make: sample(make(2, 2), torch.ones(1, 2, dtype=torch.float64, device=make.device)),
        lambda make: sample(make(3)),
    ),
    errors((lambda make: sample(make(2), make(1, 1, 1)), RuntimeError, "must have 2 or fewer dimensions")),
)
_register(
    "cartesian_prod",
    torch.cartesian_prod,
    cases(
        lambda make: sample(make(2), make(3)),
        lambda make: sample(make(2), make(3), make(4)),
        lambda make: sample(make(2), make(0)),
        lambda make: sample(make(3)),
    ),
    errors(
        (lambda make: sample(make(2, 2), make(2)), RuntimeError, "Expect a 1D vector"),
        (lambda make: sample(make(2), make(2).long()), RuntimeError, "to have the same dtype"),
    ),
)
for _name, _op, _symbol in (
    ("diagflat", torch.diagflat, ()),
    ("Tensor.diagflat", method("diagflat"), ("torch.diagflat",)),
):
    _register(
        _name,
        _op,
        cases(
            *of_input((3,), (2, 3), (), (0,)),
            lambda make: sample(make(2), 1),
            lambda make: sample(make(2, 2), offset=-2),
        ),
        errors((lambda make: sample("x"), (TypeError, AttributeError), "Tensor|diagflat")),
        symbols=_symbol,
    )
_register(
    "constant_pad_nd",
    torch.constant_pad_nd,
    cases(
        lambda make: sample(make(2, 3), (1, 2)),
        lambda make: sample(make(2, 3, 4), (1, 2, -1, 1), 1),
        lambda make: sample(make(3, 2).t(), [-1, 0, 2, 0], value=1),
        lambda make: sample(make(0, 2), (1, 1)),
    ),
    errors(
        (lambda make: sample(make(2), (1,)), RuntimeError, "must be divisible by|must be even"),
        (lambda make: sample(make(2), (1, 1, 1, 1)), RuntimeError, "[Ll]ength"),
        (lambda make: sample(make(2), (-3, -3)), RuntimeError, "negative"),
    ),
)
_register(
    "_chunk_cat",
    torch_chunk_cat,
    cases(
        lambda make: sample([make(5, 2), make(2, 2)], 0, 2),
        lambda make: sample([make(2, 5, 2), make(2, 3, 1)], 1, 3),
        lambda make: sample([make(2, 3), make(2, 4)], -1, 2),
        lambda make: sample([make(2, 3).t()], 0, 4),
    ),
    errors(
        (lambda make: sample([], 0, 2), RuntimeError, "expects a non-empty input tensor list"),
        (lambda make: sample([make(2)], 0, 0), RuntimeError, "expects positive num_chunks"),
        (lambda make: sample([make(0)], 0, 2), RuntimeError, "expects non-empty tensor"),
        (lambda make: sample([make(2, 2), make(3, 2)], 1, 2), RuntimeError, "expects same sizes"),
        (lambda make: sample([make(2), make(2).long()], 0, 2), RuntimeError, "with the same dtype"),
    ),
    gradient=False,
)


# parts

_chunks = cases(
    lambda make: sample(make(5, 3), 2),
    lambda make: sample(make(5, 3), 4, -1),
    lambda make: sample(make(6), chunks=3, dim=0),
)
_splits = cases(
    lambda make: sample(make(5, 3), 2),
    lambda make: sample(make(4, 6).t(), 6),
    lambda make: sample(make(2, 5), 3, dim=1),
)
_sizes = cases(lambda make: sample(make(5, 3), [1, 4]), lambda make: sample(make(5, 3), [1, 2], dim=1))
_no_dims = errors((lambda make: sample(make(), 1), RuntimeError, "at least a 1-dimensional tensor"))
_bad_sizes = errors((lambda make: sample(make(5), [1, 2]), RuntimeError, "sum exactly to 5"))
for _name, _samples, _wrong in (
    ("unsafe_chunk", _chunks, _no_dims),
    ("unsafe_split", _splits, _no_dims),
    ("unsafe_split_with_sizes", _sizes, _bad_sizes),
):
    _register(_name, getattr(torch, _name), _samples, _wrong)
    _register(f"Tensor.{_name}", method(_name), _samples, _wrong, symbols=(f"torch.{_name}",))

register_computed(["unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"])
