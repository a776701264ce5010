"""The complex numbers of torch: their construction, and views of their parts and of their conjugates."""

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import Tag, TensorProxy, check, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import same, torch_check
from forge.torch_internals.versions import WRONG_KIND
from forge.torchlang.core import View, getter, torchsymbol

_PARTS = (torch.float16, torch.float32, torch.float64)

# construction from two parts


def _pair(op: str, a: TensorProxy, b: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Return two tensors of a dtype that parts may have, broadcast together."""
    for each in (a, b):
        check(
            each.dtype in _PARTS,
            lambda: f"{op}: Expected both inputs to be Half, Float or Double tensors but got {a} and {b}",
            NotImplementedError,
        )
    torch_check(a.dtype == b.dtype, lambda: f"{op}: expected one scalar type for both, but got {a} and {b}")
    return clang.broadcast(op, a, b)


@torchsymbol(torch.complex)
def complex(real: TensorProxy, imag: TensorProxy) -> TensorProxy:
    """Return real + i imag. Dtypes: the same for both, float16, float32 or float64."""
    return prims.complex(*_pair("complex", real, imag))


@torchsymbol(torch.polar)
def polar(abs: TensorProxy, angle: TensorProxy) -> TensorProxy:
    """Return the complex numbers with these absolute values and angles. Dtypes: the same for both, float32 or
    float64."""
    size, angle = _pair("polar", abs, angle)
    return prims.complex(size * clang.cos(angle), size * clang.sin(angle))


@register_grad(polar)
def _polar_grad(abs: TensorProxy, angle: TensorProxy) -> TensorProxy:
    """Compute the direction from the result, as torch does: there is none at 0, and abs is assumed to be
    nonnegative."""
    out = polar(abs, angle)
    g = clang.conj(get_grad(out))
    if needs_grad(abs):
        put_grad(abs, clang.real(g * clang.sgn(out)))
    if needs_grad(angle):
        put_grad(angle, clang.real(g * out * 1j))
    return out


# views


def _check_complex(op: str, x: TensorProxy) -> None:
    check(
        x.dtype.is_complex,
        lambda: f"{op} is not implemented for tensors with non-complex dtypes: only supported for complex, not {x}",
        WRONG_KIND,
    )


def _with_real(x: TensorProxy, new: TensorProxy) -> TensorProxy:
    return prims.complex(new, prims.imag(x)) if x.dtype.is_complex else new


@torchsymbol(torch.real, getter("real"), methods=("real",), view=View.ALWAYS, invert=_with_real)
def real(input: TensorProxy) -> TensorProxy:
    """Return the real part; a real input is returned itself."""
    return clang.real(input)


@torchsymbol(
    torch.imag,
    getter("imag"),
    methods=("imag",),
    view=View.ALWAYS,
    invert=lambda x, new: prims.complex(prims.real(x), new),
)
def imag(input: TensorProxy) -> TensorProxy:
    """Return the imaginary part of a complex number."""
    _check_complex("imag", input)
    return prims.imag(input)


def _as_complex(x: TensorProxy) -> TensorProxy:
    return prims.complex(clang.select(x, -1, 0), clang.select(x, -1, 1))


def _as_real(x: TensorProxy) -> TensorProxy:
    return clang.stack([prims.real(x), prims.imag(x)], -1)


@torchsymbol(
    torch.view_as_real,
    view=View.ALWAYS,
    invert=lambda x, new: _as_complex(new),
    tags=[Tag.MAY_BE_VIEW],
)
def view_as_real(input: TensorProxy) -> TensorProxy:
    """Return both parts of complex numbers, as a last dim of length 2."""
    _check_complex("view_as_real", input)
    return _as_real(input)


prims.register_vjp(view_as_real, input=lambda g: _as_complex(g))


@torchsymbol(
    torch.view_as_complex,
    view=View.ALWAYS,
    invert=lambda x, new: _as_real(new),
    tags=[Tag.MAY_BE_VIEW],
)
def view_as_complex(input: TensorProxy) -> TensorProxy:
    """Return the complex numbers whose parts are in the last dim, of length 2. Dtypes: float16, float32 or float64."""
    check(
        input.dtype in _PARTS,
        lambda: f"view_as_complex is only supported for half, float and double tensors, but got {input}",
        WRONG_KIND if input.dtype.is_complex else NotImplementedError,
    )
    torch_check(
        input.ndim > 0 and same(input.shape[-1], 2),
        lambda: f"view_as_complex: Tensor must have a last dimension of size 2, but it is {input}",
    )
    return _as_complex(input)


prims.register_vjp(view_as_complex, input=lambda g: _as_real(g))


@torchsymbol(
    torch.conj, Tensor.conj, torch.ops.aten._conj.default, view=View.ALWAYS, invert=lambda x, new: clang.conj(new)
)
def conj(input: TensorProxy) -> TensorProxy:
    """Return the complex conjugate, which torch computes lazily when it is read; a real input is returned itself."""
    return clang.conj(input)


# A proxy does not know whether torch conjugates or negates a tensor lazily; Dynamo's fake tensors do.


@torchsymbol(torch.resolve_conj, Tensor.resolve_conj, view=View.MAYBE, tags=[Tag.MAY_BE_VIEW])
def resolve_conj(input: TensorProxy) -> TensorProxy:
    """Return a tensor with its lazy conjugation materialized; the input itself if it has none."""
    return prims.clone(input)


@torchsymbol(torch.resolve_neg, Tensor.resolve_neg, view=View.MAYBE, tags=[Tag.MAY_BE_VIEW])
def resolve_neg(input: TensorProxy) -> TensorProxy:
    """Return a tensor with its lazy negation materialized; the input itself if it has none."""
    return prims.clone(input)
