"""The loss of many scores on a CPU, without their softmax in memory.

    loss = cross_entropy(scores, target)    ->    loss = mean(logsumexp(scores) - scores[target])

torch's function writes the log softmax, as large as the scores, and saves it for the backward. The sum over each row is
one pass, and the gradient, softmax minus the targets, is one more, by one loop of a region.
"""

import math
from collections.abc import Callable

import torch

from forge import clang, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.ir.proxies import hint_of
from forge.transforms.replacement import rewrite

CROSS_ENTROPY = torchlang.cross_entropy
SCORE_LIMIT = 2**18  # fewer scores do not pay
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def decompose_cross_entropy(trace: Trace, in_torch: Callable[[BoundSymbol], bool] = lambda bound: True) -> Trace:
    """Return the trace with cross entropies of many scores on a CPU decomposed.

    in_torch: Returns whether a call runs as torch runs it.
    """

    def compose(bound: BoundSymbol) -> TensorProxy | None:
        if bound.symbol is not CROSS_ENTROPY or not in_torch(bound):
            return None
        arguments = CROSS_ENTROPY.bind(bound.args, bound.kwargs)
        x, target = arguments["input"], arguments["target"]
        if x.device.type != "cpu" or x.dtype not in _DTYPES or math.prod(map(hint_of, x.shape)) < SCORE_LIMIT:
            return None
        is_of_classes = (
            not target.is_floating_point() and arguments["weight"] is None and arguments["label_smoothing"] == 0
        )
        if not is_of_classes or arguments["size_average"] is not None or arguments["reduce"] is not None:
            return None
        return torchlang.composed_cross_entropy(x, target, arguments["ignore_index"], arguments["reduction"])

    return rewrite(trace, "decompose_cross_entropy", compose, language=clang.language)
