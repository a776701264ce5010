"""Patches of Dynamo: what changes of a tensor or a number without a guard."""

from collections.abc import Iterable
from typing import Any

import torch

from forge.torch_internals.dynamo import (
    ConstantVariable,
    TensorVariable,
    break_graph,
    lists,
)
from forge.torch_internals.dynamo import dynamo_utils as utils
from forge.torch_internals.patch import Patch, patch

_GETATTR = "var_getattr" if "var_getattr" in vars(TensorVariable) else "tp_getattro_impl"  # since torch 2.14
_UNGUARDED = frozenset({"_base", "_version", "grad_fn", "is_leaf"})
_OF_VIEWS = frozenset("as_strided_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split())


@patch(
    TensorVariable,
    "call_method",
    why="a tensor whose shape changes in place (`y.t_()`) keeps its old shape",
    issue="https://github.com/pytorch/pytorch/issues/185888",
    upstream="torch/_dynamo/variables/tensor.py:863@2.13.0, TensorVariable.call_method",
    before=(2, 14),
)
def _call_method(self: TensorVariable, tx: Any, name: str, args: list, kwargs: dict) -> Any:
    """Call a method. A tensor that the program made becomes a view of itself; for others, which outside code may see,
    the graph breaks."""
    if name not in _OF_VIEWS:
        return _call_method.original(self, tx, name, args, kwargs)
    if not _is_own(self, tx):
        break_graph(
            "a tensor's shape changes in place", f"torch.Tensor.{name}", "Others than the program may see the tensor."
        )
    view = _call_method.original(self, tx, name.removesuffix("_"), args, kwargs)
    self.proxy = view.proxy
    self.synchronize_attributes(tx)
    return self


@patch(
    TensorVariable,
    _GETATTR,
    why="what autograd knows of an input (is_leaf, grad_fn) is a constant without a guard",
    issue="not reported: no issue is of a program that branches on is_leaf or grad_fn of an input",
    upstream="torch/_dynamo/variables/tensor.py:644@2.13.0, TensorVariable.var_getattr",
)
def _getattr(self: TensorVariable, tx: Any, name: str) -> Any:
    if name in _UNGUARDED and (self.source is not None or name == "_version"):
        break_graph(
            "what autograd knows of a tensor", f"torch.Tensor.{name}", "It may be another one at the next call."
        )
    return _getattr.original(self, tx, name)


def _is_own(tensor: TensorVariable, tx: Any) -> bool:
    """Return whether the program made the tensor, one variable stands for it, and autograd sees what happens to it."""
    fake = tensor.proxy.node.meta["example_value"]
    nodes = [node for node in tx.output.graph.nodes if node.meta.get("example_value") is fake]
    is_tracked = torch.is_grad_enabled() or not fake.requires_grad
    return tensor.source is None and nodes == [tensor.proxy.node] and is_tracked


@patch(
    utils,
    "iter_contains",
    why="a number that is a symbol (a length) is unequal to every constant: `3 in x.shape` is False",
    issue="https://github.com/pytorch/pytorch/issues/153366",
    upstream="torch/_dynamo/utils.py:3263@2.13.0, iter_contains",
    before=(2, 14),
)
def _contains(items: Iterable[Any], search: Any, *others: Any, **options: Any) -> Any:
    items = list(items)
    if search.is_python_constant():
        value = search.as_python_constant()
        if any(_is_equal_symbol(each.realize(), value) for each in items):
            return ConstantVariable.create(True)
    return _contains.original(items, search, *others, **options)


Patch(
    lists,
    "iter_contains",
    _contains.replacement,
    why="the same, by the name that the module of lists has for it",
    issue=_contains.issue,
    upstream="torch/_dynamo/variables/lists.py:214@2.13.0, iter_contains",
    before=(2, 14),
)


def _is_equal_symbol(item: Any, value: Any) -> bool:
    """Return whether a symbolic number, or a sequence with some, equals a constant; guard the answer."""
    if hasattr(item, "sym_num"):
        return bool(item.sym_num == value)
    if not isinstance(item, lists.BaseListVariable) or not isinstance(value, (tuple, list)):
        return False
    if issubclass(item.python_type(), tuple) != isinstance(value, tuple) or len(item.items) != len(value):
        return False
    return all(
        part.as_python_constant() == each if part.is_python_constant() else _is_equal_symbol(part, each)
        for part, each in zip(item.items, value, strict=True)
    )
