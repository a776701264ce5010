"""The random prims: each draws from torch's default generator of its device.

Numbers are drawn in memory order; the result has the layout of the tensor `like`.
"""

from collections.abc import Sequence

import torch

from forge.ir import Dim, Tag, TensorProxy, check, current_trace
from forge.prims.core import primitive, torch_check
from forge.prims.creation import check_lengths

RANDOM = (Tag.RANDOM, Tag.NOT_DIFFERENTIABLE)


@primitive(tags=RANDOM)
def bernoulli(
    shape: Sequence[Dim],
    p: TensorProxy | float,
    dtype: torch.dtype,
    device: torch.device,
    like: TensorProxy | None = None,
) -> TensorProxy:
    """Return 1 with probability `p`, else 0. Shapes: a tensor p broadcasts to `shape`."""
    torch_check(
        not isinstance(p, (int, float)) or 0 <= p <= 1,
        lambda: f"prims.bernoulli: bernoulli_ expects p to be in [0, 1], but got p={p}",
    )
    check_lengths("prims.bernoulli", shape)
    return current_trace().tensor(shape, dtype, device)


@primitive(tags=RANDOM)
def uniform(
    shape: Sequence[Dim],
    low: float,
    high: float,
    dtype: torch.dtype,
    device: torch.device,
    like: TensorProxy | None = None,
) -> TensorProxy:
    """Draw uniform numbers in [low, high). Dtypes: floating point."""
    _check_float("prims.uniform", dtype)
    torch_check(
        not (isinstance(low, (int, float)) and isinstance(high, (int, float))) or low <= high,
        lambda: f"prims.uniform: uniform_ expects to return a [from, to) range, but found from={low} > to={high}",
    )
    check_lengths("prims.uniform", shape)
    return current_trace().tensor(shape, dtype, device)


def _check_float(op: str, dtype: torch.dtype) -> None:
    check(
        dtype.is_floating_point or dtype.is_complex,
        lambda: f"{op}: the dtype is {dtype}, for which it is not implemented; it must be floating point",
        NotImplementedError,
    )


@primitive(tags=RANDOM)
def normal(
    shape: Sequence[Dim],
    mean: float,
    std: float,
    dtype: torch.dtype,
    device: torch.device,
    like: TensorProxy | None = None,
) -> TensorProxy:
    """Draw normal numbers. Dtypes: floating point."""
    _check_float("prims.normal", dtype)
    torch_check(
        not isinstance(std, (int, float)) or std >= 0,
        lambda: f"prims.normal: normal expects std >= 0.0, but found std {std}",
    )
    check_lengths("prims.normal", shape)
    return current_trace().tensor(shape, dtype, device)


@primitive(tags=RANDOM)
def exponential(
    shape: Sequence[Dim], rate: float, dtype: torch.dtype, device: torch.device, like: TensorProxy | None = None
) -> TensorProxy:
    """Draw exponential numbers. Dtypes: floating point."""
    _check_float("prims.exponential", dtype)
    torch_check(
        not isinstance(rate, (int, float)) or rate > 0,
        lambda: f"prims.exponential: exponential_ expects lambda > 0.0, but found lambda={rate}",
    )
    check_lengths("prims.exponential", shape)
    return current_trace().tensor(shape, dtype, device)


@primitive(tags=RANDOM)
def randint(
    shape: Sequence[Dim], low: Dim, high: Dim, dtype: torch.dtype, device: torch.device, like: TensorProxy | None = None
) -> TensorProxy:
    """Draw integers, uniform in [low, high)."""
    torch_check(
        not (isinstance(low, int) and isinstance(high, int)) or low < high,
        lambda: f"prims.randint: random_ expects 'from' to be less than 'to', but got from={low} >= to={high}",
    )
    check_lengths("prims.randint", shape)
    return current_trace().tensor(shape, dtype, device)


@primitive(tags=RANDOM)
def randperm(n: Dim, dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """Return the integers below n in random order."""
    torch_check(not isinstance(n, int) or n >= 0, lambda: f"prims.randperm: n must be non-negative, got {n}")
    return current_trace().tensor((n,), dtype, device)


@primitive(tags=RANDOM)
def multinomial(x: TensorProxy, num_samples: int, replacement: bool) -> TensorProxy:
    """Draw indices from each row of weights.

    Shapes: x is (n,) or (rows, n); out is (num_samples,) or (rows, num_samples). Source: torch.multinomial.
    """
    op = "prims.multinomial"
    torch_check(x.ndim in (1, 2), lambda: f"{op}: prob_dist must be 1 or 2 dim, but x is {x}")
    torch_check(
        x.dtype.is_floating_point,
        lambda: f"{op}: multinomial only supports floating-point dtypes for input, but x is {x}",
    )
    torch_check(num_samples > 0, lambda: f"{op}: cannot sample n_sample <= 0 samples, got {num_samples}")
    torch_check(
        replacement or not isinstance(x.shape[-1], int) or num_samples <= x.shape[-1],
        lambda: (
            f"{op}: cannot sample n_sample > prob_dist.size(-1) samples without replacement: {num_samples} from {x}"
        ),
    )
    return current_trace().tensor((*x.shape[:-1], num_samples), torch.int64, x.device)
