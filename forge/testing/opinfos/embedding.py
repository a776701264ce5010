"""OpInfos of the embedding family."""

from typing import Any

import torch
import torch.nn.functional as F

from forge.testing.opinfo import NO_COMPLEX_ON_A_GPU
from forge.testing.table import index, ints, op, sample, t, wrong

op(
    "nn.functional.embedding",
    sample(index(2, 3, high=5), t(5, 4)),
    sample(ints(1, 1, 3), t(5, 4), padding_idx=1),
    sample(ints(4, 0), t(5, 4), -1),
    sample(ints(1, 1, 3), t(5, 4), scale_grad_by_freq=True),
    sample(ints(), t(5, 4)),
    sample(index(high=5), t(4, 5).t()),
    sample(ints(2).int(), t(5, 4)),
    wrong(t(2), t(5, 4), match="scalar types: Long, Int"),
    wrong(ints(1), t(4), match="'weight' must be 2-D"),
    wrong(ints(1), t(5, 4), padding_idx=7, error=AssertionError, match="within num_embeddings"),
)


def _with_table(indices: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Return the embedding by a clone of the table, and the clone."""
    weight = weight.clone()
    return F.embedding(indices, weight, *args, **kwargs), weight


op(
    "nn.functional.embedding.max_norm",
    [sample(index(2, 3, high=5), t(5, 4), max_norm=1.0), sample(ints(1, 1, 3), t(5, 4), 1, 0.5, 1.0)],
    wrong(t(2), t(5, 4), max_norm=1.0, match="scalar types: Long, Int|Long"),
    dtypes=(torch.float32, torch.float64),
    op=_with_table,
)
op(
    "embedding_renorm",
    [sample(t(5, 4), index(2, 3, high=5), 1.0, 2.0), sample(t(5, 4), ints(1, 1, 3), 0.5, 1.0)],
    wrong(t(5, 4), t(2), 1.0, 2.0, match="scalar types: Long, Int|Long"),
    dtypes=(torch.float32, torch.float64, torch.complex64),
    gradient=False,
    symbols=("torch.ops.aten.embedding_renorm.default",),
    directives=(NO_COMPLEX_ON_A_GPU,),
    op=lambda table, indices, *how: torch.embedding_renorm_(table.detach().clone(), indices, *how),
)
op(
    "embedding",
    sample(t(5, 4), index(2, 3, high=5)),
    sample(t(5, 4), ints(1, 1, 3), 1),
    sample(t(5, 4), ints(1, 1, 3), scale_grad_by_freq=True),
    wrong(t(5, 4), t(2), match="scalar types: Long, Int"),
)
op(
    "nn.functional.one_hot",
    [sample(index(2, 3, high=5), 5), sample(index(high=3), num_classes=4), sample(ints(), 3)],
    wrong(t(2), 3, match="only applicable to index tensor"),
    dtypes=(torch.float32,),
    gradient=False,
)
