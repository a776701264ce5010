"""What changes between two calls is seen by the second; what happens before the first is as in eager."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn

import forge

X = torch.linspace(-1, 1, 8).view(2, 4)


def classes() -> tuple[type, type, type]:
    """A module's class, its subclass, and one that holds a module."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    class Sub(Net):
        pass

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    return Net, Sub, Outer


@pytest.mark.parametrize(
    "make",
    [
        lambda net, sub, outer: net(),
        lambda net, sub, outer: sub(),
        lambda net, sub, outer: outer(net()),
        lambda net, sub, outer: nn.Sequential(nn.Tanh(), outer(sub())),
    ],
    ids=["its class", "its base class", "its submodule's class", "a base class deep inside"],
)
def test_a_forward_that_is_patched_on_the_class_is_used(make: Callable) -> None:
    net, sub, outer = classes()
    module = make(net, sub, outer)
    jitted = forge.jit(module)
    torch.testing.assert_close(jitted(X), module(X))
    net.forward = lambda self, x: self.fc(x) * 2 + 7
    torch.testing.assert_close(jitted(X), module(X))


def test_a_forward_that_is_patched_on_a_class_of_torchs_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    jitted = forge.jit(module)
    jitted(X)
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * 0 + 5)
    torch.testing.assert_close(jitted(X), torch.full((2, 3), 5.0))


def test_a_class_without_a_forward_of_its_own_is_compiled() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    module = Holder()
    jitted = forge.jit(module, fullgraph=True)
    torch.testing.assert_close(jitted(X), module(X))


# lazily initialised modules


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.Dropout(0.5), nn.LazyLinear(2), nn.LazyBatchNorm1d())


def test_a_lazy_module_draws_the_random_numbers_that_it_draws_in_eager() -> None:
    torch.manual_seed(3)
    expected = lazy()
    outputs = [expected(X), expected(X)]
    torch.manual_seed(3)
    jitted = forge.jit(lazy())
    for output in outputs:
        torch.testing.assert_close(jitted(X), output)
    torch.testing.assert_close(list(jitted.parameters()), list(expected.parameters()))
    assert forge.explain(jitted).graphs == 1


# writes that autograd does not see


def add_to_data(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    p.data.add_(x.detach())
    return p * x


def scale_a_part_of_data(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    p.data[0].mul_(3)
    return p * x


def data_under_no_grad(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        p.data.add_(x)
    return p * x


def a_part_under_no_grad(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        p[0].add_(1)
        p[1:].mul_(x[1:])
    return p * x


def a_detached_value(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    shown = p.detach()
    shown.clamp_(-0.1, 0.1)
    return p * x + shown


def between_two_uses(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    before = p * 2
    p.data.copy_(x)
    return before * p.sin()


def the_data_gets_a_history(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    data = p.data
    data.mul_(x)
    return p * 2 + data


def data_of_a_value(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = p * x
    y.data.mul_(2)
    return y * y


WRITES = (
    add_to_data,
    scale_a_part_of_data,
    data_under_no_grad,
    a_part_under_no_grad,
    a_detached_value,
    between_two_uses,
    the_data_gets_a_history,
    data_of_a_value,
)


@pytest.mark.parametrize("function", WRITES, ids=operator.attrgetter("__name__"))
def test_a_write_that_autograd_does_not_see_changes_values_and_leaves_gradients(function: Callable) -> None:
    results = []
    for run in (function, forge.jit(function)):
        p = nn.Parameter(torch.tensor([1.5, -0.3, -2.2]))
        x = torch.tensor([0.7, -1.1, 0.4], requires_grad=True)
        for _ in range(2):
            run(p, x).sum().backward()
        results.append((p.detach(), p.grad, x.grad))
    torch.testing.assert_close(results[1], results[0])
