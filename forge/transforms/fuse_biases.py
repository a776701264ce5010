"""Vectors added to linear layers without a bias become biases, which the product's kernel adds as it writes.

    linear(x, weight) + row = linear(x, weight, row)

A region would read the whole product and write another one: twice the logits of a language model whose biases are a
separate buffer. The product is not rounded before the addition.
"""

import math
from collections import Counter
from collections.abc import Callable

import torch

from forge import torchlang
from forge.ir import BoundSymbol, Tag, TensorProxy, Trace
from forge.prims.core import statically_true
from forge.transforms.replacement import rewrite

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ABOUT_BACKWARD = frozenset({Tag.NO_GRAD, Tag.RECOMPUTE})  # which must be the same for both calls


def fuse_biases(trace: Trace, in_torch: Callable[[BoundSymbol], bool] = lambda bound: True) -> Trace:
    """Return the trace with vectors added to linear layers as their biases, if nothing else reads the product.

    in_torch: whether a call runs as torch runs it.
    """
    reads = Counter(name for bound in trace.bound_symbols for name in set(bound.inputs))
    reads.update(trace.output_names)
    products = {
        bound.output.name: bound
        for bound in trace.bound_symbols
        if _is_product(bound) and reads[bound.output.name] == 1 and in_torch(bound)
    }
    if not products:
        return trace

    def add(bound: BoundSymbol) -> TensorProxy | None:
        if bound.symbol is not torchlang.add:
            return None
        arguments = torchlang.add.bind(bound.args, bound.kwargs)
        for product, row in (arguments["input"], arguments["other"]), (arguments["other"], arguments["input"]):
            layer = products.get(getattr(product, "name", ""))
            if layer is not None and arguments["alpha"] == 1 and _is_row(row, product) and _alike(layer, bound):
                x, weight = (torchlang.linear.bind(layer.args, layer.kwargs)[name] for name in ("input", "weight"))
                result: TensorProxy = torchlang.linear(x, weight, torchlang.reshape(row, (product.shape[-1],)))
                return result
        return None

    return rewrite(trace, "fuse_biases", add)


def _is_product(bound: BoundSymbol) -> bool:
    """Return whether a call is a linear layer without a bias."""
    if bound.symbol is not torchlang.linear or bound.output.dtype not in _DTYPES:
        return False
    return torchlang.linear.bind(bound.args, bound.kwargs)["bias"] is None


def _is_row(row: object, product: TensorProxy) -> bool:
    """Return whether a tensor has one number for each column of a product, of its dtype."""
    if not isinstance(row, TensorProxy) or not 1 <= row.ndim <= product.ndim:
        return False
    if row.dtype != product.dtype or row.device != product.device:
        return False
    return statically_true(row.shape[-1] == product.shape[-1]) and statically_true(math.prod(row.shape[:-1]) == 1)


def _alike(layer: BoundSymbol, sum: BoundSymbol) -> bool:
    """Return whether gradients flow through both calls, or through neither."""
    return layer.mode == sum.mode and layer.tags & _ABOUT_BACKWARD == sum.tags & _ABOUT_BACKWARD
