"""The prims of divisors, multiples, and the parts of floating point numbers."""

import torch

from forge.ir import TensorProxy, get_grad, put_grad, register_grad
from forge.prims.elementwise import convert_element_type, exp2
from forge.prims.library import make_library_prim

gcd = make_library_prim(torch.gcd, "The greatest common divisor, elementwise.")
lcm = make_library_prim(torch.lcm, "The least common multiple, elementwise.")
frexp = make_library_prim(
    torch.frexp, "(mantissa, exponent): x is mantissa * 2^exponent, |mantissa| from 1/2 to 1, elementwise."
)


@register_grad(frexp)
def _frexp_grad(x: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Differentiate the mantissa, x / 2^exponent; the exponent is constant almost everywhere."""
    mantissa, exponent = frexp(x)
    power = convert_element_type(exponent, torch.float64 if x.dtype == torch.float64 else torch.float32)
    put_grad(x, get_grad(mantissa) * exp2(-power))
    return mantissa, exponent
