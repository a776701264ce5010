"""Functions of torch that make tensors of unspecified values with strides of their own.

Their strides are torch's where torch runs them; a decomposition's are row-major.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from forge import prims
from forge.clang.creation import canonical_device, check_supported
from forge.ir import Dim, TensorProxy, check
from forge.torchlang.core import torchsymbol

Dtype = torch.dtype | None
Device = torch.device | str | None
Layout = torch.layout | None


def _check_layout(size: Sequence[Dim], physical_layout: Sequence[int]) -> None:
    check(
        len(size) == len(physical_layout),
        lambda: (
            "empty_permuted: Number of dimensions in size does not match the length of the physical_layout: "
            f"{tuple(size)} and {tuple(physical_layout)}"
        ),
        RuntimeError,
    )
    for dim in physical_layout:
        check(
            0 <= dim < len(size),
            lambda dim=dim: f"empty_permuted: Dimension out of range (expected to be below {len(size)}, but got {dim})",
            RuntimeError,
        )
    check(
        len(set(physical_layout)) == len(physical_layout),
        lambda: f"empty_permuted: Duplicate dim not allowed: {tuple(physical_layout)}",
        RuntimeError,
    )


@torchsymbol(torch.empty_permuted, factory=True)
def empty_permuted(
    size: Sequence[Dim],
    physical_layout: Sequence[int],
    *,
    dtype: Dtype = None,
    layout: Layout = None,
    device: Device = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
) -> TensorProxy:
    """A tensor of unspecified values, whose dims lie in memory in the order `physical_layout`."""
    check_supported("empty_permuted", layout=layout, requires_grad=requires_grad)
    _check_layout(size, [int(dim) for dim in physical_layout])
    return prims.empty(tuple(size), dtype or torch.get_default_dtype(), canonical_device(device))


def _check_strides(op: str, size: Sequence[Dim], stride: Sequence[Dim]) -> None:
    check(
        len(size) == len(stride),
        lambda: f"{op}: dimensionality of sizes ({len(size)}) must match dimensionality of strides ({len(stride)})",
        RuntimeError,
    )
    check(
        not any(prims.known(step < 0) for step in stride),
        lambda: f"{op}: Negative strides are not supported: {tuple(stride)}",
        RuntimeError,
    )


@torchsymbol(torch.empty_strided, factory=True)
def empty_strided(
    size: Sequence[Dim],
    stride: Sequence[Dim],
    *,
    dtype: Dtype = None,
    layout: Layout = None,
    device: Device = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
) -> TensorProxy:
    """A tensor of unspecified values with these strides."""
    check_supported("empty_strided", layout=layout, requires_grad=requires_grad)
    _check_strides("empty_strided", size, stride)
    return prims.empty(tuple(size), dtype or torch.get_default_dtype(), canonical_device(device))


@torchsymbol(Tensor.new_empty_strided)
def new_empty_strided(
    self: TensorProxy,
    size: Sequence[Dim],
    stride: Sequence[Dim],
    *,
    dtype: Dtype = None,
    layout: Layout = None,
    device: Device = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
) -> TensorProxy:
    """A tensor of unspecified values with these strides. Dtypes: self's."""
    check_supported("new_empty_strided", layout=layout, requires_grad=requires_grad)
    _check_strides("new_empty_strided", size, stride)
    device = self.device if device is None else canonical_device(device)
    return prims.empty(tuple(size), dtype or self.dtype, device)
