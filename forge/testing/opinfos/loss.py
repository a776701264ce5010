"""OpInfos of the loss family."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import Directive, ErrorSample, OpInfo, Sample, register_opinfo, sample
from forge.testing.opinfos.specs import Spec, calls, classes, errors, given, t, wrong

REDUCTIONS = ("none", "mean", "sum")
_ROUNDED = Directive(
    "tolerance",
    "the decomposition rounds to half precision at other places than torch's kernels do",
    executors=("torch-prims",),
    dtypes=(torch.bfloat16, torch.float16),
    tolerance=(3e-2, 1e-1),
)


def _reduced(call: Sample, reductions: Sequence[str] = REDUCTIONS) -> list[Sample]:
    """The call with each reduction."""
    return [Sample(call.args, {**call.kwargs, "reduction": reduction}) for reduction in reductions]


def _register(name: str, samples: Sequence[Sample], mistakes: Sequence[ErrorSample], **known: Any) -> None:
    op: Callable = known.pop("op", None) or getattr(F, name)
    wanted = [each for call in samples for each in _reduced(call)]
    known.setdefault("directives", (_ROUNDED,))
    register_opinfo(OpInfo(f"nn.functional.{name}", op, calls(*wanted), errors(*mistakes), **known))


def _unknown(*args: Any, **kwargs: Any) -> ErrorSample:
    return wrong(*args, **kwargs, reduction="half", error=ValueError, match="not a valid value for reduction")


# classes

_IGNORED = given(0, -100, 2, 1, dtype=torch.int64)
_WEIGHTS = Spec((5,), values=[0.5, 1.0, 2.0, 0.25, 1.5])


def _fixed_weight(op: Callable) -> Callable:
    """op with its weight detached: torch has no gradient for it."""

    def run(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, **options: Any) -> Any:
        return op(input, target, None if weight is None else weight.detach(), **options)

    run.__name__ = op.__name__
    return run


_CLASSES = (
    sample(t(4, 5), classes(4, count=5)),
    sample(t(4, 5), _IGNORED),
    sample(t(4, 5), classes(4, count=5), _WEIGHTS),
    sample(t(4, 5), given(0, 3, 2, 1, dtype=torch.int64), _WEIGHTS, ignore_index=2),
    sample(t(5), classes(count=5)),
    sample(t(2, 5, 3), classes(2, 3, count=5)),
    sample(t(2, 5, 3, 4), classes(2, 3, 4, count=5), _WEIGHTS),
    sample(t(2, 5, 3, 2, 2), classes(2, 3, 2, 2, count=5)),
)
_CLASS_ERRORS = (
    wrong(t(4, 5), classes(3, count=5), error=ValueError, match="match target batch_size"),
    wrong(t(4, 5, 2), classes(4, 3, count=5), match="Expected target size"),
    wrong(t(4, 5), classes(4, count=5), t(4), match="weight tensor should be defined"),
    _unknown(t(4, 5), classes(4, count=5)),
)
_register(
    "nll_loss",
    _CLASSES,
    _CLASS_ERRORS,
    op=_fixed_weight(F.nll_loss),
    symbols=("torch.nn.functional.nll_loss",),
)
_register(
    "cross_entropy",
    (
        *_CLASSES,
        sample(t(4, 5), _IGNORED, label_smoothing=0.2),
        sample(t(4, 5), given(0, 3, 2, 1, dtype=torch.int64), _WEIGHTS, ignore_index=2, label_smoothing=0.2),
        sample(t(2, 5, 3), t(2, 5, 3, low=0, high=1)),
        sample(t(2, 5), t(2, 5, low=0, high=1), _WEIGHTS, label_smoothing=0.1),
        sample(t(5), t(5, low=0, high=1)),
    ),
    (
        *_CLASS_ERRORS,
        wrong(t(4, 5), classes(4, count=5), label_smoothing=2.0, match="between 0.0 and 1.0"),
    ),
    op=_fixed_weight(F.cross_entropy),
    symbols=("torch.nn.functional.cross_entropy",),
)


# distances

_PAIRS = (sample(t(3, 4), t(3, 4)), sample(t(3, 4), t(4)), sample(t(), t()), sample(t(0, 3), t(0, 3)))
_PAIR_ERRORS = (wrong(t(3), t(4), match="do not broadcast"), _unknown(t(3), t(3)))
_register("mse_loss", (*_PAIRS, sample(t(3, 4), t(3, 4), weight=t(3, 4, low=0.1, high=2))), _PAIR_ERRORS)
_register("l1_loss", _PAIRS, _PAIR_ERRORS)
_register(
    "smooth_l1_loss",
    (*_PAIRS, sample(t(3, 4), t(3, 4), beta=0.3), sample(t(3, 4), t(3, 4), beta=0.0)),
    (*_PAIR_ERRORS, wrong(t(3), t(3), beta=-1.0, match="negative values")),
)
_register(
    "huber_loss",
    (*_PAIRS, sample(t(3, 4), t(3, 4), delta=0.3), sample(t(3, 4), t(3, 4), weight=t(3, 4, low=0.1, high=2))),
    (*_PAIR_ERRORS, wrong(t(3), t(3), delta=-1.0, match="non-positive values")),
)


# probabilities


def _fixed_options(op: Callable, *names: str) -> Callable:
    """op with these options detached: torch has no gradient for them."""

    def run(input: torch.Tensor, target: torch.Tensor, **options: Any) -> Any:
        return op(input, target, **{key: v.detach() if key in names else v for key, v in options.items()})

    run.__name__ = op.__name__
    return run


_FOUR = Spec((4,), values=[0.5, 1.0, 2.0, 0.25])
_register(
    "binary_cross_entropy",
    (sample(t(3, 4), t(3, 4)), sample(t(3, 4), t(3, 4), weight=_FOUR)),
    (wrong(t(3), t(4), error=ValueError, match="must be the same as input size"),),
    op=_fixed_options(F.binary_cross_entropy, "weight"),
    symbols=("torch.nn.functional.binary_cross_entropy",),
    domain=(0.1, 0.9),
)
_register(
    "binary_cross_entropy_with_logits",
    (sample(t(3, 4), t(3, 4, low=0, high=1)), sample(t(3, 4), t(3, 4, low=0, high=1), weight=_FOUR, pos_weight=_FOUR)),
    (wrong(t(3), t(4), error=ValueError, match="must be the same as input size"),),
    op=_fixed_options(F.binary_cross_entropy_with_logits, "weight", "pos_weight"),
    symbols=("torch.nn.functional.binary_cross_entropy_with_logits",),
)
register_opinfo(
    OpInfo(
        "nn.functional.kl_div",
        F.kl_div,
        calls(
            *_reduced(sample(t(3, 4), t(3, 4, low=0.1, high=1)), (*REDUCTIONS, "batchmean")),
            *_reduced(sample(t(3, 4), t(3, 4), log_target=True), (*REDUCTIONS, "batchmean")),
        ),
        errors(_unknown(t(3), t(3))),
        directives=(_ROUNDED,),
    )
)
_register(
    "poisson_nll_loss",
    (
        sample(t(3, 4), t(3, 4)),
        sample(t(3, 4), t(3, 4, low=0, high=4), False),
        sample(t(3, 4), t(3, 4, low=0.5, high=4), full=True),
    ),
    (_unknown(t(3), t(3)),),
    domain=(0.1, 2.0),
)
_register(
    "gaussian_nll_loss",
    (sample(t(3, 4), t(3, 4), t(3, 4)), sample(t(3, 4), t(3, 4), t(3, 1), full=True), sample(t(3, 4), t(3, 4), t(3))),
    (
        wrong(t(3, 4), t(3, 4), t(2), error=ValueError, match="incorrect size"),
        _unknown(t(3), t(3), t(3, low=0.1, high=1)),
    ),
    domain=(0.1, 3.0),
)


# margins

_SIGNS = Spec((3,), values=[1.0, -1.0, 1.0])


def _last_fixed(op: Callable) -> Callable:
    """op with its last argument, the target, detached."""

    def run(*args: Any, **options: Any) -> Any:
        return op(*args[:-1], args[-1].detach(), **options)

    run.__name__ = op.__name__
    return run


_register(
    "hinge_embedding_loss",
    (sample(t(3), _SIGNS), sample(t(3), _SIGNS, margin=0.5)),
    (_unknown(t(3), t(3)),),
    op=_last_fixed(F.hinge_embedding_loss),
    symbols=("torch.nn.functional.hinge_embedding_loss",),
)
_register(
    "cosine_embedding_loss",
    (
        sample(t(3, 4), t(3, 4), _SIGNS),
        sample(t(3, 4), t(3, 4), _SIGNS, margin=0.1),
        sample(t(4), t(4), Spec((), values=-1.0)),
    ),
    (wrong(t(3), t(3), t(3), match="expects 2D input"),),
    op=_last_fixed(F.cosine_embedding_loss),
    symbols=("torch.nn.functional.cosine_embedding_loss",),
)
_register(
    "margin_ranking_loss",
    (sample(t(3), t(3), _SIGNS), sample(t(3), t(3), _SIGNS, margin=0.5)),
    (wrong(t(3), t(3), t(3, 3), match="same dimension"),),
    op=_last_fixed(F.margin_ranking_loss),
    symbols=("torch.nn.functional.margin_ranking_loss",),
)
_register(
    "triplet_margin_loss",
    (
        sample(t(3, 4), t(3, 4), t(3, 4)),
        sample(t(3, 4), t(3, 4), t(3, 4), 0.5, 1.0, swap=True),
        sample(t(4), t(4), t(4)),
    ),
    (
        wrong(t(3), t(3, 3), t(3), match="same number of dimensions"),
        wrong(t(3), t(3), t(3), margin=-1.0, error=ValueError, match="greater than 0"),
    ),
)
_register(
    "soft_margin_loss",
    (sample(t(3), _SIGNS),),
    (_unknown(t(3), t(3)),),
    op=_last_fixed(F.soft_margin_loss),
    symbols=("torch.nn.functional.soft_margin_loss",),
)
_register(
    "multilabel_soft_margin_loss",
    (sample(t(3, 4), t(3, 4, low=0, high=1)), sample(t(3, 4), t(3, 4, low=0, high=1), t(4))),
    (wrong(t(3), t(4), match="do not broadcast"),),
)
