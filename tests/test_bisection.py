"""The search for a difference's cause by forge.bisect."""

import pytest
import torch
from torch import nn

import forge
from forge import torchlang, transforms
from forge.executors import OperatorExecutor
from forge.ir import Trace
from forge.ir.grad_rules import get_grad, put_grad
from forge.transforms.users import run_users

X = torch.linspace(-2, 2, 24).view(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.dropout(self.norm(self.up(x)), 0.5, self.training))


def executor(name: str, symbol: object, fn: object, rule: object = None) -> OperatorExecutor:
    mine = OperatorExecutor(name)
    op = mine.register_operator(f"{name}_op", like=symbol, fn=fn)
    mine.register_implementation(symbol, op, grad_transform=rule and rule(op))
    return mine


TANH = torchlang.find(torch.tanh)
RIGHT = executor("right", torchlang.find(torch.sigmoid), torch.sigmoid)


def doubled(op: object) -> object:
    def rule(x: object) -> object:
        out = op(x)
        put_grad(x, get_grad(out) * 2)
        return out

    return rule


def as_it_is(trace: Trace) -> Trace:
    return trace.derive("as it is", trace.bound_symbols)


def tanh_to_sin(trace: Trace) -> Trace:
    sin = torchlang.find(torch.sin)
    calls = [bound.replace(symbol=sin) if bound.symbol is TANH else bound for bound in trace.bound_symbols]
    return trace.derive("tanh to sin", calls)


def test_where_nothing_differs_it_says_so() -> None:
    found = forge.bisect(forge.jit(Net(), executors=[RIGHT, "torch"]), X)
    assert found.kind == "none" and "eager's" in str(found)


@pytest.mark.parametrize(
    ("wrong", "how"),
    [
        (executor("wrong", TANH, lambda x: torch.tanh(x) * 1.01), "result 0 is "),
        (executor("wrong", TANH, torch.tanh, doubled), "gradient "),
    ],
)
def test_a_wrong_executor_is_named_with_its_call(wrong: OperatorExecutor, how: str) -> None:
    found = forge.bisect(forge.jit(Net(), executors=[RIGHT, wrong, "torch"]), X)
    assert (found.kind, found.name) == ("executor", "wrong") and found.how.startswith(how)
    assert found.call and "the executor wrong makes the difference" in str(found)


def test_a_wrong_transform_is_named() -> None:
    jitted = forge.jit(Net(), transforms=[as_it_is, tanh_to_sin], executors=[RIGHT, "torch"])
    found = forge.bisect(jitted, X)
    assert (found.kind, found.name) == ("transform", "tanh_to_sin") and "torch.sin by torch" in found.call


def raises(*args: object) -> object:
    raise ZeroDivisionError("by design")


def test_an_executor_that_raises_is_named() -> None:
    jitted = forge.jit(Net(), executors=[RIGHT, executor("wrong", TANH, raises), "torch"])
    found = forge.bisect(jitted, X)
    assert (found.kind, found.name, found.call) == ("executor", "wrong", None)
    assert str(found).endswith("the executor wrong makes the difference: it raises ZeroDivisionError: by design")


def test_a_transform_that_raises_is_named_by_bisect_and_by_a_note() -> None:
    jitted = forge.jit(Net(), transforms=[as_it_is, raises], executors=["torch"])
    with pytest.raises(ZeroDivisionError, match="by design") as raised:
        jitted(X)
    assert raised.value.__notes__[-1] == "raised by forge.jit's transform raises"
    found = forge.bisect(jitted, X)
    assert (found.kind, found.name) == ("transform", "raises") and "ZeroDivisionError: by design" in found.how


def test_what_raises_in_eager_raises_in_bisect() -> None:
    with pytest.raises(ZeroDivisionError):
        forge.bisect(forge.jit(raises), X)


def test_a_right_kernel_is_let_be() -> None:
    def silu(input: torch.Tensor) -> torch.Tensor:
        return input * torch.sigmoid(input)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * 2

    kernel = forge.kernel("torch.nn.functional.silu", silu, grad="composite")
    assert forge.bisect(forge.jit(f, kernels=[kernel]), X.clone().requires_grad_()).kind == "none"


def test_a_wrong_pass_of_forges_own_is_forges(monkeypatch: pytest.MonkeyPatch) -> None:
    def cse(trace: Trace) -> Trace:
        return trace.derive("cse", run_users([tanh_to_sin], trace, []).bound_symbols)

    monkeypatch.setattr(transforms, "cse", cse)
    found = forge.bisect(forge.jit(Net(), executors=[RIGHT, "torch"], transforms=[as_it_is]), X)
    assert found.kind == "forge" and "torch.sin by torch" in found.call and "forge's own" in str(found)


def test_what_was_not_jitted_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"was not made by forge\.jit"):
        forge.bisect(Net(), X)
