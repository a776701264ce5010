"""Gradients at the edges: at 0, infinity, nan, huge or tiny values, and ties, against eager's.

The default run tests one dtype of each op with fewer values, the slow one all. `pytest tests/test_edges.py --op max`
runs everything about one op.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support import all_samples, chosen_opinfos, map_tensors, short, tensors_in
from torch.utils import _pytree

from forge.api.functional import Direct
from forge.testing import OpInfo, Sample
from forge.torch_internals.versions import TORCH

DTYPES = (torch.float32, torch.complex64)
LARGEST = 200  # elements of a sample
WITHIN = {"rtol": 2e-3, "atol": 1e-4}
EVERYTHING = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e30, -1e30, 1e-30, 2.0, 2.0, 0.5, -0.5, 30.0)
FINITE = tuple(value for value in EVERYTHING if math.isfinite(value))
POOLS = (EVERYTHING, FINITE, (0.0, 0.0, 1.0, 1.0, -1.0), (0.0, 0.5, 1.0))
ALIKE = (0.0, 1.0, math.nan, math.inf, -1.0)

UNARY = """abs acos acosh asin asinh atan atanh cos cosh digamma erf erfc erfinv exp exp2 expm1 i0 lgamma log log10
log1p log2 reciprocal rsqrt sigmoid sin sinh sqrt tan tanh angle ceil floor frac neg positive sgn sign square trunc
deg2rad round nan_to_num logit sinc special.entr special.erfcx special.i0e special.i1 special.i1e special.log_ndtr
special.ndtr special.ndtri polygamma clamp clamp_min clamp_max"""
ACTIVATIONS = """relu relu6 hardtanh leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid softplus logsigmoid
hardshrink softshrink tanhshrink softsign threshold prelu glu softmax log_softmax softmin lp_pool1d normalize"""
BINARY = """add sub mul div remainder fmod pow float_power maximum minimum fmin fmax atan2 hypot copysign nextafter
where logaddexp logaddexp2 xlogy special.xlog1py addcmul addcdiv lerp"""
REDUCTIONS = """sum mean nansum nanmean amax amin prod logsumexp var std var_mean std_mean max min aminmax median
nanmedian mode kthvalue topk sort msort cumsum cumprod logcumsumexp cummax cummin quantile nanquantile
linalg.vector_norm linalg.matrix_norm linalg.norm norm dist pairwise_distance cosine_similarity cdist trace diff"""
LOSSES = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
poisson_nll_loss gaussian_nll_loss hinge_embedding_loss cosine_embedding_loss margin_ranking_loss triplet_margin_loss
soft_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss cross_entropy"""
OVERFLOWS = "what overflows on the way is infinite or nan by the order in which it is computed"
EXCEPT = {
    ("acos", torch.complex64): OVERFLOWS,
    ("asin", torch.complex64): OVERFLOWS,
    ("cosine_similarity", torch.float32): OVERFLOWS,
}
if TORCH >= (2, 15):
    UNSTABLE = "torch selects by an unstable algorithm, and which of equal values it takes is not defined"
    EXCEPT |= {(name, torch.float32): UNSTABLE for name in ("quantile", "nanquantile")}


def _names() -> set[str]:
    of_functional = {f"nn.functional.{name}" for name in f"{ACTIVATIONS} {LOSSES}".split()}
    return of_functional | set(f"{UNARY} {BINARY} {REDUCTIONS}".split())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = []
    for info in chosen_opinfos(metafunc.config):
        dtypes = [dtype for dtype in DTYPES if dtype in info.dtypes] if info.name in _names() else []
        for dtype in dtypes:
            for all_of_them in (False, True):
                slow = [pytest.mark.slow] if all_of_them or dtype.is_complex else []
                which = "all" if all_of_them else "some"
                cases.append(
                    pytest.param(info, dtype, all_of_them, marks=slow, id=f"{info.name}-{short(dtype)}-{which}")
                )
    metafunc.parametrize("info,dtype,all_of_them", cases)


def _fills(count: int) -> Iterator[tuple[Sequence[float], int]]:
    """Yield values to draw from, and a seed: `count` for each of the pools."""
    yield from (((value,), 0) for value in ALIKE)
    yield from ((pool, seed) for pool in POOLS for seed in range(count))


def _filled(sample: Sample, pool: Sequence[float], seed: int) -> Sample:
    """Return the sample with other values in its tensors of floats, which require a gradient."""
    draw = random.Random(seed)

    def fill(x: torch.Tensor) -> torch.Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return x
        parts = [torch.tensor(draw.choices(pool, k=x.numel())).reshape(x.shape) for _ in range(1 + x.is_complex())]
        value = torch.complex(*parts) if x.is_complex() else parts[0]
        return torch.empty_like(x).copy_(value).requires_grad_()

    args, kwargs = map_tensors(fill, (sample.args, sample.kwargs))
    return Sample(args, kwargs)


def _gradients(op: Any, sample: Sample) -> tuple:
    """Return the gradients of all tensors that require one; each element of the results has its own weight."""
    results = [x for x in _pytree.tree_leaves(op(*sample.args, **sample.kwargs)) if isinstance(x, torch.Tensor)]
    flowing = [x for x in results if x.requires_grad]
    weights = [(torch.arange(x.numel()).reshape(x.shape) * 0.5 + 1).to(x.dtype) for x in flowing]
    wanted = [x for x in tensors_in((sample.args, sample.kwargs)) if x.requires_grad]
    return torch.autograd.grad(flowing, wanted, weights, allow_unused=True) if flowing else ()


@pytest.mark.one_in(4)
def test_gradients_at_the_edges(info: OpInfo, dtype: torch.dtype, all_of_them: bool) -> None:
    reason = EXCEPT.get((info.name, dtype))
    if reason is not None:
        pytest.skip(reason)
    given = [x for x in all_samples(info, "cpu", dtype) if all(t.numel() <= LARGEST for t in tensors_in(x.args))]
    for sample in given if all_of_them else given[:: -(-len(given) // 4)]:
        jitted = Direct(info.op, executors=["torch"])
        for pool, seed in _fills(4 if all_of_them else 1):
            filled = _filled(sample, pool, seed)
            try:
                expected = _gradients(info.op, filled)
            except (RuntimeError, ValueError):  # torch refuses these values
                continue
            if expected:
                torch.testing.assert_close(_gradients(jitted, filled), expected, equal_nan=True, **WITHIN)
