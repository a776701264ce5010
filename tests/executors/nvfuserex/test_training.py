"""Models trained through nvFuser's executor have eager's gradients: with the double on a CPU, with the library on a
GPU."""

import copy

import pytest
import torch
from nvfuser_executors import AVAILABLE

import forge
from tests.models.test_models import build, difference, loss_of

DEVICES = [pytest.param(name, device, id=name) for name, device in AVAILABLE.items()]


@pytest.mark.parametrize(("executor", "device"), DEVICES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "conv_net"])
@pytest.mark.one_in(2)
def test_a_model_trains_as_in_eager(name, executor, device):
    model, arguments = build(name, True, device)
    eager = copy.deepcopy(model)
    jitted = forge.jit(model, executors=[executor, "torch"])
    expected, actual = loss_of(eager(**arguments)), loss_of(jitted(**arguments))
    torch.testing.assert_close(actual, expected)
    expected.backward()
    actual.backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            assert difference(ours.grad, theirs.grad) < 1e-4
    for stages in (forge.last_traces(jitted), forge.last_backward_traces(jitted)):
        assert any(bound.symbol.id.startswith(f"{executor}.fusion") for bound in stages[-1].bound_symbols)
