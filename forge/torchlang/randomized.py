"""Random functions of torch whose numbers torch's library draws as a whole."""

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
    """Numbers of a Cauchy distribution. Shapes and dtypes: self's."""
    return prims.cauchy(self, median, sigma)


@fills("geometric_")
def fill_geometric(self: TensorProxy, p: float) -> TensorProxy:
    """Return samples of the number of tries until a success of probability `p`. Shapes and dtypes: self's."""
    prims.check_dtype("geometric_", self, prims.REAL)
    return prims.geometric(self, p)


@fills("log_normal_")
def fill_log_normal(self: TensorProxy, mean: float = 1, std: float = 2) -> TensorProxy:
    """e to the power of normally distributed numbers. Shapes and dtypes: self's."""
    prims.check_dtype("log_normal_", self, prims.REAL)
    return prims.log_normal(self, mean, std)


# of a tensor of parameters, whose gradients are zeros, as in eager


@torchsymbol(torch.poisson, tags=RANDOM_CONSTANT)
def poisson(input: TensorProxy, generator: Generator = None) -> TensorProxy:
    """Numbers of Poisson distributions with these rates."""
    check_supported("poisson", generator=generator)
    return prims.poisson(input)


prims.register_vjp(poisson, input=lambda g, input: prims.full(input.shape, 0, input.dtype, input.device))


# of a tensor of parameters, as torch.distributions draws them


@torchsymbol(torch.binomial, tags=[Tag.RANDOM])
def binomial(count: TensorProxy, prob: TensorProxy, generator: Generator = None) -> TensorProxy:
    """Return the number of successes in `count` tries of probability `prob`."""
    check_supported("binomial", generator=generator)
    return prims.binomial(count, prob)


@torchsymbol(torch_sample_dirichlet, tags=[Tag.RANDOM])
def sample_dirichlet(self: TensorProxy, generator: Generator = None) -> TensorProxy:
    """Numbers of Dirichlet distributions with these concentrations, one distribution a row."""
    check_supported("_sample_dirichlet", generator=generator)
    return prims.sample_dirichlet(self)


@torchsymbol(torch_dirichlet_grad)
def dirichlet_grad(x: TensorProxy, alpha: TensorProxy, total: TensorProxy) -> TensorProxy:
    """Return the derivative of numbers of Dirichlet distributions by their concentrations `alpha`, of sum `total`."""
    return prims.dirichlet_grad(x, alpha, total)


@torchsymbol(torch_standard_gamma, tags=[Tag.RANDOM])
def standard_gamma(self: TensorProxy, generator: Generator = None) -> TensorProxy:
    """Numbers of gamma distributions with these concentrations and rate 1."""
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
    """input, times a number uniform in [lower, upper) where it is not positive; times their mean but in training."""
    check_supported("rrelu", generator=generator)
    return _rrelu(input, lower, upper, training)


@torchsymbol(F.rrelu, inplace_position=4)
def rrelu(input: TensorProxy, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False) -> TensorProxy:
    """input, times a number uniform in [lower, upper) where it is not positive; times their mean but in training."""
    return _rrelu(input, lower, upper, training)


@torchsymbol(F.gumbel_softmax)
def gumbel_softmax(
    logits: TensorProxy, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> TensorProxy:
    """softmax of the logits with noise, over tau; where `hard`, 1 at its largest in the forward alone."""
    dims = clang.canonical_dims("gumbel_softmax", dim, logits.ndim)
    noise = -clang.log(prims.exponential(logits.shape, 1, logits.dtype, logits.device))
    soft = softmax((logits + noise) / tau, dim)
    if not hard or prims.statically_true(logits.numel() == 0):
        return soft
    place = clang.unsqueeze(prims.max_dim(prims.detach(soft), dims[0])[1], dims[0])
    zeros = prims.full(logits.shape, 0, logits.dtype, logits.device)
    return prims.scatter(zeros, dims[0], place, 1.0) - prims.detach(soft) + soft
