"""The prims of a tensor's elements: hashes, and the indices of nonzero elements."""

import torch

from forge.ir import Tag
from forge.prims.library import make_library_prim

hash_tensor = make_library_prim(
    torch.hash_tensor,
    "The exclusive or of the elements' bits, in 64-bit dtypes, over some dims.",
    tags=[Tag.NOT_DIFFERENTIABLE],
)
nonzero_static = make_library_prim(
    torch.nonzero_static,
    "The places of the first `size` elements that are not 0, one in a row, and after these fill_value.",
    tags=[Tag.NOT_DIFFERENTIABLE],
)
