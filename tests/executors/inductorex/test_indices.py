"""Regions whose indices sympy does not simplify in reasonable time are run by torch."""

import warnings

import pytest
import torch

import forge
from forge.torch_internals.inductor import index_bound as indices


def windows(x: torch.Tensor) -> torch.Tensor:
    height, width = x.shape
    x = torch.roll(x.sin() + 1, (-2, -2), (0, 1))
    x = x.view(height // 2, 2, width // 2, 2).transpose(1, 2).reshape(-1, 4)
    return x.softmax(-1) * 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.slow
def test_a_long_index_is_a_reason_to_decline(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "LONGEST", 10)
    jitted = forge.jit(windows, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in ((4, 6), (8, 4)):
            x = torch.randn(shape, requires_grad=grad)
            torch.testing.assert_close(jitted(x), windows(x))
            if grad:
                given = [torch.autograd.grad(call(x).cos().sum(), x)[0] for call in (jitted, windows)]
                torch.testing.assert_close(*given)
    reasons = {reason for row in forge.explain(jitted).rows for _, reason in row.declined}
    assert "Inductor cannot compile it: LongIndex: an index in a tensor has more than 10 terms" in reasons
