"""The differences between two runs of a call."""

from typing import Any

import torch
from torch.utils import _pytree

LOOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def difference(
    ours: Any, theirs: Any, what: str = "result", *, strides: bool = True, values: bool = True
) -> str | None:
    """Return the first difference in words, or None: structure, metadata, values and strides of tensors; values of the
    rest."""
    our_leaves, our_spec = _pytree.tree_flatten(ours)
    their_leaves, their_spec = _pytree.tree_flatten(theirs)
    if our_spec != their_spec:
        return f"{what}: structure is {our_spec}, not {their_spec}"
    for i, (our, their) in enumerate(zip(our_leaves, their_leaves, strict=True)):
        where = what if len(our_leaves) == 1 else f"{what} {i}"
        found = _leaf(our, their, strides, values)
        if found is not None:
            return f"{where}: {found}"
    return None


def _leaf(our: Any, their: Any, strides: bool, values: bool) -> str | None:
    if not isinstance(their, torch.Tensor):
        if isinstance(our, torch.Tensor):
            return f"is a tensor, not {their!r}"
        same = our == their or (our != our and their != their)
        return None if type(our) is type(their) and same else f"is {our!r}, not {their!r}"
    if not isinstance(our, torch.Tensor):
        return f"is {our!r}, not a tensor"
    for name in ("dtype", "device", "layout", "shape", "is_quantized"):
        if getattr(our, name) != getattr(their, name):
            return f"{name} is {getattr(our, name)}, not {getattr(their, name)}"
    for name in ("is_conj", "is_neg"):
        if getattr(our, name)() != getattr(their, name)():
            return f"{name}() is {getattr(our, name)()}, not {getattr(their, name)()}"
    if strides and their.layout == torch.strided and _strides(our) != _strides(their):
        return f"strides are {our.stride()}, not {their.stride()}"
    if not values:
        return None
    try:
        tolerance = LOOSE.get(their.dtype)
        given = {} if tolerance is None else {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(our.detach(), their.detach(), equal_nan=True, **given)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return None


def _strides(tensor: torch.Tensor) -> tuple:
    """Return the strides that determine the elements' places."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1)


def sharing(inputs: Any, outputs: Any) -> tuple:
    """Return, for each output, the first input or output whose memory it shares, and its offset there."""
    known: dict[int, tuple] = {}
    found = []
    for kind, values in (("input", inputs), ("output", outputs)):
        for i, each in enumerate(_tensors(values)):
            memory = each.untyped_storage()._cdata
            if kind == "output":
                found.append((known.get(memory), each.storage_offset() if memory in known else None))
            known.setdefault(memory, (kind, i))
    return tuple(found)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [
        leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    ]
