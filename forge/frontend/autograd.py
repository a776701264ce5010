"""One torch.autograd.Function for a differentiated region."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from forge.frontend.ambient import unconverted
from forge.torchlang import autocast

_TWICE = (
    "forge: this result was differentiated by forge's own backward, which has no gradient itself: double backward "
    "(create_graph=True) is not supported; run this part in eager for it"
)


class Region:
    """A compiled forward that saves and the backwards that read what it saved.

    forward(*inputs) returns (outputs, saved tensors, saved numbers). `backward_for(present)` is compiled on first use
    for each set of outputs that have a gradient, so that an unused output costs nothing and leaves None.
    """

    def __init__(
        self,
        forward: Callable,
        backward_for: Callable[[tuple[bool, ...]], Callable],
        non_differentiable: list[int],
    ) -> None:
        backwards: dict[tuple[bool, ...], Callable] = {}
        lock = threading.RLock()

        class ForgeFunction(torch.autograd.Function):
            @staticmethod
            @unconverted
            def forward(ctx: Any, *inputs: Any) -> Any:
                outputs, tensors, numbers = forward(*inputs)
                ctx.save_for_backward(*tensors)
                ctx.numbers = numbers
                ctx.set_materialize_grads(False)
                if non_differentiable:
                    ctx.mark_non_differentiable(*[outputs[i] for i in non_differentiable])
                return outputs

            @staticmethod
            @unconverted
            def backward(ctx: Any, *gradients: Any) -> Any:
                if autocast.is_enabled():
                    with autocast.disabled():
                        return ForgeFunction.backward(ctx, *gradients)
                present = tuple([gradient is not None for gradient in gradients])
                function = backwards.get(present)
                if function is None:
                    with lock:  # threads may meet here
                        function = backwards.get(present) or backwards.setdefault(present, backward_for(present))
                given = [gradient for gradient in gradients if gradient is not None]
                boxed = [*ctx.saved_tensors, *ctx.numbers, *given]
                recorded = torch.is_grad_enabled()
                ctx.maybe_clear_saved_tensors()
                del gradients, given
                with torch.no_grad():
                    results = function(boxed)
                return _once(results) if recorded else results

        self.apply = ForgeFunction.apply


def _once(results: tuple) -> tuple:
    """Gradients that raise when they are differentiated again."""
    tensors = [result for result in results if result is not None]
    if not tensors:
        return results
    tracked = [tensor.detach().requires_grad_() for tensor in tensors]
    guarded = torch._C._functions.DelayedError(_TWICE.encode(), len(tracked))(*tracked)
    remaining = iter(guarded if isinstance(guarded, tuple) else (guarded,))
    return tuple(None if result is None else next(remaining) for result in results)
