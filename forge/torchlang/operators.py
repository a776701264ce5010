"""The operators of aten that are not functions of torch, which torch runs for its functions, gradients and
transforms."""

from collections.abc import Sequence

import torch

from forge import prims
from forge.ir import Dim, Symbol, TensorProxy, check
from forge.prims.core import torch_check
from forge.torchlang.conversion import convert_tensor
from forge.torchlang.core import View, torchsymbol
from forge.torchlang.nn.conv import per_dim

aten = torch.ops.aten
Gradients = tuple[TensorProxy | None, TensorProxy | None, TensorProxy | None]


@torchsymbol(aten.alias.default, view=View.ALWAYS, invert=lambda x, new: new)
def alias(self: TensorProxy) -> TensorProxy:
    """Return a tensor that shares the same memory. Source: aten.alias."""
    return prims.alias(self)


@torchsymbol(aten._to_copy.default)
def _to_copy(
    self: TensorProxy,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> TensorProxy:
    """Return a copy in another dtype or on another device. Source: aten._to_copy."""
    check(layout in (None, torch.strided), lambda: f"_to_copy: layout {layout} is not dense", NotImplementedError)
    return convert_tensor(self, dtype, device, copy=True, memory_format=memory_format)


@torchsymbol(aten.convolution_backward.default)
def convolution_backward(
    grad_output: TensorProxy,
    input: TensorProxy,
    weight: TensorProxy,
    bias_sizes: Sequence[Dim] | None,
    stride: Sequence[Dim],
    padding: Sequence[Dim],
    dilation: Sequence[Dim],
    transposed: bool,
    output_padding: Sequence[Dim],
    groups: int,
    output_mask: Sequence[bool],
) -> Gradients:
    """Return the gradients of a convolution's input, weight and bias, None for those that output_mask does not request.
    Source: aten.convolution_backward."""
    count = input.ndim - 2
    parameters = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    *lists, extra = [per_dim("convolution_backward", name, each, count) for name, each in parameters.items()]
    sizes = weight.shape[1] * groups if transposed else weight.shape[0]
    return prims.convolution_backward(
        grad_output,
        input,
        weight,
        (sizes,) if bias_sizes is None and output_mask[2] else bias_sizes and tuple(bias_sizes),
        *lists,
        transposed,
        extra,
        groups,
        tuple(output_mask),
    )


def _grid_sampler_backward(name: str, rank: int) -> Symbol:
    def body(
        grad_output: TensorProxy,
        input: TensorProxy,
        grid: TensorProxy,
        interpolation_mode: int,
        padding_mode: int,
        align_corners: bool,
        output_mask: Sequence[bool],
    ) -> tuple[TensorProxy | None, TensorProxy]:
        torch_check(
            input.ndim == grid.ndim == rank + 2,
            lambda: f"{name}: input and grid must have {rank + 2} dims, but they are {input} and {grid}",
        )
        how = (interpolation_mode, padding_mode, align_corners, tuple(output_mask))
        return prims.grid_sampler_backward(grad_output, input, grid, *how)

    body.__name__, body.__doc__ = (
        name,
        f"The gradients of a {rank}-d grid_sample's input and grid. Source: aten.{name}.",
    )
    return torchsymbol(getattr(aten, name).default)(body)


grid_sampler_2d_backward = _grid_sampler_backward("grid_sampler_2d_backward", 2)
grid_sampler_3d_backward = _grid_sampler_backward("grid_sampler_3d_backward", 3)
