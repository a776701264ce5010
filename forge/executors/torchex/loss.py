"""The torch executor's loss family, with eager's backward kernels, whose only residuals are the inputs."""

from collections.abc import Callable

import torch

from forge import clang, torchlang
from forge.executors.executor import Decision, decline
from forge.executors.torchex.core import run_torchlang, torchex
from forge.ir import Symbol, TensorProxy, get_grad, needs_grad, put_grad
from forge.prims.core import like

aten = torch.ops.aten

Flag = bool | None
Optional = TensorProxy | None

REDUCTION = {"none": 0, "mean": 1, "sum": 2}


# losses of a difference: the target's gradient is the input's gradient with input and target swapped


def _backward_of(name: str, kernel: Callable) -> Symbol:
    """Return an operator (g, x, y, reduction, options) that computes the gradient of x."""
    return torchex.register_operator(name, meta=lambda g, x, y, *how: like(x), fn=kernel)


def _put_pair(
    backward: Symbol, out: TensorProxy, input: TensorProxy, target: TensorProxy, reduction: str, *options: float
) -> None:
    """Put the gradients of both operands, which are broadcast first as in torch's Python functions."""
    g = get_grad(out)
    x, y = clang.prepare(backward.name, input, target)
    for argument, pair in ((input, (x, y)), (target, (y, x))):
        if needs_grad(argument):
            put_grad(argument, backward(g, *pair, REDUCTION[reduction], *options))


mse_loss_backward = _backward_of("mse_loss_backward", aten.mse_loss_backward.default)
smooth_l1_loss_backward = _backward_of("smooth_l1_loss_backward", aten.smooth_l1_loss_backward.default)
huber_loss_backward = _backward_of("huber_loss_backward", aten.huber_loss_backward.default)


def _has_no_weight(*args: object, weight: Optional = None, **options: object) -> Decision:
    has_weight = weight is not None or any(isinstance(arg, TensorProxy) for arg in args[2:])
    return decline("a weighted loss has no kernel of its own") if has_weight else True


def _mse_loss_grad(
    input: TensorProxy,
    target: TensorProxy,
    size_average: Flag = None,
    reduce: Flag = None,
    reduction: str = "mean",
    weight: None = None,
) -> TensorProxy:
    out = torchlang.mse_loss(input, target, size_average, reduce, reduction)
    _put_pair(mse_loss_backward, out, input, target, reduction)
    return out


def _smooth_l1_loss_grad(
    input: TensorProxy,
    target: TensorProxy,
    size_average: Flag = None,
    reduce: Flag = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> TensorProxy:
    if beta == 0 or input.is_complex() or target.is_complex():  # torch runs l1_loss
        return NotImplemented
    out = torchlang.smooth_l1_loss(input, target, size_average, reduce, reduction, beta)
    _put_pair(smooth_l1_loss_backward, out, input, target, reduction, beta)
    return out


def _huber_loss_grad(
    input: TensorProxy, target: TensorProxy, reduction: str = "mean", delta: float = 1.0, weight: None = None
) -> TensorProxy:
    out = torchlang.huber_loss(input, target, reduction, delta)
    _put_pair(huber_loss_backward, out, input, target, reduction, delta)
    return out


run_torchlang(torchlang.mse_loss, checker=_has_no_weight, grad_transform=_mse_loss_grad)
run_torchlang(torchlang.smooth_l1_loss, grad_transform=_smooth_l1_loss_grad)
run_torchlang(torchlang.huber_loss, checker=_has_no_weight, grad_transform=_huber_loss_grad)


# nll_loss, to which cross_entropy decomposes


def _as_image(x: torch.Tensor) -> torch.Tensor:
    """Reshape (N, C, *) to (N, C, H, W): the kernels take vectors and images only."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], 1, -1)


def _nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, total weight)."""
    if x.ndim < 3:
        return aten.nll_loss_forward(x, target, weight, reduction, ignore_index)
    image = _as_image(x)
    out, total = aten.nll_loss2d_forward(
        image, target.reshape(len(image), *image.shape[2:]), weight, reduction, ignore_index
    )
    return (out.view(target.shape) if reduction == 0 else out), total


def _nll_loss_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total: torch.Tensor,
) -> torch.Tensor:
    if x.ndim < 3:
        return aten.nll_loss_backward(g, x, target, weight, reduction, ignore_index, total)
    image = _as_image(x)
    target = target.reshape(len(image), *image.shape[2:])
    g = g.reshape(target.shape) if reduction == 0 else g
    return aten.nll_loss2d_backward(g, image, target, weight, reduction, ignore_index, total).view(x.shape)


nll_loss_forward = torchex.register_operator(
    "nll_loss_forward",
    meta=lambda x, target, weight, reduction, ignore_index: (
        like(x, shape=target.shape if reduction == 0 else ()),
        like(x, shape=()),
    ),
    fn=_nll_loss,
)
nll_loss_backward = torchex.register_operator(
    "nll_loss_backward", meta=lambda g, x, *rest: like(x), fn=_nll_loss_backward
)


def _nll_loss_grad(
    input: TensorProxy,
    target: TensorProxy,
    weight: Optional = None,
    size_average: Flag = None,
    ignore_index: int = -100,
    reduce: Flag = None,
    reduction: str = "mean",
) -> TensorProxy:
    how = (target, weight, REDUCTION[reduction], ignore_index)
    out, total = nll_loss_forward(input, *how)
    put_grad(input, nll_loss_backward(get_grad(out), input, *how, total))
    return out


run_torchlang(torchlang.nll_loss, grad_transform=_nll_loss_grad)


def _scores_of_classes(x: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return x at the targets, by nll_loss, whose error names a target out of range."""
    return _nll_loss(x, target, None, REDUCTION["none"], ignore_index)[0].neg_()


torchex.register_implementation(torchlang.class_scores, _scores_of_classes)


# binary_cross_entropy

binary_cross_entropy_backward = torchex.register_operator(
    "binary_cross_entropy_backward",
    meta=lambda g, x, *rest: like(x),
    fn=aten.binary_cross_entropy_backward.default,
)


def _binary_cross_entropy_grad(
    input: TensorProxy,
    target: TensorProxy,
    weight: Optional = None,
    size_average: Flag = None,
    reduce: Flag = None,
    reduction: str = "mean",
) -> TensorProxy:
    out = torchlang.binary_cross_entropy(input, target, weight, size_average, reduce, reduction)
    g = get_grad(out)
    if weight is not None:
        weight = clang.expand_to(weight, target.shape)
    put_grad(input, binary_cross_entropy_backward(g, input, target, weight, REDUCTION[reduction]))
    if needs_grad(target):
        put_grad(target, torchlang.spread(-torchlang.logit(input), g, weight, reduction))
    return out


run_torchlang(torchlang.binary_cross_entropy, grad_transform=_binary_cross_entropy_grad)
