"""The softmax with attention sinks."""

from forge.clang.core import as_gradient, clangop, convert
from forge.clang.elementwise import add, div, exp, maximum, mul, neg, sub, widen
from forge.clang.reduction import amax, sum
from forge.ir import TensorProxy, get_grad, put_grad, register_grad


@clangop()
def sink_softmax(scores: TensorProxy, sinks: TensorProxy) -> TensorProxy:
    """Return softmax over the last dim of the concatenated scores and sinks, without the columns of the sinks.

    Shapes: scores (*batch, columns), sinks (*batch, any). Source: Xiao et al., "Efficient Streaming Language Models
    with Attention Sinks" (2024).
    """
    return _shares(scores, sinks)[0]


def _shares(scores: TensorProxy, sinks: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Return the shares of the scores and the sinks in the sum of all exponentials."""
    wide, others = widen(scores), widen(sinks)
    largest = maximum(amax(wide, -1, True), amax(others, -1, True))
    powers, of_sinks = exp(sub(wide, largest)), exp(sub(others, largest))
    total = add(sum(powers, -1, True), sum(of_sinks, -1, True))
    return convert(div(powers, total), scores.dtype), div(of_sinks, total)


@register_grad(sink_softmax)
def _sink_softmax_grad(scores: TensorProxy, sinks: TensorProxy) -> TensorProxy:
    out, of_sinks = _shares(scores, sinks)
    g, weights = widen(get_grad(out)), widen(out)
    weighted = mul(g, weights)
    mean = sum(weighted, -1, True)
    put_grad(scores, as_gradient(sub(weighted, mul(weights, mean)), scores.dtype))
    put_grad(sinks, as_gradient(neg(mul(of_sinks, mean)), sinks.dtype))
    return out
