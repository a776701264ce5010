"""The head of a language model and its loss as one call; forge/transforms/linear_cross_entropy.py matches them."""

from collections.abc import Callable
from typing import Literal

import torch

from forge import clang
from forge.ir import Symbol, TensorProxy
from forge.torchlang.linalg import linear
from forge.torchlang.nn.loss import cross_entropy

Step = tuple[Literal["to"], torch.dtype] | tuple[Literal["mul", "div"], float] | tuple[Literal["tanh"]]

_STEPS: dict[str, Callable[..., TensorProxy]] = {
    "to": clang.convert,
    "mul": clang.mul,
    "div": clang.div,
    "tanh": clang.tanh,
}


def _linear_cross_entropy(
    hidden: TensorProxy,
    weight: TensorProxy,
    bias: TensorProxy | None,
    logits: TensorProxy | None,
    target: TensorProxy,
    class_weight: TensorProxy | None,
    steps: tuple[Step, ...],
    first: int,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> TensorProxy:
    """Return cross_entropy of the rows of linear(hidden, weight, bias), after `steps`: ("to", dtype), ("mul", number),
    ("div", number) and ("tanh",), in order.

    `logits`, if the program uses them elsewhere, are those rows after the steps before `first`.
    Shapes: hidden (..., H), weight (V, H), bias (V,), logits (..., V), class_weight (V,); target has as many elements
    as hidden has rows; out is () or, with reduction="none", target's.
    Dtypes: out has the dtype of the last cast, or hidden's.
    """
    x = linear(hidden, weight, bias) if logits is None else logits
    for kind, *operands in steps[0 if logits is None else first :]:
        x = _STEPS[kind](x, *operands)
    rows = clang.as_rows(x)
    options = (None, ignore_index, None, reduction, label_smoothing)
    out = cross_entropy(rows, clang.reshape(target, (-1,)), class_weight, *options)
    return clang.reshape(out, target.shape) if reduction == "none" else out


linear_cross_entropy = Symbol("linear_cross_entropy", "forge.linear_cross_entropy", body=_linear_cross_entropy)
