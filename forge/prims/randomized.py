"""The random prims that are one function of torch: their draws depend on values, or no other prims express them.

Each fills new memory like its first argument.
"""

from typing import Any

import torch

from forge.ir import Tag, TensorProxy, current_trace
from forge.prims.core import primitive
from forge.prims.library import make_library_prim
from forge.prims.random import RANDOM
from forge.torch_internals.functions import (
    nn_rrelu_with_noise,
    torch_dirichlet_grad,
    torch_sample_dirichlet,
    torch_standard_gamma,
)


def cauchy_like(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return memory like x's, filled by Tensor.cauchy_."""
    return torch.empty_like(x).cauchy_(*args, **kwargs)


def geometric_like(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return memory like x's, filled by Tensor.geometric_."""
    return torch.empty_like(x).geometric_(*args, **kwargs)


def log_normal_like(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return memory like x's, filled by Tensor.log_normal_."""
    return torch.empty_like(x).log_normal_(*args, **kwargs)


def rrelu_slopes(x: torch.Tensor, lower: float, upper: float) -> torch.Tensor:
    """Return the factors that torch.rrelu applies to x in training."""
    noise = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # which torch fills row by row
    nn_rrelu_with_noise(x, noise, lower, upper, True)
    return noise


cauchy = make_library_prim(cauchy_like, "Numbers of a Cauchy distribution.", name="cauchy", tags=RANDOM)
geometric = make_library_prim(geometric_like, "Numbers of a geometric distribution.", name="geometric", tags=RANDOM)
log_normal = make_library_prim(log_normal_like, "Powers of normal numbers.", name="log_normal", tags=RANDOM)
rrelu_noise = make_library_prim(
    rrelu_slopes, "1 where x > 0, else uniform in [lower, upper).", name="rrelu_noise", tags=RANDOM
)
poisson = make_library_prim(torch.poisson, "Numbers of Poisson distributions with these rates.", tags=RANDOM)
binomial = make_library_prim(torch.binomial, "Numbers of binomial distributions.", tags=RANDOM)
sample_dirichlet = make_library_prim(
    torch_sample_dirichlet, "Numbers of Dirichlet distributions.", name="sample_dirichlet", tags=RANDOM
)
standard_gamma = make_library_prim(
    torch_standard_gamma, "Numbers of gamma distributions.", name="standard_gamma", tags=RANDOM
)


# derivatives of samples with respect to distribution parameters, which torch does not differentiate again

dirichlet_grad = make_library_prim(
    torch_dirichlet_grad,
    "The derivative of numbers of Dirichlet distributions.",
    name="dirichlet_grad",
    tags=[Tag.NOT_DIFFERENTIABLE],
)


@primitive(tags=[Tag.NOT_DIFFERENTIABLE])
def standard_gamma_grad(concentration: TensorProxy, sample: TensorProxy) -> TensorProxy:
    """Return the derivative of gamma samples with respect to their concentrations. Shapes: all are equal.

    Source: torch._standard_gamma_grad, which does not support fake tensors.
    """
    return current_trace().tensor(concentration.shape, concentration.dtype, concentration.device)
