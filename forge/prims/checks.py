"""The prims that check values at run time."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from forge.ir import Tag, TensorProxy, check
from forge.prims.core import check_tensor, primitive
from forge.torch_internals.functions import torch_check_with


class ViolatedAssumption(RuntimeError):
    """The error when an assumption under which a program was captured does not hold; the program has changed nothing
    yet."""


def fail(error: type[Exception], message: str | Callable[..., str] | None, *values: Any) -> NoReturn:
    """Raise torch._check_with's error for a condition that does not hold. The arguments are those of `require`."""
    text = partial(message, *values) if callable(message) else partial(str, message)
    torch_check_with(error, False, None if message is None else text)
    raise AssertionError("torch._check_with did not raise")


@primitive(tags=[Tag.EFFECT, Tag.SYNCHRONIZING, Tag.NOT_DIFFERENTIABLE])
def require(
    condition: TensorProxy | bool | torch.SymBool,
    message: str | Callable[..., str] | None,
    error: str | type[Exception],
    *values: Any,
) -> None:
    """Raise an exception, or the built-in one of this name, if the condition, one bool, does not hold.

    message: text, a function of the values, or None for torch's own.
    """
    if isinstance(condition, (bool, torch.SymBool)):
        return
    check_tensor("prims.require", condition=condition)
    check(condition.ndim == 0, lambda: f"prims.require: condition is {condition}, but must be one bool")
