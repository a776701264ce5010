"""Patches of Dynamo: branches on random numbers that every draw decides alike."""

import math
import operator
import sys
from typing import Any

import torch

from forge.torch_internals.dynamo import InstructionTranslatorBase, TensorVariable
from forge.torch_internals.patch import patch

_COMPARISONS = {operator.lt, operator.le, operator.gt, operator.ge}
_MIRRORED = {operator.lt: operator.gt, operator.le: operator.ge, operator.gt: operator.lt, operator.ge: operator.le}
_LAST = math.nextafter(1.0, 0.0)  # torch.rand draws from [0, 1)
_JUMPS = InstructionTranslatorBase.POP_JUMP_IF_FALSE.__code__


@patch(
    TensorVariable,
    "as_python_constant",
    why="`if torch.rand([]) < self.layerdrop` breaks the graph in each layer, also where nothing is dropped",
    issue="not reported: models say `if self.layerdrop > 0` themselves by now",
    upstream="torch/_dynamo/variables/base.py:439@2.13.0, VariableTracker.as_python_constant",
)
def _as_python_constant(self: TensorVariable) -> Any:
    """Return the constant that a tensor is. For a jump, and for nothing else, one that compares a random number with a
    bound of all of them is one, too: the program draws it, and does not wait for it."""
    caller = sys._getframe(1)
    if caller.f_code.co_name == "is_python_constant" and caller.f_back is not None:
        caller = caller.f_back
    outcome = _outcome(self.proxy.node) if caller.f_code is _JUMPS else None
    return _as_python_constant.original(self) if outcome is None else outcome


def _outcome(node: torch.fx.Node) -> bool | None:
    """Return what a comparison of a number of torch.rand with a constant gives for all draws; None where it depends."""
    if node.target not in _COMPARISONS or len(node.args) != 2:
        return None
    compare, (left, right) = node.target, node.args
    if isinstance(right, torch.fx.Node):
        compare, left, right = _MIRRORED[compare], right, left
    if not (isinstance(left, torch.fx.Node) and left.target is torch.rand and isinstance(right, (int, float))):
        return None
    outcomes = {bool(compare(number, right)) for number in (0.0, _LAST)}
    return outcomes.pop() if len(outcomes) == 1 else None
