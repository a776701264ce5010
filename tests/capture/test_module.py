"""A jitted module is still the module."""

import copy
import pickle

import pytest
import torch
from torch import nn

import forge


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x)) * self.scale if self.training else self.fc(x)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 8).view(2, 4)


def test_isinstance_and_keys_are_the_originals(net):
    jitted = forge.jit(net)
    assert isinstance(jitted, Net)
    assert list(jitted.state_dict()) == list(net.state_dict())
    assert [name for name, _ in jitted.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert jitted.fc is net.fc


def test_load_state_dict_reaches_the_compiled_call(net):
    jitted = forge.jit(net)
    jitted(X)
    other = Net()
    jitted.load_state_dict(other.state_dict())
    torch.testing.assert_close(jitted(X), other(X))
    torch.testing.assert_close(net(X), other(X))


def test_train_and_eval_choose_the_branch(net):
    jitted = forge.jit(net)
    torch.testing.assert_close(jitted(X), net(X))
    jitted.eval()
    assert not net.training
    torch.testing.assert_close(jitted(X), net.fc(X))
    jitted.train()
    torch.testing.assert_close(jitted(X), torch.relu(net.fc(X)) * 2)


def test_hooks_added_before_and_after_compiling_run(net):
    calls = []
    net.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    jitted = forge.jit(net)
    jitted(X)
    assert calls == ["pre"]
    jitted.fc.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(jitted(X), torch.relu(nn.functional.linear(X, net.fc.weight, net.fc.bias) + 1) * 2)
    handle = jitted.register_forward_hook(lambda module, args, output: output * 0)
    assert jitted(X).abs().sum() == 0
    handle.remove()
    assert jitted(X).abs().sum() > 0


def test_global_module_hooks_added_later_run(net):
    jitted = forge.jit(net)
    jitted(X)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output + 100)
    try:
        torch.testing.assert_close(jitted(X), net(X))
    finally:
        handle.remove()
    torch.testing.assert_close(jitted(X), net(X))


def test_gradient_hooks_on_parameters_run(net):
    jitted = forge.jit(net)
    seen = []
    net.fc.weight.register_hook(lambda g: seen.append(g.shape))
    jitted(X).sum().backward()
    assert seen == [net.fc.weight.shape]


def test_replaced_weight_and_submodule_are_used(net):
    jitted = forge.jit(net)
    jitted(X)
    jitted.fc.weight = nn.Parameter(torch.ones(3, 4))
    torch.testing.assert_close(jitted(X), net(X))
    jitted.fc = nn.Linear(4, 3, bias=False)
    assert net.fc is jitted.fc
    torch.testing.assert_close(jitted(X), net(X))


def test_to_changes_the_dtype_of_both(net):
    jitted = forge.jit(net)
    jitted(X)
    assert jitted.to(torch.float64) is jitted
    assert net.fc.weight.dtype == torch.float64
    torch.testing.assert_close(jitted(X.double()), net(X.double()))


def test_deepcopy_is_jitted_and_separate(net):
    jitted = forge.jit(net)
    twin = copy.deepcopy(jitted)
    assert isinstance(twin, Net) and forge.last_traces(twin) == []
    with torch.no_grad():
        twin.fc.weight.zero_()
    assert net.fc.weight.abs().sum() > 0
    torch.testing.assert_close(twin(X), torch.relu(twin.fc.bias.expand(2, 3)) * 2)
    assert forge.explain(twin).graphs == 1


def test_pickle_round_trip_is_jitted(net):
    jitted = forge.jit(net)
    jitted(X)
    twin = pickle.loads(pickle.dumps(jitted))
    assert isinstance(twin, Net)
    torch.testing.assert_close(twin(X), net(X))
    assert forge.explain(twin).graphs == 1


def test_inside_a_sequential_and_inside_another_jit(net):
    inner = forge.jit(net)
    outer = nn.Sequential(inner, nn.Tanh())
    torch.testing.assert_close(outer(X), torch.tanh(net(X)))
    jitted = forge.jit(outer, fullgraph=True)
    torch.testing.assert_close(jitted(X), torch.tanh(net(X)))
    assert list(jitted.state_dict()) == ["0.fc.weight", "0.fc.bias", "0.scale"] or set(jitted.state_dict()) == {
        "0.fc.weight",
        "0.fc.bias",
        "0.scale",
    }


def test_the_original_stays_in_eager(net):
    forge.jit(net)
    assert type(net) is Net
    assert "__call__" not in vars(type(net))


def test_many_modules_of_one_class_each_compile_once():
    nets = [forge.jit(Net()) for _ in range(20)]
    for each in nets:
        each(X)
    assert [forge.explain(each).graphs for each in nets] == [1] * 20
    assert all(forge.explain(each).recompiles == [] for each in nets)


def test_a_bare_linear_is_compiled():
    linear = nn.Linear(4, 3)
    jitted = forge.jit(linear)
    torch.testing.assert_close(jitted(X), linear(X))
    assert forge.explain(jitted).graphs == 1


def test_a_changed_python_global_is_seen():
    scope = {"factor": 2.0}
    exec("def f(x):\n    return x * factor", scope)
    jitted = forge.jit(scope["f"])
    torch.testing.assert_close(jitted(X), X * 2)
    scope["factor"] = 3.0
    torch.testing.assert_close(jitted(X), X * 3)


def test_parameters_without_gradient_get_none(net):
    net.unused = nn.Parameter(torch.ones(2))
    net.fc.bias.requires_grad_(False)
    jitted = forge.jit(net)
    jitted(X).sum().backward()
    assert net.unused.grad is None and net.fc.bias.grad is None and net.fc.weight.grad is not None


def test_methods_of_the_class_call_the_module_as_before():
    class Generator(Net):
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) + self(x)

    module = Generator()
    jitted = forge.jit(module)
    torch.testing.assert_close(jitted.twice(X), module.twice(X))
    assert forge.explain(jitted).graphs == 1
