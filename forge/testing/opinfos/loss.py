"""OpInfos of the loss family."""

from collections.abc import Sequence
from typing import Any

from forge.testing.opinfo import ErrorSample, Sample
from forge.testing.table import detach_args, flat, index, ints, op, sample, t, tolerance, values, wrong

REDUCTIONS = ("none", "mean", "sum")
_ROUNDED = tolerance("the decomposition rounds to half precision at other places than torch's kernels do", 3e-2, 1e-1)


def _reductions_of(call: Sample, reductions: Sequence[str] = REDUCTIONS) -> list[Sample]:
    """Return the call with each reduction."""
    return [Sample(call.args, {**call.kwargs, "reduction": reduction}) for reduction in reductions]


def _op(name: str, *rows: Any, **options: Any) -> None:
    """Register a loss, with every row in each reduction."""
    reduced = [_reductions_of(row) if isinstance(row, Sample) else row for row in flat(rows)]
    op(f"nn.functional.{name}", *reduced, **{"directives": (_ROUNDED,), **options})


def _unknown(*args: Any, **kwargs: Any) -> ErrorSample:
    return wrong(*args, **kwargs, reduction="half", error=ValueError, match="not a valid value for reduction")


# classes

_IGNORED = ints(0, -100, 2, 1)
_WEIGHTS = values([0.5, 1.0, 2.0, 0.25, 1.5])


_FIXED_WEIGHT = detach_args(2, "weight")  # torch has no gradient for it
_CLASSES = (
    sample(t(4, 5), index(4, high=5)),
    sample(t(4, 5), _IGNORED),
    sample(t(4, 5), index(4, high=5), _WEIGHTS),
    sample(t(4, 5), ints(0, 3, 2, 1), _WEIGHTS, ignore_index=2),
    sample(t(5), index(high=5)),
    sample(t(2, 5, 3), index(2, 3, high=5)),
    sample(t(2, 5, 3, 4), index(2, 3, 4, high=5), _WEIGHTS),
    sample(t(2, 5, 3, 2, 2), index(2, 3, 2, 2, high=5)),
)
_CLASS_ERRORS = (
    wrong(t(4, 5), index(3, high=5), error=ValueError, match="match target batch_size"),
    wrong(t(4, 5, 2), index(4, 3, high=5), match="Expected target size"),
    wrong(t(4, 5), index(4, high=5), t(4), match="weight tensor should be defined"),
    _unknown(t(4, 5), index(4, high=5)),
)
_op("nll_loss", _CLASSES, _CLASS_ERRORS, wrap=_FIXED_WEIGHT)
_op(
    "cross_entropy",
    _CLASSES,
    sample(t(4, 5), _IGNORED, label_smoothing=0.2),
    sample(t(4, 5), ints(0, 3, 2, 1), _WEIGHTS, ignore_index=2, label_smoothing=0.2),
    sample(t(2, 5, 3), t(2, 5, 3, low=0, high=1)),
    sample(t(2, 5), t(2, 5, low=0, high=1), _WEIGHTS, label_smoothing=0.1),
    sample(t(5), t(5, low=0, high=1)),
    _CLASS_ERRORS,
    wrong(t(4, 5), index(4, high=5), label_smoothing=2.0, match="between 0.0 and 1.0"),
    wrap=_FIXED_WEIGHT,
    symbols=("torch.nn.functional.cross_entropy",),
)


# distances

_PAIRS = (sample(t(3, 4), t(3, 4)), sample(t(3, 4), t(4)), sample(t(), t()), sample(t(0, 3), t(0, 3)))
_PAIR_ERRORS = (wrong(t(3), t(4), match="do not broadcast"), _unknown(t(3), t(3)))
_op("mse_loss", _PAIRS, sample(t(3, 4), t(3, 4), weight=t(3, 4, low=0.1, high=2)), _PAIR_ERRORS)
_op("l1_loss", _PAIRS, _PAIR_ERRORS)
_op(
    "smooth_l1_loss",
    _PAIRS,
    [sample(t(3, 4), t(3, 4), beta=0.3), sample(t(3, 4), t(3, 4), beta=0.0)],
    _PAIR_ERRORS,
    wrong(t(3), t(3), beta=-1.0, match="negative values"),
)
_op(
    "huber_loss",
    _PAIRS,
    [sample(t(3, 4), t(3, 4), delta=0.3), sample(t(3, 4), t(3, 4), weight=t(3, 4, low=0.1, high=2))],
    _PAIR_ERRORS,
    wrong(t(3), t(3), delta=-1.0, match="non-positive values"),
)


# probabilities


_FOUR = values([0.5, 1.0, 2.0, 0.25])
_op(
    "binary_cross_entropy",
    [sample(t(3, 4), t(3, 4)), sample(t(3, 4), t(3, 4), weight=_FOUR)],
    wrong(t(3), t(4), error=ValueError, match="must be the same as input size"),
    wrap=detach_args("weight"),
    symbols=("torch.nn.functional.binary_cross_entropy",),
    domain=(0.1, 0.9),
)
_op(
    "binary_cross_entropy_with_logits",
    [sample(t(3, 4), t(3, 4, low=0, high=1)), sample(t(3, 4), t(3, 4, low=0, high=1), weight=_FOUR, pos_weight=_FOUR)],
    wrong(t(3), t(4), error=ValueError, match="must be the same as input size"),
    wrap=detach_args("weight", "pos_weight"),
    symbols=("torch.nn.functional.binary_cross_entropy_with_logits",),
)
op(
    "nn.functional.kl_div",
    _reductions_of(sample(t(3, 4), t(3, 4, low=0.1, high=1)), (*REDUCTIONS, "batchmean")),
    _reductions_of(sample(t(3, 4), t(3, 4), log_target=True), (*REDUCTIONS, "batchmean")),
    _unknown(t(3), t(3)),
    directives=(_ROUNDED,),
)
_op(
    "poisson_nll_loss",
    sample(t(3, 4), t(3, 4)),
    sample(t(3, 4), t(3, 4, low=0, high=4), False),
    sample(t(3, 4), t(3, 4, low=0.5, high=4), full=True),
    _unknown(t(3), t(3)),
    domain=(0.1, 2.0),
)
_op(
    "gaussian_nll_loss",
    [sample(t(3, 4), t(3, 4), t(3, 4)), sample(t(3, 4), t(3, 4), t(3, 1), full=True), sample(t(3, 4), t(3, 4), t(3))],
    wrong(t(3, 4), t(3, 4), t(2), error=ValueError, match="incorrect size"),
    _unknown(t(3), t(3), t(3, low=0.1, high=1)),
    domain=(0.1, 3.0),
)


# margins

_SIGNS = values([1.0, -1.0, 1.0])


_FIXED_TARGET = detach_args(-1)
_op(
    "hinge_embedding_loss",
    [sample(t(3), _SIGNS), sample(t(3), _SIGNS, margin=0.5)],
    _unknown(t(3), t(3)),
    wrap=_FIXED_TARGET,
    symbols=("torch.nn.functional.hinge_embedding_loss",),
)
_op(
    "cosine_embedding_loss",
    [sample(t(3, 4), t(3, 4), _SIGNS), sample(t(3, 4), t(3, 4), _SIGNS, margin=0.1), sample(t(4), t(4), values(-1.0))],
    wrong(t(3), t(3), t(3), match="expects 2D input"),
    wrap=_FIXED_TARGET,
    symbols=("torch.nn.functional.cosine_embedding_loss",),
)
_op(
    "margin_ranking_loss",
    [sample(t(3), t(3), _SIGNS), sample(t(3), t(3), _SIGNS, margin=0.5)],
    wrong(t(3), t(3), t(3, 3), match="same dimension"),
    wrap=_FIXED_TARGET,
    symbols=("torch.nn.functional.margin_ranking_loss",),
)
_op(
    "triplet_margin_loss",
    sample(t(3, 4), t(3, 4), t(3, 4)),
    sample(t(3, 4), t(3, 4), t(3, 4), 0.5, 1.0, swap=True),
    sample(t(4), t(4), t(4)),
    wrong(t(3), t(3, 3), t(3), match="same number of dimensions"),
    wrong(t(3), t(3), t(3), margin=-1.0, error=ValueError, match="greater than 0"),
)
_op(
    "soft_margin_loss",
    sample(t(3), _SIGNS),
    _unknown(t(3), t(3)),
    wrap=_FIXED_TARGET,
    symbols=("torch.nn.functional.soft_margin_loss",),
)
_op(
    "multilabel_soft_margin_loss",
    [sample(t(3, 4), t(3, 4, low=0, high=1)), sample(t(3, 4), t(3, 4, low=0, high=1), t(4))],
    wrong(t(3), t(4), match="do not broadcast"),
)
