"""What a tensor's elements are, and where: hashes, and the places of those that are not 0."""

from collections.abc import Sequence

from forge import clang, prims
from forge.ir import Dim, TensorProxy
from forge.prims.core import known, torch_check
from forge.torchlang.aliases import torchaliases


@torchaliases("hash_tensor")
def hash_tensor(
    input: TensorProxy, dim: int | Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> TensorProxy:
    """Return the exclusive or of the elements' bits, in 64-bit dtypes, over `dim` (all by default). Dtypes: out is
    uint64."""
    torch_check(mode == 0, lambda: f"hash_tensor: Unknown hash_tensor mode: {mode}; 0 is the only one")
    return prims.hash_tensor(input, list(clang.as_tuple(dim)), keepdim=keepdim, mode=mode)


@torchaliases("nonzero_static")
def nonzero_static(input: TensorProxy, *, size: Dim, fill_value: int = -1) -> TensorProxy:
    """Return the places of the first `size` elements that are not 0, one in a row, and after these fill_value."""
    torch_check(not known(size < 0), lambda: f"nonzero_static: 'size' must be an non-negative integer, not {size}")
    return prims.nonzero_static(input, size=size, fill_value=fill_value)
