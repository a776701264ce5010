"""The torch executor's implementations of the elementwise family."""

from collections.abc import Callable
from typing import Any

import torch

from forge import clang, prims, torchlang
from forge.executors.executor import Decision, decline
from forge.executors.torchex.core import run_clang, run_prim, run_prims, run_torchlang, torchex
from forge.ir import TensorProxy

_UNARY = """abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc erfinv exp exp2 expm1
floor i0 isfinite isinf isnan lgamma log log10 log1p log2 neg polygamma reciprocal round rsqrt sgn sigmoid sign signbit
sin sinh sqrt tan tanh trunc""".split()
_SPECIAL = "bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx i0e i1 i1e log_ndtr ndtri zeta".split()
_BINARY = "add bitwise_and bitwise_or bitwise_xor floor_divide mul pow remainder sub where".split()
_TENSOR_FIRST = "copysign eq fmod ge gt le lt ne".split()
_TENSORS_ONLY = "atan2 heaviside hypot igamma igammac nextafter".split()
_OTHER_NAME: dict[str, Callable] = {
    "conj": torch.conj_physical,
    "div": torch.true_divide,
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
}

run_prims({getattr(prims, name): getattr(torch, name) for name in [*_UNARY, *_BINARY]})
run_prims({getattr(prims, name): getattr(torch.special, name) for name in _SPECIAL})
run_prims({getattr(prims, name): function for name, function in _OTHER_NAME.items()})
run_prim(prims.convert_element_type)(torch.Tensor.to)


@run_prim(prims.real)
def real(x: torch.Tensor) -> torch.Tensor:
    """Return a copy; torch.real returns a view of x."""
    return torch.real(x).clone()


@run_prim(prims.imag)
def imag(x: torch.Tensor) -> torch.Tensor:
    """Return a copy; torch.imag returns a view of x."""
    return torch.imag(x).clone()


@run_prim(prims.device_put)
def device_put(x: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
    """Call x.to with a device."""
    return x.to(device, non_blocking=non_blocking)


@run_prim(prims.no_derivative)
def no_derivative(gradient: torch.Tensor, of: str) -> torch.Tensor:
    """Raise the error that torch's backward raises."""
    raise NotImplementedError(f"the derivative for '{of}' is not implemented")


# prims accept a number as a tensor operand; some of torch's functions do not


def _of_tensors(function: Callable) -> Callable:
    """Wrap `function`, which takes tensors only, to accept a number as either operand."""

    def run(a: Any, b: Any) -> torch.Tensor:
        if not isinstance(a, torch.Tensor):
            a = torch.full((), a, dtype=b.dtype, device=b.device)
        elif not isinstance(b, torch.Tensor):
            b = torch.full((), b, dtype=a.dtype, device=a.device)
        return function(a, b)

    return _publish(run, function.__name__)


def _publish(function: Callable, name: str) -> Callable:
    """Make a function an attribute of this module, which a printed trace refers to."""
    function.__name__ = function.__qualname__ = name
    globals()[name] = function
    return function


for _name in [*_TENSOR_FIRST, *_TENSORS_ONLY]:
    run_prim(getattr(prims, _name))(_of_tensors(getattr(torch, _name)))


def _limit(function: Callable, by_number: Callable) -> Callable:
    """Return maximum or minimum for tensors, or for a tensor and a number."""

    def run(a: Any, b: Any) -> torch.Tensor:
        if not isinstance(b, torch.Tensor):
            return by_number(a, b)
        return function(a, b) if isinstance(a, torch.Tensor) else by_number(b, a)

    return _publish(run, function.__name__)


run_prim(prims.maximum)(_limit(torch.maximum, torch.clamp_min))
run_prim(prims.minimum)(_limit(torch.minimum, torch.clamp_max))


# clang's binary operations broadcast and promote as torch's do


def _tensor_first(a: Any, b: Any) -> Decision:
    return isinstance(a, TensorProxy) or decline("torch's function takes no number first")


def _tensors_only(a: Any, b: Any) -> Decision:
    return (isinstance(a, TensorProxy) and isinstance(b, TensorProxy)) or decline("torch's function takes no number")


run_clang({getattr(clang, name): getattr(torch, name) for name in _BINARY})
run_clang({getattr(clang, name): function for name, function in _OTHER_NAME.items() if name != "conj"})
run_clang({clang.square: torch.square, clang.zeta: torch.special.zeta})
for _name in _TENSOR_FIRST:
    torchex.register_implementation(getattr(clang, _name), getattr(torch, _name), checker=_tensor_first)
for _name in [*_TENSORS_ONLY, "maximum", "minimum"]:
    torchex.register_implementation(getattr(clang, _name), getattr(torch, _name), checker=_tensors_only)

for _name in _TENSOR_FIRST:
    run_torchlang(getattr(torchlang, _name), checker=lambda input, other: _tensor_first(input, other))
