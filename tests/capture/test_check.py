"""The culprits that forge.jit(check="eager") finds: a kernel, its gradient, a transform, a meta function, a
decomposition; correct programs pass."""

import pytest
import torch
from torch import nn

import forge
from forge import torchlang
from forge.executors import OperatorExecutor
from forge.ir import Trace
from forge.ir.grad_rules import get_grad, put_grad

X = torch.linspace(-2, 2, 24).view(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.5, self.training)) + x


def wrong(name: str, run: object, **more: object) -> OperatorExecutor:
    """Return an executor that runs `name` with `run`."""
    mine = OperatorExecutor("mine")
    symbol = torchlang.find(getattr(torch.nn.functional, name, None) or getattr(torch, name))
    mine.register_implementation(symbol, mine.register_operator(f"my_{name}", like=symbol, fn=run), **more)
    return mine


@pytest.mark.parametrize("executors", [["torch"], ["torch-prims"], ["inductor", "torch"]])
@pytest.mark.parametrize("training", [False, True])
def test_a_right_program_is_let_be(executors: list[str], training: bool) -> None:
    net = Net().train(training)
    jitted = forge.jit(net, check="eager", executors=executors)
    out = jitted(X.clone().requires_grad_())
    out.sum().backward()
    assert all(each.grad is not None for each in net.parameters())


def test_in_place_changes_views_and_numbers_are_let_be() -> None:
    def program(x: torch.Tensor, buffer: torch.Tensor) -> tuple:
        buffer.add_(x.sum())
        y = x[1:].relu_()
        return y.t(), x.shape[0], buffer.sum().item()

    x = (X * 8).round()  # integers, whose sums are exact in any order
    torch.testing.assert_close(
        forge.jit(program, check="eager")(x.clone(), torch.zeros(3)), program(x.clone(), torch.zeros(3))
    )


def test_memory_that_was_not_written_yet_is_let_be() -> None:
    def partly(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        new, like, filled = x.new_empty(70), torch.empty_like(x), torch.empty(70).fill_(2.0)
        new[:35] = x[:35] * 2
        return new[:35] * 1, like.copy_(x) + filled, torch.empty(70).normal_()

    x = torch.linspace(-1, 1, 70)
    new, sums, _ = forge.jit(partly, check="eager")(x)
    torch.testing.assert_close((new, sums), (x[:35] * 2, x + 2))


def test_inputs_whose_elements_share_memory_are_let_be() -> None:
    x = torch.ones(3, 1, requires_grad=True)
    forge.jit(lambda x: torch.sin(x).sum(), check="eager")(x.expand(3, 4)).backward()
    torch.testing.assert_close(x.grad, torch.full((3, 1), 4 * torch.ones(()).cos().item()))


def test_a_wrong_kernel_is_named_with_its_module_and_its_inputs() -> None:
    mine = wrong("gelu", lambda x, approximate="none": torch.nn.functional.gelu(x) + (x > 1) * 0.5)
    jitted = forge.jit(Net().eval(), check="eager", executors=[mine, "torch"])
    message = r"gelu = torch.nn.functional.gelu by mine .*where eager gives"
    with pytest.raises(forge.CheckError, match=message) as caught:
        jitted(X * 4)
    error = caught.value
    assert (error.operation, error.executor) == ("torch.nn.functional.gelu", "mine")
    (given,) = error.inputs.values()
    torch.testing.assert_close(nn.functional.gelu(given), error.expected)
    assert not torch.allclose(error.actual, error.expected)


def test_the_first_that_differs_is_named_not_what_follows_from_it() -> None:
    mine = wrong("exp", lambda x: torch.exp(x) * 1.1)
    jitted = forge.jit(lambda x: torch.tanh(torch.exp(torch.sin(x))).sum(), check="eager", executors=[mine, "torch"])
    with pytest.raises(forge.CheckError) as caught:
        jitted(X)
    assert caught.value.operation == "torch.exp"


def overwriting(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    out = nn.functional.gelu(input, approximate=approximate)
    input.mul_(2)
    return out


@pytest.mark.parametrize("training", [False, True])
def test_a_kernel_that_overwrites_its_argument_is_named(training: bool) -> None:
    jitted = forge.jit(Net().eval(), check="eager", executors=[wrong("gelu", overwriting), "torch"])
    message = r"gelu by mine \(.*test_check.py:\d+ .*\) overwrites its argument input, linear: .*let it copy that"
    with pytest.raises(forge.CheckError, match=message) as caught, torch.set_grad_enabled(training):
        jitted(X)
    error = caught.value
    assert (error.operation, error.executor) == ("torch.nn.functional.gelu", "mine")
    torch.testing.assert_close(error.actual, 2 * error.expected)
    torch.testing.assert_close(error.inputs["linear"], error.expected)


@torch.library.custom_op("forge_check::secretly", mutates_args=())
def secretly(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


secretly.register_fake(torch.empty_like)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("of_an_input", [False, True])
def test_an_operator_that_overwrites_its_argument_undeclared_is_named(training: bool, of_an_input: bool) -> None:
    """The operator itself is named: not the source of the value that it overwrites, nor a later reader."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x if of_an_input else x * 3
        z = secretly(y)
        return y * 5, z

    jitted = forge.jit(program, check="eager")
    message = (
        r"forge_check\.secretly\.default .*test_check.py:\d+  z = secretly\(y\)\) overwrites its argument x, \w+: "
    )
    with pytest.raises(forge.CheckError, match=f"{message}.*mutates_args") as caught:
        jitted(torch.ones(2, requires_grad=training))
    assert caught.value.actual.tolist() == [value + 1 for value in caught.value.expected.tolist()]


def test_what_a_kernel_says_that_it_overwrites_is_let_be() -> None:
    kernel = forge.kernel("torch.nn.functional.gelu", overwriting, mutates=["input"])
    net = Net().eval()
    with torch.no_grad():
        jitted = forge.jit(net, check="eager", kernels=[kernel])
        torch.testing.assert_close(jitted(X), net(X))
    assert "overwriting" in {row.executor for row in forge.explain(jitted).rows}


def test_a_wrong_gradient_of_a_kernel_is_found() -> None:
    mine = OperatorExecutor("mine")
    tanh = torchlang.find(torch.tanh)
    mine_tanh = mine.register_operator("my_tanh", like=tanh, fn=torch.tanh)

    def rule(x: object) -> object:
        out = mine_tanh(x)
        put_grad(x, get_grad(out) * 2)
        return out

    mine.register_implementation(tanh, mine_tanh, grad_transform=rule)
    jitted = forge.jit(lambda x: torch.tanh(x).sum(), check="eager", executors=[mine, "torch"])
    out = jitted(X.clone().requires_grad_())
    with pytest.raises(forge.CheckError, match=r"gradient of x is not what eager gives: .*a gradient rule is wrong"):
        out.backward()


def test_a_transform_that_changes_a_value_is_found() -> None:
    def sin_to_cos(trace: Trace) -> Trace:
        sin, cos = torchlang.find(torch.sin), torchlang.find(torch.cos)
        calls = [bound.replace(symbol=cos) if bound.symbol is sin else bound for bound in trace.bound_symbols]
        return trace.derive("sin to cos", calls)

    with pytest.raises(forge.CheckError, match=r"= torch.cos by torch"):
        forge.jit(lambda x: torch.sin(x) * 2, check="eager", transforms=[sin_to_cos], executors=["torch"])(X)


def test_a_result_that_is_not_what_its_meta_function_says_is_found() -> None:
    mine = wrong("exp", lambda x: torch.exp(x).double())
    with pytest.raises(forge.CheckError, match=r"it gave f64\[4, 6\], its meta function says f32\[4, 6\]"):
        forge.jit(lambda x: torch.exp(x), check="eager", executors=[mine, "torch"])(X)


def test_a_call_that_decomposes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    silu = torchlang.find(torch.nn.functional.silu)
    monkeypatch.setattr(silu, "body", lambda input, inplace=False: torchlang.find(torch.sigmoid)(input))
    with pytest.raises(forge.CheckError):
        forge.jit(lambda x: torch.nn.functional.silu(x), check="eager", executors=["torch-prims"])(X)


def test_what_check_may_be_is_told() -> None:
    with pytest.raises(ValueError, match="check is 'eagr', but must be one of None, eager"):
        forge.jit(Net(), check="eagr")
