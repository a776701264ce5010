"""Bessel and Airy functions and the orthogonal polynomials, as torch's library has them."""

from collections.abc import Callable

import torch

from forge import clang, prims
from forge.ir import Symbol, TensorProxy
from forge.prims.special_functions import BESSEL, POLYNOMIALS
from forge.torchlang.aliases import TensorOrNumber, check_operands
from forge.torchlang.core import torchsymbol


def _define(name: str, body: Callable) -> Symbol:
    prim = getattr(prims, name)
    body.__name__, body.__doc__ = name, prim.meta.__doc__
    return torchsymbol(getattr(torch.special, name))(body)


def _of_input(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(input: TensorProxy) -> TensorProxy:
        return prim(input)

    return _define(name, body)


def _of_x(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(x: TensorProxy) -> TensorProxy:
        return prim(x)

    return _define(name, body)


def _polynomial(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(x: TensorOrNumber, n: TensorOrNumber) -> TensorProxy:
        check_operands(name, x=x, n=n)
        return prim(*clang.prepare(name, x, n, kind=clang.Promotion.INT_TO_FLOAT))

    return _define(name, body)


for _name in BESSEL:
    _make = _of_input if _name.startswith("modified") else _of_x  # as torch calls its argument
    globals()[_name] = _make(_name)
for _name in POLYNOMIALS:
    globals()[_name] = _polynomial(_name)
