"""A patch of torch.utils.swap_tensors, for those who watch tensors that it swaps."""

import functools

import torch

from forge.torch_internals.patch import Hook, Scope, patch

before_swap: Hook[[torch.Tensor, torch.Tensor], None] = Hook("forget two tensors that are to be swapped")


@patch(
    torch.utils,
    "swap_tensors",
    scope=Scope.PROCESS,
    why="it refuses tensors that have weak references, and nothing tells that the values of a frozen weight are others",
    issue="https://github.com/pytorch/pytorch/issues/186796",
    upstream="torch/utils/__init__.py:35@2.13.0, swap_tensors",
)
@functools.wraps(torch.utils.swap_tensors)
def follow_swaps(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Swap two tensors, as torch.utils.swap_tensors does."""
    before_swap(t1, t2)
    follow_swaps.original(t1, t2)
