"""The torch executor's implementations of the linear algebra family."""

import torch
from torch.nn import functional as F

from forge import clang, prims, torchlang
from forge.executors.torchex.core import composites, run_clang, run_torchlang, torch_prims, torchex
from forge.executors.torchex.memory import ROW_BYTES
from forge.ir import Tag, TensorProxy, get_grad, needs_grad, put_grad
from forge.prims.core import like
from forge.torch_internals.functions import torch_grouped_mm

run_clang({clang.vector_norm: torch.linalg.vector_norm})
torch_prims.register_implementation(prims.matmul, torch.matmul)

mm = torchex.register_operator("mm", like=prims.matmul, fn=torch.mm)
bmm = torchex.register_operator("bmm", like=prims.matmul, fn=torch.bmm)
matmul = torchex.register_operator("matmul", like=clang.matmul, fn=torch.matmul)


def _product(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """Select the product at compile time, which torch.matmul does at run time."""
    if a.ndim == b.ndim == 2:
        return mm(a, b)
    if a.ndim == b.ndim == 3 and prims.statically_true(a.shape[0] == b.shape[0]):
        return bmm(a, b)
    return matmul(a, b)


for _symbol in (prims.matmul, clang.matmul):
    torchex.register_implementation(_symbol, execution_transform=_product)


def _has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether torch's grouped product takes matrices with their strides: rows or columns have stride 1, and all
    rows begin at multiples of 16 bytes.

    Source: check_valid_strides_and_return_transposed (aten/src/ATen/native/GroupedMMUtils.h).
    """
    *batch, down, right = x.stride()
    if down == 1 and right >= max(1, x.shape[-2]):
        step = right
    elif right == 1 and down >= max(1, x.shape[-1]):
        step = down
    else:
        return False
    multiple = ROW_BYTES // x.element_size()
    return all(each % multiple == 0 for each in (*batch, step, x.storage_offset()))


def _with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    if _has_aligned_rows(x):
        return x
    missing = -x.shape[-1] % (ROW_BYTES // x.element_size())
    if missing == 0:
        return x.clone(memory_format=torch.contiguous_format)
    return F.pad(x, (0, missing)).narrow(-1, 0, x.shape[-1])


def _with_aligned_columns(x: torch.Tensor) -> torch.Tensor:
    return x if _has_aligned_rows(x) else _with_aligned_rows(x.mT).mT


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """Call torch's function; copy operands first whose layout its kernels do not support.

    In a copy, groups are consecutive blocks. Where the groups split each row instead, the GPU kernel fails if one is
    empty or does not begin at a multiple of 16 bytes.
    Source: prepare_grouped_gemm_data (aten/src/ATen/native/cuda/GroupMMCommon.cuh).
    """
    align_a = _with_aligned_columns if a.ndim == b.ndim == 2 else _with_aligned_rows
    align_b = _with_aligned_columns if a.ndim > b.ndim else _with_aligned_rows
    return torch_grouped_mm(align_a(a), align_b(b), offs)


grouped_mm = torchex.register_operator("grouped_mm", like=prims.grouped_mm, fn=_grouped_mm)
grouped_mm_of_host_offsets = torchex.register_operator(
    "grouped_mm_of_host_offsets", like=prims.grouped_mm, fn=_grouped_mm, tags=[Tag.SYNCHRONIZING]
)


def _choose_grouped_mm(a: TensorProxy, b: TensorProxy, offs: TensorProxy | None = None) -> TensorProxy:
    """Choose by dtype on a GPU: torch's bfloat16 kernel reads the offsets on the device; for other dtypes torch copies
    them to the host."""
    if a.device.type == "cuda" and a.dtype != torch.bfloat16 and offs is not None:
        return grouped_mm_of_host_offsets(a, b, offs)
    return grouped_mm(a, b, offs)


torchex.register_implementation(prims.grouped_mm, execution_transform=_choose_grouped_mm)
torch_prims.register_implementation(prims.grouped_mm, _grouped_mm)
composites.update((torchlang.grouped_mm, torchlang.grouped_mm_by_position))


def _cdist_backward(
    g: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """Call the kernel, which requires one batch dim and contiguous rows."""
    batch = g.shape[:-2]
    x1, x2 = [x.expand(*batch, *x.shape[-2:]).contiguous() for x in (x1, x2)]
    return torch.ops.aten._cdist_backward(g.contiguous(), x1, x2, p, distances.contiguous())


cdist_backward = torchex.register_operator(
    "cdist_backward",
    meta=lambda g, x1, x2, p, distances: like(x1, shape=(*g.shape[:-2], *x1.shape[-2:])),
    fn=_cdist_backward,
)


def _cdist_grad(x1: TensorProxy, x2: TensorProxy, p: float = 2.0, *mode: str, **kwargs: str) -> TensorProxy:
    """Save the operands and the distances; the decomposition would save every difference."""
    out = torchlang.cdist(x1, x2, p, *mode, **kwargs)
    g = get_grad(out)
    if needs_grad(x1):
        put_grad(x1, cdist_backward(g, x1, x2, p, out))
    if needs_grad(x2):
        put_grad(x2, cdist_backward(g.transpose(-2, -1), x2, x1, p, out.transpose(-2, -1)))
    return out


run_torchlang(torchlang.cdist, grad_transform=_cdist_grad)
