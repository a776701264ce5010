"""The random functions of torch that torch's library draws in one operator."""

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.clang.creation import check_supported
from forge.ir import Tag, TensorProxy
from forge.prims.core import torch_check
from forge.torch_internals.functions import torch_dirichlet_grad, torch_sample_dirichlet, torch_standard_gamma
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn.activation import leaky_relu
from forge.torchlang.nn.softmax import softmax
from forge.torchlang.random import RANDOM_CONSTANT, fills

Generator = torch.Generator | None

# methods that fill a tensor


@fills("cauchy_")
def fill_cauchy(self: TensorProxy, median: float = 0, sigma: float = 1) -> TensorProxy:
    """Draw samples of a Cauchy distribution. Shapes and dtypes: self's."""
    return prims.cauchy(self, median, sigma)


@fills("geometric_")
def fill_geometric(self: TensorProxy, p: float) -> TensorProxy:
    """Draw the number of trials until a success of probability `p`. Shapes and dtypes: self's."""
    prims.check_dtype("geometric_", self, prims.REAL)
    return prims.geometric(self, p)


@fills("log_normal_")
def fill_log_normal(self: TensorProxy, mean: float = 1, std: float = 2) -> TensorProxy:
    """Draw samples of a log-normal distribution. Shapes and dtypes: self's."""
    prims.check_dtype("log_normal_", self, prims.REAL)
    return prims.log_normal(self, mean, std)


# with a tensor of parameters, whose gradients are zeros, as in eager


@torchsymbol(torch.poisson, tags=RANDOM_CONSTANT)
def poisson(input: TensorProxy, generator: Generator = None) -> TensorProxy:
    """Draw samples of Poisson distributions with these rates."""
    check_supported("poisson", generator=generator)
    return prims.poisson(input)


prims.register_vjp(poisson, input=lambda g, input: prims.full(input.shape, 0, input.dtype, input.device))


# with a tensor of parameters, as torch.distributions draws them


@torchsymbol(torch.binomial, tags=[Tag.RANDOM])
def binomial(count: TensorProxy, prob: TensorProxy, generator: Generator = None) -> TensorProxy:
    """Draw the number of successes in `count` trials of probability `prob`."""
    check_supported("binomial", generator=generator)
    return prims.binomial(count, prob)


@torchsymbol(torch_sample_dirichlet, tags=[Tag.RANDOM])
def sample_dirichlet(self: TensorProxy, generator: Generator = None) -> TensorProxy:
    """Draw samples of Dirichlet distributions with these concentrations, one distribution per row."""
    check_supported("_sample_dirichlet", generator=generator)
    return prims.sample_dirichlet(self)


@torchsymbol(torch_dirichlet_grad)
def dirichlet_grad(x: TensorProxy, alpha: TensorProxy, total: TensorProxy) -> TensorProxy:
    """Return the derivative of Dirichlet samples with respect to their concentrations `alpha`, of sum `total`."""
    return prims.dirichlet_grad(x, alpha, total)


@torchsymbol(torch_standard_gamma, tags=[Tag.RANDOM])
def standard_gamma(self: TensorProxy, generator: Generator = None) -> TensorProxy:
    """Draw samples of gamma distributions with these concentrations and rate 1."""
    check_supported("_standard_gamma", generator=generator)
    return prims.standard_gamma(self)


prims.register_vjp(standard_gamma, self=lambda g, self, out: g * prims.standard_gamma_grad(self, out))


# activation functions


def _rrelu(input: TensorProxy, lower: float, upper: float, training: bool) -> TensorProxy:
    torch_check(
        lower <= upper,
        lambda: f"rrelu: Lower bound should be less than or equal to the upper bound, but they are {lower}, {upper}",
    )
    if not training:
        return leaky_relu(prims.contiguous(input, torch.contiguous_format), (lower + upper) / 2)
    return input * prims.rrelu_noise(input, lower, upper)


@torchsymbol(torch.rrelu, inplace=torch.rrelu_)
def torch_rrelu(
    input: TensorProxy,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    generator: Generator = None,
) -> TensorProxy:
    """Return input, multiplied where it is not positive by a number uniform in [lower, upper), in evaluation by their
    mean."""
    check_supported("rrelu", generator=generator)
    return _rrelu(input, lower, upper, training)


@torchsymbol(F.rrelu, inplace_position=4)
def rrelu(input: TensorProxy, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False) -> TensorProxy:
    """Return input, multiplied where it is not positive by a number uniform in [lower, upper), in evaluation by their
    mean."""
    return _rrelu(input, lower, upper, training)


@torchsymbol(F.gumbel_softmax)
def gumbel_softmax(
    logits: TensorProxy, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> TensorProxy:
    """Return softmax of (logits + Gumbel noise) / tau; with `hard`, one-hot in the forward only."""
    dims = clang.canonical_dims("gumbel_softmax", dim, logits.ndim)
    noise = -clang.log(prims.exponential(logits.shape, 1, logits.dtype, logits.device))
    soft = softmax((logits + noise) / tau, dim)
    if not hard or prims.statically_true(logits.numel() == 0):
        return soft
    place = clang.unsqueeze(prims.max_dim(prims.detach(soft), dims[0])[1], dims[0])
    zeros = prims.full(logits.shape, 0, logits.dtype, logits.device)
    return prims.scatter(zeros, dims[0], place, 1.0) - prims.detach(soft) + soft
