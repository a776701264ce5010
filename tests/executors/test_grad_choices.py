"""Choices of an executor about how its implementation is differentiated."""

import pytest
import torch

import forge
from forge import torchlang
from forge.executors import OperatorExecutor
from forge.ir import TensorProxy, get_grad, put_grad
from forge.prims.core import like


def log_softmax_like(x):
    return torch.tanh(torch.exp(x) * 0.1)


@pytest.fixture
def composite():
    """Define a composite symbol without a gradient rule, whose decomposition's backward reads intermediate values."""
    from forge.patterns import Pattern

    return Pattern(log_softmax_like)


def jit_with(composite, grad):
    calls = []

    def kernel(x):
        calls.append(x.shape)
        return log_softmax_like(x)

    mine = OperatorExecutor("mine")
    mine.register_implementation(composite.symbol, kernel, grad=grad)

    def transform(trace):
        from forge.patterns import replace_patterns

        return replace_patterns(trace, [composite])[0]

    jitted = forge.jit(lambda x: log_softmax_like(x * 2) + 1, executors=[mine, "torch"], transforms=[transform])
    return jitted, calls


@pytest.mark.parametrize(("grad", "in_training"), [("decompose", 0), ("recompute", 1), ("none", 0)])
def test_a_kernel_without_its_own_gradient(composite, grad, in_training):
    jitted, calls = jit_with(composite, grad)
    jitted(torch.ones(3))
    assert len(calls) == 1
    x = torch.randn(4, requires_grad=True)
    jitted(x).sum().backward()
    assert len(calls) == 1 + in_training
    expected = torch.autograd.grad((log_softmax_like(x * 2) + 1).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_recomputing_saves_the_inputs_of_the_call_alone(composite):
    jitted, _ = jit_with(composite, "recompute")
    x = torch.randn(4, requires_grad=True)
    jitted(x).sum().backward()
    forward = next(t for t in forge.last_traces(jitted) if t.name == "forward")
    assert len(forward.output[1]) == 1


def test_the_reason_is_told_where_a_gradient_is_missing(composite):
    jitted, _ = jit_with(composite, "none")
    jitted(torch.randn(4, requires_grad=True))
    reasons = [reason for row in forge.explain(jitted).rows for reason in row.declined]
    assert ("mine", "the implementation has no gradient, and one is needed") in reasons


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="grad is 'maybe', but must be one of decompose, recompute, none"):
        OperatorExecutor("mine").register_implementation(torchlang.find(torch.tanh), torch.tanh, grad="maybe")


def test_double_backward_differentiates_by_the_symbols_own_rule_where_the_executors_has_none() -> None:
    mine = OperatorExecutor("mine")
    forward = mine.register_operator("forward", like=torchlang.silu, fn=torch.nn.functional.silu)
    backward = mine.register_operator("backward", meta=lambda g, x: like(x), fn=torch.ops.aten.silu_backward.default)

    def rule(input: TensorProxy) -> TensorProxy:
        out = forward(input)
        put_grad(input, backward(get_grad(out), input))
        return out

    mine.register_implementation(torchlang.silu, forward, grad_transform=rule)
    x = torch.randn(3, dtype=torch.float64)
    ours = forge.jit(lambda x: torch.nn.functional.silu(x).sum(), executors=[mine, "torch"])
    found = torch.autograd.functional.hessian(ours, x)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(lambda x: torch.nn.functional.silu(x).sum(), x))
