"""The head and loss of a language model: one kernel reads a chunk of logits and writes their gradient in its place.

The products are torch's, and so is the order of the chunks (forge/executors/torchex/linear_cross_entropy.py).
"""

import math
from typing import Any, NamedTuple

import torch

from forge.executors.cudaex.availability import runs_triton
from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.executors.torchex import linear_cross_entropy as chunked
from forge.ir import TensorProxy
from forge.torch_internals.autograd import get_current_graph_task_keep_graph as graph_is_kept
from forge.torchlang.nn.fused_linear_cross_entropy import Step

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Capped(NamedTuple):
    """The steps from logits to scores as one formula: after * x, or after * tanh(before * x)."""

    before: float
    has_tanh: bool
    after: float


def as_formula(steps: tuple[Step, ...]) -> Capped | None:
    """Return the formula of steps that scale, with one tanh at most; None for others. Casts are not rounded to: the
    kernel computes in float32."""
    factors, tanhs = [1.0], 0
    for step in steps:
        if step[0] == "tanh":
            tanhs += 1
            factors.append(1.0)
        elif step[0] != "to":
            factors[-1] *= step[1] if step[0] == "mul" else 1 / step[1]
    if tanhs > 1 or not all(math.isfinite(each) and each for each in factors):
        return None
    return Capped(factors[0], True, factors[1]) if tanhs else Capped(1.0, False, factors[0])


def _is_scored(steps: tuple[Step, ...], logits: object, first: int) -> bool:
    """Return whether the logits that the program reads are scores already: scaled, or with a tanh."""
    return logits is not None and any(kind != "to" for kind, *_ in steps[:first])


def _cross_entropy(
    inputs: chunked.Rows, rows: slice, weights: chunked.Weights, logits: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    from forge.executors.cudaex.kernels import cross_entropy  # Triton is imported where a program runs it

    formula = as_formula(inputs.steps)
    assert formula is not None, "the checker declines other steps"
    is_scored = _is_scored(inputs.steps, inputs.logits, inputs.first)
    options = (inputs.classes, formula, is_scored, inputs.ignore_index, inputs.label_smoothing)
    return cross_entropy(logits, inputs.target[rows], weights.of_gradient[rows], out, *options)


def _chunk_loss(inputs: chunked.Rows, rows: slice, weights: chunked.Weights, is_reduced: bool) -> torch.Tensor:
    losses = _cross_entropy(inputs, rows, weights, chunked.logits_of(inputs, rows), None) * weights.of_loss[rows]
    return losses.sum() if is_reduced else losses


def _differentiate_chunk(
    inputs: chunked.Rows, rows: slice, weights: chunked.Weights
) -> tuple[torch.Tensor, torch.Tensor, None]:
    logits, out = chunked.logits_of(inputs, rows), None
    if inputs.logits is not None:
        out = inputs.weight.new_empty((logits.shape[0], inputs.weight.shape[0]))
    losses = _cross_entropy(inputs, rows, weights, logits, logits if out is None else out)
    return torch.dot(losses, weights.of_loss[rows]), logits if out is None else out, None


def _scale(gradient: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    from forge.executors.cudaex.kernels import scale_

    return gradient * g if graph_is_kept() else scale_(gradient, g)


def _checker(
    hidden: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    logits: TensorProxy | None,
    target: TensorProxy,
    class_weight: TensorProxy | None,
    steps: tuple[Step, ...],
    first: int,
    *options: object,
) -> Decision:
    decision = runs_triton("hidden", hidden)
    if not decision:
        return decision
    if hidden.dtype not in _DTYPES:
        return decline(f"hidden is {hidden.dtype}, but must be bfloat16, float16 or float32")
    if ("to", torch.float64) in steps:
        return decline("the loss is computed in float64, and the kernel computes in float32")
    if as_formula(steps) is None:
        return decline("the logits are changed by more than scales and one tanh")
    if _is_scored(steps, logits, first) and any(kind != "to" for kind, *_ in steps[first:]):
        return decline("the program reads the logits between two of their steps")
    return True


def _loss(*call: Any) -> torch.Tensor:
    return chunked.loss_of(_chunk_loss, *call)


def _loss_and_gradients(*call: Any) -> tuple[torch.Tensor | None, ...]:
    return chunked.loss_and_gradients_of(_differentiate_chunk, *call)


def register(executor: OperatorExecutor) -> None:
    """Register the head with an executor."""
    chunked.register(executor, _loss, _loss_and_gradients, _scale, _checker)
