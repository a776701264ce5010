"""Embeddings whose rows are kept short."""

import torch

from forge.prims.elementwise import refuse_gradient
from forge.prims.library import make_library_prim

embedding_renorm = make_library_prim(
    torch.ops.aten.embedding_renorm.default,
    "The table with the rows that indices name scaled down to max_norm, where their norm is larger.",
    name="embedding_renorm",
)
refuse_gradient(embedding_renorm)
