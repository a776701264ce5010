"""The grad mode of torch: the effect of no_grad, enable_grad and set_grad_enabled on a program.

While a program is recorded, this thread is in the mode in which the program would run: a directly traced function
changes it itself, and the Dynamo front end follows the changes in its graph. A call that ran without grad carries
Tag.NO_GRAD, and no gradient flows through it. The compiled program computes its values in one mode; its epilogue
(forge/compiler/program.py) sets the mode for each write and view, and at last the program's final mode.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from forge.ir import Tag, Trace
from forge.ir.pytree import tree_map
from forge.torch_internals.autograd import set_grad_enabled


@contextmanager
def preserve() -> Iterator[None]:
    """Restore the grad mode at the exit of the context."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        yield


def note(trace: Trace) -> None:
    """Tag the symbols that a front end records from now on with this thread's grad mode."""
    if not trace.follows_grad_mode:
        return
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # in which enable_grad has no effect
        trace.tags = trace.tags - {Tag.NO_GRAD}
    else:
        trace.tags = trace.tags | {Tag.NO_GRAD}


def restore_on_error(call: Callable, mode: bool) -> Callable:
    """Return `call`, made to restore the grad mode at its entry, `mode`, after an exception."""

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except BaseException:
            set_grad_enabled(mode)
            raise

    return run


def with_grad(call: Callable) -> Callable:
    """Return `call`, run with grad enabled for callers without it, except in inference mode, where that has no
    effect."""

    def run(*args: Any) -> Any:
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            return call(*args)

    return run


class InMode:
    """A function that differentiates inside (torch.func.grad), run in the program's grad mode at the call: values are
    computed without grad, in which it would return zeros."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.mode = torch.is_grad_enabled()

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() == self.mode:
            return self.function(*args)
        with torch.set_grad_enabled(self.mode):
            return tree_map(_detach, self.function(*tree_map(_detach, args)))


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
