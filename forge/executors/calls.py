"""Calls of a symbol as data: the metadata of a call, to be stored, printed and rebuilt in another process."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from forge.ir import SYMBOLIC_TYPES, TensorProxy
from forge.ir.proxies import plain
from forge.support.dtypes import dtype_name, show
from forge.torch_internals.pytree import torch_pytree

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


class NotReproducible(ValueError):
    """A call whose arguments cannot be built in another process."""


@dataclass(frozen=True)
class Meta:
    """The metadata of a tensor before the program runs. strides: None if unknown."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None = None

    def map(self, function: Callable[[Any], Any]) -> "Meta":
        """Return the metadata with every size and stride replaced."""
        strides = None if self.strides is None else tuple(map(function, self.strides))
        return Meta(tuple(map(function, self.shape)), self.dtype, self.device, strides)


@dataclass(frozen=True)
class Call:
    """A call of a symbol, with a Meta for each tensor."""

    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def metas(self) -> list[Meta]:
        return [leaf for leaf in torch_pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Meta)]

    def map(self, function: Callable[[Any], Any]) -> "Call":
        """Return the call with every leaf replaced."""
        return Call(*torch_pytree.tree_map(function, (self.args, self.kwargs)))


Passes = Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None


@dataclass(frozen=True)
class Case:
    """A call on real tensors. note: their special property. offset: the storage offset of each tensor, in elements.
    strides_known: whether the checker sees the strides. gradients: whether they are compared; layouts: whether incoming
    ones of other layouts are. passes: accepts the kernel's and eager's results if these are right however they
    differ."""

    args: tuple
    kwargs: dict[str, Any]
    note: str = ""
    offset: int = 0
    strides_known: bool = True
    gradients: bool = True
    passes: Passes = None
    layouts: bool = True


def with_strides(values: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Return the values in memory of these strides; unchanged if none are known."""
    if strides is None or values.stride() == strides:
        return values
    result = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device)
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    result[index] = values[index]
    return result


def format_arguments(values: Mapping[str, Any], note: str = "") -> str:
    """Return arguments by name as text; `note` follows each tensor."""
    arguments = [(name, value) for name, value in values.items() if value is not None]
    return ", ".join(part for name, value in arguments for part in _format_argument(name, value, note))


def _format_argument(name: str, value: Any, note: str) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield f"{name}: {dtype_name(value.dtype)}{list(value.shape)}{f' ({note})' if note else ''}"
    elif isinstance(value, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in value):
        for i, each in enumerate(value):
            yield from _format_argument(f"{name}[{i}]", each, note)
    else:
        yield f"{name}={show(value)}"


def call_of(args: tuple, kwargs: dict, number: Callable[[Any], Any] | None = None) -> Call:
    """Return a call on proxies or tensors as data. number: maps a number that may be symbolic to data; by default, to
    its value in this run. Raises NotReproducible."""
    return Call(tuple(args), dict(kwargs)).map(lambda leaf: _to_meta(leaf, number or _number))


def _to_meta(leaf: Any, number: Callable[[Any], Any]) -> Any:
    leaf = plain(leaf)
    if isinstance(leaf, (TensorProxy, torch.Tensor)):
        strides = leaf.strides if isinstance(leaf, TensorProxy) else leaf.stride()
        numbers = None if strides is None else tuple(map(number, strides))
        return Meta(tuple(map(number, leaf.shape)), leaf.dtype, torch.device(leaf.device), numbers)
    if isinstance(leaf, SYMBOLIC_TYPES):
        return number(leaf)
    if isinstance(leaf, PLAIN):
        return leaf
    raise NotReproducible(f"the kernel cannot be verified: its argument {leaf!r} cannot be made in another process")


def _number(value: Any) -> Any:
    if not isinstance(value, SYMBOLIC_TYPES):
        return value
    if value.node.hint is None:
        raise NotReproducible(f"the kernel cannot be verified: {value} is not known before the program runs")
    return value.node.hint
