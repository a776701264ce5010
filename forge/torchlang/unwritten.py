"""Functions of torch that make tensors of unspecified values with strides of their own.

Their strides are torch's where torch runs them; a decomposition's are row-major.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from forge import prims
from forge.clang.creation import canonical_device
from forge.ir import Dim, TensorProxy
from forge.prims.core import torch_check
from forge.torchlang.core import torchsymbol
from forge.torchlang.creation import FACTORY, with_options

Dtype = torch.dtype | None
Device = torch.device | str | None
Layout = torch.layout | None


def _check_layout(size: Sequence[Dim], physical_layout: Sequence[int]) -> None:
    torch_check(
        len(size) == len(physical_layout),
        lambda: (
            "empty_permuted: Number of dimensions in size does not match the length of the physical_layout: "
            f"{tuple(size)} and {tuple(physical_layout)}"
        ),
    )
    for dim in physical_layout:
        torch_check(
            0 <= dim < len(size),
            lambda dim=dim: f"empty_permuted: Dimension out of range (expected to be below {len(size)}, but got {dim})",
        )
    torch_check(
        len(set(physical_layout)) == len(physical_layout),
        lambda: f"empty_permuted: Duplicate dim not allowed: {tuple(physical_layout)}",
    )


@torchsymbol(torch.empty_permuted, factory=True)
@with_options(*FACTORY)
def empty_permuted(
    size: Sequence[Dim], physical_layout: Sequence[int], *, dtype: Dtype = None, device: Device = None
) -> TensorProxy:
    """Return a tensor of unspecified values, whose dims lie in memory in the order `physical_layout`."""
    _check_layout(size, [int(dim) for dim in physical_layout])
    return prims.empty(tuple(size), dtype or torch.get_default_dtype(), canonical_device(device))


def _check_strides(op: str, size: Sequence[Dim], stride: Sequence[Dim]) -> None:
    torch_check(
        len(size) == len(stride),
        lambda: f"{op}: dimensionality of sizes ({len(size)}) must match dimensionality of strides ({len(stride)})",
    )
    torch_check(
        not any(prims.known(step < 0) for step in stride),
        lambda: f"{op}: Negative strides are not supported: {tuple(stride)}",
    )


@torchsymbol(torch.empty_strided, factory=True)
@with_options(*FACTORY)
def empty_strided(
    size: Sequence[Dim], stride: Sequence[Dim], *, dtype: Dtype = None, device: Device = None
) -> TensorProxy:
    """Return a tensor of unspecified values with these strides."""
    _check_strides("empty_strided", size, stride)
    return prims.empty(tuple(size), dtype or torch.get_default_dtype(), canonical_device(device))


@torchsymbol(Tensor.new_empty_strided)
@with_options(*FACTORY)
def new_empty_strided(
    self: TensorProxy, size: Sequence[Dim], stride: Sequence[Dim], *, dtype: Dtype = None, device: Device = None
) -> TensorProxy:
    """Return a tensor of unspecified values with these strides. Dtypes: self's."""
    _check_strides("new_empty_strided", size, stride)
    device = self.device if device is None else canonical_device(device)
    return prims.empty(tuple(size), dtype or self.dtype, device)
