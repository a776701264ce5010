"""The user's names of dims, as in torch.export.Dim("batch"), for the text of signatures and errors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from forge.torch_internals.pytree import torch_pytree

DimNames = Mapping[int, str]


def dim_names(
    args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any, parameters: Sequence[str]
) -> list[DimNames]:
    """Return for each leaf of the arguments the names of its dims, as `dynamic_shapes` of torch.export gives them."""
    values = [*args, *kwargs.values()]
    if isinstance(dynamic_shapes, Mapping):
        names = [*parameters[: len(args)], *[""] * (len(args) - len(parameters)), *kwargs]
        shapes = [dynamic_shapes.get(name) for name in names]
    else:
        shapes = list(dynamic_shapes or ())
    shapes += [None] * (len(values) - len(shapes))
    return [names for value, shape in zip(values, shapes, strict=False) for names in _of(value, shape)]


def _of(value: Any, shape: Any) -> Iterator[DimNames]:
    if isinstance(value, torch.Tensor):
        dims = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
        yield {dim: size.__name__ for dim, size in dims if type(size) is Dim}
    elif isinstance(value, dict) and isinstance(shape, Mapping):
        for key, part in value.items():
            yield from _of(part, shape.get(key))
    elif type(value) in (tuple, list) and isinstance(shape, (tuple, list)) and len(value) == len(shape):
        for part, own in zip(value, shape, strict=True):
            yield from _of(part, own)
    else:
        yield from ({} for _ in torch_pytree.tree_leaves(value))
