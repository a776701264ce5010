"""Divisors, multiples, and what a floating point number consists of."""

from forge import clang, prims
from forge.ir import Symbol, TensorProxy
from forge.torchlang.aliases import results, torchaliases


def _of_integers(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(input: TensorProxy, other: TensorProxy) -> TensorProxy:
        return prim(*clang.prepare(name, input, other))

    body.__name__, body.__doc__ = name, f"{prim.meta.__doc__} Dtypes: integers."
    return torchaliases(name)(body)


gcd = _of_integers("gcd")
lcm = _of_integers("lcm")


@torchaliases("frexp")
def frexp(input: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """(mantissa, exponent): input is mantissa * 2^exponent. Dtypes: floating point; the exponent is int32."""
    return results.frexp(prims.frexp(input))
