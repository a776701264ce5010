"""Patches of torch.nn.Parameter, for those who watch what is handed out of a parameter's memory."""

import functools
from typing import Any

import torch

from forge.torch_internals.patch import Hook, Patch, Scope, patch
from forge.torch_internals.tensors import data_descriptor

note_alias: Hook[[torch.Tensor, Any], None] = Hook("note a tensor or an array that shares a parameter's memory")


def _data(parameter: torch.Tensor) -> torch.Tensor:
    data = data_descriptor.__get__(parameter)
    note_alias(parameter, data)
    return data


@patch(
    torch.nn.Parameter,
    "numpy",
    scope=Scope.PROCESS,
    why="a write to the array counts no version: the values of a frozen weight would be outdated",
    issue="not reported: torch documents it; an array is none of autograd's",
    upstream="torch/_C/__init__.pyi:7300@2.13.0, TensorBase.numpy",
)
@functools.wraps(torch.Tensor.numpy)
def follow_numpy(parameter: torch.Tensor, **options: Any) -> Any:
    """Return an array that shares a parameter's memory, as torch.Tensor.numpy does."""
    array = follow_numpy.original(parameter, **options)
    note_alias(parameter, array)
    return array


follow_data = Patch(
    torch.nn.Parameter,
    "data",
    property(_data, data_descriptor.__set__, doc=data_descriptor.__doc__),
    scope=Scope.PROCESS,
    why="a tensor of `p.data` has a version of its own: the values of a frozen weight would be outdated",
    issue="not reported: torch documents it; `data` is there to keep a change from autograd",
    upstream="torch/_C/__init__.pyi:2186@2.13.0, TensorBase.data",
)
