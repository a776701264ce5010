"""The operators against eager: docs/how-to/custom-operators.md."""

import functools

import pytest
import torch
from acme_ops.for_forge import BLURRED, CLIPPED

import forge


@pytest.mark.parametrize("info", (CLIPPED, BLURRED), ids=lambda info: info.name)
def test_values_and_gradients_match_eager(info):
    jitted = forge.jit(info.op, executors=["torch", "acme"])
    for each in info.samples(info, torch.device("cpu"), torch.float64):
        x, *rest = each.args
        x = x.requires_grad_()
        torch.testing.assert_close(jitted(x, *rest, **each.kwargs), info.op(x, *rest, **each.kwargs))
        assert torch.autograd.gradcheck(functools.partial(jitted, **each.kwargs), (x, *rest))
    assert not forge.explain(jitted).opaque_calls
