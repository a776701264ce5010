"""OpInfos of the creation family."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from forge.testing.opinfo import (
    ALL,
    FLOATS,
    REAL,
    ErrorGenerator,
    OpInfo,
    Sample,
    SampleGenerator,
    register_opinfo,
    sample,
)
from forge.testing.opinfos.cases import Case, Maker, cases, errors, method, of_input


def _register(name: str, op: Callable, samples: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    register_opinfo(OpInfo(name, op, samples, wrong, **{"dtypes": ALL, "gradient": False, **known}))


def from_arguments(*calls: Sample) -> SampleGenerator:
    """The calls with the tested dtype and device, and the first one without a dtype too."""

    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        yield sample(*calls[0].args, **calls[0].kwargs, device=device)
        for call in calls:
            yield sample(*call.args, **call.kwargs, dtype=dtype, device=device)

    return samples


# sizes

_sizes = from_arguments(sample(2, 3), sample((2, 3)), sample(()), sample(0, 2), sample([4], pin_memory=False))
_negative = errors((lambda make: sample(2, -1), RuntimeError, "negative dimension"))
for _name in ("zeros", "ones", "empty"):
    _register(_name, getattr(torch, _name), _sizes, _negative)
_register(
    "full",
    torch.full,
    from_arguments(sample((2, 3), 1), sample((2,), True), sample((), 2.5), sample([0, 2], fill_value=0)),
    errors((lambda make: sample((-1,), 1), RuntimeError, "negative dimension")),
)
_register(
    "full.inferred_dtype",
    torch.full,
    cases(*(lambda make, value=value: sample((2,), value, device=make.device) for value in (True, 1, 1.5, -2))),
    errors((lambda make: sample((-1,), 1), RuntimeError, "negative dimension")),
    dtypes=(torch.float32,),
)

_likes = [
    *of_input((2, 3), (), (0, 3)),
    lambda make: sample(make(2, 3), dtype=torch.float64),
    lambda make: sample(make(2, 3, 4, 5).to(memory_format=torch.channels_last), device=make.device),
]
_no_tensor = errors((lambda make: sample([1.0]), TypeError, "must be Tensor"))
for _name in ("zeros_like", "ones_like"):
    _register(_name, getattr(torch, _name), cases(*_likes), _no_tensor)
_register(  # of integers: gradients cannot be compared of unspecified values
    "empty_like",
    torch.empty_like,
    cases(
        *(lambda make, shape=shape: sample(make.index(shape, 9), dtype=make.dtype) for shape in ((2, 3), (), (0, 3)))
    ),
    _no_tensor,
)
_register(
    "full_like",
    torch.full_like,
    cases(*of_input((2, 3), (), (0, 3), fill_value=1), lambda make: sample(make(2), 1.5, dtype=torch.float64)),
    errors((lambda make: sample([1.0], 1), TypeError, "must be Tensor")),
)
_news = cases(
    lambda make: sample(make(2), 2, 3),
    lambda make: sample(make(2), (2, 3)),
    lambda make: sample(make(2), [0], dtype=torch.float64),
    lambda make: sample(make(2), (), device=make.device),
)
_bad_new = errors((lambda make: sample(make(2), (-1,)), RuntimeError, "negative dimension"))
for _name in ("new_zeros", "new_ones"):
    _register(f"Tensor.{_name}", method(_name), _news, _bad_new, symbols=(f"torch.Tensor.{_name}",))
_register(
    "Tensor.new_empty",
    method("new_empty"),
    cases(lambda make: sample(make.places(1), 2, 3, dtype=make.dtype), lambda make: sample(make.places(1), (0, 2))),
    _bad_new,
    symbols=("torch.Tensor.new_empty",),
)
_register(
    "Tensor.new_full",
    method("new_full"),
    cases(lambda make: sample(make(2), (2, 3), 1), lambda make: sample(make(2), (), 1, dtype=torch.float64)),
    errors((lambda make: sample(make(2), (-1,), 1), RuntimeError, "negative dimension")),
    symbols=("torch.Tensor.new_full",),
)


def _zeroed(x: torch.Tensor) -> torch.Tensor:
    """x.zero_() on a clone of x."""
    return x.clone().zero_()


# numbers


def _of_data(data: Any) -> Case:
    return lambda make: sample(data)


_ragged = errors(
    (lambda make: sample([[1, 2], [3]]), ValueError, "expected sequence.* of (one )?length"),
    (lambda make: sample([1, "a"]), (TypeError, ValueError), "data holds 'a'"),
)
_numbers = from_arguments(sample([[1, 2], [3, 4]]), sample(3), sample([]), sample([True, False]), sample([[], []]))
_register("tensor", torch.tensor, _numbers, _ragged)
_register(
    "tensor.inferred_dtype",
    torch.tensor,
    cases(*map(_of_data, (1, 2.5, True, [1, 2], [1, 2.5], [True, 2], (), [[]]))),
    _ragged,
    dtypes=(torch.float32,),
)
_register(
    "as_tensor",
    torch.as_tensor,
    cases(
        lambda make: sample(make(2, 3)),
        lambda make: sample(make(2, 3), dtype=torch.float64),
        lambda make: sample([1, 2], device=make.device),
        lambda make: sample(2.5, dtype=make.dtype),
    ),
    _ragged,
    gradient=True,
)
_register(
    "Tensor.new_tensor",
    method("new_tensor"),
    cases(lambda make: sample(make(2), [1, 0]), lambda make: sample(make(2), 1, dtype=torch.float64)),
    errors((lambda make: sample(make(2), [[1, 2], [3]]), ValueError, "expected sequence.* of (one )?length")),
    symbols=("torch.Tensor.new_tensor",),
)
_register(
    "scalar_tensor",
    torch.scalar_tensor,
    from_arguments(sample(1), sample(2.5), sample(True)),
    errors((lambda make: sample("x"), TypeError, "must be Number|must be a number")),
)


# sequences

_register(
    "arange",
    torch.arange,
    from_arguments(
        sample(5),
        sample(0),
        sample(1, 6),
        sample(1, 8, 3),
        sample(6, 0, -2),
        sample(0.0, 7.0, 2.0),
        sample(start=1, end=4, step=2),
    ),
    errors(
        (lambda make: sample(0, 5, 0), RuntimeError, "step must be nonzero"),
        (lambda make: sample(5, 0), RuntimeError, "inconsistent with step sign"),
    ),
    dtypes=REAL,
)
_register(
    "arange.inferred_dtype",
    torch.arange,
    cases(
        lambda make: sample(0.0, 2.0, 0.3, device=make.device),
        lambda make: sample(2, 0.5, -0.25, device=make.device),
        lambda make: sample(3.5, device=make.device),
    ),
    errors((lambda make: sample(5.0, 0.0), RuntimeError, "inconsistent with step sign")),
    dtypes=(torch.float32,),
)
_lines = from_arguments(sample(0, 8, 5), sample(2.0, 9.0, 4), sample(3, 3, 1), sample(0, 1, 0), sample(4, 0, steps=5))
_bad_line = errors((lambda make: sample(0, 1, -1), RuntimeError, "must be non-negative"))
_register("linspace", torch.linspace, _lines, _bad_line, dtypes=REAL)


def _bounds(make: Maker, *bounds: float) -> list[torch.Tensor]:
    """0-d tensors of these numbers."""
    return [torch.tensor(bound, dtype=make.dtype, device=make.device) for bound in bounds]


for _name in ("linspace", "logspace"):
    _register(
        f"{_name}.of_tensors",
        getattr(torch, _name),
        cases(
            lambda make: sample(*_bounds(make, 0, 3), 5),
            lambda make: sample(*_bounds(make, 3), 1, steps=4),
            lambda make: sample(-1, *_bounds(make, 2), 3, dtype=torch.float64),
            lambda make: sample(*_bounds(make, 2, 2), 1),
            lambda make: sample(*_bounds(make, 2, 2), 0),
            lambda make: sample(*_bounds(make, 0, 3), 3, dtype=torch.int64),
        ),
        errors((lambda make: sample(make(1), 2, 3), RuntimeError, "only supports 0-dimensional start and end")),
        dtypes=REAL,
        gradient=False,
    )
_register(
    "linspace.tensors",
    torch.linspace,
    cases(
        lambda make: sample(make(), make(), 5),
        lambda make: sample(make(), 3, steps=4, dtype=torch.float64),
        lambda make: sample(-2.0, make(), 1),
    ),
    errors((lambda make: sample(make(1), 2.0, 3), RuntimeError, "0-dimensional start and end")),
    dtypes=REAL[:2],
)
_register(
    "logspace",
    torch.logspace,
    from_arguments(sample(0, 2, 5), sample(-1.0, 1.0, 3, base=2.0), sample(0, 1, 1)),
    errors((lambda make: sample(0, 1, -1), RuntimeError, "must be non-negative")),
    dtypes=FLOATS,
)
_register(
    "eye",
    torch.eye,
    from_arguments(sample(3), sample(2, 4), sample(4, 2), sample(0), sample(n=2, m=0)),
    errors((lambda make: sample(-1), RuntimeError, "greater or equal to 0")),
)
for _name in ("tril_indices", "triu_indices"):
    _register(
        _name,
        getattr(torch, _name),
        cases(
            *(
                lambda make, arguments=arguments: sample(*arguments, device=make.device)
                for arguments in ((3, 4), (4, 3, 1), (3, 3, -2), (0, 2), (3, 3, 5), (3, 3, -5))
            ),
            lambda make: sample(3, 4, 0, dtype=torch.int32, device=make.device),
        ),
        errors((lambda make: sample(-1, 2), RuntimeError, "must be non-negative|non-negative")),
        dtypes=(torch.float32,),
    )
_register(
    "Tensor.zero_",
    _zeroed,
    cases(*of_input((2, 3), (), (0, 3))),
    errors((lambda make: sample("x"), AttributeError, "clone")),
    symbols=("torch.Tensor.zero_",),
    gradient=True,
)
