"""The torch executor's implementations of the indexing family."""

import torch

from forge import clang, prims, torchlang
from forge.executors.torchex.core import run_clang, run_prim, run_prims, run_torchlang

aten = torch.ops.aten

run_prims(
    {
        prims.index: aten.index.Tensor,
        prims.index_put: aten.index_put.default,
        prims.gather: torch.gather,
        prims.scatter: torch.scatter,
        prims.masked_scatter: torch.masked_scatter,
        prims.masked_scatter_backward: aten.masked_scatter_backward.default,
        prims.embedding: torch.embedding,
        prims.embedding_backward: aten.embedding_dense_backward.default,
    }
)
run_clang(
    {
        clang.gather: torch.gather,
        clang.index_add: torch.index_add,
        clang.index_copy: torch.index_copy,
        clang.index_fill: torch.index_fill,
        clang.index_select: torch.index_select,
        clang.masked_fill: torch.masked_fill,
    }
)
# whose indices may be None, which torch.index_put's may not
run_torchlang(torchlang.index_put, aten.index_put.default)


@run_prim(prims.index_sum)
def index_sum(g: torch.Tensor, indices: tuple, shape: tuple) -> torch.Tensor:
    """Sum what an index picks: a mask picks as many elements as it happens to."""
    return aten.index.Tensor(g, indices).sum_to_size(shape)


@run_prim(prims.scatter_reduce)
def scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, include_self: bool = True
) -> torch.Tensor:
    """Scatter and reduce; a sum with x itself has a kernel of its own."""
    if reduce == "sum" and include_self:
        return torch.scatter_add(x, dim, index, src)
    return torch.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)


@run_prim(prims.searchsorted)
def searchsorted(sorted: torch.Tensor, values: torch.Tensor, right: bool, dtype: torch.dtype) -> torch.Tensor:
    """torch.searchsorted has a flag for int32."""
    return torch.searchsorted(sorted, values, right=right, out_int32=dtype == torch.int32)
