"""Losses that look at values are part of one program; what they refuse is refused when it runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge


@pytest.mark.parametrize("grad", [False, True])
def test_a_negative_variance_is_refused_when_the_program_runs(grad: bool) -> None:
    loss = forge.jit(nn.GaussianNLLLoss(), fullgraph=True)
    mean, target, var = torch.randn(3, 4, requires_grad=grad), torch.randn(3, 4), torch.rand(3, 4)
    torch.testing.assert_close(loss(mean, target, var), F.gaussian_nll_loss(mean, target, var))
    with pytest.raises(ValueError, match="var has negative entry"):
        loss(mean, target, -var)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("tensors", [False, True])
def test_ctc_loss_is_part_of_its_program(reduction: str, tensors: bool) -> None:
    scores = torch.randn(6, 2, 5, requires_grad=True)
    targets, lengths = torch.randint(1, 5, (2, 3)), ((6, 5), (3, 2))
    given = [torch.tensor(each) for each in lengths] if tensors else lengths

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(scores.log_softmax(2), targets, *given, reduction=reduction)

    jitted = forge.jit(loss, fullgraph=True)
    ours, theirs = jitted(scores), loss(scores)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(*(torch.autograd.grad(each.sum(), scores) for each in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)
