"""Pooling over windows of random lengths."""

import math

from forge.ir import Dim, Symbol, TensorProxy, get_grad, put_grad, register_grad
from forge.prims.creation import full
from forge.prims.indexing import scatter_reduce
from forge.prims.library import make_library_prim
from forge.prims.shape import reshape
from forge.torch_internals.functions import nn_fractional_max_pool2d, nn_fractional_max_pool3d

fractional_max_pool2d = make_library_prim(
    nn_fractional_max_pool2d, "The largest value of each window, and its place among all of its channel's."
)
fractional_max_pool3d = make_library_prim(
    nn_fractional_max_pool3d, "The largest value of each window, and its place among all of its channel's."
)


def _register(prim: Symbol, count: int) -> None:
    @register_grad(prim)
    def rule(
        x: TensorProxy, kernel_size: tuple[Dim, ...], output_size: tuple[Dim, ...], samples: TensorProxy
    ) -> tuple[TensorProxy, TensorProxy]:
        """Put each window's gradient at its place."""
        out, indices = prim(x, kernel_size, output_size, samples)
        before = x.shape[:-count]
        zeros = reshape(full(x.shape, 0, x.dtype, x.device), (*before, math.prod(x.shape[-count:])))
        places, g = (reshape(each, (*before, math.prod(out.shape[-count:]))) for each in (indices, get_grad(out)))
        put_grad(x, reshape(scatter_reduce(zeros, len(before), places, g, "sum"), x.shape))
        return out, indices


_register(fractional_max_pool2d, 2)
_register(fractional_max_pool3d, 3)
