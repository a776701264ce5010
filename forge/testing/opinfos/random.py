"""OpInfos of the random family: under one seed, eager's bits and eager's state of the generator."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import (
    FLOATS,
    INTEGERS,
    REAL,
    Directive,
    ErrorGenerator,
    OpInfo,
    SampleGenerator,
    register_opinfo,
    sample,
)
from forge.testing.opinfos.cases import cases, errors, of_input
from forge.testing.opinfos.creation import from_arguments


def _register(name: str, op: Callable, samples: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    register_opinfo(OpInfo(name, op, samples, wrong, **{"gradient": False, **known}))


# tensors of random numbers

_sizes = from_arguments(sample(2, 3), sample((2, 3)), sample(()), sample(0, 2), sample(size=(20,)))
_negative = errors((lambda make: sample(2, -1), RuntimeError, "negative dimension"))
_register("rand", torch.rand, _sizes, _negative)
_register("randn", torch.randn, _sizes, _negative)
_no_tensor = errors((lambda make: sample([1.0]), TypeError, "must be Tensor"))
_likes = cases(*of_input((2, 3), (), (0, 3)), lambda make: sample(make(2, 3), dtype=torch.float64))
_register("rand_like", torch.rand_like, _likes, _no_tensor)
_register("randn_like", torch.randn_like, _likes, _no_tensor)
_empty_range = "from=5 >= to=5"
_register(
    "randint",
    torch.randint,
    from_arguments(sample(5, (2, 3)), sample(2, 7, (4,)), sample(1, high=9, size=(3,)), sample(high=3, size=())),
    errors(
        (lambda make: sample(5, 5, (2,)), RuntimeError, _empty_range),
        (lambda make: sample(2, 7), TypeError, "must be tuple of ints"),  # torch's parser, before any trace
    ),
    dtypes=REAL,
)
_register(
    "randint_like",
    torch.randint_like,
    cases(lambda make: sample(make(2, 3), 5), lambda make: sample(make(4), 2, 7), lambda make: sample(make(), high=3)),
    errors((lambda make: sample(make(2), 5, 5), RuntimeError, _empty_range)),
    dtypes=REAL,
)
_register(
    "randperm",
    torch.randperm,
    from_arguments(sample(7), sample(0), sample(n=1)),
    errors((lambda make: sample(-1), RuntimeError, "negative")),
    dtypes=INTEGERS,
)
_register(
    "normal",
    torch.normal,
    cases(
        lambda make: sample(make(2, 3), make(2, 3).abs()),
        lambda make: sample(make(2, 3), 2.0),
        lambda make: sample(1.0, make(3, 2).t().abs()),
        lambda make: sample(0.0, 1.0, (2, 3), dtype=make.dtype, device=make.device),
    ),
    errors(
        (lambda make: sample(0.0, -1.0, (2,)), RuntimeError, "std >= 0"),
        (lambda make: sample(0.0, 1.0), TypeError, "invalid combination"),  # torch's parser, before any trace
    ),
    gradient=True,
)
_register(
    "multinomial",
    torch.multinomial,
    cases(
        lambda make: sample(make(5).abs() + 1, 3),
        lambda make: sample(make(2, 5).abs() + 1, 7, True),
        lambda make: sample(make(2, 5).abs() + 1, num_samples=1, replacement=False),
    ),
    errors(
        (lambda make: sample(make(3).abs(), 5), RuntimeError, "without replacement"),
        (lambda make: sample(make(3).abs(), 0), RuntimeError, "cannot sample n_sample <= 0"),
    ),
)
_register(
    "bernoulli",
    torch.bernoulli,
    cases(
        lambda make: sample(make(2, 3).sigmoid()),
        lambda make: sample(make(2, 3), 0.25),
        lambda make: sample(make(), p=1),
    ),
    errors((lambda make: sample(make(3), p=2.0), RuntimeError, "expects p to be in")),
    gradient=True,
)


# methods that fill a tensor


def filling(name: str) -> Callable:
    """x.name(...) on a clone of x."""

    def fill(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return getattr(x.clone(), name)(*args, **kwargs)

    fill.__name__ = name
    return fill


def _fills(name: str, calls: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    _register(f"Tensor.{name}", filling(name), calls, wrong, symbols=(f"torch.Tensor.{name}",), gradient=True, **known)


_fills(
    "uniform_",
    cases(*of_input((2, 3), (), (0, 3)), lambda make: sample(make(4), -1, 1), lambda make: sample(make(4), to=3)),
    errors((lambda make: sample(make(3), 2, 1), RuntimeError, "from=2 > to=1")),
)
_fills(
    "normal_",
    cases(*of_input((2, 3), (), (0, 3)), lambda make: sample(make(20), 1, 2), lambda make: sample(make(4), std=3)),
    errors((lambda make: sample(make(3), 0, -1), RuntimeError, "std >= 0")),
)
_fills(
    "bernoulli_",
    cases(*of_input((2, 3), ()), lambda make: sample(make(4), 0.2), lambda make: sample(make(4), torch.rand(4))),
    errors((lambda make: sample(make(3), 2.0), RuntimeError, "expects p to be in")),
    dtypes=REAL,
)
_fills(
    "exponential_",
    cases(*of_input((2, 3), (), (0, 3)), lambda make: sample(make(4), lambd=2.0)),
    errors((lambda make: sample(make(3), -1.0), RuntimeError, "lambda > 0")),
)
_fills(
    "random_",
    cases(
        lambda make: sample(make(4), 5), lambda make: sample(make(2, 3), 2, 7), lambda make: sample(make(3), 0, to=4)
    ),
    errors((lambda make: sample(make(3), 5, 5), RuntimeError, _empty_range)),
    dtypes=REAL,
    directives=(Directive("xfail", "Dynamo does not trace Tensor.random_", test="test_jit", executors=("torch",)),),
)


# dropout


def _drawn_otherwise(*tests: str) -> tuple[Directive, ...]:
    """Eager's fused kernel reads several numbers at once where they lie beside each other; it takes no complex ones."""
    return tuple(
        Directive(
            "xfail",
            "on a GPU eager's fused dropout draws other numbers than its decomposition",
            test=test,
            executors=("torch-prims",),
            devices=("cuda",),
            dtypes=FLOATS,
        )
        for test in tests
    )


_fused = _drawn_otherwise("test_consistency", "test_gradient", "test_strided[transposed]")
_shapes = ((20,), (3, 4), (), (0, 3), (2, 3, 4))
_bad_p = errors(
    (lambda make: sample(make(2, 3), 1.5), ValueError, "between 0 and 1"),
    (lambda make: sample(make(2, 3), -0.1), ValueError, "between 0 and 1"),
)
_functional = cases(
    *of_input(*_shapes, p=0.3, training=True),
    lambda make: sample(make(3, 4), 0.3, False),
    lambda make: sample(make(3, 4), 0.0, True),
    lambda make: sample(make(3, 4), 1.0, True),
    lambda make: sample(make(3, 4).t(), 0.5, True),
)
_register("nn.functional.dropout", F.dropout, _functional, _bad_p, gradient=True, directives=_fused)
_register("nn.functional.alpha_dropout", F.alpha_dropout, _functional, _bad_p, gradient=True)


def _dropped_in_place(x: torch.Tensor, p: float) -> torch.Tensor:
    """F.dropout(inplace=True) on a product, which may be changed."""
    return F.dropout(x * 2, p, True, True)


_register(
    "nn.functional.dropout.inplace",
    _dropped_in_place,
    cases(lambda make: sample(make(3, 4), 0.3), lambda make: sample(make(3, 4), 1.0)),
    _bad_p,
    symbols=("torch.dropout_",),
    gradient=True,
)
_bad_torch_p = errors((lambda make: sample(make(2, 3), 1.5, True), RuntimeError, "between 0 and 1|expects p"))
_positional = cases(
    *(lambda make, shape=shape: sample(make(*shape), 0.3, True) for shape in _shapes),
    lambda make: sample(make(4, 3).t(), 0.3, True),
    lambda make: sample(make(3, 4), 0.3, False),
    lambda make: sample(make(3, 4), 0.0, True),
    lambda make: sample(make(3, 4), 1.0, True),
)
_register("dropout", torch.dropout, _positional, _bad_torch_p, gradient=True, directives=_fused)
_register("alpha_dropout", torch.alpha_dropout, _positional, _bad_torch_p, gradient=True)
_register(
    "native_dropout",
    torch.native_dropout,
    cases(
        lambda make: sample(make(3, 4), 0.3, True),
        lambda make: sample(make(4, 3).t(), 0.3, True),
        lambda make: sample(make(3, 4), 0.3, False),
        lambda make: sample(make(3, 4), 1.0, True),
    ),
    errors((lambda make: sample(torch.ones(3), 1.5, True), RuntimeError, "between 0 and 1")),  # a GPU takes it
    gradient=True,
    directives=(*_fused, *_drawn_otherwise("test_half_gradient")),
)
_channels = cases(
    lambda make: sample(make(2, 8, 5), 0.5, True),
    lambda make: sample(make(2, 8), 0.5, True),
    lambda make: sample(make(2, 8, 5), 0.5, False),
    lambda make: sample(make(2, 8, 5), 0.0, True),
    lambda make: sample(make(2, 8, 5), 1.0, True),
    lambda make: sample(make(8, 2, 5).transpose(0, 1), 0.5, True),
)
_no_channels = errors((lambda make: sample(make(3), 0.5, True), RuntimeError, "at least 2 dim"))
for _name in ("feature_dropout", "feature_alpha_dropout"):
    _register(_name, getattr(torch, _name), _channels, _no_channels, gradient=True)
_register("nn.functional.feature_alpha_dropout", F.feature_alpha_dropout, _channels, _bad_p, gradient=True)
for _name, _rank in (("dropout1d", 3), ("dropout2d", 4), ("dropout3d", 5)):
    _shape = (2, 8, 3, 2, 2)[:_rank]
    _register(
        f"nn.functional.{_name}",
        getattr(F, _name),
        cases(
            lambda make, shape=_shape: sample(make(*shape)),
            lambda make, shape=_shape: sample(make(*shape), 0.3, True),
            lambda make, shape=_shape: sample(make(*shape), p=0.3, training=False),
            lambda make, shape=_shape: sample(make(*shape), 0.0),
        ),
        _bad_p,
        gradient=True,
    )
