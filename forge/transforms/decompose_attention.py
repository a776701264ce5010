"""Attention that torch would compose is decomposed into forge's calls, whose regions fuse the ops between the products.

torch has no kernel for a mask that needs a gradient, for dropout on a CPU, or if torch.nn.attention.sdpa_kernel
allows none. Each operation of its composition writes all scores to memory, and so does each gradient. Heads that are
views of a projection are copied by torch's products, in the forward and again in the backward; here they are made
contiguous once.
"""

from collections.abc import Callable
from typing import Any

from forge import clang, prims, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.transforms.grad import active_names, is_differentiated
from forge.transforms.replacement import rewrite

ATTENTION = torchlang.scaled_dot_product_attention
# whether torch has no kernel for a call, from its arguments and from which of query, key, value and mask a gradient
# may flow to
HasNoKernel = Callable[[dict[str, Any], tuple[bool, ...]], bool]
_TENSORS = ("query", "key", "value", "attn_mask")


def decompose_attention(
    trace: Trace,
    has_no_kernel: HasNoKernel,
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
) -> Trace:
    """Return the trace with attention calls decomposed, if torch composes them.

    Args:
        trace: The program.
        has_no_kernel: Decides for a call.
        in_torch: Returns whether a call runs as torch runs it.
    """
    if all(bound.symbol is not ATTENTION for bound in trace.bound_symbols):
        return trace
    active = active_names(trace)

    def compose(bound: BoundSymbol) -> TensorProxy | None:
        if bound.symbol is not ATTENTION or not in_torch(bound):
            return None
        arguments = ATTENTION.bind(bound.args, bound.kwargs)
        flows = is_differentiated(bound)
        needs_grad = tuple([flows and x is not None and x.name in active for x in map(arguments.get, _TENSORS)])
        if not has_no_kernel(arguments, needs_grad):
            return None
        rows = {name: prims.contiguous(arguments[name]) for name in ("query", "key", "value")}
        return ATTENTION.definition(**arguments | rows)

    return rewrite(trace, "decompose_attention", compose, language=clang.language)
