"""The dim orders of tensors, and the fix-ups that convert a tensor to one."""

from collections.abc import Sequence

import torch

from forge.hub.manifest.model import CONTIGUOUS, DimOrder, KernelEntry, Layout, OrderAlias
from forge.hub.manifest.where import UnknownValue, is_true
from forge.ir import Dim, TensorProxy

Tensor = torch.Tensor | TensorProxy

ORDERS = {
    "contiguous": CONTIGUOUS,
    "channels_last": DimOrder((0, 2, 3, 1)),
    "channels_last_3d": DimOrder((0, 2, 3, 4, 1)),
}


def strides_of(tensor: Tensor) -> Sequence[Dim] | None:
    """Return the strides of a tensor, or None for a proxy that does not know them."""
    return tensor.strides if isinstance(tensor, TensorProxy) else tensor.stride()


def in_order(order: DimOrder, tensor: Tensor) -> bool | None:
    """Return whether the tensor's elements lie in memory in this order, without gaps; None if that is not known.

    Source: tensor.permute(order).is_contiguous(), which an expanded tensor is not (Tensor.dim_order() says it is).
    """
    shape, strides = tensor.shape, strides_of(tensor)
    if order.dims is not None and len(order.dims) != len(shape):
        return False
    if strides is None:
        return None
    dims = range(len(shape)) if order.dims is None else order.dims
    expected: Dim = 1
    matches = True
    try:
        for dim in reversed(dims):
            if is_true(shape[dim] == 1):
                continue
            matches = matches and is_true(strides[dim] == expected)
            expected = expected * shape[dim]
        return matches or is_true(expected == 0)
    except UnknownValue:
        return None


def fix_ups(entry: KernelEntry) -> dict[str, Layout]:
    """Return the conversions of a kernel's arguments at run time: those of `layout` and `align`, and those to the
    declared dim orders, which a checker cannot verify for a proxy without strides."""
    layouts = dict(entry.layout)
    for name, alias in entry.orders.items():
        if len(alias.orders) == 1:
            layout = layouts.get(name, Layout())
            layouts[name] = Layout(layout.order or alias.orders[0], layout.align)
    return layouts


def fix(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the tensor in the layout that a kernel needs: the tensor itself if it has that layout, else a copy."""
    order = layout.order
    if order is not None:
        if order.dims is None:
            tensor = tensor.contiguous()
        elif len(order.dims) == tensor.ndim:
            inverse = sorted(range(tensor.ndim), key=order.dims.__getitem__)
            tensor = tensor.permute(order.dims).contiguous().permute(inverse)
    if layout.align is not None and tensor.data_ptr() % layout.align:
        tensor = tensor.clone()
    return tensor


def empty_in_order(shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory whose elements lie in this order of dims, outermost first."""
    inverse = sorted(range(len(dims)), key=dims.__getitem__)
    return torch.empty([shape[dim] for dim in dims], dtype=dtype, device=device).permute(inverse)


def fits(alias: OrderAlias, tensor: Tensor) -> tuple[DimOrder, ...]:
    """Return the orders of an alias that the tensor has, or may have."""
    return tuple(order for order in alias.orders if in_order(order, tensor) is not False)
