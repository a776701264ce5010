"""The Bessel and Airy functions and orthogonal polynomials. torch has derivatives of those in SMOOTH only."""

from collections.abc import Callable

import torch

from forge.ir import Symbol, Tag, TensorProxy
from forge.prims.elementwise import i1_slope, register_unary
from forge.prims.library import make_library_prim
from forge.torch_internals.versions import TORCH

BESSEL = {
    "airy_ai": "The Airy function of the first kind",
    "modified_bessel_i0": "The modified Bessel function of the first kind, order 0",
    "modified_bessel_i1": "The modified Bessel function of the first kind, order 1",
    "modified_bessel_k0": "The modified Bessel function of the second kind, order 0",
    "modified_bessel_k1": "The modified Bessel function of the second kind, order 1",
    "scaled_modified_bessel_k0": "e^x times the modified Bessel function of the second kind, order 0",
    "scaled_modified_bessel_k1": "e^x times the modified Bessel function of the second kind, order 1",
    "spherical_bessel_j0": "The spherical Bessel function of the first kind, order 0",
}
SMOOTH = tuple(name for name in BESSEL if name.startswith("modified") and TORCH >= (2, 15))
POLYNOMIALS = {
    "chebyshev_polynomial_t": "Chebyshev's polynomial of the first kind",
    "chebyshev_polynomial_u": "Chebyshev's polynomial of the second kind",
    "chebyshev_polynomial_v": "Chebyshev's polynomial of the third kind",
    "chebyshev_polynomial_w": "Chebyshev's polynomial of the fourth kind",
    "hermite_polynomial_h": "Hermite's polynomial, the physicists'",
    "hermite_polynomial_he": "Hermite's polynomial, the statisticians'",
    "laguerre_polynomial_l": "Laguerre's polynomial",
    "legendre_polynomial_p": "Legendre's polynomial",
    "shifted_chebyshev_polynomial_t": "Chebyshev's polynomial of the first kind, of 2x - 1",
    "shifted_chebyshev_polynomial_u": "Chebyshev's polynomial of the second kind, of 2x - 1",
    "shifted_chebyshev_polynomial_v": "Chebyshev's polynomial of the third kind, of 2x - 1",
    "shifted_chebyshev_polynomial_w": "Chebyshev's polynomial of the fourth kind, of 2x - 1",
}


def _special(name: str, meaning: str) -> Symbol[TensorProxy]:
    function = getattr(torch.special, name)
    tags = [] if name in SMOOTH else [Tag.NOT_DIFFERENTIABLE]
    return make_library_prim(function, f"{meaning}, elementwise.", name=name, tags=tags)


for _name, _meaning in BESSEL.items():
    globals()[_name] = _special(_name, _meaning)
for _name, _meaning in POLYNOMIALS.items():
    globals()[_name] = _special(_name, f"{_meaning} of degree n at x")


_GRADIENTS: dict[str, Callable[[TensorProxy, TensorProxy, TensorProxy], TensorProxy]] = {
    "modified_bessel_i0": lambda g, x, out: g * _modified_bessel("i1", x),
    "modified_bessel_i1": lambda g, x, out: g * i1_slope(x, lambda over_x: _modified_bessel("i0", x) - out * over_x),
    "modified_bessel_k0": lambda g, x, out: g * -_modified_bessel("k1", x),
    "modified_bessel_k1": lambda g, x, out: g * -(_modified_bessel("k0", x) + out / x),
}


def _modified_bessel(order: str, x: TensorProxy) -> TensorProxy:
    prim: Symbol[TensorProxy] = globals()[f"modified_bessel_{order}"]
    return prim(x)


for _name in SMOOTH:
    register_unary(globals()[_name], _GRADIENTS[_name])
