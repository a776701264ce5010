"""Patches of Dynamo: asserts and f-strings of a number that is a symbol."""

import sys
from typing import Any

import torch

from forge.torch_internals.dynamo import (
    ConstantVariable,
    InstructionTranslatorBase,
    StringFormatVariable,
    SymNodeVariable,
    symbolic_convert,
)
from forge.torch_internals.patch import Hook, Scope, patch

add_check: Hook[[Any, type[Exception], Any, Any], None] = Hook("capture a check of a condition, with its message")


@patch(
    InstructionTranslatorBase,
    "_format_value",
    scope=Scope.MESSAGE,
    why="a number that is a symbol is formatted as what it is at the first call",
    issue="https://github.com/pytorch/pytorch/issues/129882",
    upstream="torch/_dynamo/symbolic_convert.py:4160@2.13.0, InstructionTranslatorBase._format_value",
)
def format_value(self: InstructionTranslatorBase, spec: Any, flags: int) -> None:
    """Format a value in an f-string; a symbolic number stays a value that the program reads as it runs."""
    if not isinstance(self.stack[-1], SymNodeVariable):
        format_value.original(self, spec, flags)
        return
    text = "{:" + spec.as_python_constant() + "}"
    self.push(StringFormatVariable(text, [self.pop()], {}))


@patch(
    symbolic_convert,
    "_detect_and_normalize_assert_statement",
    why="an assert on a number that is a symbol is no check of the program: Dynamo has the condition alone, for itself",
    issue="https://github.com/pytorch/pytorch/issues/137217",
    upstream="torch/_dynamo/symbolic_convert.py:836@2.13.0, _detect_and_normalize_assert_statement",
)
def _is_assert(self: InstructionTranslatorBase, *how: Any) -> bool:
    """Return whether a jump is that of an `assert`. Of one on a number that is a symbol Dynamo keeps the condition
    alone, for itself: it becomes a check."""
    is_assert = _is_assert.original(self, *how)
    condition = sys._getframe(1).f_locals["value"] if is_assert else None
    if isinstance(condition, SymNodeVariable) and isinstance(condition.sym_num, torch.SymBool):
        message = self.stack[-1].as_python_constant()
        message = "" if message == _NO_MESSAGE else message
        add_check(self, AssertionError, condition, ConstantVariable.create(message))
    return is_assert


_NO_MESSAGE = "assertion error"  # Dynamo's, of an `assert` that has none
