"""Functions of torch that read values: the substitutes that Dynamo captures for them.

Dynamo runs captured calls on fake tensors, on which these functions fail. A substitute returns results of the same
shape and dtype without reading values; torchlang maps it to the original function, which is what runs.

If torch itself runs the captured call (in eager, or for a function's transform), a substitute calls its function.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from forge.ir import Dim
from forge.torch_internals.fake_tensors import is_fake
from forge.torchlang import stands_for

Lengths = torch.Tensor | Sequence[Dim]
STAND_INS: dict[Callable, Callable] = {}


class _State(threading.local):
    are_off = False


_state = _State()


@contextmanager
def without_substitutes() -> Iterator[None]:
    """Decompose these functions in this context: they are called on fake tensors, too."""
    before, _state.are_off = _state.are_off, True
    try:
        yield
    finally:
        _state.are_off = before


def _for(function: Callable) -> Callable:
    """Return a decorator that registers a function's substitute on fake tensors."""

    def add(result: Callable) -> Callable:
        @functools.wraps(result)
        def stand_in(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            captured = is_fake(input) and not _state.are_off
            return (result if captured else function)(input, *args, **kwargs)

        STAND_INS[function] = stand_in
        stands_for(stand_in, function)
        return stand_in

    return add


@_for(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Substitute for F.gaussian_nll_loss, which rejects a negative var."""
    if isinstance(var, torch.Tensor) and var.ndim == input.ndim - 1:
        var = var.unsqueeze(-1)
    loss = (input - target) ** 2 / var
    return loss if reduction == "none" else loss.sum()


@_for(F.ctc_loss)
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Substitute for F.ctc_loss, whose residuals depend on the longest target."""
    losses = log_probs.sum((0, -1))
    return losses if reduction == "none" else losses.sum()


@_for(torch.ctc_loss)
def torch_ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: int = 0,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Substitute for torch.ctc_loss, whose residuals depend on the longest target."""
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, reduction="mean" if reduction else "none")
