"""OpInfos of the embedding family."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import (
    NO_COMPLEX_ON_A_GPU,
    ErrorGenerator,
    OpInfo,
    SampleGenerator,
    register_opinfo,
    sample,
)
from forge.testing.opinfos.cases import cases, errors


def _register(name: str, op: Callable, samples: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    register_opinfo(OpInfo(name, op, samples, wrong, **known))


_register(
    "nn.functional.embedding",
    F.embedding,
    cases(
        lambda make: sample(make.index((2, 3), 5), make(5, 4)),
        lambda make: sample(make.places(1, 1, 3), make(5, 4), padding_idx=1),
        lambda make: sample(make.places(4, 0), make(5, 4), -1),
        lambda make: sample(make.places(1, 1, 3), make(5, 4), scale_grad_by_freq=True),
        lambda make: sample(make.places(), make(5, 4)),
        lambda make: sample(make.index((), 5), make(4, 5).t()),
        lambda make: sample(make.places(2).int(), make(5, 4)),
    ),
    errors(
        (lambda make: sample(make(2), make(5, 4)), RuntimeError, "scalar types: Long, Int"),
        (lambda make: sample(make.places(1), make(4)), RuntimeError, "'weight' must be 2-D"),
        (lambda make: sample(make.places(1), make(5, 4), padding_idx=7), AssertionError, "within num_embeddings"),
    ),
)


def _shortened(indices: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """On a clone of the table, which it returns, too."""
    weight = weight.clone()
    return F.embedding(indices, weight, *args, **kwargs), weight


_register(
    "nn.functional.embedding.max_norm",
    _shortened,
    cases(
        lambda make: sample(make.index((2, 3), 5), make(5, 4), max_norm=1.0),
        lambda make: sample(make.places(1, 1, 3), make(5, 4), 1, 0.5, 1.0),
    ),
    errors((lambda make: sample(make(2), make(5, 4), max_norm=1.0), RuntimeError, "scalar types: Long, Int|Long")),
    dtypes=(torch.float32, torch.float64),
    symbols=("torch.nn.functional.embedding",),
)
_register(
    "embedding_renorm",
    lambda table, indices, *how: torch.embedding_renorm_(table.detach().clone(), indices, *how),
    cases(
        lambda make: sample(make(5, 4), make.index((2, 3), 5), 1.0, 2.0),
        lambda make: sample(make(5, 4), make.places(1, 1, 3), 0.5, 1.0),
    ),
    errors((lambda make: sample(make(5, 4), make(2), 1.0, 2.0), RuntimeError, "scalar types: Long, Int|Long")),
    dtypes=(torch.float32, torch.float64, torch.complex64),
    gradient=False,
    symbols=("torch.ops.aten.embedding_renorm.default",),
    directives=(NO_COMPLEX_ON_A_GPU,),
)
_register(
    "embedding",
    torch.embedding,
    cases(
        lambda make: sample(make(5, 4), make.index((2, 3), 5)),
        lambda make: sample(make(5, 4), make.places(1, 1, 3), 1),
        lambda make: sample(make(5, 4), make.places(1, 1, 3), scale_grad_by_freq=True),
    ),
    errors((lambda make: sample(make(5, 4), make(2)), RuntimeError, "scalar types: Long, Int")),
)
_register(
    "nn.functional.one_hot",
    F.one_hot,
    cases(
        lambda make: sample(make.index((2, 3), 5), 5),
        lambda make: sample(make.index((), 3), num_classes=4),
        lambda make: sample(make.places(), 3),
    ),
    errors((lambda make: sample(make(2), 3), RuntimeError, "only applicable to index tensor")),
    dtypes=(torch.float32,),
    gradient=False,
)
