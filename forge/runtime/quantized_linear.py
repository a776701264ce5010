"""Linear layers with quantized weights: the quantization, and the module.

forge/torchlang/nn/quantized.py has the operators and defines scales and zero points.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from forge.torch_internals.modules import Converted, parameters_of, set_parameters
from forge.torchlang.nn.quantized import OPERATORS, dequantize, dequantize_packed

_TINY = torch.finfo(torch.float32).eps


class QuantizedWeight(NamedTuple):
    """A quantized weight. zero_point: only for 4 bits, unless it is 8."""

    weight: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


class Scheme(NamedTuple):
    """The storage format of a weight.

    operator: the name of its operator. dtype: of the stored weight; uint8 holds two elements of 4 bits. group_size: the
    number of elements of a row that share a scale; None for all of them. has_zero_point: whether a group's range is
    from its minimum to its maximum, or symmetric around zero.
    """

    operator: str
    dtype: torch.dtype
    group_size: int | None = None
    has_zero_point: bool = False

    def problem_with(self, weight: torch.Tensor) -> str | None:
        """Return why a weight cannot be stored in this format, None if it can."""
        if weight.ndim != 2:
            return f"the weight has {weight.ndim} dims"
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the weight is {weight.dtype}"
        if type(weight.data) is not torch.Tensor:
            return f"the weight is a {type(weight.data).__name__}"
        if not weight.numel():
            return "the weight has no elements"
        columns = weight.shape[1]
        if self.group_size is not None and columns % self.group_size:
            return f"rows of {columns} elements are no multiple of the group size {self.group_size}"
        if self.dtype == torch.uint8 and columns % 2:
            return f"rows of {columns} elements are not even, and a byte holds two"
        return None

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """Return a weight of (out, in) in this format."""
        rows, columns = weight.shape
        size = self.group_size or columns
        groups = weight.detach().float().reshape(rows, columns // size, size)
        if self.dtype == torch.uint8:
            return self._pack(groups, torch.float32 if weight.dtype == torch.float16 else weight.dtype)
        greatest = torch.iinfo(self.dtype).max if self.dtype == torch.int8 else torch.finfo(self.dtype).max
        scale = (groups.abs().amax(-1) / greatest).clamp(min=_TINY)
        values = groups / scale[..., None]
        values = values.round() if self.dtype == torch.int8 else values.clamp(-greatest, greatest)
        return QuantizedWeight(values.reshape(rows, columns).to(self.dtype), self._by_row(scale))

    def _pack(self, groups: torch.Tensor, dtype: torch.dtype) -> QuantizedWeight:
        """Return groups in 4 bits, with scales of `dtype`; elements are quantized by the rounded scales."""
        if self.has_zero_point:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)  # 0 is exact
            scale = ((high - low) / 15).clamp(min=_TINY).to(dtype)
            zero = (-low / scale.float()).round().clamp(0, 15)
        else:
            scale = (groups.abs().amax(-1) / 7).clamp(min=_TINY).to(dtype)
            zero = torch.full_like(scale, 8, dtype=torch.float32)
        elements = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15).to(torch.uint8)
        low, high = elements.flatten(1)[:, ::2], elements.flatten(1)[:, 1::2]
        return QuantizedWeight(
            low | high << 4, self._by_row(scale), self._by_row(zero.to(dtype)) if self.has_zero_point else None
        )

    def _by_row(self, per_group: torch.Tensor) -> torch.Tensor:
        return per_group.squeeze(1) if self.group_size is None else per_group

    def dequantize(self, stored: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of a weight in this format."""
        if self.dtype == torch.uint8:
            return dequantize_packed(*stored, dtype)
        return dequantize(stored.weight, stored.scale, dtype)


class QuantizedLinear(Converted, nn.Linear):
    """torch.nn.Linear with a quantized weight: `weight`, `scale` and maybe `zero_point`, which are never trained.

    Only its input and its bias have gradients. Dtype conversions (`.half()`) do not change the stored weight. It is a
    Linear, since other parts of the model may look for one.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        nn.Module.__init__(self)
        self.__dict__.update({name: value for name, value in vars(linear).items() if name not in _OF_MODULES})
        for name in _OF_MODULES:
            getattr(self, name).update(getattr(linear, name))
        self.scheme = scheme
        self.original_dtype = linear.weight.dtype
        self.set_stored(scheme.quantize(linear.weight))

    def set_stored(self, stored: QuantizedWeight) -> None:
        """Replace the weight."""
        for name, value in stored._asdict().items():
            self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))

    @property
    def stored(self) -> QuantizedWeight:
        """The weight."""
        return QuantizedWeight(self.weight, self.scale, self.zero_point)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product with the dequantized weight, in the dtype of the input or of autocast."""
        device = input.device.type
        bias: torch.Tensor | None = self.bias
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
            bias = None if bias is None else bias.to(input.dtype)
        zero_point = () if self.scheme.dtype != torch.uint8 else (self.zero_point,)
        return OPERATORS[self.scheme.operator](input, self.weight, self.scale, *zero_point, bias)

    def convert(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return a converted tensor; quantized values are not converted."""
        if not any(x is each for each in self.stored):
            return function(x)
        return function(x.view(_BITS[x.dtype.itemsize])).view(x.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedLinear":
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __getstate__(self) -> dict[str, Any]:  # pickle, unlike torch.save, cannot read floats of 8 bits
        return {**self.__dict__, "_parameters": {**parameters_of(self), "weight": self.weight.view(torch.uint8)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        weight = self.weight.view(self.scheme.dtype)
        set_parameters(self, {**parameters_of(self), "weight": nn.Parameter(weight, requires_grad=False)})

    def extra_repr(self) -> str:
        """Return the sizes and the format of the weight."""
        return f"{super().extra_repr()}, {self.scheme.operator}, group_size={self.scheme.group_size}"


_OF_MODULES = ("_parameters", "_buffers", "_modules")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # which a conversion of floats does not change
