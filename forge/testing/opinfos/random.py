"""OpInfos of the random family: under one seed, eager's bits and eager's state of the generator."""

from functools import partial

import torch
import torch.nn.functional as F

from forge.testing.opinfo import FLOATS, INTEGERS, REAL, Directive
from forge.testing.opinfos.creation import from_arguments
from forge.testing.table import DEVICE, DTYPE, Value, on_a_clone, op, sample, t, unary, wrong

_op = partial(op, gradient=False)


# tensors of random numbers

_sizes = from_arguments(sample(2, 3), sample((2, 3)), sample(()), sample(0, 2), sample(size=(20,)))
_negative = [wrong(2, -1, match="negative dimension")]
_op("rand randn", _sizes, _negative)
_no_tensor = [wrong([1.0], error=TypeError, match="must be Tensor")]
_likes = [*unary((2, 3), (), (0, 3)), sample(t(2, 3), dtype=torch.float64)]
_op("rand_like randn_like", _likes, _no_tensor)
_empty_range = "from=5 >= to=5"
_op(
    "randint",
    from_arguments(sample(5, (2, 3)), sample(2, 7, (4,)), sample(1, high=9, size=(3,)), sample(high=3, size=())),
    wrong(5, 5, (2,), match=_empty_range),
    wrong(2, 7, error=TypeError, match="must be tuple of ints"),  # torch's parser, before any trace
    dtypes=REAL,
)
_op(
    "randint_like",
    [sample(t(2, 3), 5), sample(t(4), 2, 7), sample(t(), high=3)],
    wrong(t(2), 5, 5, match=_empty_range),
    dtypes=REAL,
)
_op("randperm", from_arguments(sample(7), sample(0), sample(n=1)), wrong(-1, match="negative"), dtypes=INTEGERS)
_op(
    "normal",
    sample(t(2, 3), t(2, 3).abs()),
    sample(t(2, 3), 2.0),
    sample(1.0, t(3, 2).t().abs()),
    sample(0.0, 1.0, (2, 3), dtype=DTYPE, device=DEVICE),
    wrong(0.0, -1.0, (2,), match="std >= 0"),
    wrong(0.0, 1.0, error=TypeError, match="invalid combination"),  # torch's parser, before any trace
    gradient=True,
)
_op(
    "multinomial",
    sample(t(5).abs() + 1, 3),
    sample(t(2, 5).abs() + 1, 7, True),
    sample(t(2, 5).abs() + 1, num_samples=1, replacement=False),
    [wrong(t(3).abs(), 5, match="without replacement"), wrong(t(3).abs(), 0, match="cannot sample n_sample <= 0")],
)
_op(
    "bernoulli",
    [sample(t(2, 3).sigmoid()), sample(t(2, 3), 0.25), sample(t(), p=1)],
    wrong(t(3), p=2.0, match="expects p to be in"),
    gradient=True,
)


# methods that fill a tensor

_fill = partial(op, wrap=on_a_clone)
_fill(
    "Tensor.uniform_",
    unary((2, 3), (), (0, 3)),
    [sample(t(4), -1, 1), sample(t(4), to=3)],
    wrong(t(3), 2, 1, match="from=2 > to=1"),
)
_fill(
    "Tensor.normal_",
    unary((2, 3), (), (0, 3)),
    [sample(t(20), 1, 2), sample(t(4), std=3)],
    wrong(t(3), 0, -1, match="std >= 0"),
)
_fill(
    "Tensor.bernoulli_",
    unary((2, 3), ()),
    [sample(t(4), 0.2), sample(t(4), Value(lambda target: torch.rand(4)))],
    wrong(t(3), 2.0, match="expects p to be in"),
    dtypes=REAL,
)
_fill("Tensor.exponential_", unary((2, 3), (), (0, 3)), sample(t(4), lambd=2.0), wrong(t(3), -1.0, match="lambda > 0"))
_fill(
    "Tensor.random_",
    [sample(t(4), 5), sample(t(2, 3), 2, 7), sample(t(3), 0, to=4)],
    wrong(t(3), 5, 5, match=_empty_range),
    dtypes=REAL,
    directives=(Directive("xfail", "Dynamo does not trace Tensor.random_", test="test_jit", executors=("torch",)),),
)


# dropout


def _other_numbers(*tests: str) -> tuple[Directive, ...]:
    """Return failures: eager's fused kernel reads several numbers at once where they lie beside each other.

    It takes no complex ones."""
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


_fused = _other_numbers("test_consistency", "test_gradient", "test_strided[transposed]")
_shapes = ((20,), (3, 4), (), (0, 3), (2, 3, 4))
_bad_p = [
    wrong(t(2, 3), 1.5, error=ValueError, match="between 0 and 1"),
    wrong(t(2, 3), -0.1, error=ValueError, match="between 0 and 1"),
]
_functional = [
    *unary(*_shapes, p=0.3, training=True),
    sample(t(3, 4), 0.3, False),
    sample(t(3, 4), 0.0, True),
    sample(t(3, 4), 1.0, True),
    sample(t(3, 4).t(), 0.5, True),
]
_op("nn.functional.dropout", _functional, _bad_p, gradient=True, directives=_fused)
_op("nn.functional.alpha_dropout", _functional, _bad_p, gradient=True)


def _dropout_in_place(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return F.dropout(inplace=True) of a product, which may be changed."""
    return F.dropout(x * 2, p, True, True)


_op(
    "nn.functional.dropout.inplace",
    [sample(t(3, 4), 0.3), sample(t(3, 4), 1.0)],
    _bad_p,
    symbols=("torch.dropout_",),
    gradient=True,
    op=_dropout_in_place,
)
_bad_torch_p = [wrong(t(2, 3), 1.5, True, match="between 0 and 1|expects p")]
_positional = [
    *(sample(t(*shape), 0.3, True) for shape in _shapes),
    sample(t(4, 3).t(), 0.3, True),
    sample(t(3, 4), 0.3, False),
    sample(t(3, 4), 0.0, True),
    sample(t(3, 4), 1.0, True),
]
_op("dropout", _positional, _bad_torch_p, gradient=True, directives=_fused)
_op("alpha_dropout", _positional, _bad_torch_p, gradient=True)
_op(
    "native_dropout",
    sample(t(3, 4), 0.3, True),
    sample(t(4, 3).t(), 0.3, True),
    sample(t(3, 4), 0.3, False),
    sample(t(3, 4), 1.0, True),
    wrong(torch.ones(3), 1.5, True, match="between 0 and 1"),  # a GPU takes it
    gradient=True,
    directives=(*_fused, *_other_numbers("test_half_gradient")),
)
_channels = [
    sample(t(2, 8, 5), 0.5, True),
    sample(t(2, 8), 0.5, True),
    sample(t(2, 8, 5), 0.5, False),
    sample(t(2, 8, 5), 0.0, True),
    sample(t(2, 8, 5), 1.0, True),
    sample(t(8, 2, 5).transpose(0, 1), 0.5, True),
]
_no_channels = [wrong(t(3), 0.5, True, match="at least 2 dim")]
_op("feature_dropout feature_alpha_dropout", _channels, _no_channels, gradient=True)
_op("nn.functional.feature_alpha_dropout", _channels, _bad_p, gradient=True)
for _name, _rank in (("dropout1d", 3), ("dropout2d", 4), ("dropout3d", 5)):
    _shape = (2, 8, 3, 2, 2)[:_rank]
    _op(
        f"nn.functional.{_name}",
        sample(t(*_shape)),
        sample(t(*_shape), 0.3, True),
        sample(t(*_shape), p=0.3, training=False),
        sample(t(*_shape), 0.0),
        _bad_p,
        gradient=True,
    )
