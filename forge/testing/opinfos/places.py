"""OpInfos of functions that write at places, or say where and what elements are."""

from collections.abc import Callable

import torch

from forge.testing.opinfo import ALL, FLOATS, INTEGERS, REAL, OpInfo, register_opinfo, sample
from forge.testing.opinfos.cases import Maker, cases, errors, method
from forge.torch_internals.functions import torch_unsafe_masked_index, torch_unsafe_masked_index_put_accumulate

_WITH_COMPLEX = (*ALL, torch.complex64)


def _flat(make: Maker, *shape: int, count: int) -> torch.Tensor:
    """Flat indices in an integer dtype."""
    places = make.index(shape, count)
    return places if make.dtype.is_floating_point else places.to(make.dtype)


for _name, _op in {
    "diagonal_scatter": torch.diagonal_scatter,
    "Tensor.diagonal_scatter": method("diagonal_scatter"),
}.items():
    register_opinfo(
        OpInfo(
            _name,
            _op,
            cases(
                lambda make: sample(make(3, 4), make(3)),
                lambda make: sample(make(4, 3).t(), make(2), 2),
                lambda make: sample(make(2, 3, 4), make(4, 2), -1, 1, 0),
                lambda make: sample(make(0, 3), make(0)),
            ),
            errors(
                (lambda make: sample(make(3, 4), make(2)), RuntimeError, "to have a size equal to the slice"),
                (lambda make: sample(make(3, 4), make(3), 0, 1, 1), RuntimeError, "cannot be identical"),
            ),
            dtypes=_WITH_COMPLEX,
            symbols=("torch.diagonal_scatter",),
        )
    )


def _reducing(reduce: str) -> OpInfo:
    return OpInfo(
        f"index_reduce.{reduce}",
        torch.index_reduce,
        cases(
            lambda make: sample(make(3, 4), 0, make.places(2, 0, 2), make(3, 4), reduce),
            lambda make: sample(make(4, 3).t(), 1, make.places(1, 1), make(3, 2), reduce, include_self=False),
            lambda make: sample(make(5), -1, make.places(4).int(), make(1), reduce),
            lambda make: sample(make(), 0, make.places(0), make(), reduce),
            lambda make: sample(make(2, 3), 0, make.places(), make(0, 3), reduce),
        ),
        errors(
            (lambda make: sample(make(3, 4), 0, make.places(0), make(1, 3), reduce), RuntimeError, "must match self"),
            (lambda make: sample(make(3), 0, make.places(0, 1), make(1), reduce), RuntimeError, "Number of indices"),
            (lambda make: sample(make(3), 0, make(1), make(1), reduce), RuntimeError, "Expected dtype int32/int64"),
            (
                lambda make: sample(make(3), 0, make.places(0)[None], make(1), reduce),
                IndexError,
                "supposed to be a vector",
            ),
            (lambda make: sample(make(3), 0, make.places(0), make(1).double(), reduce), RuntimeError, "same scalar"),
            (lambda make: sample(make(3), 0, make.places(0), make(1), "sum"), RuntimeError, "to be one of prod"),
        ),
        dtypes=REAL,
    )


for _reduce in ("prod", "mean", "amax", "amin"):
    register_opinfo(_reducing(_reduce))

_PUT: dict[str, Callable] = {"put": torch.put, "Tensor.put": method("put"), "Tensor.put_": method("put_")}
for _name, _op in _PUT.items():
    register_opinfo(
        OpInfo(
            _name,
            _op,
            cases(
                lambda make: sample(make(3, 4), make.places(1, -1, 5), make(3)),
                lambda make: sample(make(3, 4), make.places(1, 1, 5).view(3, 1), make(1, 3), True),
                lambda make: sample(make(5), make.places(), make(0)),
                lambda make: sample(make(), make.places(0), make(1), accumulate=True),
            ),
            errors(
                (lambda make: sample(make(3), make.places(0, 1), make(1)), IndexError, "same number of elements"),
                (lambda make: sample(make(3), make.places(0).int(), make(1)), RuntimeError, "Expected a long tensor"),
                (lambda make: sample(make(3), make.places(0), make(1).double()), RuntimeError, "to have the same"),
                (lambda make: sample(make(0), make.places(0), make(1)), IndexError, "into an empty tensor"),
            ),
            dtypes=_WITH_COMPLEX,
            symbols=("torch.put",),
        )
    )


# by a mask

register_opinfo(
    OpInfo(
        "_unsafe_masked_index",
        torch_unsafe_masked_index,
        cases(
            lambda make: sample(make(5), make.mask(6), [make.index((6,), 9)], 2),
            lambda make: sample(make(4, 5), make.mask(3, 2), [make.index((3, 1), 6), make.index((1, 2), 6)], 1),
            lambda make: sample(make(4, 5).t(), make.mask(3, 1), [make.index((3,), 5)], 0),
            lambda make: sample(make(0), make.mask(3), [make.places(0, 1, 2)], 1),
        ),
        errors(
            (
                lambda make: sample(make(3), make.mask(1), [make(1)], 0.0),
                RuntimeError,
                "found unexpected index type",
            ),
        ),
        dtypes=_WITH_COMPLEX,
    )
)
register_opinfo(
    OpInfo(
        "_unsafe_masked_index_put_accumulate",
        torch_unsafe_masked_index_put_accumulate,
        cases(
            lambda make: sample(make(5), make.mask(6), [make.index((6,), 9)], make(6)),
            lambda make: sample(make(4, 5), make.mask(3, 2), [make.index((3, 1), 6), make.index((2,), 6)], make(3, 2)),
            lambda make: sample(make(0), make.mask(3), [make.places(0, 1, 2)], make(3)),
        ),
        errors(
            (
                lambda make: sample(make(3), make.mask(1), [make(1)], make(1)),
                RuntimeError,
                "found unexpected index type",
            ),
            (
                lambda make: sample(make(3), make.mask(1), [make.places(0)], make(1).double()),
                RuntimeError,
                "source and destination dtypes match",
            ),
        ),
        dtypes=_WITH_COMPLEX,
    )
)


# what and where elements are

register_opinfo(
    OpInfo(
        "isin",
        torch.isin,
        cases(
            lambda make: sample(make.index((3, 4), 9).to(make.dtype), make.index((5,), 9).to(make.dtype)),
            lambda make: sample(make.index((2,), 9).to(make.dtype), make.index((40,), 99).to(make.dtype), invert=True),
            lambda make: sample(make.places(1, 2).to(make.dtype), 2),
            lambda make: sample(2, make.places(1, 2).to(make.dtype), assume_unique=True),
            lambda make: sample(make(3), make(0)),
            lambda make: sample(make(0), make(3)),
        ),
        errors(
            (lambda make: sample(make(2).bool(), make(2).bool()), RuntimeError, "Unsupported input type"),
            (lambda make: sample("x", make(2)), TypeError, "must be|invalid combination"),
        ),
        dtypes=(*FLOATS, *INTEGERS),
        gradient=False,
    )
)
register_opinfo(
    OpInfo(
        "unravel_index",
        torch.unravel_index,
        cases(
            lambda make: sample(_flat(make, 4, count=6), (2, 3)),
            lambda make: sample(_flat(make, 2, 3, count=24), [2, 3, 4]),
            lambda make: sample(_flat(make, count=5), 5),
            lambda make: sample(_flat(make, 0, count=6), torch.Size([2, 3])),
        ),
        errors(
            (lambda make: sample(make(3), (2, 3)), TypeError, "to be integer dtype"),
            (lambda make: sample(make.places(1), (2, -3)), ValueError, "cannot have negative values"),
        ),
        dtypes=INTEGERS,
        gradient=False,
    )
)
