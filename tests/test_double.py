"""The double backward of every OpInfo: torch.autograd.gradgradcheck in float64, and eager's own second gradients.

Every op for which eager's gradgradcheck passes is checked; a few of them by default, all under the `slow` marker.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import assert_same, chosen_opinfos, copy_of, map_tensors, samples, tensors_in
from torch.autograd import gradgradcheck
from torch.nn import functional as F

import forge
from forge.api.functional import Direct
from forge.testing import OpInfo, Sample
from tests.seeding import seed

EACH = 16  # one op of so many is checked by default
LONG = {"_grouped_mm"}  # minutes
WITHIN = (1e-5, 1e-6)

# torch's own second gradient is not the function's, which its gradgradcheck does not detect
EAGER_IS_WRONG = ("embedding", "nn.functional.embedding")  # scale_grad_by_freq is forgotten

# functions whose second gradient forge refuses, with its reason
REFUSED = {
    "aten.grid_sampler_2d_backward": "prims.grid_sampler_double_backward has no gradient rule",
    "aten.grid_sampler_3d_backward": "prims.grid_sampler_double_backward has no gradient rule",
    "nn.functional.scaled_dot_product_attention": "draws random numbers",
    "nn.functional.scaled_dot_product_attention.dropout": "draws random numbers",
    "nn.functional.embedding": "no second gradient with scale_grad_by_freq",
    "embedding": "no second gradient with scale_grad_by_freq",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "info" not in metafunc.fixturenames:
        return
    infos = [info for info in chosen_opinfos(metafunc.config) if info.gradient]
    marks = [[pytest.mark.slow] if at % EACH or info.name in LONG else [] for at, info in enumerate(infos)]
    metafunc.parametrize(
        "info", [pytest.param(info, id=info.name, marks=each) for info, each in zip(infos, marks, strict=True)]
    )


@pytest.mark.one_in(4)
def test_second_gradients(info: OpInfo) -> None:
    """They equal eager's, and finite differences, for every sample with second gradients in eager."""
    for sample in samples(info, "cpu", info.precise):
        call = _Call(info, sample)
        if not call.inputs or not call.passes(info.reference or info.op):
            continue
        jitted = Direct(info.op, executors=["torch"])
        try:
            found = call.second(jitted)
        except NotImplementedError as error:
            assert REFUSED.get(info.name, "nothing") in str(error)
            continue
        assert_same(found, call.second(info.reference or info.op), within=WITHIN)
        assert call.passes(jitted), "gradgradcheck, which passes in eager"


AT_ZERO = {
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "softplus": F.softplus,
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none", beta=0.5),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x[None], x[None].abs(), reduction="none"),
}


@pytest.mark.parametrize("name", AT_ZERO)
def test_higher_gradients_at_zero(name: str) -> None:
    """The functions are smooth there, although their formulas contain |x|, which is not."""

    def gradients(function: Callable) -> list[torch.Tensor]:
        x = torch.tensor([0.0, -0.0, 0.3, -0.7], dtype=torch.float64, requires_grad=True)
        last, results = function(x), []
        for _ in range(3):
            if not last.requires_grad:  # eager's second gradient is a constant
                break
            (last,) = torch.autograd.grad(last.sum(), x, create_graph=True)
            results.append(last.detach())
        return results

    expected = gradients(AT_ZERO[name])
    actual = gradients(forge.jit(AT_ZERO[name], executors=["torch"]))
    assert_same(actual[: len(expected)], expected, within=WITHIN)


def test_the_second_gradient_of_sinc_at_zero() -> None:
    """It is -pi^2 / 3; eager's is nan."""
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(forge.jit(torch.sinc, executors=["torch"])(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_same(first, torch.zeros_like(x))
    assert_same(second, torch.full_like(x, -(torch.pi**2) / 3))


class _Call:
    """A sample as a function of its float inputs, which gets clones of them: an op may change its arguments."""

    def __init__(self, info: OpInfo, sample: Sample) -> None:
        self.sample = copy_of(sample)
        found = tensors_in((self.sample.args, self.sample.kwargs))
        self.places = [i for i, x in enumerate(found) if x.is_floating_point()]
        self.inputs = [found[i].clone().requires_grad_() for i in self.places]

    def run(self, function: Callable, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fresh = copy_of(self.sample)
        found = tensors_in((fresh.args, fresh.kwargs))
        given = {id(found[place]): x.clone() for place, x in zip(self.places, inputs, strict=True)}
        args, kwargs = map_tensors(lambda x: given.get(id(x), x), (fresh.args, fresh.kwargs))
        seed(1)
        outputs = tensors_in(function(*args, **kwargs))
        return tuple(out for out in outputs if out.requires_grad and out.is_floating_point())

    def passes(self, function: Callable) -> bool:
        """Return whether gradgradcheck passes; eager raises if it has no second gradient."""
        try:
            if not self.run(function, *self.inputs):
                return False
            return gradgradcheck(
                lambda *inputs: self.run(function, *inputs), self.inputs, fast_mode=True, raise_exception=False
            )
        except (RuntimeError, NotImplementedError, IndexError):
            return False

    def second(self, function: Callable) -> list[torch.Tensor]:
        """Return gradients of a sum of the gradients, with random weights and zeros for missing ones."""
        outputs = self.run(function, *self.inputs)
        weights = _random(outputs, 2)
        gradients = torch.autograd.grad(
            outputs, self.inputs, weights, create_graph=True, allow_unused=True, materialize_grads=True
        )
        flowing = [(g, w) for g, w in zip(gradients, _random(gradients, 3), strict=True) if g.requires_grad]
        if not flowing:
            return [torch.zeros_like(x) for x in (*self.inputs, *weights)]
        chosen, theirs = zip(*flowing, strict=True)
        inputs = [*self.inputs, *weights]
        return list(torch.autograd.grad(chosen, inputs, theirs, allow_unused=True, materialize_grads=True))


def _random(like: Any, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, dtype=x.dtype, generator=generator).requires_grad_() for x in like]
