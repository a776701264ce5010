"""Torch's pytrees."""

from typing import Any

import torch
from torch.utils import _pytree as torch_pytree


def register_mapping(cls: type[dict[Any, Any]]) -> None:
    """Make a subclass of dict a nest, as dict is one."""
    torch_pytree.register_pytree_node(
        cls,
        lambda value: (list(value.values()), list(value)),
        lambda values, keys: cls(zip(keys, values, strict=True)),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=lambda value: (
            [(torch_pytree.MappingKey(key), each) for key, each in value.items()],
            list(value),
        ),
    )


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a nest, in order."""
    return [leaf for leaf in torch_pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
