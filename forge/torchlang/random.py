"""The random functions of torch. Each draws from the default generator of its device, as eager does, in eager's order.

A user's `generator` is not supported.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge import clang, prims
from forge.clang.creation import canonical_device
from forge.ir import INT_TYPES, Dim, Symbol, Tag, TensorProxy, check, get_grad, needs_grad, put_grad, register_grad
from forge.ir.memory import Memory
from forge.prims.core import torch_check
from forge.torch_internals.versions import TORCH
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import torchsymbol, write
from forge.torchlang.creation import FACTORY, with_options

Dtype = torch.dtype | None
Device = torch.device | str | None
Layout = torch.layout | None
RANDOM = (Tag.RANDOM,)
RANDOM_CONSTANT = (Tag.RANDOM, Tag.ZERO_GRAD)

# tensors of random numbers


def _of_size(name: str, draw: Callable, meaning: str) -> Symbol:
    """Return the symbol of torch.rand or torch.randn: the size as several arguments or one."""

    @with_options(*FACTORY, "generator")
    def body(*size: Lengths, dtype: Dtype = None, device: Device = None, **kwargs: Lengths) -> TensorProxy:
        check(
            set(kwargs) <= {"size"} and not (kwargs and size),
            lambda: f"{name}: unexpected arguments {sorted(kwargs)}",
            TypeError,
        )
        shape = clang.lengths(tuple(kwargs.values()) or size)
        return draw(shape, dtype or torch.get_default_dtype(), canonical_device(device))

    body.__name__, body.__doc__ = name, f"{meaning} Dtypes: the default float dtype."
    return torchsymbol(getattr(torch, name), tags=RANDOM, factory=True)(body)


def _uniform(
    shape: Sequence[Dim], dtype: torch.dtype, device: torch.device, like: TensorProxy | None = None
) -> TensorProxy:
    return prims.uniform(tuple(shape), 0.0, 1.0, dtype, device, like=like)


def _normal(
    shape: Sequence[Dim], dtype: torch.dtype, device: torch.device, like: TensorProxy | None = None
) -> TensorProxy:
    return prims.normal(tuple(shape), 0.0, 1.0, dtype, device, like=like)


rand = _of_size("rand", _uniform, "Uniform in [0, 1).")
randn = _of_size("randn", _normal, "Normally distributed.")


def _like(name: str, draw: Callable, meaning: str) -> Symbol:
    """Return the symbol of torch.rand_like or torch.randn_like."""

    @with_options(*FACTORY, "memory_format", "generator")
    def body(input: TensorProxy, *, dtype: Dtype = None, device: Device = None) -> TensorProxy:
        device = input.device if device is None else canonical_device(device)
        return draw(input.shape, dtype or input.dtype, device, input)

    body.__name__, body.__doc__ = name, f"{meaning} Shapes and dtypes: input's."
    return torchsymbol(getattr(torch, name), tags=RANDOM)(body)


rand_like = _like("rand_like", _uniform, "Uniform in [0, 1).")
randn_like = _like("randn_like", _normal, "Normally distributed.")


def _bounds(op: str, args: tuple, low: Dim | None, high: Dim | None) -> tuple[Dim, Dim, tuple]:
    """Return low (0 if only one bound is given), high, and the arguments that follow them."""
    numbers = [arg for arg in args if isinstance(arg, INT_TYPES)]
    rest = tuple(arg for arg in args if not isinstance(arg, INT_TYPES))
    if len(numbers) == 2:
        low, high = numbers
    elif len(numbers) == 1:
        low, high = (low, numbers[0]) if high is None else (numbers[0], high)
    if high is None:
        raise TypeError(f"{op}: missing the argument 'high'")
    return low or 0, high, rest


def _shape(op: str, size: Sequence[Dim] | None) -> tuple[Dim, ...]:
    if size is None:
        raise TypeError(f'{op}() missing 1 required positional arguments: "size"')
    return tuple(size)


@torchsymbol(torch.randint, tags=RANDOM, factory=True)
@with_options(*FACTORY, "generator")
def randint(
    *args: Lengths,
    low: Dim | None = None,
    high: Dim | None = None,
    size: Sequence[Dim] | None = None,
    dtype: Dtype = None,
    device: Device = None,
) -> TensorProxy:
    """Draw integers, uniform in [low, high): randint(high, size) or randint(low, high, size). Dtypes: int64."""
    low, high, rest = _bounds("randint", args, low, high)
    shape = _shape("randint", rest[0] if rest else size)
    return prims.randint(shape, low, high, dtype or torch.int64, canonical_device(device))


@torchsymbol(torch.randint_like, tags=RANDOM)
@with_options(*FACTORY, "generator", "memory_format")
def randint_like(
    input: TensorProxy,
    *args: Lengths,
    low: Dim | None = None,
    high: Dim | None = None,
    dtype: Dtype = None,
    device: Device = None,
) -> TensorProxy:
    """Draw integers, uniform in [low, high). Shapes and dtypes: input's."""
    low, high, _ = _bounds("randint_like", args, low, high)
    device = input.device if device is None else canonical_device(device)
    return prims.randint(input.shape, low, high, dtype or input.dtype, device, like=input)


@torchsymbol(torch.randperm, tags=RANDOM, factory=True)
@with_options(*FACTORY, "generator")
def randperm(n: Dim, *, dtype: Dtype = torch.int64, device: Device = None) -> TensorProxy:
    """Return the integers below n in random order."""
    return prims.randperm(n, dtype or torch.int64, canonical_device(device))


@torchsymbol(torch.normal, tags=RANDOM_CONSTANT, factory=True)
@with_options(*FACTORY, "generator")
def normal(
    mean: TensorProxy | float = 0.0,
    std: TensorProxy | float = 1.0,
    size: Sequence[Dim] | None = None,
    *,
    dtype: Dtype = None,
    device: Device = None,
) -> TensorProxy:
    """Draw normal numbers with the given means and standard deviations, numbers or tensors."""
    tensors = [value for value in (mean, std) if isinstance(value, TensorProxy)]
    if not tensors:
        dtype = dtype or torch.get_default_dtype()
        return prims.normal(_shape("normal", size), mean, std, dtype, canonical_device(device))
    shape = clang.broadcast_shapes("normal", *[value.shape for value in tensors])
    noise = prims.normal(shape, 0.0, 1.0, tensors[0].dtype, tensors[0].device)
    return noise * std + mean


@torchsymbol(torch.multinomial, Tensor.multinomial, tags=(*RANDOM, Tag.NOT_DIFFERENTIABLE))
@with_options("generator")
def multinomial(input: TensorProxy, num_samples: int, replacement: bool = False) -> TensorProxy:
    """Draw indices from each row of weights."""
    return prims.multinomial(input, num_samples, replacement)


@torchsymbol(torch.bernoulli, Tensor.bernoulli, tags=RANDOM_CONSTANT)
@with_options("generator")
def bernoulli(input: TensorProxy, p: float | None = None) -> TensorProxy:
    """Return 1 with probability `p`, or with input's elements as probabilities, else 0. Shapes and dtypes: input's."""
    return prims.bernoulli(input.shape, input if p is None else p, input.dtype, input.device)


prims.register_vjp(bernoulli, input=lambda g, input: _no_slope(input))


prims.register_vjp(normal, mean=lambda g, mean: _no_slope(mean), std=lambda g, std: _no_slope(std))


def _no_slope(x: TensorProxy) -> TensorProxy:
    return prims.full(x.shape, 0, x.dtype, x.device)


# methods that fill a tensor, as pure functions that draw the values for a tensor like it


def fills(name: str) -> Callable[[Callable], Symbol]:
    """Return a decorator that makes a body the meaning of Tensor.name, which writes random numbers into its tensor.

    The tensor's previous value, and parameters that are tensors, get gradients of zeros, as in eager.
    """
    method = getattr(Tensor, name)

    def run(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return method(torch.empty_like(self), *args, **kwargs)

    run.__name__ = name.rstrip("_")

    def decorate(body: Callable) -> Symbol:
        body = with_options("generator", op=name)(body)
        symbol = torchsymbol(run, id=f"torch.Tensor.{name}", inplace=method, tags=RANDOM_CONSTANT)(body)

        @register_grad(symbol)
        def rule(self: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
            out = symbol(self, *args, **kwargs)
            get_grad(out)
            for argument in (self, *args, *kwargs.values()):
                if needs_grad(argument):
                    put_grad(argument, _no_slope(argument))
            return out

        return symbol

    return decorate


def _range(args: tuple, kwargs: dict, default_high: Any) -> tuple[Any, Any]:
    """Return the bounds of x.uniform_(0, 1), whose names are `from` and `to`."""
    bounds = {**dict(zip(("from", "to"), args, strict=False)), **kwargs}
    return bounds.get("from", 0), bounds.get("to", default_high)


@fills("uniform_")
def uniform(self: TensorProxy, *args: float, **kwargs: float) -> TensorProxy:
    """Draw uniform numbers in [from, to), by default in [0, 1). Shapes and dtypes: self's."""
    low, high = _range(args, kwargs, 1)
    return prims.uniform(self.shape, low, high, self.dtype, self.device, like=self)


@fills("normal_")
def fill_normal(self: TensorProxy, mean: float = 0, std: float = 1) -> TensorProxy:
    """Draw normal numbers. Shapes and dtypes: self's."""
    return prims.normal(self.shape, mean, std, self.dtype, self.device, like=self)


@fills("bernoulli_")
def fill_bernoulli(self: TensorProxy, p: TensorProxy | float = 0.5) -> TensorProxy:
    """Return 1 with probability `p`, else 0. Shapes and dtypes: self's."""
    return prims.bernoulli(self.shape, p, self.dtype, self.device, like=self)


@fills("exponential_")
def exponential(self: TensorProxy, lambd: float = 1) -> TensorProxy:
    """Draw exponential numbers with rate `lambd`. Shapes and dtypes: self's."""
    return prims.exponential(self.shape, lambd, self.dtype, self.device, like=self)


@fills("random_")
def fill_random(self: TensorProxy, *args: int, **kwargs: Any) -> TensorProxy:
    """Draw integers, uniform: random_() over the dtype's range, random_(to) from 0, random_(from, to)."""
    if len(args) == 1 and not kwargs:
        args = (0, *args)
    low, high = _range(args, kwargs, None)
    return prims.randint(
        self.shape, low, _above(self.dtype) if high is None else high, self.dtype, self.device, like=self
    )


def _above(dtype: torch.dtype) -> int:
    """Return the integer after the largest that a dtype represents exactly."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max


# dropout


def check_probability(op: str, p: float) -> None:
    """Raise ValueError unless p is a probability; RuntimeError for nan, which torch's Python functions accept."""
    check(
        0 <= p <= 1,
        lambda: f"{op}: dropout probability has to be between 0 and 1, but got {p}",
        RuntimeError if p != p else ValueError,
    )


def apply_dropout(x: TensorProxy, p: float, training: bool, noise_shape: Sequence[Dim] | None = None) -> TensorProxy:
    """Return x with elements (or channels, by noise_shape) zeroed with probability p, the others scaled to keep the
    mean.

    If p is 0, or not in training, return x itself and draw nothing.
    """
    if not training or p == 0 or prims.statically_true(x.numel() == 0):
        return x
    if p == 1:
        return x * prims.full((), 0, x.dtype, x.device)
    noise = _dropout_mask(x, p, noise_shape)
    return x * (noise / (1 - p))


def _run_dropout_(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return torch.dropout_(input.clone(), p, train)


def _dropout_mask(x: TensorProxy, p: float, noise_shape: Sequence[Dim] | None) -> TensorProxy:
    """Return 1 for the elements that dropout keeps, 0 for those that it zeroes."""
    if noise_shape is None:
        return prims.bernoulli(x.shape, 1 - p, noise_dtype(x.dtype), x.device, like=x)
    return prims.bernoulli(tuple(noise_shape), 1 - p, noise_dtype(x.dtype), x.device)


def noise_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of dropout's noise: a real one for complex numbers since torch 2.15."""
    return prims.real_dtype(dtype) if TORCH >= (2, 15) else dtype


@torchsymbol(_run_dropout_, id="torch.dropout_", inplace=torch.dropout_)
def dropout_(input: TensorProxy, p: float, train: bool) -> TensorProxy:
    """Zero elements with probability p in training, the others scaled to keep the mean.

    It is a separate symbol because on a GPU, eager's in-place form draws other numbers than torch.dropout.
    """
    check_torch_probability("dropout_", p)
    return apply_dropout(input, p, train)


def _dropout_handler(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> TensorProxy:
    return _dropout_call(symbol, memory, *args, **kwargs)


def _dropout_call(
    symbol: Symbol, memory: Memory, input: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False
) -> TensorProxy:
    check_probability("dropout", p)
    value = memory.read(input)
    if inplace:
        write(input, dropout_(value, p, training), memory, "dropout_")
        return input
    out = symbol(value, p, training)
    return input if out is value else out


@torchsymbol(F.dropout, handler=_dropout_handler)
def dropout(input: TensorProxy, p: float = 0.5, training: bool = True) -> TensorProxy:
    """Zero elements with probability p in training, the others scaled to keep the mean."""
    return apply_dropout(input, p, training)


@torchsymbol(torch.dropout)
def torch_dropout(input: TensorProxy, p: float, train: bool) -> TensorProxy:
    """Zero elements with probability p in training, the others scaled to keep the mean."""
    check_torch_probability("dropout", p)
    return apply_dropout(input, p, train)


def check_torch_probability(op: str, p: float) -> None:
    """Raise RuntimeError, as torch's own functions do, unless p is a probability."""
    torch_check(0 <= p <= 1, lambda: f"{op}: dropout probability has to be between 0 and 1, but got {p}")


@torchsymbol(torch.native_dropout)
def native_dropout(input: TensorProxy, p: float, train: bool | None) -> tuple[TensorProxy, TensorProxy]:
    """Return (elements zeroed with probability p in training and the others scaled, the mask of those kept)."""
    check_torch_probability("native_dropout", p)
    if train is False or p == 0 or prims.statically_true(input.numel() == 0):
        return prims.clone(input), prims.full(input.shape, True, torch.bool, input.device)
    noise = _dropout_mask(input, p, None)
    return input * noise * (0.0 if p == 1 else 1 / (1 - p)), noise != 0


def _channel_noise(op: str, x: TensorProxy) -> tuple[Dim, ...]:
    torch_check(
        x.ndim >= 2, lambda: f"{op}: Feature dropout requires at least 2 dimensions in the input, but it is {x}"
    )
    return (*x.shape[:2], *[1] * (x.ndim - 2))


def _by_channel(x: TensorProxy, p: float, training: bool) -> TensorProxy:
    if not training or p == 0 or prims.statically_true(x.numel() == 0):
        return x
    return apply_dropout(x, p, training, _channel_noise("feature_dropout", x))


@torchsymbol(torch.feature_dropout, inplace=torch.feature_dropout_)
def feature_dropout(input: TensorProxy, p: float, train: bool) -> TensorProxy:
    """Zero whole channels (of dim 1) with probability p in training, the others scaled to keep the mean."""
    check_torch_probability("feature_dropout", p)
    return _by_channel(input, p, train)


@torchsymbol(F.dropout1d, inplace_position=3)
def dropout1d(input: TensorProxy, p: float = 0.5, training: bool = True) -> TensorProxy:
    """Zero whole channels of (N, C, L) or (C, L) with probability p in training, the others scaled."""
    check_probability("dropout1d", p)
    torch_check(
        input.ndim in (2, 3), lambda: f"dropout1d: Expected 2D or 3D input, but received a {input.ndim}D input: {input}"
    )
    return _by_channel(input, p, training) if input.ndim == 3 else _of_one(input, p, training)


def _of_one(x: TensorProxy, p: float, training: bool) -> TensorProxy:
    """Apply channel-wise dropout to a sample without a batch dim."""
    if not training or p == 0:
        return x
    return clang.squeeze(_by_channel(clang.unsqueeze(x, 0), p, training), (0,))


@torchsymbol(F.dropout2d, inplace_position=3)
def dropout2d(input: TensorProxy, p: float = 0.5, training: bool = True) -> TensorProxy:
    """Zero whole channels (of dim 1) with probability p in training, the others scaled."""
    check_probability("dropout2d", p)
    return _by_channel(input, p, training)


@torchsymbol(F.dropout3d, inplace_position=3)
def dropout3d(input: TensorProxy, p: float = 0.5, training: bool = True) -> TensorProxy:
    """Zero whole channels of (N, C, D, H, W) or (C, D, H, W) with probability p in training, the others scaled."""
    check_probability("dropout3d", p)
    return _by_channel(input, p, training) if input.ndim == 5 else _of_one(input, p, training)


ALPHA = 1.7580993408473766


def _alpha_dropped(x: TensorProxy, p: float, training: bool, noise_shape: Sequence[Dim] | None) -> TensorProxy:
    """Set elements to SELU's lowest value with probability p, then scale and shift to keep mean and variance."""
    if not training or p == 0 or prims.statically_true(x.numel() == 0):
        return x
    if p == 1:
        return x * prims.full((), 0, x.dtype, x.device)
    noise = _dropout_mask(x, p, noise_shape)
    a = 1.0 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    return x * (noise * a) + ((noise - 1) * (ALPHA * a) + ALPHA * a * p)


@torchsymbol(F.alpha_dropout, inplace_position=3)
def alpha_dropout(input: TensorProxy, p: float = 0.5, training: bool = False) -> TensorProxy:
    """Apply dropout for SELU, which keeps the mean and variance of a standard normal input."""
    check_probability("alpha_dropout", p)
    return _alpha_dropped(input, p, training, None)


@torchsymbol(torch.alpha_dropout, inplace=torch.alpha_dropout_)
def torch_alpha_dropout(input: TensorProxy, p: float, train: bool) -> TensorProxy:
    """Apply dropout for SELU, which keeps the mean and variance of a standard normal input."""
    check_torch_probability("alpha_dropout", p)
    return _alpha_dropped(input, p, train, None)


@torchsymbol(F.feature_alpha_dropout, inplace_position=3)
def feature_alpha_dropout(input: TensorProxy, p: float = 0.5, training: bool = False) -> TensorProxy:
    """Apply alpha_dropout to whole channels (of dim 1)."""
    check_probability("feature_alpha_dropout", p)
    return _alpha_dropped(input, p, training, _channel_noise("feature_dropout", input) if training and p else None)


@torchsymbol(torch.feature_alpha_dropout, inplace=torch.feature_alpha_dropout_)
def torch_feature_alpha_dropout(input: TensorProxy, p: float, train: bool) -> TensorProxy:
    """Apply alpha_dropout to whole channels (of dim 1)."""
    check_torch_probability("feature_alpha_dropout", p)
    return _alpha_dropped(input, p, train, _channel_noise("feature_dropout", input) if train and p else None)
