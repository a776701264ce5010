"""The loss of large scores on a CPU, which keeps no softmax in memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.transforms.decompose_cross_entropy import SCORE_LIMIT, decompose_cross_entropy

CASES = {
    "rows": ((300, 1000), (300,), {}),
    "sum": ((300, 1000), (300,), {"reduction": "sum"}),
    "none": ((300, 1000), (300,), {"reduction": "none"}),
    "a class that is ignored": ((300, 1000), (300,), {"ignore_index": 7}),
    "images": ((4, 100, 30, 30), (4, 30, 30), {}),
    "images, none": ((4, 100, 30, 30), (4, 30, 30), {"reduction": "none"}),
    "one": ((300_000,), (), {}),
}


def is_composed(jitted: Callable) -> bool:
    calls = [bound for trace in forge.last_traces(jitted) for bound in trace.bound_symbols]
    return any("class_scores" in bound.symbol.id for bound in calls)


def scores_and_targets(
    shape: tuple[int, ...], target: tuple[int, ...], dtype: torch.dtype, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = 3 * torch.randn(shape, dtype=torch.float64)
    targets = torch.randint(0, shape[min(1, len(shape) - 1)], target)
    if target:
        targets.view(-1)[::5] = ignored
    return scores.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_near_those_of_float64(case: str, dtype: torch.dtype) -> None:
    """They are nearer than eager's, or as near up to a few roundings."""
    torch.manual_seed(0)
    shape, target, options = CASES[case]
    x, y = scores_and_targets(shape, target, dtype, options.get("ignore_index", -100))

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y, **options)

    jitted = forge.jit(loss)
    exact = x.detach().double().requires_grad_()
    found = []
    for function, scores in ((jitted, x), (loss, x), (loss, exact)):
        out = function(scores, y)
        found.append((out.detach(), *torch.autograd.grad(out, scores, torch.ones_like(out))))
    assert is_composed(jitted)
    for ours, eagers, wanted in zip(*found, strict=True):
        assert (ours.dtype, ours.stride()) == (eagers.dtype, eagers.stride())
        rounding = 4 * torch.finfo(dtype).eps * wanted.abs().max()
        assert (ours - wanted).abs().max() <= (eagers - wanted).abs().max() + rounding


def test_the_mean_of_no_losses_is_not_a_number() -> None:
    jitted = forge.jit(lambda x, y: F.cross_entropy(x, y))
    assert jitted(torch.randn(300, 1000), torch.full((300,), -100)).isnan()


@pytest.mark.parametrize("target", [1000, -3])
def test_a_target_out_of_bounds_raises_eagers_error(target: int) -> None:
    jitted = forge.jit(lambda x, y: F.cross_entropy(x, y))
    with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
        jitted(torch.randn(300, 1000), torch.full((300,), target))


def test_a_backward_reads_the_scores_and_saves_a_number_for_each_row() -> None:
    jitted = forge.jit(lambda x, y: F.cross_entropy(x.tanh(), y))
    x, y = torch.randn(300, 1000, requires_grad=True), torch.randint(0, 1000, (300,))
    for rows in (300, 500):
        jitted(x[:rows], y[:rows]).backward()
    (_, saved, _) = forge.last_traces(jitted)[-1].output
    shapes = [tuple(each.shape) for each in saved if isinstance(each, forge.ir.TensorProxy)]
    assert shapes.count((300, 1000)) == 1 and (300, 1) in shapes


def test_the_gradient_may_be_differentiated() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(300, 1000, requires_grad=True), torch.randint(0, 1000, (300,))
    second = []
    for loss in (forge.jit(lambda x, y: F.cross_entropy(x, y)), F.cross_entropy):
        (first,) = torch.autograd.grad(loss(x, y), x, create_graph=True)
        second.append(torch.autograd.grad((first * 1000).square().sum(), x)[0])
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), (300, 1000)),
        (lambda x, y: F.cross_entropy(x, y, weight=x.detach()[0].exp()), (300, 1000)),
        (lambda x, y: F.cross_entropy(x, x.detach().softmax(1)), (300, 1000)),
        (lambda x, y: F.cross_entropy(x, y), (30, 100)),
    ],
    ids=["label smoothing", "weights", "probabilities", "few scores"],
)
def test_what_is_no_such_loss_stays(loss: Callable, shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape, requires_grad=True), torch.randint(0, shape[1], shape[:1])
    jitted = forge.jit(loss)
    torch.testing.assert_close(jitted(x, y), loss(x, y))
    assert not is_composed(jitted)
    assert shape[0] * shape[1] >= SCORE_LIMIT or shape == (30, 100)


def test_eager_bits_and_other_kernels_keep_the_loss() -> None:
    x, y = torch.randn(300, 1000), torch.randint(0, 1000, (300,))
    jitted = forge.jit(lambda x, y: F.cross_entropy(x, y), numerics="eager")
    assert torch.equal(jitted(x, y), F.cross_entropy(x, y)) and not is_composed(jitted)
    trace = forge.trace(lambda x, y: F.cross_entropy(x, y), x, y)
    assert decompose_cross_entropy(trace, in_torch=lambda bound: False) is trace
    assert decompose_cross_entropy(trace) is not trace
