"""OpInfos of the random functions that torch's library draws as a whole: under one seed, eager's bits."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import REAL, ErrorGenerator, OpInfo, SampleGenerator, register_opinfo, sample
from forge.testing.opinfos.cases import cases, errors, of_input
from forge.testing.opinfos.random import filling


def _register(name: str, op: Callable, samples: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    register_opinfo(OpInfo(name, op, samples, wrong, **known))


def _fills(name: str, calls: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    _register(f"Tensor.{name}", filling(name), calls, wrong, symbols=(f"torch.Tensor.{name}",), **known)


_fills(
    "cauchy_",
    cases(*of_input((2, 3), (), (0, 3)), lambda make: sample(make(4), 1.0, 2.0), lambda make: sample(make(4), sigma=3)),
    errors((lambda make: sample(make(3), 0, -1.0), RuntimeError, "sigma > 0")),
)
_fills(
    "geometric_",
    cases(*of_input((2, 3), (), (0, 3), p=0.3), lambda make: sample(make(4), 0.9)),
    errors((lambda make: sample(make(3), 2.0), RuntimeError, "expects p to be in")),
    dtypes=REAL,
)
_fills(
    "log_normal_",
    cases(*of_input((2, 3), (), (0, 3)), lambda make: sample(make(4), 0.0, 0.5), lambda make: sample(make(4), std=3)),
    errors((lambda make: sample(make(3), 0, -1.0), RuntimeError, "std > 0")),
)
_no_tensor = (lambda make: sample("x"), TypeError, "must be Tensor")
_register(
    "poisson",
    torch.poisson,
    cases(*of_input((2, 3), (), (0, 3))),
    errors(_no_tensor),
    domain=(0, 9),
)
_crossed = (lambda make: sample(make(3), 0.5, 0.1), RuntimeError, "Lower bound should be less")
for _name, _op in (("nn.functional.rrelu", F.rrelu), ("rrelu", torch.rrelu)):
    _register(
        _name,
        _op,
        cases(
            *of_input((2, 3), (), (0, 3)),
            lambda make: sample(make(20), training=True),
            lambda make: sample(make(4, 5), 0.2, 0.4, True),
            lambda make: sample(make(4), 0.2, 0.6),
        ),
        errors(_crossed),
    )
_register(
    "nn.functional.gumbel_softmax",
    F.gumbel_softmax,
    cases(
        *of_input((2, 3), (4,), (0, 3)),
        lambda make: sample(make(3, 4), tau=0.5, dim=0),
        lambda make: sample(make(3, 4), 2.0, hard=True),
        lambda make: sample(make(2, 3, 4), hard=True, dim=1),
    ),
    errors((lambda make: sample(make(3), dim=2), IndexError, "out of range")),
)
