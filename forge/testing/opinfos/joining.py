"""OpInfos of functions that join tensors, split them, and repeat their elements."""

from collections.abc import Callable
from typing import Any

import torch

from forge.testing.opinfo import ALL, Directive, ErrorGenerator, OpInfo, SampleGenerator, register_opinfo, sample
from forge.testing.opinfos.cases import cases, errors, method, register_computed


def _register(name: str, op: Callable, samples: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    register_opinfo(OpInfo(name, op, samples, wrong, dtypes=ALL, **known))


def _method(name: str, samples: SampleGenerator, wrong: ErrorGenerator) -> None:
    _register(f"Tensor.{name}", method(name), samples, wrong, symbols=(f"torch.Tensor.{name}",))


_register(
    "cat",
    torch.cat,
    cases(
        lambda make: sample([make(2, 3), make(4, 3)]),
        lambda make: sample((make(2, 3), make(2, 1), make(2, 0)), -1),
        lambda make: sample([make(3)], dim=0),
        lambda make: sample([make(0), make(2, 3)], dim=-2),
        lambda make: sample([make(2, 3), make(2, 3).double()], 1),
        lambda make: sample([make(2, 3), make(3, 2).t()], 1),
    ),
    errors(
        (lambda make: sample([make(2, 3), make(2, 4)]), RuntimeError, "Sizes of tensors must match"),
        (lambda make: sample([make()]), RuntimeError, "zero-dimensional"),
        (lambda make: sample([make(2)], 1), IndexError, "out of range"),
    ),
)
_register(
    "stack",
    torch.stack,
    cases(
        lambda make: sample([make(2, 3), make(2, 3)]),
        lambda make: sample([make(2, 3), make(3, 2).t()], -1),
        lambda make: sample((make(), make(), make()), dim=0),
        lambda make: sample([make(0, 2)], 1),
    ),
    errors(
        (lambda make: sample([make(2), make(3)]), RuntimeError, "expects each tensor to be equal size"),
        (lambda make: sample([make(2)], 2), IndexError, "out of range"),
    ),
)
_stacks = cases(
    lambda make: sample([make(2, 3), make(2, 3)]),
    lambda make: sample([make(3), make(3)]),
    lambda make: sample((make(2, 3, 4), make(2, 3, 4))),
)
_bad_stack = errors(
    (lambda make: sample([make(2, 3), make(4, 5)]), RuntimeError, "Sizes of tensors must match"),
)
for _name in ("hstack", "vstack", "dstack", "column_stack"):
    _register(_name, getattr(torch, _name), _stacks, _bad_stack)


# parts

_splits = cases(
    lambda make: sample(make(5, 3), 2),
    lambda make: sample(make(5, 3), [1, 4]),
    lambda make: sample(make(4, 6), (2, 0, 4), -1),
    lambda make: sample(make(4, 6).t(), 6),
    lambda make: sample(make(0, 3), 2),
)
_bad_split = errors(
    (lambda make: sample(make(5), [1, 2]), RuntimeError, "sum exactly to 5"),
    (lambda make: sample(make(), 2), RuntimeError, "at least a 1-dimensional tensor"),
)
_register("split", torch.split, _splits, _bad_split)
_method("split", _splits, _bad_split)
_register(
    "split_with_sizes",
    torch.split_with_sizes,
    cases(lambda make: sample(make(5, 3), [1, 4]), lambda make: sample(make(5, 3), [1, 2], dim=1)),
    errors((lambda make: sample(make(5), [1, 2]), RuntimeError, "sum exactly to 5")),
)
_register(
    "chunk",
    torch.chunk,
    cases(
        lambda make: sample(make(5, 3), 2),
        lambda make: sample(make(5, 3), 4, -1),
        lambda make: sample(make(0, 3), 2),
        lambda make: sample(make(6), chunks=3, dim=0),
    ),
    errors(
        (lambda make: sample(make(5), 0), RuntimeError, "to be greater than 0"),
        (lambda make: sample(make(), 1), RuntimeError, "at least a 1-dimensional tensor"),
    ),
)
_tensor_splits = [
    lambda make: sample(make(4, 6, 8), 2),
    lambda make: sample(make(4, 6, 8), (1, 3)),
    lambda make: sample(make(4, 6, 8), [2, 2, -1]),
]
_register(
    "tensor_split",
    torch.tensor_split,
    cases(*_tensor_splits, lambda make: sample(make(5), 3), lambda make: sample(make(2, 5), 3, dim=-1)),
    errors(
        (lambda make: sample(make(5), 0), RuntimeError, "must be larger than 0"),
        (lambda make: sample(make(), 1), RuntimeError, "at least a 1-dimensional tensor"),
    ),
)
for _name in ("hsplit", "vsplit", "dsplit"):
    _register(
        _name,
        getattr(torch, _name),
        cases(*_tensor_splits),
        errors((lambda make: sample(make(5, 7, 9), 2), RuntimeError, "not divisible by the split_size")),
    )
_register(
    "unbind",
    torch.unbind,
    cases(
        lambda make: sample(make(3, 2)),
        lambda make: sample(make(3, 2), -1),
        lambda make: sample(make(2)),
        lambda make: sample(make(0, 2)),
    ),
    errors((lambda make: sample(make(2), 1), IndexError, "out of range")),
)


# repetition

_repeats = cases(
    lambda make: sample(make(2, 3), (2, 1)),
    lambda make: sample(make(2, 3), (2, 1, 3)),
    lambda make: sample(make(3), (1,)),
    lambda make: sample(make(), (2, 2)),
    lambda make: sample(make(2, 3), (0, 2)),
)
_bad_repeat = errors(
    (lambda make: sample(make(2, 3), (2,)), RuntimeError, "can not be smaller than number of dimensions"),
    (lambda make: sample(make(2), (-1,)), RuntimeError, "negative dimension"),
)
_method("repeat", _repeats, _bad_repeat)
_bad_tile = errors((lambda make: sample(make(2), (-1,)), RuntimeError, "negative dimension"))
_tiles = cases(lambda make: sample(make(2, 3), (2,)), lambda make: sample(make(3), (2, 1, 2)))
_register("tile", torch.tile, _tiles, _bad_tile)
_method("tile", _tiles, _bad_tile)
_register(
    "repeat_interleave",
    torch.repeat_interleave,
    cases(
        lambda make: sample(make(2, 3), 2),
        lambda make: sample(make(2, 3), 2, 1),
        lambda make: sample(make(2, 3), 0, dim=0),
        lambda make: sample(make(), 3),
    ),
    errors(
        (lambda make: sample(make(2), -1), RuntimeError, "[Rr]epeats must be non-negative"),
        (lambda make: sample(make(2), 2, 1), IndexError, "out of range"),
    ),
)


_register(
    "repeat_interleave.by_a_tensor",
    torch.repeat_interleave,
    cases(
        lambda make: sample(make(3), make.places(1, 0, 2), output_size=3),
        lambda make: sample(make(2, 3), make.places(2, 1), 0, output_size=3),
        lambda make: sample(make(4, 3).t(), make.places(2).int(), dim=1, output_size=8),
        lambda make: sample(make(2, 2), make.places(2).view(()), output_size=8),
        lambda make: sample(make.places(1, 0, 2), output_size=3),
        lambda make: sample(make(0), make.places(), output_size=0),
    ),
    errors(
        (lambda make: sample(make(3), make(3), output_size=3), RuntimeError, "must be 0-dim or 1-dim|not implemented"),
        (lambda make: sample(make(3), make.places(1, 2), output_size=3), RuntimeError, "must have the same size"),
    ),
    directives=(
        Directive(
            "skip",
            "expanded repeats have another sum than output_size, which stops a GPU: device-side assert triggered",
            test="test_strided[expanded]",
            devices=("cuda",),
        ),
    ),
)


_register(
    "diff",
    torch.diff,
    cases(
        lambda make: sample(make(3, 5)),
        lambda make: sample(make(3, 5), 2, 0),
        lambda make: sample(make(3, 5), dim=-1, prepend=make(3, 1)),
        lambda make: sample(make(3, 5), prepend=make(3, 1), append=make(3, 2)),
        lambda make: sample(make(4), 3),
        lambda make: sample(make(3, 5), 0),
    ),
    errors(
        (lambda make: sample(make()), RuntimeError, "at least one-dimensional"),
        (lambda make: sample(make(3), -1), RuntimeError, "order must be non-negative"),
    ),
)

register_computed("split Tensor.split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind".split())
