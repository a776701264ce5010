"""multi_head_attention_forward is replaced by its decomposition.

Later passes see its attention like a call of scaled_dot_product_attention, and its projections and its softmax like any
others.
"""

from collections.abc import Callable
from typing import Any

from forge import torchlang
from forge.ir import BoundSymbol, Trace, current_trace
from forge.transforms.replacement import rewrite


def inline_attention(trace: Trace, in_torch: Callable[[BoundSymbol], bool] = lambda bound: True) -> Trace:
    """Return the trace with attention composites decomposed.

    in_torch: Returns whether a call runs as torch runs it; another stays whole.
    """

    def inline(bound: BoundSymbol) -> Any:
        if bound.symbol is not torchlang.multi_head_attention_forward or not in_torch(bound):
            return None
        for call in bound.subsymbols:
            current_trace().record(call.replace(tags=call.tags | bound.tags))
        return bound.output

    return rewrite(trace, "inline_attention", inline)
