"""The losses of torch.nn.functional. The deprecated size_average and reduce are not supported: a call with them is
opaque.

The file is long because the losses share reductions, weights and checks.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Symbol, TensorProxy, check, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import same, same_shape, statically_true, torch_check
from forge.torchlang.core import torchsymbol
from forge.torchlang.limits import clamp_min
from forge.torchlang.nn.activation import logsigmoid
from forge.torchlang.nn.softmax import log_softmax
from forge.torchlang.special import logit, xlogy
from forge.torchlang.vector_norms import pairwise_distance

Optional = TensorProxy | None


def loss_symbol(function: Callable) -> Callable[[Callable], Symbol]:
    """Return torchsymbol for a loss without torch's deprecated arguments, which raise NotImplementedError."""
    order = list(inspect.signature(function).parameters)

    def decorate(body: Callable) -> Symbol:
        own = inspect.signature(body).parameters
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        deprecated = [inspect.Parameter(name, kind, default=None) for name in ("size_average", "reduce")]
        parameters = sorted((*own.values(), *deprecated), key=lambda each: (order + list(own)).index(each.name))
        signature = inspect.Signature(parameters)

        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> TensorProxy:
            arguments = signature.bind(*args, **kwargs).arguments
            check(
                arguments.pop("size_average", None) is None and arguments.pop("reduce", None) is None,
                lambda: (
                    f"{body.__name__}: size_average and reduce are deprecated; use reduction='none', 'mean' or 'sum'"
                ),
                NotImplementedError,
            )
            return body(**arguments)

        run.__signature__ = signature  # type: ignore[attr-defined]  # functions have it where they are given it
        return torchsymbol(function)(run)

    return decorate


def reduce_loss(loss: TensorProxy, reduction: str) -> TensorProxy:
    """Return the loss, its mean or its sum. Raises ValueError for another reduction."""
    check(
        reduction in ("none", "mean", "sum"),
        lambda: f"{reduction} is not a valid value for reduction; it must be 'none', 'mean' or 'sum'",
    )
    if reduction == "none":
        return loss
    return clang.mean(loss) if reduction == "mean" else clang.sum(loss)


def spread(slope: TensorProxy, g: TensorProxy, weight: TensorProxy | None, reduction: str) -> TensorProxy:
    """Return each element's gradient of a weighted and reduced loss, rounded in torch's order of operations."""
    gradient = slope * g
    gradient = gradient if weight is None else gradient * weight
    return gradient / slope.numel() if reduction == "mean" else gradient


# distances


def _pair(op: str, input: TensorProxy, target: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    return clang.prepare(op, input, target)


def _weight(op: str, loss: TensorProxy, weight: Optional, input: TensorProxy, reduction: str) -> TensorProxy:
    """Return the loss, weighted; its mean is over the sum of the weights."""
    if weight is None:
        return reduce_loss(loss, reduction)
    check(
        same_shape(weight.shape, input.shape),
        lambda: f"{op}: Weights and input must have the same size, but they are {weight} and {input}",
    )
    total = reduce_loss(loss * weight, "sum" if reduction == "mean" else reduction)
    return total / clang.sum(weight) if reduction == "mean" else total


@loss_symbol(F.mse_loss)
def mse_loss(input: TensorProxy, target: TensorProxy, reduction: str = "mean", weight: Optional = None) -> TensorProxy:
    """Return (input - target) ** 2."""
    x, y = _pair("mse_loss", input, target)
    if weight is None:  # torch's kernel takes real numbers, its weighted form any
        prims.check_dtype("mse_loss", x, prims.REAL)
    return _weight("mse_loss", (x - y) ** 2, weight, input, reduction)


@loss_symbol(F.l1_loss)
def l1_loss(input: TensorProxy, target: TensorProxy, reduction: str = "mean", weight: Optional = None) -> TensorProxy:
    """Return |input - target|."""
    x, y = _pair("l1_loss", input, target)
    return _weight("l1_loss", clang.abs(x - y), weight, input, reduction)


@loss_symbol(F.smooth_l1_loss)
def smooth_l1_loss(input: TensorProxy, target: TensorProxy, reduction: str = "mean", beta: float = 1.0) -> TensorProxy:
    """Return d ** 2 / (2 * beta) where d = |input - target| < beta, else d - beta / 2."""
    torch_check(beta >= 0, lambda: f"smooth_l1_loss: beta is {beta}, but does not support negative values")
    x, y = _pair("smooth_l1_loss", input, target)
    difference = x - y
    distance = clang.abs(difference)
    if beta > 0:
        prims.check_dtype("smooth_l1_loss", x, prims.REAL)
        near = difference * difference * (0.5 / beta)  # where the distance is 0, its second derivative would be 0
        distance = clang.where(distance < beta, near, distance - 0.5 * beta)
    return reduce_loss(distance, reduction)


@torchsymbol(F.huber_loss)
def huber_loss(
    input: TensorProxy, target: TensorProxy, reduction: str = "mean", delta: float = 1.0, weight: Optional = None
) -> TensorProxy:
    """Return d ** 2 / 2 where d = |input - target| <= delta, else delta * (d - delta / 2)."""
    torch_check(delta > 0, lambda: f"huber_loss does not support non-positive values for delta, but got {delta}")
    x, y = _pair("huber_loss", input, target)
    prims.check_dtype("huber_loss", x, prims.REAL)
    difference = x - y
    distance = clang.abs(difference)
    is_far = distance > delta
    near = clang.where(is_far, 0, difference)  # for an infinite difference, the gradient would be nan
    loss = clang.where(is_far, (distance - 0.5 * delta) * delta, near * near * 0.5)
    loss = clang.convert(loss, input.dtype)
    if weight is None or reduction != "mean":
        return _weight("huber_loss", loss, weight, input, reduction)
    return clang.mean(_weight("huber_loss", loss, weight, input, "none"))


# probabilities


@loss_symbol(F.binary_cross_entropy)
def binary_cross_entropy(
    input: TensorProxy, target: TensorProxy, weight: Optional = None, reduction: str = "mean"
) -> TensorProxy:
    """Return -(target * log(input) + (1 - target) * log(1 - input)), each logarithm at least -100."""
    _check_binary("binary_cross_entropy", input, target)
    negative, positive = [clamp_min(each, -100) for each in (clang.log1p(-input), clang.log(input))]
    loss = (target - 1) * negative - target * positive
    return reduce_loss(loss if weight is None else clang.convert(loss * weight, input.dtype), reduction)


def _check_binary(op: str, input: TensorProxy, target: TensorProxy) -> None:
    check(
        same_shape(input.shape, target.shape),
        lambda: f"{op}: Target size {list(target.shape)} must be the same as input size {list(input.shape)}",
    )


prims.register_vjp(
    binary_cross_entropy,
    input=lambda g, input, target, weight, reduction: spread(
        (input - target) / clamp_min((1 - input) * input, 1e-12), g, weight, reduction
    ),
    target=lambda g, input, weight, reduction: spread(-logit(input), g, weight, reduction),
)


@loss_symbol(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: TensorProxy,
    target: TensorProxy,
    weight: Optional = None,
    reduction: str = "mean",
    pos_weight: Optional = None,
) -> TensorProxy:
    """Return binary_cross_entropy of sigmoid(input), numerically stable; pos_weight multiplies the term of positive
    targets."""
    _check_binary("binary_cross_entropy_with_logits", input, target)
    positive = logsigmoid(input)
    if pos_weight is not None:
        positive = positive * ((pos_weight - 1) * target + 1)
    loss = (1 - target) * input - positive
    return reduce_loss(loss if weight is None else loss * weight, reduction)


def _slope_of_logits(input: TensorProxy, target: TensorProxy, pos_weight: Optional) -> TensorProxy:
    if pos_weight is None:
        return clang.sigmoid(input) - target
    ones = pos_weight * target
    return (ones + 1 - target) * clang.sigmoid(input) - ones


def _slope_of_target(input: TensorProxy, pos_weight: Optional) -> TensorProxy:
    return -input if pos_weight is None else logsigmoid(-input) - pos_weight * logsigmoid(input)


prims.register_vjp(
    binary_cross_entropy_with_logits,
    input=lambda g, input, target, weight, reduction, pos_weight: spread(
        _slope_of_logits(input, target, pos_weight), g, weight, reduction
    ),
    target=lambda g, input, weight, reduction, pos_weight: spread(
        _slope_of_target(input, pos_weight), g, weight, reduction
    ),
)


@loss_symbol(F.kl_div)
def kl_div(input: TensorProxy, target: TensorProxy, reduction: str = "mean", log_target: bool = False) -> TensorProxy:
    """Return target * (log(target) - input), where input is a logarithm, and target, too, with log_target."""
    for each in (input, target):
        prims.check_dtype("kl_div", each, prims.REAL, RuntimeError)
    if log_target:
        loss = clang.exp(target) * (target - input)
    else:
        product = target * input  # first, as in torch: its share of the gradient is added last
        loss = xlogy(target, target) - product
    if reduction != "batchmean":
        return reduce_loss(loss, reduction)
    return clang.sum(loss) / input.shape[0] if input.ndim else clang.sum(loss)


@loss_symbol(F.poisson_nll_loss)
def poisson_nll_loss(
    input: TensorProxy,
    target: TensorProxy,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> TensorProxy:
    """Return exp(input) - target * input (input - target * log(input + eps) without log_input), plus Stirling's term if
    `full`."""
    loss = clang.exp(input) - target * input if log_input else input - target * clang.log(input + eps)
    if full:
        stirling = target * clang.log(target) - target + 0.5 * clang.log(target * (2 * math.pi))
        loss = loss + clang.where(target <= 1, 0, stirling)
    return reduce_loss(loss, reduction)


@torchsymbol(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: TensorProxy,
    target: TensorProxy,
    var: TensorProxy | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> TensorProxy:
    """Return (log(var) + (input - target) ** 2 / var) / 2, where var is clamped to eps without an effect on its
    gradient.

    Raises: ValueError for a negative var; for a tensor, when the program runs.
    """
    if not isinstance(var, TensorProxy):
        check(var >= 0, lambda: f"gaussian_nll_loss: var has negative entry/entries: {var}")
        variance = prims.full(input.shape, var, input.dtype, input.device)
    else:
        prims.require(clang.all(clang.logical_not(var < 0)), "var has negative entry/entries", "ValueError")
        variance = var
    variance = _variance(input, variance)
    variance = prims.with_data(variance, clamp_min(variance, eps))
    loss = 0.5 * (clang.log(variance) + (input - target) ** 2 / variance)
    return reduce_loss(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


def _variance(input: TensorProxy, var: TensorProxy) -> TensorProxy:
    """Return var, with a last dim of length 1 if it has one number per row of the input."""
    if same_shape(var.shape, input.shape):
        return var
    if same_shape(var.shape, input.shape[:-1]):
        return clang.unsqueeze(var, -1)
    check(
        same_shape(var.shape, (*input.shape[:-1], 1)),
        lambda: f"gaussian_nll_loss: var is of incorrect size: {var} for input {input}",
    )
    return var


# classes


@loss_symbol(F.nll_loss)
def nll_loss(
    input: TensorProxy, target: TensorProxy, weight: Optional = None, ignore_index: int = -100, reduction: str = "mean"
) -> TensorProxy:
    """Return -weight[target] * input[target], 0 where target is ignore_index; its mean is over the used weights.

    Shapes: input (C,) or (N, C, *), target () or (N, *), weight (C,).
    """
    check_classes("nll_loss", input, target, weight)
    prims.check_dtype("nll_loss", input, prims.REAL)
    used = target != ignore_index
    classes = clang.convert(clang.where(used, target, 0), torch.int64)
    picked = _scores_of(input, classes)
    weights = clang.convert(used, input.dtype) if weight is None else clang.where(used, _look_up(weight, classes), 0)
    loss = clang.where(used, -picked * weights, 0)
    if reduction != "mean":
        return reduce_loss(loss, reduction)
    return clang.sum(loss) / clang.sum(weights)


def _scores_of(input: TensorProxy, classes: TensorProxy) -> TensorProxy:
    dim = 0 if input.ndim == 1 else 1
    return prims.squeeze(prims.gather(input, dim, clang.unsqueeze(classes, dim)), (dim,))


def _class_scores(input: TensorProxy, target: TensorProxy, ignore_index: int) -> TensorProxy:
    used = target != ignore_index
    classes = clang.convert(clang.where(used, target, 0), torch.int64)
    return clang.where(used, _scores_of(input, classes), 0)


class_scores = Symbol("class_scores", "forge.class_scores", body=_class_scores)
class_scores.__doc__ = """Return the score of each target, 0 where it is ignore_index.

Shapes: input (C,) or (N, C, *), target and out () or (N, *).
"""


def _class_losses(input: TensorProxy, target: TensorProxy, ignore_index: int) -> TensorProxy:
    total = clang.logsumexp(clang.widen(input), 0 if input.ndim == 1 else 1, False)
    loss = total - clang.convert(class_scores(input, target, ignore_index), total.dtype)
    return clang.where(target != ignore_index, loss, 0)


class_losses = Symbol("class_losses", "forge.class_losses", body=_class_losses)
class_losses.__doc__ = """Return logsumexp(input) less the score of each target, 0 where it is ignore_index.

Shapes: input (C,) or (N, C, *), target and out () or (N, *). Dtypes: out is float32 where input is narrower.
"""


@register_grad(class_losses)
def _class_losses_grad(input: TensorProxy, target: TensorProxy, ignore_index: int) -> TensorProxy:
    """Compare all classes with the target, so that one loop writes softmax minus the one-hot target."""
    dim = 0 if input.ndim == 1 else 1
    wide, used = clang.widen(input), target != ignore_index
    total = clang.logsumexp(wide, dim, True)
    scores = clang.convert(class_scores(input, target, ignore_index), total.dtype)
    out = clang.where(used, prims.squeeze(total, (dim,)) - scores, 0)
    classes = prims.iota(input.shape[dim], 0, 1, torch.int64, input.device)
    shape = tuple(input.shape[dim] if each == dim else 1 for each in range(input.ndim))
    is_target = prims.broadcast_in_dim(classes, shape, (dim,)) == clang.unsqueeze(target, dim)
    softmax = clang.exp(wide - total)
    g = clang.unsqueeze(clang.where(used, get_grad(out), 0), dim)
    put_grad(input, clang.convert(clang.where(is_target, softmax - 1, softmax) * g, input.dtype))
    return out


def composed_cross_entropy(
    input: TensorProxy, target: TensorProxy, ignore_index: int = -100, reduction: str = "mean"
) -> TensorProxy:
    """Return cross_entropy of classes as logsumexp(input) - input[target], which needs no softmax in memory.

    Dtypes: computed in float32 if input's is narrower; out has input's.
    Shapes: those of cross_entropy.
    """
    check_classes("cross_entropy", input, target, None)
    loss = class_losses(input, target, ignore_index)
    if reduction == "mean":
        used = clang.convert(target != ignore_index, loss.dtype)
        loss = clang.sum(loss) / clang.sum(used)
    elif reduction != "none":
        loss = reduce_loss(loss, reduction)
    return clang.convert(loss, input.dtype)


def check_classes(op: str, input: TensorProxy, target: TensorProxy, weight: Optional) -> None:
    """Raise for class indices as target, or class weights, that do not match the input."""
    torch_check(
        target.dtype in (torch.int64, torch.uint8),
        lambda: f"{op}: expected target of dtype Long or Byte, but got {target}",
    )
    check(input.ndim > 0, lambda: f"{op}: Expected 1 or more dimensions, but input is {input}", ValueError)
    check(
        input.ndim == 1 or target.ndim == 0 or same(input.shape[0], target.shape[0]),
        lambda: f"{op}: Expected input batch_size to match target batch_size, but they are {input} and {target}",
    )
    expected = input.shape[:1] + input.shape[2:] if input.ndim > 1 else ()
    torch_check(
        same_shape(target.shape, expected),
        lambda: f"{op}: Expected target size {list(expected)}, got {target} for input {input}",
    )
    classes = input.shape[0 if input.ndim == 1 else 1]
    torch_check(
        weight is None or same_shape(weight.shape, (classes,)),
        lambda: (
            f"{op}: weight tensor should be defined either for all {classes} classes or no classes, but got {weight}"
        ),
    )


def _look_up(table: TensorProxy, indices: TensorProxy) -> TensorProxy:
    """Return table[indices]."""
    flat = clang.reshape(indices, (indices.numel(),))
    return clang.reshape(prims.gather(table, 0, flat), indices.shape)


@loss_symbol(F.cross_entropy)
def cross_entropy(
    input: TensorProxy,
    target: TensorProxy,
    weight: Optional = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TensorProxy:
    """Return nll_loss of log_softmax; target may be probabilities of input's shape; label_smoothing mixes in a uniform
    distribution.

    Shapes: input (C,) or (N, C, *), target of classes () or (N, *), weight (C,).
    """
    torch_check(
        0 <= label_smoothing <= 1,
        lambda: f"cross_entropy: label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}",
    )
    torch_check(input.ndim > 0, lambda: f"cross_entropy: input is {input}, but must have at least 1 dim")
    dim = 0 if input.ndim == 1 else 1
    if target.is_floating_point() and target.ndim == input.ndim:
        return _of_probabilities(input, target, weight, reduction, label_smoothing, dim)
    check_classes("cross_entropy", input, target, weight)
    scores = log_softmax(input, dim)
    loss = nll_loss(scores, target, weight, ignore_index=ignore_index, reduction=reduction)
    if label_smoothing == 0:
        return loss
    even = _of_even(scores, target, weight, ignore_index, reduction, dim)
    return loss * (1 - label_smoothing) + even * (label_smoothing / input.shape[dim])


def _class_weights(weight: TensorProxy, ndim: int, dim: int) -> TensorProxy:
    return prims.broadcast_in_dim(weight, tuple(weight.shape[0] if i == dim else 1 for i in range(ndim)), (dim,))


def _of_probabilities(
    input: TensorProxy, target: TensorProxy, weight: Optional, reduction: str, label_smoothing: float, dim: int
) -> TensorProxy:
    torch_check(
        all(map(same, input.shape, target.shape)),
        lambda: f"cross_entropy: Expected target of probabilities to have input's shape, but got {target} and {input}",
    )
    if label_smoothing > 0:
        target = target * (1 - label_smoothing) + label_smoothing / input.shape[dim]
    terms = log_softmax(input, dim) * target
    if weight is not None:
        terms = terms * _class_weights(weight, input.ndim, dim)
    loss = -clang.sum(terms, dim)
    if reduction != "mean":
        return reduce_loss(loss, reduction)
    return clang.sum(loss) / (input.numel() // input.shape[dim])


def _of_even(
    scores: TensorProxy, target: TensorProxy, weight: Optional, ignore_index: int, reduction: str, dim: int
) -> TensorProxy:
    """Return the loss for uniform target probabilities, times the number of classes."""
    terms = scores if weight is None else scores * _class_weights(weight, scores.ndim, dim)
    used = target != ignore_index
    loss = clang.where(used, -clang.sum(terms, dim), 0)
    if reduction != "mean":
        return reduce_loss(loss, reduction)
    if weight is None:
        return clang.sum(loss) / clang.sum(clang.convert(used, loss.dtype))
    classes = clang.convert(clang.where(used, target, 0), torch.int64)
    return clang.sum(loss) / clang.sum(clang.where(used, _look_up(weight, classes), 0))


# margins


@loss_symbol(F.hinge_embedding_loss)
def hinge_embedding_loss(
    input: TensorProxy, target: TensorProxy, margin: float = 1.0, reduction: str = "mean"
) -> TensorProxy:
    """Return input where target is 1, max(0, margin - input) where it is -1 (their sum where it is neither)."""
    far = clang.where(target != 1, clamp_min(margin - input, 0), 0)
    near = clang.where(target != -1, input, 0)
    return reduce_loss(far + near, reduction)


@loss_symbol(F.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: TensorProxy, input2: TensorProxy, target: TensorProxy, margin: float = 0, reduction: str = "mean"
) -> TensorProxy:
    """Return 1 - cos(input1, input2) where target is 1, max(0, cos - margin) where it is -1.

    Shapes: inputs (N, D) and target (N,), or (D,) and ().
    """
    op = "cosine_embedding_loss"
    torch_check(
        target.ndim in (0, 1) and input1.ndim == target.ndim + 1 and input2.ndim == target.ndim + 1,
        lambda: (
            f"{op}: {target.ndim}D target tensor expects {target.ndim + 1}D input tensors, but found "
            f"{input1} and {input2}"
        ),
    )
    product = clang.sum(input1 * input2, -1)
    squares = [clang.sum(x * x, -1) + 1e-12 for x in (input1, input2)]
    cosine = product / clang.sqrt(squares[0] * squares[1])
    near = clang.where(target == 1, 1 - cosine, 0)
    far = clang.where(target == -1, clamp_min(cosine - margin, 0), 0)
    return reduce_loss(near + far, reduction)


@loss_symbol(F.margin_ranking_loss)
def margin_ranking_loss(
    input1: TensorProxy, input2: TensorProxy, target: TensorProxy, margin: float = 0, reduction: str = "mean"
) -> TensorProxy:
    """Return max(0, margin - target * (input1 - input2))."""
    torch_check(
        input1.ndim == input2.ndim == target.ndim,
        lambda: (
            f"margin_ranking_loss: All input tensors should have same dimension but got: {input1}, {input2}, {target}"
        ),
    )
    return reduce_loss(clamp_min(-target * (input1 - input2) + margin, 0), reduction)


def _check_triplet(op: str, margin: float, **tensors: TensorProxy) -> None:
    check(margin > 0, lambda: f"{op}: margin must be greater than 0, got {margin}")
    ranks = {tensor.ndim for tensor in tensors.values()}
    torch_check(
        len(ranks) == 1,
        lambda: (
            f"{op}: The anchor, positive, and negative tensors are expected to have the same number of "
            f"dimensions, but got: {list(tensors.values())}"
        ),
    )


def _triplet(near: TensorProxy, far: TensorProxy, across: Optional, margin: float, reduction: str) -> TensorProxy:
    """Return max(0, margin + near - far), where far is the minimum of far and `across`, if given."""
    far = far if across is None else clang.minimum(far, across)
    return reduce_loss(clamp_min(near + margin - far, 0), reduction)


@loss_symbol(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: TensorProxy,
    positive: TensorProxy,
    negative: TensorProxy,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> TensorProxy:
    """Return max(0, margin + |anchor - positive| - |anchor - negative|); with swap, the distance of positive and
    negative if smaller."""
    _check_triplet("triplet_margin_loss", margin, anchor=anchor, positive=positive, negative=negative)
    near, far = pairwise_distance(anchor, positive, p, eps), pairwise_distance(anchor, negative, p, eps)
    across = pairwise_distance(positive, negative, p, eps) if swap else None
    return _triplet(near, far, across, margin, reduction)


@loss_symbol(F.soft_margin_loss)
def soft_margin_loss(input: TensorProxy, target: TensorProxy, reduction: str = "mean") -> TensorProxy:
    """Return log(1 + exp(-target * input))."""
    exponent = clang.convert(-target * input, input.dtype)
    return reduce_loss(clang.log1p(clang.exp(exponent)), reduction)


@register_grad(soft_margin_loss)
def _soft_margin_loss_grad(
    input: TensorProxy, target: TensorProxy, size_average: None = None, reduce: None = None, reduction: str = "mean"
) -> TensorProxy:
    out = soft_margin_loss(input, target, reduction=reduction)
    g, power = get_grad(out), clang.exp(-target * input)
    share: TensorProxy | float = -1.0
    if reduction == "mean" and not statically_true(input.numel() == 0):
        share /= input.numel()
        if input.device.type == "cpu":  # torch's CPU kernel rounds it, others do not
            share = prims.full((), share, power.dtype, input.device)
    for each, other in ((input, target), (target, input)):
        if needs_grad(each):
            put_grad(each, other * power * share / (power + 1) * g)
    return out


@loss_symbol(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(
    input: TensorProxy, target: TensorProxy, weight: Optional = None, reduction: str = "mean"
) -> TensorProxy:
    """Return the mean over the last dim of binary_cross_entropy_with_logits, each class with its weight."""
    loss = -(target * logsigmoid(input) + (1 - target) * logsigmoid(-input))
    loss = loss if weight is None else loss * weight
    return reduce_loss(clang.sum(loss, -1) / input.shape[-1], reduction)
