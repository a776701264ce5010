"""How torch runs the activation family: eager's forward kernels, and its own backward kernels for gradients."""

import torch

from forge import torchlang
from forge.executors.torchex.core import run_torchlang, torchex
from forge.ir import TensorProxy, get_grad, put_grad
from forge.prims.core import like

aten = torch.ops.aten

silu_backward = torchex.register_operator("silu_backward", meta=lambda g, x: like(x), fn=aten.silu_backward)


def _silu_grad(input: TensorProxy) -> TensorProxy:
    out = torchlang.silu(input)
    put_grad(input, silu_backward(get_grad(out), input))
    return out


run_torchlang(torchlang.silu, grad_transform=_silu_grad)
