"""The prims of complex numbers from their parts."""

import torch

from forge.ir import Symbol, TensorProxy, get_grad, needs_grad, put_grad, register_grad
from forge.prims.elementwise import imag, real
from forge.prims.library import make_library_prim

complex: Symbol[TensorProxy] = make_library_prim(
    torch.complex, "The complex numbers of these real and imaginary parts, elementwise."
)


@register_grad(complex)
def _complex_grad(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    out = complex(a, b)
    g = get_grad(out)
    if needs_grad(a):
        put_grad(a, real(g))
    if needs_grad(b):
        put_grad(b, imag(g))
    return out
