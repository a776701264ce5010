"""Losses that check values are part of one program; bad values are refused at run time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge import clang, torchlang


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


LENGTHS = torch.tensor([6, 5]), torch.tensor([3, 2])
TARGETS = torch.tensor([[1, 2, 4], [3, 1, 2]])
TRANSFORMED = {
    "grad of a negative log likelihood": lambda x: torch.func.grad(lambda x: F.gaussian_nll_loss(x[0], x[1], x[2]))(x),
    "vmap of one": lambda x: torch.vmap(lambda x: F.gaussian_nll_loss(x[0], x[1], 2.0))(x),
    "grad of a CTC loss": lambda x: torch.func.grad(lambda x: F.ctc_loss(x.log(), TARGETS, *LENGTHS))(x),
    "vjp of one": lambda x: torch.func.vjp(lambda x: torch.ctc_loss(x.log(), TARGETS, *LENGTHS), x)[1](torch.ones(2))[
        0
    ],
}


@pytest.mark.filterwarnings("ignore:forge. a graph runs in eager")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_what_torch_runs_of_a_program_is_the_function_itself(name: str) -> None:
    x = torch.rand(6, 2, 5) + 0.1
    torch.testing.assert_close(forge.jit(TRANSFORMED[name])(x), TRANSFORMED[name](x))


def test_a_graph_that_runs_in_eager_runs_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlang.find(torch.tanh), "body", lambda x: clang.unsqueeze(x, 0))
    x, target, var = torch.rand(3, 3, 4).unbind()
    with pytest.warns(UserWarning, match="a graph runs in eager"):
        out = forge.jit(lambda x: F.gaussian_nll_loss(torch.tanh(x), target, var))(x)
    torch.testing.assert_close(out, F.gaussian_nll_loss(torch.tanh(x), target, var))
