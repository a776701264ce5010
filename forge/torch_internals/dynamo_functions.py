"""Patches of Dynamo: torch.autograd.Function, whose backward it forgets, or does not compare with its forward."""

import linecache
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from forge.torch_internals.dynamo import (
    AutogradFunctionApplyVariable,
    AutogradFunctionVariable,
    break_graph,
    graph_break,
    lists,
)
from forge.torch_internals.functorch import maybe_current_level
from forge.torch_internals.patch import Hook, patch

find_wrong_gradients: Hook[[str, Sequence[Any], Sequence[bool], Any], str | None] = Hook(
    "compare the gradients of a torch.autograd.Function with its inputs"
)


@patch(
    FunctionCtx,
    "set_materialize_grads",
    why="a backward would get zeros where set_materialize_grads(False) asks for None",
    issue="https://github.com/pytorch/pytorch/issues/118396",
    upstream="torch/_dynamo/variables/misc.py:1183@2.13.0, AutogradFunctionContextVariable",
)
def _set_materialize_grads(self: FunctionCtx, value: bool) -> None:
    self.materialize_grads = value
    if not value:
        graph_break("the gradients of a torch.autograd.Function that may be None")


@patch(
    FunctionCtx,
    "mark_dirty",
    why="Dynamo does not see that a Function changes its input in place",
    issue="https://github.com/pytorch/pytorch/issues/184113",
    upstream="torch/_dynamo/variables/misc.py:1072@2.11.0, AutogradFunctionContextVariable",
    before=(2, 13),
    not_probed="tests/capture/test_autograd.py has programs, for torch before 2.13",
)
def _mark_dirty(self: FunctionCtx, *tensors: Any) -> None:
    _mark_dirty.original(self, *tensors)
    graph_break("an input that a torch.autograd.Function changes in place")


@patch(
    AutogradFunctionVariable,
    "call_apply",
    why="a Function's own backward is forgotten in torch.func, and in another Function without its source",
    issue="https://github.com/pytorch/pytorch/issues/193279",
    upstream="torch/_dynamo/variables/misc.py:943@2.13.0, AutogradFunctionVariable.call_apply",
)
def _call_apply(self: AutogradFunctionVariable, tx: Any, args: list, kwargs: dict) -> Any:
    if maybe_current_level() is not None and any(map(_may_have_gradients, args)):
        break_graph(
            "torch.autograd.Function in a transform of torch.func",
            f"{self.fn_cls.__name__}.apply",
            "Its own backward would be forgotten.",
        )
    if _applying and not linecache.getlines(self.fn_cls.forward.__code__.co_filename):
        break_graph(
            "torch.autograd.Function, without its source, in another one",
            f"{self.fn_cls.__name__}.apply",
            "In a backward, its own would be forgotten; where it is called is told by its source.",
        )
    _applying.append(self.fn_cls)
    try:
        return _call_apply.original(self, tx, args, kwargs)
    finally:
        _applying.pop()


@patch(
    AutogradFunctionApplyVariable,
    "rewire_bwd_graph_outputs",
    why="a backward that gives wrong gradients is not refused, as torch does",
    issue="not reported: no issue names the gradients that Dynamo drops; eager refuses them",
    upstream="torch/_dynamo/variables/higher_order_ops.py:5156@2.13.0, rewire_bwd_graph_outputs",
)
def _rewire(self: AutogradFunctionApplyVariable, *args: Any) -> Any:
    """Match the gradients of a backward with the inputs of its forward. Dynamo drops those without an input, and
    compares no shapes; a wrong backward runs in eager, where torch reports it."""
    *_, outputs, _, _, operands = args
    inputs = [_example(each) for each in operands]
    needs = [isinstance(each, torch.Tensor) and each.requires_grad for each in inputs]
    gradients = tuple(map(_example, outputs.items)) if isinstance(outputs, lists.TupleVariable) else _example(outputs)
    problem = find_wrong_gradients(_applying[-1].__name__, inputs, needs, gradients)
    if problem is not None:
        break_graph(WRONG_BACKWARD, f"{_applying[-1].__name__}.apply", problem, RuntimeError(problem))
    return _rewire.original(self, *args)


def _may_have_gradients(variable: Any) -> bool:
    """Return whether an argument may be differentiated: masks index their tensors of integers by a Function."""
    if isinstance(variable, lists.BaseListVariable):
        return any(map(_may_have_gradients, variable.items))
    if variable.is_tensor():
        dtype = _example(variable).dtype
        return bool(dtype.is_floating_point or dtype.is_complex)
    return not variable.is_python_constant()


def _example(variable: Any) -> Any:
    """Return the value that Dynamo has for a variable: a fake tensor, None, or anything else."""
    if variable.is_tensor():
        return variable.as_proxy().node.meta["example_value"]
    return variable.as_python_constant() if variable.is_python_constant() else variable


WRONG_BACKWARD = "wrong gradients of a torch.autograd.Function"
_applying: list[type] = []  # the Functions whose bodies Dynamo captures now: one frame at a time
