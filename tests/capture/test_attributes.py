"""Attributes that an object gets after the first call, by each way to look them up, against eager."""

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge
from forge.torch_internals.versions import TORCH


class Namespace:
    """An object of the user's."""


class Slots:
    __slots__ = ("late",)


class Attributes(dict):
    """A dict that may have attributes."""


class Filling:
    """An object that makes an attribute on its first access."""

    def __getattr__(self, name: str) -> float:
        if name != "late" or "asked" in self.__dict__:
            raise AttributeError(name)
        self.asked = True
        return 3.0


def function() -> None:
    """Serve as a function that has attributes."""


OWNERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "module": lambda model: model,
    "object": lambda model: model.namespace,
    "slots": lambda model: model.slots,
    "class": type,
    "function": lambda model: function,
    "python module": lambda model: PYTHON,
    "dict": lambda model: model.attributes,
    "parameter": lambda model: model.weight,
}
PYTHON = types.ModuleType("python")


def by_except(owner: Any, value: Any) -> Any:
    try:
        return owner.late
    except AttributeError:
        owner.late = value
        return 1.0


def by_default(owner: Any, value: Any) -> Any:
    found = getattr(owner, "late", 1.0)
    owner.late = value
    return found


def by_hasattr(owner: Any, value: Any) -> Any:
    if hasattr(owner, "late"):
        return owner.late
    owner.late = value
    return 1.0


def by_getattr(owner: Any, value: Any) -> Any:
    try:
        return getattr(owner, "late")  # noqa: B009
    except AttributeError:
        setattr(owner, "late", value)  # noqa: B010
        return 1.0


WAYS = (by_except, by_default, by_hasattr, by_getattr)


def by_membership(owner: Any, value: Any) -> Any:
    if "late" in owner.__dict__:
        return owner.late
    owner.late = value
    return 1.0


def by_get(owner: Any, value: Any) -> Any:
    found = owner.__dict__.get("late")
    owner.late = value
    return 1.0 if found is None else found


def by_vars(owner: Any, value: Any) -> Any:
    if "late" not in vars(owner):
        owner.late = value
        return 1.0
    return owner.late


def by_count(owner: Any, value: Any) -> Any:
    count = len(owner.__dict__)
    setattr(owner, f"late{count}", value)
    return float(count)


def by_setdefault(owner: Any, value: Any) -> Any:
    counts = vars(owner).setdefault("counts", [])
    counts.append(1)
    return float(len(counts))


OF_DICTS = (by_membership, by_get, by_vars, by_count)
OWNERS_OF_DICTS = ("module", "object", "function", "python module")
OF_CLASSES = OF_DICTS if TORCH >= (2, 13) else ()  # Dynamo assumed a class's attributes to be constant


class Model(torch.nn.Module):
    def __init__(self, way: Callable, owner: Callable, value: Any) -> None:
        super().__init__()
        self.way, self.owner, self.value = way, owner, value
        self.namespace, self.slots, self.attributes = Namespace(), Slots(), Attributes()
        self.weight = torch.nn.Parameter(torch.eye(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.way(self.owner(self), self.value)


def called(way: Callable, owner: Callable, value: Any, jit: bool) -> list[torch.Tensor]:
    class Fresh(Model):
        """A class whose attributes are its own."""

    torch._dynamo.reset()
    for each in (function, PYTHON):
        for name in [name for name in vars(each) if name.startswith(("late", "counts"))]:
            delattr(each, name)
    model = Fresh(way, owner, value)
    run = forge.jit(model) if jit else model
    return [run(torch.ones(2, 3)).detach() for _ in range(4)]


@pytest.mark.parametrize("value", [5.0, torch.full((3,), 5.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(4)
def test_an_attribute_that_comes_with_the_first_call_is_read_by_the_next(way: Callable, owner: str, value: Any) -> None:
    expected, actual = (called(way, OWNERS[owner], value, jit) for jit in (False, True))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("way", "owner"),
    [
        *itertools.product([*OF_DICTS, by_setdefault], OWNERS_OF_DICTS),
        *itertools.product(OF_CLASSES, ["class"]),  # which has a view of its dict
    ],
)
def test_what_a_dict_of_attributes_gains_is_seen(way: Callable, owner: str) -> None:
    expected, actual = (called(way, OWNERS[owner], 5.0, jit) for jit in (False, True))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("way", [by_except, by_default, by_hasattr, by_membership])
def test_an_attribute_that_the_caller_sets_is_seen(way: Callable) -> None:
    def looks(owner: Any, value: Any) -> Any:
        return 2.0 if "flag" in owner.__dict__ else way(owner, value)

    class Flagged(Model):
        """A model that its caller marks between calls."""

    model = Flagged(looks, OWNERS["module"], 5.0)
    jitted = forge.jit(model)
    x = torch.ones(2, 3)
    before = [jitted(x)[0, 0].item() for _ in range(2)]
    model.flag = True
    assert (before, jitted(x)[0, 0].item()) == ([1.0, 5.0], 2.0)
    del model.flag, model.late
    assert jitted(x)[0, 0].item() == 1.0


@pytest.mark.parametrize("items", [{}, {"key": 1}], ids=["empty", "not empty"])
def test_attributes_of_a_dict_are_guarded(items: dict) -> None:
    def scaled(x: torch.Tensor, owner: Attributes) -> torch.Tensor:
        return x * owner.late

    jitted, owner = forge.jit(scaled), Attributes(items)
    for late in (1.0, 2.0, 3.0):
        owner.late = late
        assert torch.equal(jitted(torch.ones(2), owner), torch.full((2,), late))


def test_what_computes_attributes_is_called_once() -> None:
    def scaled(x: torch.Tensor, owner: Filling) -> torch.Tensor:
        return x * getattr(owner, "late", 2.0)

    results = []
    for function in (scaled, forge.jit(scaled)):
        owner = Filling()
        results.append([function(torch.ones(2), owner)[0].item() for _ in range(3)])
        owner.late = 5.0
        results[-1].append(function(torch.ones(2), owner)[0].item())
    assert results == [[3.0, 2.0, 2.0, 5.0]] * 2


@pytest.mark.parametrize("owner", [None, 3, "text", (1, 2)], ids=repr)
def test_constants_have_no_attributes(owner: Any) -> None:
    def scaled(x: torch.Tensor, owner: Any) -> torch.Tensor:
        own = len(getattr(owner, "__dict__", {}))
        return x * getattr(owner, "late", 2.0) + own if not hasattr(owner, "early") else x

    jitted = forge.jit(scaled, strict=True)
    assert torch.equal(jitted(torch.ones(2), owner), torch.full((2,), 2.0))
