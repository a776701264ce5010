"""The dtype and device conversions of torch."""

from typing import Any

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import Symbol, TensorProxy, check
from forge.torchlang.core import torchsymbol


def convert_tensor(
    x: TensorProxy,
    dtype: torch.dtype | None,
    device: torch.device | None = None,
    *,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> TensorProxy:
    """Return x with another dtype, device and layout; if it has them all, return x and record nothing.

    The device is changed first if that moves fewer bytes.
    """
    out = x
    moves = device is not None and not _same_device(device, x.device)
    if dtype is not None and dtype != x.dtype and (not moves or dtype.itemsize <= x.dtype.itemsize):
        out = prims.convert_element_type(out, dtype)
    if moves:
        out = prims.device_put(out, device, non_blocking)
    if dtype is not None:
        out = clang.convert(out, dtype)
    if memory_format not in (None, torch.preserve_format):
        return prims.clone(out, memory_format) if copy and out is x else prims.contiguous(out, memory_format)
    return prims.clone(out) if copy and out is x else out


def _same_device(a: torch.device, b: torch.device) -> bool:
    if a == b:
        return True
    if a.type != b.type or (a.index is not None and b.index is not None):
        return False
    if a.type == "cpu":
        return True
    current = torch.accelerator.current_device_index()
    return (current if a.index is None else a.index) == (current if b.index is None else b.index)


def as_device(device: Any) -> torch.device:
    """Return a torch.device, given one, its name, or an accelerator's index."""
    return device if isinstance(device, torch.device) else torch.device(device)


@torchsymbol(Tensor.to)
def to(self: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
    """Return self with another dtype, device or layout: to(dtype), to(device, dtype), to(other), each with
    non_blocking, copy and memory_format."""
    dtype, device, other = kwargs.get("dtype"), kwargs.get("device"), kwargs.get("tensor")
    rest = args
    if args:
        first, rest = args[0], args[1:]
        if isinstance(first, torch.dtype):
            dtype = first
        elif isinstance(first, TensorProxy):
            other = first
        else:
            device = first
            if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
                dtype, rest = rest[0], rest[1:]
    if other is not None:
        dtype, device = other.dtype, other.device
    options = dict(zip(("non_blocking", "copy"), rest, strict=False))
    options.update({name: kwargs[name] for name in ("non_blocking", "copy", "memory_format") if name in kwargs})
    return convert_tensor(self, dtype, None if device is None else as_device(device), **options)


@torchsymbol(Tensor.type_as)
def type_as(self: TensorProxy, other: TensorProxy) -> TensorProxy:
    """Return self with other's dtype and device."""
    return convert_tensor(self, other.dtype, other.device)


_TENSOR_TYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Bool": torch.bool,
}
_NAME_OF_TYPE = {dtype: name for name, dtype in _TENSOR_TYPES.items()}


@torchsymbol(Tensor.type)
def type(self: TensorProxy, dtype: Any = None, non_blocking: bool = False) -> TensorProxy | str:
    """Return self as a dtype, which may be given by a legacy name ("torch.FloatTensor"); without a dtype, the legacy
    name of self's type."""
    if dtype is None:
        module = "torch" if self.device.type == "cpu" else f"torch.{self.device.type}"
        return f"{module}.{_NAME_OF_TYPE[self.dtype]}Tensor"
    if isinstance(dtype, torch.dtype):
        return convert_tensor(self, dtype)
    name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    module, _, kind = name.rpartition(".")
    check(
        kind.removesuffix("Tensor") in _TENSOR_TYPES and module.startswith("torch"),
        lambda: f"type: invalid type: '{name}'; give a torch.dtype",
        ValueError,
    )
    device = torch.device(module.partition(".")[2] or "cpu")
    return convert_tensor(self, _TENSOR_TYPES[kind.removesuffix("Tensor")], device, non_blocking=non_blocking)


def _conversion(name: str, dtype: torch.dtype) -> Symbol:
    def body(self: TensorProxy, memory_format: torch.memory_format | None = None) -> TensorProxy:
        return convert_tensor(self, dtype, memory_format=memory_format)

    body.__name__, body.__doc__ = name, f"self as {dtype}; itself when it is."
    return torchsymbol(getattr(Tensor, name))(body)


for _name, _dtype in {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "chalf": torch.complex32,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
}.items():
    globals()[_name] = _conversion(_name, _dtype)


@torchsymbol(Tensor.cpu)
def cpu(self: TensorProxy, memory_format: torch.memory_format | None = None) -> TensorProxy:
    """Return self on the CPU; self itself if it is there already."""
    return convert_tensor(self, None, torch.device("cpu"), memory_format=memory_format)
