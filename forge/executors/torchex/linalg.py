"""The torch executor's implementations of the linear algebra family."""

import torch

from forge import clang, prims, torchlang
from forge.executors.torchex.core import run_clang, run_torchlang, torch_prims, torchex
from forge.ir import TensorProxy, get_grad, needs_grad, put_grad
from forge.prims.core import like

run_clang({clang.vector_norm: torch.linalg.vector_norm})
torch_prims.register_implementation(prims.matmul, torch.matmul)

mm = torchex.register_operator("mm", like=prims.matmul, fn=torch.mm)
bmm = torchex.register_operator("bmm", like=prims.matmul, fn=torch.bmm)
matmul = torchex.register_operator("matmul", like=clang.matmul, fn=torch.matmul)


def _product(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """torch.matmul finds out at run time what is known here: which product it is."""
    if a.ndim == b.ndim == 2:
        return mm(a, b)
    if a.ndim == b.ndim == 3 and prims.statically_true(a.shape[0] == b.shape[0]):
        return bmm(a, b)
    return matmul(a, b)


for _symbol in (prims.matmul, clang.matmul):
    torchex.register_implementation(_symbol, execution_transform=_product)


def _cdist_backward(
    g: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """Call the kernel, which wants one batch and rows laid out one after another."""
    batch = g.shape[:-2]
    x1, x2 = [x.expand(*batch, *x.shape[-2:]).contiguous() for x in (x1, x2)]
    return torch.ops.aten._cdist_backward(g.contiguous(), x1, x2, p, distances.contiguous())


cdist_backward = torchex.register_operator(
    "cdist_backward",
    meta=lambda g, x1, x2, p, distances: like(x1, shape=(*g.shape[:-2], *x1.shape[-2:])),
    fn=_cdist_backward,
)


def _cdist_grad(x1: TensorProxy, x2: TensorProxy, p: float = 2.0, *mode: str, **named: str) -> TensorProxy:
    """Save the operands and the distances; the decomposition would save every difference."""
    out = torchlang.cdist(x1, x2, p, *mode, **named)
    g = get_grad(out)
    if needs_grad(x1):
        put_grad(x1, cdist_backward(g, x1, x2, p, out))
    if needs_grad(x2):
        put_grad(x2, cdist_backward(g.transpose(-2, -1), x2, x1, p, out.transpose(-2, -1)))
    return out


run_torchlang(torchlang.cdist, grad_transform=_cdist_grad)
