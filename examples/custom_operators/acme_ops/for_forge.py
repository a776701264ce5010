"""What forge knows of acme's operators: import it once, before what calls them is jitted."""

import torch

import acme_ops  # noqa: F401  registers the operators
from forge.executors import OperatorExecutor, register_executor
from forge.ir import TensorProxy, get_grad, put_grad, register_grad
from forge.prims import make_prim
from forge.prims.core import like
from forge.testing import FLOATS, OpInfo, register_opinfo, sample
from forge.torchlang import torchsymbol


@torchsymbol(torch.ops.acme.softclip.default)
def softclip(x: TensorProxy, limit: float = 1.0) -> TensorProxy:
    """x where it is small, and never beyond the limit."""
    return (x / limit).tanh() * limit


@register_grad(softclip)
def _softclip_grad(x, limit=1.0):
    out = softclip(x, limit)
    part = out / limit
    put_grad(x, get_grad(out) * (1 - part * part))
    return out


def _blur_meta(x: TensorProxy) -> TensorProxy:
    if x.ndim == 0:
        raise ValueError(f"acme.blur: x is {x}, but must have rows")
    return like(x)


blur_prim = make_prim("acme.blur", "blur", meta=_blur_meta)


@register_grad(blur_prim)
def _blur_grad(x):
    out = blur_prim(x)
    put_grad(x, blur_prim(get_grad(out)))
    return out


@torchsymbol(torch.ops.acme.blur.default)
def blur(x: TensorProxy) -> TensorProxy:
    """Each number of a row, mixed with its two neighbours."""
    return blur_prim(x)


acme = register_executor(OperatorExecutor("acme"), default=True)
acme.register_implementation(blur_prim, torch.ops.acme.blur.default)


def _samples(info, device, dtype):
    for shape in ((5,), (2, 3), (0, 4)):
        yield sample(info.tensor(shape, device, dtype))


def _softclip_samples(info, device, dtype):
    yield from _samples(info, device, dtype)
    yield sample(info.tensor((4,), device, dtype), limit=0.5)


CLIPPED = register_opinfo(
    OpInfo("acme.softclip", torch.ops.acme.softclip.default, _softclip_samples, dtypes=FLOATS[:2])
)
BLURRED = register_opinfo(OpInfo("acme.blur", torch.ops.acme.blur.default, _samples, dtypes=FLOATS[:2]))
