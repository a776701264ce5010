"""The torch executor's multi-class margin losses, with eager's backward kernels."""

import torch

from forge import torchlang
from forge.executors.torchex.core import run_torchlang, torchex
from forge.executors.torchex.loss import REDUCTION
from forge.ir import TensorProxy, get_grad, needs_grad, put_grad
from forge.prims.core import like

aten = torch.ops.aten

Flag = bool | None

multi_margin_loss_backward = torchex.register_operator(
    "multi_margin_loss_backward", meta=lambda g, x, *rest: like(x), fn=aten.multi_margin_loss_backward.default
)
multilabel_margin_loss_forward = torchex.register_operator(
    "multilabel_margin_loss_forward",
    meta=lambda x, target, reduction: (
        like(x, shape=x.shape[:1] if reduction == 0 and x.ndim == 2 else ()),
        like(x),
    ),
    fn=aten.multilabel_margin_loss_forward.default,
)
multilabel_margin_loss_backward = torchex.register_operator(
    "multilabel_margin_loss_backward", meta=lambda g, x, *rest: like(x), fn=aten.multilabel_margin_loss_backward.default
)


def _multi_margin_loss_grad(
    input: TensorProxy,
    target: TensorProxy,
    p: int = 1,
    margin: float = 1.0,
    weight: TensorProxy | None = None,
    size_average: Flag = None,
    reduce: Flag = None,
    reduction: str = "mean",
) -> TensorProxy:
    if needs_grad(weight):
        return NotImplemented
    out = torchlang.multi_margin_loss(input, target, p, margin, weight, reduction=reduction)
    how = (p, margin, weight, REDUCTION[reduction])
    put_grad(input, multi_margin_loss_backward(get_grad(out), input, target, *how))
    return out


def _multilabel_margin_loss_grad(
    input: TensorProxy,
    target: TensorProxy,
    size_average: Flag = None,
    reduce: Flag = None,
    reduction: str = "mean",
) -> TensorProxy:
    how = REDUCTION[reduction]
    out, is_target = multilabel_margin_loss_forward(input, target, how)
    put_grad(input, multilabel_margin_loss_backward(get_grad(out), input, target, how, is_target))
    return out


run_torchlang(torchlang.multi_margin_loss, grad_transform=_multi_margin_loss_grad)
run_torchlang(torchlang.multilabel_margin_loss, grad_transform=_multilabel_margin_loss_grad)
