"""Generated code of a claimed kernel: its own call, among torch's calls."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.hubex import Kernel


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def silu_into(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(F.silu(x))


def silu_backward_into(gradient: torch.Tensor, grad_output: torch.Tensor, x: torch.Tensor) -> None:
    sigmoid = torch.sigmoid(x)
    gradient.copy_(grad_output * sigmoid * (1 + x * (1 - sigmoid)))


def silu_kernel() -> Kernel:
    grad = {
        "kernel_name": silu_backward_into,
        "args": {"grad_output": "grad_output", "x": "input"},
        "out": "gradient",
        "returns": ["input"],
    }
    return forge.kernel(F.silu, silu_into, dtypes=[torch.float32], args={"x": "input"}, out="out", grad=grad)


def three(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.silu(a) * F.silu(b), F.silu(F.silu(a))


def gradients(function: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    first, second = function(*leaves)
    return list(torch.autograd.grad(first.sum() + second.pow(2).sum(), leaves))


def test_each_call_writes_to_memory_of_its_own() -> None:
    inputs = [torch.randn(4, 8), torch.randn(4, 8)]
    jitted = forge.jit(three, kernels=[silu_kernel()])
    torch.testing.assert_close(jitted(*inputs), three(*inputs))
    torch.testing.assert_close(gradients(jitted, inputs), gradients(three, inputs))
    claimed = [row.operation for row in forge.explain(jitted).rows if row.executor == "silu_into"]
    assert claimed.count("hub.silu_into.backward") == 3


def test_a_call_stands_in_the_code_as_a_person_would_write_it() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    jitted = forge.jit(lambda x: F.silu(x), kernels=[silu_kernel()])
    gradient = torch.autograd.grad(jitted(x).sum(), x)[0]
    forward, backward = str(forge.last_traces(jitted)[-1]), str(forge.last_backward_traces(jitted)[-1])
    memory = re.escape("torch.empty((4, 8), dtype=torch.float32, device=torch.device('cpu'))")
    here = re.escape(__name__)
    assert re.search(rf"(\w+) = {memory}.*\n    {here}\.silu_into\(x=x, out=\1\); (\w+) = \1 ", forward)
    call = rf"{here}\.silu_backward_into\(grad_output=\1, x=x, gradient=\2\); \w+ = \2 "
    assert re.search(rf"(\w+) = grad_\w+\.contiguous\(\)(?s:.*)    (\w+) = {memory}.*\n    {call}", backward)
    scope: dict[str, Any] = {}
    exec(backward, scope)
    assert torch.equal(scope["backward"]([x.detach(), torch.ones(4, 8)])[0], gradient)


def test_results_go_to_positions_in_any_order() -> None:
    def backward(grad_up: torch.Tensor, grad_gate: torch.Tensor, *given: torch.Tensor) -> None:
        grad_output, gate, up = given
        sigmoid = torch.sigmoid(gate)
        grad_gate.copy_(grad_output * up * sigmoid * (1 + gate * (1 - sigmoid)))
        grad_up.copy_(grad_output * gate * sigmoid)

    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    grad = {
        "kernel_name": backward,
        "args": ["grad_output", "gate", "up"],
        "out": [1, 0],
        "returns": ["gate", "up"],
    }
    kernel = forge.kernel("pattern:swiglu", swiglu, name="own", dtypes=[torch.float32], grad=grad)
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    jitted = forge.jit(swiglu, kernels=[kernel])
    torch.testing.assert_close(
        torch.autograd.grad(jitted(*leaves).sum(), leaves), torch.autograd.grad(swiglu(*leaves).sum(), leaves)
    )
    assert [row.executor for row in forge.explain(jitted).rows].count("own") == 2
