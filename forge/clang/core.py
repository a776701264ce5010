"""The core language: its context, the decorator that makes its symbols, and promotion and broadcasting of operands."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch

from forge import prims
from forge.clang.promotion import Promotion, compute_dtype
from forge.ir import INT_TYPES, Dim, LanguageContext, Symbol, TensorProxy, check
from forge.prims.core import check_same_device, same, statically_true, torch_check

__all__ = [
    "all_symbols",
    "as_gradient",
    "broadcast",
    "broadcast_shapes",
    "canonical_dims",
    "clangop",
    "convert",
    "expand_to",
    "language",
    "prepare",
]

T = TypeVar("T")
language = LanguageContext("clang")
_symbols: dict[str, Symbol] = {}


def clangop(*operators: str) -> Callable[[Callable[..., T]], Symbol[T]]:
    """Make the decorated function a symbol of the core language.

    In that language, it implements the method of its own name and `operators` (their names are in forge/ir/proxies.py).
    """

    def decorate(body: Callable[..., T]) -> Symbol[T]:
        name = body.__name__
        check(name not in _symbols, lambda: f"clangop: {name} is defined twice")
        symbol = _symbols[name] = Symbol(name, f"clang.{name}", body=body)
        for method in (name, *operators):
            check(method not in language.methods, lambda method=method: f"clangop: method {method} is defined twice")
            language.methods[method] = symbol
        return symbol

    return decorate


def all_symbols() -> dict[str, Symbol]:
    """Return every symbol of the core language by name."""
    return dict(_symbols)


@overload
def convert(x: TensorProxy, dtype: torch.dtype) -> TensorProxy: ...
@overload
def convert(x: T, dtype: torch.dtype) -> T: ...
def convert(x: Any, dtype: torch.dtype) -> Any:
    """Return x as `dtype`; x itself if it has that dtype, or is a number."""
    if not isinstance(x, TensorProxy) or x.dtype == dtype:
        return x
    return prims.convert_element_type(x, dtype)


def as_gradient(g: TensorProxy, dtype: torch.dtype) -> TensorProxy:
    """Return a gradient in the dtype of its value: the real part for a real value."""
    if g.dtype.is_complex and not dtype.is_complex:
        g = prims.real(g)
    return convert(g, dtype)


def broadcast_shapes(op: str, *shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the shape that tensors of these shapes broadcast to.

    Raises RuntimeError naming the shapes if they do not broadcast. Source: torch.broadcast_shapes.
    """
    rank = max(map(len, shapes))
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            if statically_true(size == 1):
                continue
            if statically_true(result[dim] == 1):
                result[dim] = size
            else:
                torch_check(
                    same(result[dim], size),
                    lambda dim=dim, size=size: (
                        f"{op}: shapes {' and '.join(str(list(shape)) for shape in shapes)} do not broadcast: "
                        f"The size of tensor a ({result[dim]}) must match the size of tensor b ({size}) "
                        f"at non-singleton dimension {dim}"
                    ),
                )
    return tuple(result)


def known_equal(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Return whether two shapes are known to be equal, without a guard; `==` would guard on the first lengths that
    differ."""
    return len(a) == len(b) and all(m is n or statically_true(m == n) for m, n in zip(a, b, strict=True))


def expand_to(x: TensorProxy, shape: Sequence[Dim]) -> TensorProxy:
    """Return x broadcast to `shape`; x itself if it has that shape."""
    if known_equal(x.shape, shape):
        return x
    offset = len(shape) - x.ndim
    return prims.broadcast_in_dim(x, tuple(shape), tuple(range(offset, len(shape))))


def broadcast(op: str, *operands: Any) -> tuple[Any, ...]:
    """Return the operands with every tensor expanded to their common shape; numbers unchanged."""
    shapes = [operand.shape for operand in operands if isinstance(operand, TensorProxy)]
    if all(known_equal(shape, shapes[0]) for shape in shapes[1:]):
        return operands
    shape, device = broadcast_shapes(op, *shapes), check_same_device(op, *operands)
    return tuple(
        expand_to(_beside(operand, device), shape) if isinstance(operand, TensorProxy) else operand
        for operand in operands
    )


def _beside(x: TensorProxy, device: torch.device) -> TensorProxy:
    """Move a 0-d CPU tensor, which may be mixed with tensors on another device, to that device if it must be
    expanded."""
    return x if x.device == device else prims.device_put(x, device)


def prepare(op: str, *operands: Any, kind: Promotion = Promotion.DEFAULT) -> tuple[Any, ...]:
    """Return the operands in one dtype and one shape, for an elementwise prim."""
    dtype = compute_dtype(*operands, kind=kind)
    return broadcast(op, *[convert(operand, dtype) for operand in operands])


def canonical_dims(op: str, dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return dims counted from the front; None (or an empty sequence) means all of them."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return tuple(range(ndim))
    if isinstance(dims, INT_TYPES):
        dims = (dims,)
    result = prims.check_dims(op, dims, ndim)
    return result if ndim else ()
