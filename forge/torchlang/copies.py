"""The copies of torch's views: torch.x_copy returns the values of torch.x in its own memory, in row-major order."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge import prims
from forge.ir import Symbol, TensorProxy
from forge.torchlang import joining, shape
from forge.torchlang.core import torchsymbol

Parts = tuple[TensorProxy, ...]


def _identity(input: TensorProxy) -> TensorProxy:
    return input


_SHOWN: dict[str, Callable] = {
    "alias_copy": _identity,
    "diagonal_copy": shape.diagonal,
    "expand_copy": shape.expand,
    "narrow_copy": shape.narrow,
    "permute_copy": shape.permute,
    "select_copy": shape.select,
    "slice_copy": shape.aten_slice,
    "split_copy": joining.split,
    "split_with_sizes_copy": joining.split_with_sizes,
    "squeeze_copy": shape.squeeze,
    "t_copy": shape.t,
    "transpose_copy": shape.transpose,
    "unbind_copy": joining.unbind,
    "unfold_copy": shape.tensor_unfold,
    "unsqueeze_copy": shape.unsqueeze,
    "view_copy": shape.reshape,
}


def _clone(view: TensorProxy) -> TensorProxy:
    return prims.clone(view, torch.contiguous_format)


def _make_copy_variant(name: str, view: Callable) -> Symbol:
    def body(input: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy | Parts:
        result = view(input, *args, **kwargs)
        return _clone(result) if isinstance(result, TensorProxy) else tuple(_clone(part) for part in result)

    body.__name__, body.__doc__ = name, f"What torch.{name.removesuffix('_copy')} shows, in memory of its own."
    function = getattr(torch, name)
    return torchsymbol(function, *([Tensor.narrow_copy] if name == "narrow_copy" else []))(body)


for _name, _view in _SHOWN.items():
    globals()[_name] = _make_copy_variant(_name, _view)
