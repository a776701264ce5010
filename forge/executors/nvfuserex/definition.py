"""The definition of a region for nvFuser, as plain data: inputs, operators in order, outputs.

Regions that differ only in symbolic lengths, or in the values of noncontiguous strides, have the same definition. It is
stored on disk, and `define` passes it to the library.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

DTYPES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Int",
    torch.int32: "Int32",
    torch.bool: "Bool",
}
_BY_NAME = {str(dtype): dtype for dtype in DTYPES}

CAST = "cast"  # only where the dtype is another


class Ref(NamedTuple):
    """A reference to the value with this number: inputs first, then the results of each operation."""

    place: int


class TensorInput(NamedTuple):
    """An input tensor: lengths (-1: any), contiguity and stride order as in nvFuser's descriptor."""

    shape: tuple[int, ...]
    contiguity: tuple[bool | None, ...]
    stride_order: tuple[int, ...]
    dtype: torch.dtype
    is_cpu: bool


class NumberInput(NamedTuple):
    """An input number, which is an integer."""

    position: int


class Operation(NamedTuple):
    """An operation fd.ops.<name>(*args, **kwargs); refs stand for values, torch's dtypes for nvFuser's."""

    name: str
    args: tuple
    kwargs: tuple[tuple[str, Any], ...] = ()


class Output(NamedTuple):
    """A returned value. `order`: the number of faster dims of each dim; `strides`: None if they are those of a dense
    tensor in this order, for any lengths. `is_alias`: its elements are those of another value, whose memory nvFuser may
    return for it."""

    ref: Ref
    order: tuple[int, ...]
    strides: tuple[int, ...] | None
    is_alias: bool


class Definition(NamedTuple):
    """A region for nvFuser. `places`: the positions of the region's inputs that it reads, in order."""

    places: tuple[int, ...]
    inputs: tuple[TensorInput | NumberInput, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Output, ...]


def define(definition: Definition, library: Any) -> Any:
    """Return the library's FusionDefinition. Raises the library's errors."""
    failed: Exception | None = None
    with library.FusionDefinition() as fusion:
        try:
            _define(definition, library, fusion)
        except Exception as error:  # a definition that is left with an error prints it
            failed = error
    if failed is not None:
        raise failed
    return fusion


def _define(definition: Definition, library: Any, fusion: Any) -> None:
    values = [_define_input(each, library, fusion) for each in definition.inputs]
    for operation in definition.operations:
        args = [_to_library(each, values, library) for each in operation.args]
        kwargs = {name: _to_library(each, values, library) for name, each in operation.kwargs}
        if operation.name == CAST and args[0].dtype() == args[1]:
            values.append(args[0])
        else:
            values.append(getattr(fusion.ops, operation.name)(*args, **kwargs))
    for output in definition.outputs:
        fusion.add_output(values[output.ref.place])


def _define_input(spec: TensorInput | NumberInput, library: Any, fusion: Any) -> Any:
    if isinstance(spec, NumberInput):
        return fusion.define_scalar(library.DataType.Int)
    return fusion.define_tensor(
        shape=list(spec.shape),
        contiguity=list(spec.contiguity),
        dtype=data_type(library, spec.dtype),
        is_cpu=spec.is_cpu,
        stride_order=list(spec.stride_order),
    )


def data_type(library: Any, dtype: torch.dtype) -> Any:
    """Return nvFuser's dtype for torch's."""
    return getattr(library.DataType, DTYPES[dtype])


def _to_library(value: Any, values: list[Any], library: Any) -> Any:
    if isinstance(value, Ref):
        return values[value.place]
    if isinstance(value, torch.dtype):
        return data_type(library, value)
    return [_to_library(each, values, library) for each in value] if isinstance(value, tuple) else value


# on disk


def dump(*values: Any) -> bytes:
    """Serialize definitions, and tuples of numbers, to bytes for `load`."""
    return json.dumps(_to_json(values)).encode()


def load(data: bytes) -> tuple:
    """Deserialize dumped definitions."""
    return _read(json.loads(data))


_KINDS = {kind.__name__: kind for kind in (Ref, TensorInput, NumberInput, Operation, Output, Definition)}


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, tuple):
        items = [_to_json(each) for each in value]
        return {"kind": type(value).__name__, "of": items} if type(value).__name__ in _KINDS else items
    return value


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "dtype" in value:
            return _BY_NAME[value["dtype"]]
        return _KINDS[value["kind"]](*map(_read, value["of"]))
    return tuple(map(_read, value)) if isinstance(value, list) else value
