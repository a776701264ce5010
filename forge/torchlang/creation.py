"""The functions of torch that create tensors from scratch, or like another.

`layout`, `pin_memory` and `memory_format` do not change a tensor's values; `requires_grad=True` and sparse layouts are
not supported.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forge import clang, prims
from forge.clang.creation import canonical_device, check_supported, dtype_of
from forge.ir import Dim, Number, Real, Symbol, TensorProxy, check
from forge.prims.core import torch_check
from forge.prims.creation import nested_numbers
from forge.torch_internals.functions import refs_tensor
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol

Dtype = torch.dtype | None
Device = torch.device | str | None
Layout = torch.layout | None
Fill = Callable[[Sequence[Dim], torch.dtype, torch.device], TensorProxy]


FACTORY = ("layout", "pin_memory", "requires_grad")
_DEFAULTS = {"pin_memory": False, "requires_grad": False}  # None for others


def with_options(*options: str, op: str | None = None) -> Callable[[Callable], Callable]:
    """Return a decorator that accepts torch options which change no value, and refuses those that would change the
    tensor.

    op: the function's name in the error, by default its own.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=_DEFAULTS.get(name)) for name in options]

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> TensorProxy:
            check_supported(op or run.__name__, **{name: kwargs.pop(name) for name in options if name in kwargs})
            return body(*args, **kwargs)

        parameters = list(inspect.signature(body).parameters.values())
        last = [parameters.pop()] if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
        signature = inspect.signature(body).replace(parameters=[*parameters, *added, *last])
        run.__signature__ = signature  # type: ignore[attr-defined]  # functions have it where they are given it
        return run

    return decorate


def _zeros(shape: Sequence[Dim], dtype: torch.dtype, device: torch.device) -> TensorProxy:
    return prims.full(tuple(shape), 0, dtype, device)


def _ones(shape: Sequence[Dim], dtype: torch.dtype, device: torch.device) -> TensorProxy:
    return prims.full(tuple(shape), 1, dtype, device)


def _empty(shape: Sequence[Dim], dtype: torch.dtype, device: torch.device) -> TensorProxy:
    return prims.empty(tuple(shape), dtype, device)


def _of_size(name: str, fill: Fill, meaning: str) -> Symbol:
    """Return the symbol of torch.zeros or its kin: the size as several arguments or one."""

    @with_options(*FACTORY, "memory_format")
    def body(*size: Lengths, dtype: Dtype = None, device: Device = None, **kwargs: Lengths) -> TensorProxy:
        shape = _size(name, size, kwargs)
        return fill(shape, dtype or torch.get_default_dtype(), canonical_device(device))

    body.__name__, body.__doc__ = name, f"{meaning} Dtypes: the default float dtype."
    return torchsymbol(getattr(torch, name), factory=True)(body)


def _size(op: str, size: tuple, kwargs: dict) -> tuple[Dim, ...]:
    check(
        set(kwargs) <= {"size"} and not (kwargs and size),
        lambda: f"{op}: unexpected arguments {sorted(kwargs)}",
        TypeError,
    )
    return clang.lengths(tuple(kwargs.values()) or size)


zeros = _of_size("zeros", _zeros, "A tensor of zeros.")
ones = _of_size("ones", _ones, "A tensor of ones.")
empty = _of_size("empty", _empty, "A tensor of unspecified values.")


@torchsymbol(torch.full, factory=True)
@with_options(*FACTORY)
def full(
    size: Sequence[Dim], fill_value: Number | TensorProxy, *, dtype: Dtype = None, device: Device = None
) -> TensorProxy:
    """Return a tensor filled with a value. Dtypes: bool, int64 or the default float dtype, depending on the value."""
    return _fill(tuple(size), fill_value, dtype, canonical_device(device))


def _fill(shape: Sequence[Dim], value: Number | TensorProxy, dtype: Dtype, device: torch.device) -> TensorProxy:
    if isinstance(value, TensorProxy):
        return clang.expand(clang.convert(value, dtype or value.dtype), shape)
    return prims.full(tuple(shape), value, dtype or clang.dtype_of(value), device)


def _like(name: str, fill: Fill, meaning: str) -> Symbol:
    """Return the symbol of torch.zeros_like or its kin."""

    @with_options(*FACTORY, "memory_format")
    def body(input: TensorProxy, *, dtype: Dtype = None, device: Device = None) -> TensorProxy:
        return fill(input.shape, dtype or input.dtype, input.device if device is None else canonical_device(device))

    body.__name__, body.__doc__ = name, f"{meaning} Shapes and dtypes: input's."
    return torchsymbol(getattr(torch, name))(body)


zeros_like = _like("zeros_like", _zeros, "A tensor of zeros.")
ones_like = _like("ones_like", _ones, "A tensor of ones.")
empty_like = _like("empty_like", _empty, "A tensor of unspecified values.")


@torchsymbol(torch.full_like)
@with_options(*FACTORY, "memory_format")
def full_like(input: TensorProxy, fill_value: Number, *, dtype: Dtype = None, device: Device = None) -> TensorProxy:
    """Return a tensor filled with a value. Shapes and dtypes: input's."""
    device = input.device if device is None else canonical_device(device)
    return _fill(input.shape, fill_value, dtype or input.dtype, device)


def _new(name: str, fill: Fill, meaning: str) -> Symbol:
    """Return the symbol of Tensor.new_zeros or its kin."""

    @with_options(*FACTORY)
    def body(
        self: TensorProxy, *size: Lengths, dtype: Dtype = None, device: Device = None, **kwargs: Lengths
    ) -> TensorProxy:
        device = self.device if device is None else canonical_device(device)
        return fill(_size(name, size, kwargs), dtype or self.dtype, device)

    body.__name__, body.__doc__ = name, f"{meaning} Dtypes: self's."
    return torchsymbol(getattr(Tensor, name))(body)


new_zeros = _new("new_zeros", _zeros, "A tensor of zeros.")
new_ones = _new("new_ones", _ones, "A tensor of ones.")
new_empty = _new("new_empty", _empty, "A tensor of unspecified values.")


@torchsymbol(Tensor.new_full)
@with_options(*FACTORY)
def new_full(
    self: TensorProxy,
    size: Sequence[Dim],
    fill_value: Number | TensorProxy,
    *,
    dtype: Dtype = None,
    device: Device = None,
) -> TensorProxy:
    """Return a tensor filled with a value. Dtypes: self's."""
    device = self.device if device is None else canonical_device(device)
    return _fill(tuple(size), fill_value, dtype or self.dtype, device)


# numbers


def _values(data: TensorProxy, dtype: Dtype, device: Device) -> TensorProxy:
    """Return the values of a tensor, without its history."""
    values = prims.detach(data)
    if device is not None and canonical_device(device) != data.device:
        values = prims.device_put(values, canonical_device(device))
    return clang.convert(values, dtype or data.dtype)


def _copied(data: TensorProxy, dtype: Dtype, device: Device) -> TensorProxy:
    """Return the values of a tensor, without its history, in new memory."""
    values = _values(data, dtype, device)
    return prims.clone(values) if values.dtype == data.dtype else values


def _numbers(op: str, data: Any, dtype: Dtype, device: Device) -> TensorProxy:
    leaves = list(nested_numbers(data))
    check(
        not any(hasattr(leaf, "__array__") and not isinstance(leaf, TensorProxy) for leaf in leaves),
        lambda: f"{op} of arrays is not supported (forge/torchlang/creation.py)",
        NotImplementedError,
    )
    if not any(isinstance(leaf, TensorProxy) for leaf in leaves):
        return clang.from_numbers(data, dtype, device)
    kinds = [leaf.dtype if isinstance(leaf, TensorProxy) else dtype_of(leaf) for leaf in leaves]
    return _stacked(data, dtype or functools.reduce(torch.promote_types, kinds), canonical_device(device))


def _stacked(data: Any, dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """Return nested sequences of numbers and tensors of one element as one tensor."""
    if isinstance(data, (tuple, list)):
        return clang.stack([_stacked(item, dtype, device) for item in data])
    if not isinstance(data, TensorProxy):
        return prims.full((), data, dtype, device)
    return clang.reshape(_values(data, dtype, device), ())


@torchsymbol(torch.tensor, refs_tensor, factory=True)
def tensor(
    data: Any, *, dtype: Dtype = None, device: Device = None, requires_grad: bool = False, pin_memory: bool = False
) -> TensorProxy:
    """Return the tensor of a number or of nested sequences of numbers, or a copy of a tensor without its history."""
    check_supported("tensor", requires_grad=requires_grad)
    if isinstance(data, TensorProxy):
        return _copied(data, dtype, device)
    return _numbers("tensor", data, dtype, device)


@torchsymbol(Tensor.new_tensor)
def new_tensor(
    self: TensorProxy, data: Any, *, dtype: Dtype = None, device: Device = None, requires_grad: bool = False
) -> TensorProxy:
    """Return the tensor of a number or of nested sequences of numbers, or a copy of a tensor. Dtypes: self's."""
    check_supported("new_tensor", requires_grad=requires_grad)
    if isinstance(data, TensorProxy):
        return _copied(data, dtype or self.dtype, device)
    return _numbers("new_tensor", data, dtype or self.dtype, device or self.device)


@torchsymbol(torch.as_tensor, factory=True)
def as_tensor(data: Any, dtype: Dtype = None, device: Device = None) -> TensorProxy:
    """Return a tensor unchanged if it has the dtype and device; otherwise convert the tensor or the numbers."""
    if not isinstance(data, TensorProxy):
        return _numbers("as_tensor", data, dtype, device)
    if device is not None and canonical_device(device) != data.device:
        data = prims.device_put(data, canonical_device(device))
    return clang.convert(data, dtype or data.dtype)


@torchsymbol(torch.scalar_tensor, factory=True)
@with_options(*FACTORY)
def scalar_tensor(s: Number, *, dtype: Dtype = None, device: Device = None) -> TensorProxy:
    """Return a 0-d tensor. Dtypes: the default float dtype."""
    return prims.full((), s, dtype or torch.get_default_dtype(), canonical_device(device))


# sequences


@torchsymbol(torch.arange, factory=True)
@with_options(*FACTORY)
def arange(
    start: Real, end: Real | None = None, step: Real = 1, *, dtype: Dtype = None, device: Device = None
) -> TensorProxy:
    """Return start (0 if only one bound is given), start + step, … before end."""
    first, last = (0, start) if end is None else (start, end)
    return clang.arange(first, last, step, dtype, canonical_device(device))


@torchsymbol(torch.linspace, factory=True)
@with_options(*FACTORY)
def linspace(
    start: Number | TensorProxy, end: Number | TensorProxy, steps: int, *, dtype: Dtype = None, device: Device = None
) -> TensorProxy:
    """Return `steps` numbers from start to end, evenly spaced. The bounds may be 0-d tensors, to which no gradient
    flows."""
    dtype = dtype or _spaced_dtype(start, end)
    device = canonical_device(device)
    start, end = _bounds("linspace", dtype, device, start, end)
    return clang.linspace(start, end, steps, dtype, device)


def _spaced_dtype(start: Number | TensorProxy, end: Number | TensorProxy) -> torch.dtype:
    """Return the default float dtype, or its complex one if a bound is complex."""
    numbers = any(isinstance(each, complex) for each in (start, end))
    tensors = any(isinstance(each, TensorProxy) and each.dtype.is_complex for each in (start, end))
    default = torch.get_default_dtype()
    return torch.promote_types(default, torch.complex32) if numbers or tensors else default


def _bounds(
    op: str, dtype: torch.dtype, device: torch.device, *bounds: Number | TensorProxy
) -> list[Number | TensorProxy]:
    """Return the bounds: numbers unchanged, 0-d tensors on this device in a compute dtype. They have no gradient, as in
    torch."""
    wide = dtype if clang.category(dtype) > 1 else torch.float64
    for bound in bounds:
        torch_check(
            not isinstance(bound, TensorProxy) or bound.ndim == 0,
            lambda bound=bound: f"{op} only supports 0-dimensional start and end tensors, but got {bound}",
        )
    return [_endpoint(each, wide, device) if isinstance(each, TensorProxy) else each for each in bounds]


def _endpoint(bound: TensorProxy, dtype: torch.dtype, device: torch.device) -> TensorProxy:
    bound = prims.detach(bound)
    return clang.convert(bound if bound.device == device else prims.device_put(bound, device), dtype)


@torchsymbol(torch.logspace, factory=True)
@with_options(*FACTORY)
def logspace(
    start: Number | TensorProxy,
    end: Number | TensorProxy,
    steps: int,
    base: float = 10.0,
    *,
    dtype: Dtype = None,
    device: Device = None,
) -> TensorProxy:
    """Return base to the power of `steps` numbers from start to end, evenly spaced."""
    dtype = dtype or _spaced_dtype(start, end)
    wide = dtype if clang.category(dtype) > 1 else torch.float64
    device = canonical_device(device)
    start, end = _bounds("logspace", dtype, device, start, end)
    exponents = clang.linspace(start, end, steps, wide, device)
    return clang.convert(clang.pow(base, exponents), dtype)


@torchsymbol(torch.eye, factory=True)
@with_options(*FACTORY)
def eye(n: Dim, m: Dim | None = None, *, dtype: Dtype = None, device: Device = None) -> TensorProxy:
    """Return an (n, m) matrix with ones on the diagonal; square without m."""
    for size in (n, m):
        torch_check(
            size is None or not prims.statically_true(size < 0),
            lambda size=size: f"eye: n and m must be greater or equal to 0, got {size}",
        )
    device = canonical_device(device)
    rows = prims.iota(n, 0, 1, torch.int64, device)
    columns = prims.iota(n if m is None else m, 0, 1, torch.int64, device)
    same = clang.unsqueeze(rows, 1) == clang.unsqueeze(columns, 0)
    return clang.convert(same, dtype or torch.get_default_dtype())


def _triangle(name: str, upper: bool) -> Symbol:
    @with_options(*FACTORY)
    def body(row: int, col: int, offset: int = 0, *, dtype: Dtype = torch.int64, device: Device = None) -> TensorProxy:
        torch_check(row >= 0 and col >= 0, lambda: f"{name}: row and col must be non-negative, got {row} and {col}")
        return prims.triangle_indices(upper, row, col, offset, dtype or torch.int64, canonical_device(device))

    body.__name__, body.__doc__ = name, "The rows and columns of a triangle's elements, row by row."
    return torchsymbol(getattr(torch, name), factory=True)(body)


tril_indices, triu_indices = _triangle("tril_indices", False), _triangle("triu_indices", True)


# unspecified values with given strides: torch's kernel if torch runs them, row-major in a decomposition


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
    """Return an uninitialized tensor whose dims lie in memory in the order `physical_layout`."""
    _check_layout(size, [int(dim) for dim in physical_layout])
    return prims.empty(tuple(size), dtype or torch.get_default_dtype(), canonical_device(device))


def _check_strides(op: str, size: Sequence[Dim], stride: Sequence[Dim]) -> None:
    torch_check(
        len(size) == len(stride),
        lambda: f"{op}: dimensionality of sizes ({len(size)}) must match dimensionality of strides ({len(stride)})",
    )
    torch_check(
        not any(prims.statically_true(step < 0) for step in stride),
        lambda: f"{op}: Negative strides are not supported: {tuple(stride)}",
    )


@torchsymbol(torch.empty_strided, factory=True)
@with_options(*FACTORY)
def empty_strided(
    size: Sequence[Dim], stride: Sequence[Dim], *, dtype: Dtype = None, device: Device = None
) -> TensorProxy:
    """Return an uninitialized tensor with these strides."""
    _check_strides("empty_strided", size, stride)
    return prims.empty(tuple(size), dtype or torch.get_default_dtype(), canonical_device(device))


@torchsymbol(Tensor.new_empty_strided)
@with_options(*FACTORY)
def new_empty_strided(
    self: TensorProxy, size: Sequence[Dim], stride: Sequence[Dim], *, dtype: Dtype = None, device: Device = None
) -> TensorProxy:
    """Return an uninitialized tensor with these strides. Dtypes: self's."""
    _check_strides("new_empty_strided", size, stride)
    device = self.device if device is None else canonical_device(device)
    return prims.empty(tuple(size), dtype or self.dtype, device)
