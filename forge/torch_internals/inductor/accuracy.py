"""Functions of Inductor's vectors in C++ whose digits are wrong near 0.

Inductor computes expm1 as `exp(x) - 1`, atanh as the logarithm of a quotient, and erf in float32 by a formula for its
distance from 1, as at::vec does: of a small argument, no digit is right. torch's kernels are right to a unit in the
last place. ELU, SELU and CELU are made of expm1, GELU and the distribution of a normal variable of erf. Sleef's
expm1 and erf take two to three times as long as Inductor's; polynomials, where the formulas fail, do not.

Of half precision, torch's kernels call at::vec's functions, its formula of erf too: these give the same bits.

The bugs are https://github.com/pytorch/pytorch/issues/198183 (erf, atanh) and
https://github.com/pytorch/pytorch/issues/189803 (expm1, which torch 2.14 computes by Sleef).

Source: torch._inductor.codegen.cpp.CppVecOverrides, whose static methods give the expression of a function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from math import factorial
from typing import Any, NamedTuple

import torch

from forge.torch_internals.inductor.codegen import CppKernel, CppVecOverrides
from forge.torch_internals.patch import Hook, Patch, Scope, Version, patch

needs_chunks: Hook[[Callable[[], bool]], bool] = Hook("say whether a sum is computed in chunks, by torch's answer")

# by the power of what they are in, from the least; a polynomial's largest error is 1e-8
_EXPM1 = [1 / factorial(n + 2) for n in range(7)]  # (expm1(x) / x - 1) / x, where |x| < 0.5
_ERF = [  # erf(x) / x - 1 in x * x, where |x| < 1
    0.128379166,
    -0.376126258,
    0.112835851,
    -0.0268538119,
    0.00518832767,
    -0.000801019351,
    7.85386099e-05,
]
_ERFC = [  # erfc(x) in x - 2.5, where 1 <= x <= 4; beyond, erf is 1
    0.00040695232,
    -0.00217827833,
    0.00544569097,
    -0.00835021567,
    0.00862258599,
    -0.00611656413,
    0.00279760823,
    -0.000544593148,
    -0.000258803963,
    0.000253498942,
    -8.10486126e-05,
    -7.80580825e-06,
    1.57013333e-05,
    -3.44633121e-06,
    -8.87713829e-07,
    3.49168292e-07,
]


@contextmanager
def near_zero(*, as_vec: bool) -> Iterator[None]:
    """Inside, the functions of vectors have their digits near 0; or are at::vec's own (`as_vec`)."""
    with ExitStack() as stack:
        for each in _AS_VEC if as_vec else _NEAR_ZERO:
            stack.enter_context(each)
        yield


@patch(
    CppKernel,
    "need_use_acc_helper",
    scope=Scope.COMPILE,
    why="Inductor asks whether a symbolic size is above 4096, which differs from size to size: a sum is in chunks",
    issue="not reported: torch guards the answer, or, since torch 2.13, takes no where there is none",
    upstream="torch/_inductor/codegen/cpp.py:2254@2.13.0, CppKernel.need_use_acc_helper",
    not_probed="tests/executors/inductorex/test_sizes.py has programs",
)
def chunk_sums(kernel: CppKernel, *args: Any) -> bool:
    """Return whether a sum is computed in chunks."""
    return needs_chunks(partial(chunk_sums.original, kernel, *args))


def _polynomial(coefficients: Sequence[float], x: str) -> str:
    last, *others = (f"vec({each!r})" for each in reversed(coefficients))
    return reduce(lambda sum, each: f"at::vec::fmadd({sum}, {x}, {each})", others, last)


# lines of C++ that compute a function of x in float32, a vector of the type vec
_LINES = {
    "expm1": [
        f"auto near = x * at::vec::fmadd(x, {_polynomial(_EXPM1, 'x')}, vec(1));",
        "return vec::blendv(x.exp() - vec(1), near, x.abs() < vec(0.5));",
    ],
    "erf": [
        "auto size = x.abs();",
        "auto square = x * x;",
        f"auto near = at::vec::fmadd(x, {_polynomial(_ERF, 'square')}, x);",
        "auto centered = at::vec::minimum(size, vec(4)) - vec(2.5);",
        f"auto far = vec(1) - {_polynomial(_ERFC, 'centered')};",
        "return vec::blendv(vec::blendv(far, far.neg(), x < vec(0)), near, size < vec(1));",
    ],
}


def _expression(name: str, lines: list[str] | None) -> Callable[[Any], str]:
    """Return a function that gives the expression of at::vec's function of a variable, or of the lines in float32."""

    def expression(x: Any) -> str:
        if lines is None or x.dtype != torch.float32:
            return f"{x}.{name}()"
        return f"[](const auto& x) {{ using vec = std::decay_t<decltype(x)>; {' '.join(lines)} }}({x})"

    expression.__name__ = name  # by which Inductor finds the function of a scalar
    return expression


class _Function(NamedTuple):
    """A function of vectors: what is said of its patches."""

    line: int  # of torch 2.13.0
    issue: str
    before: Version | None = None


_FUNCTIONS = {
    "atanh": _Function(1531, "https://github.com/pytorch/pytorch/issues/198183"),
    "erf": _Function(1277, "https://github.com/pytorch/pytorch/issues/198183"),
    "expm1": _Function(1271, "https://github.com/pytorch/pytorch/issues/189803", before=(2, 14)),
}


def _patches(lines: Mapping[str, list[str]], why: str, not_probed: str | None = None) -> list[Patch]:
    return [
        Patch(
            CppVecOverrides,
            name,
            staticmethod(_expression(name, lines.get(name))),
            scope=Scope.COMPILE,
            why=why,
            issue=each.issue,
            upstream=f"torch/_inductor/codegen/cpp.py:{each.line}@2.13.0, CppVecOverrides.{name}",
            before=each.before,
            not_probed=not_probed,
        )
        for name, each in _FUNCTIONS.items()
    ]


_NEAR_ZERO = _patches(_LINES, "of a small argument, no digit is right")
_AS_VEC = _patches(
    {},
    "half precision is to have the bits that torch's kernels give, which call at::vec",
    "no program is known that differs without it on torch 2.13, whose own erf is at::vec's",
)
