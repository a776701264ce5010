import pytest
import torch
from torch.nn.attention import SDPBackend

from forge.compiler.layout import _Operators
from forge.executors.torchex import attention
from forge.torch_internals.fake_tensors import FakeTensorMode


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_gradients_of_grouped_attention_have_the_strides_of_its_arguments(
    backend: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 does not count operations with fewer heads, and a call that raises would be assumed to be
    row-major."""
    monkeypatch.setattr(attention, "_choice", lambda call, leaves: backend.value)
    wanted = (True, True, True, False)
    with torch.no_grad(), FakeTensorMode(), _Operators(counts=True) as operators:
        q, k, v = [
            torch.empty(2, 64, heads, 32, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for heads in (8, 4, 4)
        ]
        out, logsumexp, state = attention.attend(q, k, v, None, 0.0, False, None, True, wanted)
        forward = operators.flops
        gradients = attention.attend_backward(torch.empty_like(out), q, k, v, None, out, logsumexp, state, wanted)
    assert [each.stride() for each in (out, *gradients[:3])] == [each.stride() for each in (q, q, k, v)]
    assert forward == 2 * 2 * 2 * 8 * 64 * 64 * 32
    assert operators.flops > 2 * forward
