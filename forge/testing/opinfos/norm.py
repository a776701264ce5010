"""OpInfos of the norm family."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.table import Value, detach_args, op, sample, t, tolerance, values, wrong
from forge.torch_internals.functions import torch_weight_norm

_HALF = (torch.bfloat16, torch.float16)
_ROUNDED = tolerance(
    "torch's kernel rounds intermediate values to half precision, the decomposition computes them in float32",
    2e-2,
    5e-2,
)

_op = partial(op, directives=(_ROUNDED,))


_LAST = (
    sample(t(2, 3, 4), (4,)),
    sample(t(2, 3, 4), (4,), t(4)),
    sample(t(4, 3, 2).transpose(0, -1), [3, 4], t(3, 4)),
    sample(t(0, 4), (4,), t(4)),
    sample(t(4), (4,), t(4)),
)
_LAST_ERRORS = (
    wrong(t(2, 3), (4,), match="Given normalized_shape"),
    wrong(t(2, 3), (), match="at least 1-dimensional"),
    wrong(t(2, 3), (3,), t(2), match="same shape as normalized_shape"),
)
_BOTH = (sample(t(2, 3, 4), (4,), t(4), t(4), 1e-2), sample(t(2, 3, 4), (3, 4), None, t(3, 4)))
_op("nn.functional.layer_norm", _LAST, _BOTH, _LAST_ERRORS)
_op("layer_norm", _LAST[:2], _BOTH, _LAST_ERRORS)
_op(
    "nn.functional.rms_norm",
    _LAST,
    [sample(t(2, 3, 4), (4,), t(4), 1e-5), sample(t(2, 3, 4), (3, 4), t(3, 4), 1e-2)],
    _LAST_ERRORS,
)
_op("rms_norm", _LAST[:2], _LAST_ERRORS)

_GROUPS = (
    sample(t(2, 6, 4, 5), 3, t(6), t(6)),
    sample(t(2, 6), 2),
    sample(t(6, 4, 2).transpose(0, -1), 2, t(4)),
    sample(t(2, 6, 3), 6, t(6), t(6), 1e-2),
    sample(t(2, 6, 2, 3, 2), 1, t(6), t(6)),
)
_GROUP_ERRORS = (
    wrong(t(2, 3), 2, match="divisible by num_groups"),
    wrong(t(2, 4), 2, t(3), match="Expected weight to be a vector"),
    wrong(t(2), 1, match="at least 2 dimensions"),
)
_op("nn.functional.group_norm", _GROUPS, _GROUP_ERRORS)
_op("group_norm", _GROUPS[:2], _GROUP_ERRORS[:2])


# running statistics: a variance is positive, and neither needs a gradient


def _statistics(channels: int) -> tuple[Value, Value]:
    steps = [0.5 * i + 0.25 for i in range(channels)]
    return values(steps[::-1]), values(steps)


_BATCH_ERRORS = (
    wrong(t(2, 3), None, None, match="to be defined"),
    wrong(t(2, 3), *_statistics(2), match="should contain 3 elements"),
    wrong(t(1, 3), None, None, training=True, error=ValueError, match="more than 1 value per channel"),
)
_op(
    "nn.functional.batch_norm",
    sample(t(4, 3, 5), *_statistics(3)),
    sample(t(4, 3), *_statistics(3), t(3), t(3), False, 0.1, 1e-2),
    sample(t(5, 3, 4, 2).transpose(0, -1), *_statistics(3), t(3), None),
    sample(t(2, 3, 2, 3, 2), *_statistics(3), t(3), t(3)),
    sample(t(0, 3, 5), *_statistics(3), t(3), t(3)),
    _BATCH_ERRORS[:2],
    wrap=detach_args(1, 2),
)
_op(
    "nn.functional.batch_norm.train",
    sample(t(4, 3, 5), None, None, training=True),
    sample(t(4, 3), None, None, t(3), t(3), True),
    sample(t(2, 3, 4, 5), None, None, t(3), None, True, 0.1, 1e-2),
    sample(t(0, 3), None, None, t(3), t(3), True),
    sample(t(2, 3, 0), None, None, training=True),
    _BATCH_ERRORS,
    wrap=detach_args(),
    symbols=(),
)


def _moves(op: Callable, *places: int) -> Callable:
    """Return a function of (out, moved statistics): op writes into clones of its arguments at `places`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = [arg.detach().clone() if i in places else arg for i, arg in enumerate(args)]
        return op(*inputs, **kwargs), *[inputs[i] for i in places]

    run.__name__ = op.__name__
    return run


_op(
    "nn.functional.batch_norm.statistics",
    sample(t(4, 3, 5), *_statistics(3), t(3), t(3), True),
    sample(t(4, 3), *_statistics(3), training=True, momentum=0.3),
    sample(t(0, 3, 5), *_statistics(3), t(3), t(3), True),
    wrong(t(2, 3), *_statistics(2), training=True, match="should contain 3 elements"),
    dtypes=(torch.float32, torch.float64),
    directives=(),
    op=_moves(F.batch_norm, 1, 2),
    symbols=(),
)
_op(
    "batch_norm",
    sample(t(4, 3, 5), t(3), t(3), *_statistics(3), False, 0.1, 1e-5, True),
    sample(t(4, 3, 5), t(3), t(3), None, None, True, 0.1, 1e-5, True),
    wrong(t(4, 3), t(2), None, None, None, True, 0.1, 1e-5, True, match="should contain 3 elements"),
    wrap=detach_args(3, 4),
)
_op(
    "nn.functional.instance_norm",
    [sample(t(2, 3, 4, 5)), sample(t(2, 3, 5), None, None, t(3), t(3)), sample(t(2, 3, 2, 3, 2), eps=1e-2)],
    wrong(t(2, 3, 1), error=ValueError, match="more than 1 spatial element"),
)
_op(
    "nn.functional.instance_norm.statistics",
    [sample(t(2, 3, 4, 5), *_statistics(3), t(3), t(3)), sample(t(2, 3, 4, 5), *_statistics(3), use_input_stats=False)],
    wrong(t(2, 3, 1), *_statistics(3), error=ValueError, match="more than 1 spatial element"),
    dtypes=(torch.float32, torch.float64),
    directives=(),
    op=_moves(F.instance_norm, 1, 2),
    symbols=(),
)
_op(
    "instance_norm",
    sample(t(2, 3, 5), t(3), t(3), None, None, True, 0.1, 1e-5, True),
    wrong(t(2, 3, 5), t(2), None, None, None, True, 0.1, 1e-5, True, match="should contain|one for each channel"),
)


# others

_op(
    "nn.functional.normalize",
    [sample(t(3, 4)), sample(t(3, 4, 2), 3.0, -1), sample(t(5), dim=0), sample(t(2, 3, 4), 1.0, (0, 2), eps=50.0)],
    wrong(t(3), error=IndexError, match="out of range"),
)
_op(
    "nn.functional.local_response_norm",
    [sample(t(2, 6, 4, 5), 3), sample(t(2, 6, 4), 2, 0.1, 0.5, 2.0), sample(t(0, 6, 4), 2), sample(t(2, 6, 0), 2)],
    wrong(t(2, 3), 2, error=ValueError, match="3D or higher"),
)
_op(
    "_weight_norm",
    sample(t(3, 4, 5), t(3, 1, 1), 0),
    sample(t(3, 4, 5), t(1, 4, 1), 1),
    sample(t(3, 4), t(1, 4), 1),
    sample(t(3, 4), t(), -1),
    wrong(t(3, 4), t(3, 1), 2, error=IndexError, match="out of range"),
    op=torch_weight_norm,
)
