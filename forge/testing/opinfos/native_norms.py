"""OpInfos of the operators behind the normalizations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from forge.testing.opinfo import Directive
from forge.testing.table import op, sample, t, tolerance, wrong
from forge.torch_internals.functions import torch_native_batch_norm_legit

aten = torch.ops.aten
NUMBERS = (bool, float)

_ROUNDED = tolerance(
    "the decomposition computes in float32 what torch's kernels for a CPU round to half precision in between",
    executors=None,
)

_op = partial(op, directives=(_ROUNDED,))


_op(
    "native_layer_norm",
    sample(t(2, 3, 4), (4,), t(4), t(4), 1e-5),
    sample(t(2, 3, 4), (3, 4), None, None, 1e-3),
    sample(t(4, 3, 2).transpose(0, -1), [4], weight=t(4), bias=None, eps=1e-5),
    wrong(t(2, 3), (4,), None, None, 1e-5, match="Given normalized_shape"),
)

_op(
    "native_group_norm",
    sample(t(2, 6, 5), t(6), t(6), 2, 6, 5, 3, 1e-5),
    sample(t(2, 6, 5, 4), None, None, 2, 6, 20, 2, 1e-3),
    sample(t(2, 6), t(6), None, N=2, C=6, HxW=1, group=1, eps=1e-5),
    wrong(t(2, 6, 5), None, None, 2, 6, 4, 3, 1e-5, match="to have|expected|Expected"),
    wrong(t(2, 6, 5), None, None, 2, 6, 5, 4, 1e-5, match="divisible by"),
)


def _with_updated_statistics(op: Callable) -> Callable:
    """Return op on clones of the running statistics, which it returns, too."""

    def run(*args: Any, **kwargs: Any) -> tuple:
        args = tuple(arg.clone() if i in (3, 4) and not isinstance(arg, NUMBERS) else arg for i, arg in enumerate(args))
        return *op(*args, **kwargs), *(arg for arg in args[3:5] if not isinstance(arg, NUMBERS))

    run.__name__ = getattr(op, "__name__", "run")
    return run


_running = (t(3), t(3, low=0.5, high=2))
_parameters = (t(3), t(3))
_x = t(4, 3, 5)
_mistakes = (
    wrong(_x, t(4), None, *_running, True, 0.1, 1e-5, match="should contain", stricter="torch reads beyond the weight"),
)
_samples = (
    sample(_x, *_parameters, *_running, True, 0.1, 1e-5),
    sample(_x, *_parameters, *_running, False, 0.1, 1e-5),
    sample(t(4, 3), None, None, *_running, True, 0.5, 1e-3),
    sample(t(4, 3, 2, 2), t(3), None, *_running, False, 0.5, 1e-3),
)
_op("native_batch_norm", _samples, _mistakes, wrap=_with_updated_statistics)
_op(
    "_native_batch_norm_legit",
    _samples,
    [sample(_x, *_parameters, True, 0.1, 1e-5), sample(_x, None, None, training=True, momentum=0.1, eps=1e-5)],
    _mistakes,
    op=_with_updated_statistics(torch_native_batch_norm_legit),
)
_op(
    "aten._native_batch_norm_legit.no_stats",
    sample(_x, *_parameters, True, 0.1, 1e-5),
    wrong(_x, t(4), None, True, 0.1, 1e-5, match="should contain", stricter="torch reads beyond the weight"),
)
_op(
    "_batch_norm_with_update",
    [sample(_x, *_parameters, *_running, 0.1, 1e-5), sample(t(4, 3), *_parameters, *_running, 0.5, 1e-3)],
    wrong(_x, t(4), None, *_running, 0.1, 1e-5, match="should contain", stricter="torch reads beyond the weight"),
    symbols=("torch.ops.aten._batch_norm_with_update.default",),
    directives=(
        _ROUNDED,
        Directive("skip", "on a GPU it is an opaque call: what cuDNN keeps is not known", devices=("cuda",)),
    ),
    op=_with_updated_statistics(aten._batch_norm_with_update.default),
)
