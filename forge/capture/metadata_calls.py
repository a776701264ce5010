"""Calls of a graph that only read a tensor's metadata, and arguments whose numbers are tensors."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from forge import torchlang
from forge.capture import fake_values
from forge.capture.aliasing import Pair
from forge.capture.numbers import RuntimeNumbers, known_constant
from forge.compiler.program import Unsupported
from forge.ir import NUMBER_TYPES, TensorProxy
from forge.ir.pytree import tensors
from forge.torch_internals.dynamo import numpy_to_tensor_wrapper

# methods that query a tensor's metadata; proxies do not have the second set
_OF_SHAPES = frozenset("dim element_size numel size".split())
_OF_MEMORY = frozenset("get_device is_contiguous storage_offset stride".split())

_NUMBERS = frozenset((bool, int, float, complex))

# methods whose size arguments are the shape of the result
_SIZED = frozenset("expand new_empty new_ones new_zeros reshape view".split())
_STRIDED = frozenset(("as_strided", torch.as_strided))

# types that construct a tensor from a size or from numbers, as functions did before torch.tensor
_TYPES = frozenset(
    getattr(torch, f"{kind}Tensor")
    for kind in ("", *"BFloat16 Bool Byte Char Double Float Half Int Long Short".split())
)
_SHORT = 64  # elements of a tensor that a program represents as numbers

# queries of a shape in lowered graphs, whose results are expressions of the program's sizes
_LENGTHS = frozenset(
    getattr(packet, overload)
    for name in ("size", "stride", "numel", "storage_offset")
    for packet in (getattr(torch.ops.aten, f"sym_{name}"),)
    for overload in packet.overloads()
)


def read_metadata(
    numbers: RuntimeNumbers, node: Node, target: Callable | str, args: tuple, kwargs: dict, example: Any
) -> Any:
    """Return the result of a call that reads numbers, sizes, memory or the items of a tuple; else NotImplemented."""
    if not tensors([args, kwargs]) and not fake_values.makes_tensors(example):
        return _on_numbers(target, args, kwargs, example)
    if target in ("item", "__int__", "__float__", "__bool__") and isinstance(example, NUMBER_TYPES):
        return numbers.item(args[0], example)
    if type(example) in _NUMBERS and torchlang.find(target) is None and _of_constants(node):
        return example
    if target in _OF_SHAPES:
        return getattr(args[0], target)(*args[1:], **kwargs)
    if target in _OF_MEMORY:
        return getattr(node.all_input_nodes[0].meta["example_value"], target)(*args[1:], **kwargs)
    if target in _LENGTHS:
        return example
    if target is operator.getitem and not isinstance(args[0], TensorProxy):
        return args[0][args[1]]
    return NotImplemented


def _of_constants(node: Node) -> bool:
    """Return whether Dynamo knows the numbers in all tensor operands of a call."""
    return all(known_constant(each.meta.get("example_value")) is not None for each in node.all_input_nodes)


def normalize(
    numbers: RuntimeNumbers, node: Node, target: Callable | str, args: tuple, kwargs: dict, operands: list[Pair]
) -> tuple[Any, tuple, dict]:
    """Return the function and arguments of a call: the getter of an attribute, torch.tensor or torch.empty for a
    call of a type, numbers in place of tensors in sizes and strides."""
    example: Any = node.meta.get("example_value")
    constant = known_constant(example)
    if constant is not None and torchlang.find(target) is None:  # of NumPy, which Dynamo runs on tensors
        return torch.tensor, (constant,), {"dtype": example.dtype}
    if isinstance(target, numpy_to_tensor_wrapper) and not node.all_input_nodes and _is_short(example):
        return torch.tensor, (target(*args, **kwargs).tolist(),), {"dtype": example.dtype, "device": example.device}
    if target is getattr:
        target, args = _getter(args)
    if target in _TYPES and not (args and isinstance(args[0], TensorProxy)):
        target, args, kwargs = _constructor(node, args, example)
    if target in _SIZED and tensors(args[1:]) and all(isinstance(size, int) for size in example.shape):
        args = (args[0], *example.shape)  # a size in a 0-d tensor, such as torch.div of sizes
    if target in _STRIDED and tensors([args[1:], kwargs]):
        args, kwargs = _as_strided_args(example, *args, **kwargs)
    return target, *numbers.read_numbers(operands, target, args, kwargs)


def _is_short(example: Any) -> bool:
    """Return whether a value is a tensor of few elements, which a program may represent as numbers."""
    return isinstance(example, torch.Tensor) and isinstance(example.numel(), int) and example.numel() <= _SHORT


def _constructor(node: Node, args: tuple, example: torch.Tensor) -> tuple[Any, tuple, dict]:
    """Return the function and arguments equivalent to a call of torch.Tensor and the like with a size or numbers."""
    how = {"dtype": example.dtype, "device": example.device}
    first = node.args[0] if node.args else None
    first = first.meta.get("example_value") if isinstance(first, Node) else first
    if isinstance(first, (tuple, list)) and not isinstance(first, torch.Size):
        return torch.tensor, args, how
    size = args[0] if isinstance(first, torch.Size) else args or (0,)
    return torch.empty, (size,), how


def _getter(args: tuple) -> tuple[Any, tuple]:
    getter = getattr(torch.Tensor, args[1], None)
    if getter is None:
        raise Unsupported(f"attribute {args[1]} of a tensor")
    return getter.__get__, (args[0],)


def _as_strided_args(example: torch.Tensor, input: Any, size: Any, stride: Any, storage_offset: Any = None) -> tuple:
    """Return the arguments of as_strided with numbers in place of 0-d tensors."""
    return (input, tuple(example.shape), tuple(example.stride())), {"storage_offset": storage_offset}


def _on_numbers(target: Callable | str, args: tuple, kwargs: dict, example: Any) -> Any:
    """Return the result of a call on numbers alone, which runs now; symbolic ones stay expressions."""
    if isinstance(example, NUMBER_TYPES):
        return example
    return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)
