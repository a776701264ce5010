"""Changes between two calls are seen by the second; changes before the first are as in eager."""

import operator
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import forge
from forge.torch_internals.versions import TORCH

X = torch.linspace(-1, 1, 8).view(2, 4)


def classes() -> tuple[type, type, type]:
    """Return a module's class, its subclass, and the class of a container module."""

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


class Helpers:
    """A class with methods of several kinds, for modules and other classes."""

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x + 2

    @staticmethod
    def alone(x: torch.Tensor) -> torch.Tensor:
        return x + 3

    @property
    def number(self) -> int:
        return 4

    def __getitem__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 5

    renamed = method


def scaled(by: float) -> Callable:
    """Return a function with the same code as the others and its own factor."""
    return lambda self, x: x * by


def replaced_code(owner: type) -> None:
    owner.method.__code__ = (lambda self, x: x * 11).__code__


PATCHES: dict[str, tuple[Callable, Callable]] = {
    "a method": (lambda s, x: s.method(x), lambda owner: setattr(owner, "method", scaled(6.0))),
    "a method twice": (lambda s, x: s.method(s.method(x)), lambda owner: setattr(owner, "method", scaled(6.0))),
    "a class method": (
        lambda s, x: s.of_class(x),
        lambda owner: setattr(owner, "of_class", classmethod(lambda cls, x: x * 7)),
    ),
    "a static method": (
        lambda s, x: s.alone(x),
        lambda owner: setattr(owner, "alone", staticmethod(lambda x: x * 8)),
    ),
    "a property": (lambda s, x: x * s.number, lambda owner: setattr(owner, "number", property(lambda self: 9))),
    "an operator": (lambda s, x: s[x], lambda owner: setattr(owner, "__getitem__", scaled(10.0))),
    "a method of another name": (lambda s, x: s.renamed(x), lambda owner: setattr(owner, "renamed", scaled(6.0))),
    "a method's code": (lambda s, x: s.method(x), replaced_code),
}


@pytest.mark.parametrize("of", ["base", "itself", "attribute"])
@pytest.mark.parametrize("patch", PATCHES)
def test_a_method_that_is_patched_on_a_class_is_used(patch: str, of: str) -> None:
    if patch == "a method's code" and of != "attribute" and TORCH < (2, 13):
        pytest.skip("Dynamo does not look at the functions of a module's class while the class has the same ones")
    calls, change = PATCHES[patch]
    helpers = type("Copied", (Helpers,), {name: copied(member) for name, member in vars(Helpers).items()})
    derived = type("Derived", (helpers, nn.Module), {})
    forward = (lambda self, x: calls(self.helpers, x)) if of == "attribute" else calls
    module = type("Net", (derived,), {"forward": forward})()
    module.helpers = helpers()
    jitted = forge.jit(module, fullgraph=True)
    torch.testing.assert_close(jitted(X), module(X))
    change(derived if of == "itself" else helpers)
    expected = module(X)
    torch.testing.assert_close(jitted(X), expected)
    jitted(X)
    assert forge.explain(jitted).graphs == 2


def copied(member: object) -> object:
    if not isinstance(member, types.FunctionType):
        return member
    return types.FunctionType(member.__code__, member.__globals__, member.__name__)


def test_a_method_with_the_same_code_and_another_closure_is_another() -> None:
    class Net(nn.Module):
        scale = scaled(2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale(x)

    module = Net()
    jitted = forge.jit(module)
    torch.testing.assert_close(jitted(X), X * 2)
    Net.scale = scaled(3.0)
    torch.testing.assert_close(jitted(X), X * 3)


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
