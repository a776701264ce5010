"""Module calls that an executor runs by another forward: the call as a function of tensors alone.

A layer is a class that lends its `forward` to modules of other classes. A module's call, by its own forward or by a
layer's, is a `ModuleForward`; a `ModuleExecutor` selects the layer, and its `ModuleOverride` verifies it.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge.executors.executor import Decision, Declined, Executor
from forge.executors.fingerprint import Fingerprint
from forge.ir import Symbol, check

TENSORS = ("_parameters", "_buffers")
DECLARED = frozenset({"has_backward", "can_torch_compile"})


@dataclass(frozen=True)
class TensorSlot:
    """A placeholder for a tensor, by its index among the tensors of a call."""

    index: int


class ModuleTemplate:
    """A module without its tensors: its class, its other attributes, and its submodules.

    names: the parameters and buffers in the order in which `build` takes them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.kind = type(module)
        own = vars(module)
        self.state = {name: value for name, value in own.items() if name not in (*TENSORS, "_modules")}
        self.none = {which: [name for name, value in own[which].items() if value is None] for which in TENSORS}
        self.own = {which: [name for name, value in own[which].items() if value is not None] for which in TENSORS}
        modules = own["_modules"].items()
        self.inside = {name: None if each is None else ModuleTemplate(each) for name, each in modules}

    @property
    def names(self) -> list[str]:
        own = [name for which in TENSORS for name in self.own[which]]
        inside = [(name, each) for name, each in self.inside.items() if each is not None]
        return [*own, *(f"{name}.{each}" for name, template in inside for each in template.names)]

    def build(self, tensors: Sequence[Any]) -> torch.nn.Module:
        """Return a module of this kind with these tensors; it shares with the original only the values of its other
        attributes."""
        iterator = iter(tensors)
        module = self._build(iterator)
        check(next(iterator, None) is None, lambda: f"{self.kind.__name__} was given more tensors than it has")
        return module

    def _build(self, iterator: Any) -> torch.nn.Module:
        module = object.__new__(self.kind)
        state = dict(self.state)
        for which in TENSORS:
            state[which] = {**dict.fromkeys(self.none[which]), **{name: next(iterator) for name in self.own[which]}}
        state["_modules"] = {
            name: None if each is None else each._build(iterator) for name, each in self.inside.items()
        }
        object.__setattr__(module, "__dict__", state)
        return module

    def unregistered_tensors(self) -> list[str]:
        """Return the attributes that hold tensors and are neither parameters nor buffers."""
        inside = [each for each in self.inside.values() if each is not None]
        own = [name for name, value in self.state.items() if isinstance(value, torch.Tensor)]
        return [*own, *(name for each in inside for name in each.unregistered_tensors())]


class ModuleForward:
    """`forward` of a module as a function of tensors: first the module's own, as in `template.names`, then those
    of the call, whose arguments are `args` and `kwargs`, with a TensorSlot for each tensor.

    contiguous: whether results are made contiguous, as the module's own are.
    """

    def __init__(
        self,
        forward: Callable,
        template: ModuleTemplate,
        args: tuple,
        kwargs: dict[str, Any],
        names: Sequence[str],
        *,
        contiguous: bool = False,
    ) -> None:
        self.forward = forward
        self.template = template
        self.args = args
        self.kwargs = kwargs
        self.names = tuple(names)
        self.own = len(template.names)
        self.contiguous = contiguous
        self.__name__ = template.kind.__name__

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind, annotation=torch.Tensor) for name in self.names])

    def __call__(self, *tensors: Any) -> Any:
        module = self.template.build(tensors[: self.own])
        values = tensors[self.own :]
        result = self.forward(module, *_fill_slots(self.args, values), **_fill_slots(self.kwargs, values))
        if not self.contiguous:
            return result
        if isinstance(result, tuple):
            return tuple(each.contiguous() for each in result)
        return result.contiguous()


def _fill_slots(tree: Any, values: Sequence[Any]) -> Any:
    if isinstance(tree, TensorSlot):
        return values[tree.index]
    if type(tree) in (tuple, list):
        return type(tree)(_fill_slots(each, values) for each in tree)
    if type(tree) is dict:
        return {name: _fill_slots(each, values) for name, each in tree.items()}
    return tree


@dataclass(frozen=True)
class Layer:
    """A class that lends its forward. library: its origin; content: the hash of the files there."""

    kind: type[torch.nn.Module]
    library: str = ""
    content: str = ""

    @property
    def name(self) -> str:
        return f"{self.library}.{self.kind.__name__}" if self.library else self.kind.__name__

    @property
    def has_backward(self) -> bool:
        """Return whether it may have a gradient; verification decides whether that is right."""
        return getattr(self.kind, "has_backward", True)

    def problem(self, module: type[torch.nn.Module]) -> str | None:
        """Return why modules of a class cannot have its forward, or None."""
        if self.kind.__init__ is not torch.nn.Module.__init__:
            return "it has a constructor of its own, and a layer has no state"
        members = {name for name in dir(self.kind) if not name.startswith("__")}
        more = sorted(members - set(dir(torch.nn.Module)) - DECLARED)
        if more:
            return f"it has {', '.join(more)} beside forward, and a layer has nothing else"
        theirs, ours = (list(inspect.signature(each.forward).parameters.values()) for each in (self.kind, module))
        if [each.kind for each in theirs] != [each.kind for each in ours]:
            names = ", ".join(map(str, theirs[1:]))
            return f"its forward takes ({names}), and that of the module ({', '.join(map(str, ours[1:]))})"
        return None


@dataclass(frozen=True)
class ModuleOverride:
    """A layer that replaces a module's own forward, for one call.

    function: the function to run. verify: returns whether it is equivalent to the module's own forward on such tensors;
    Declined with the reason. symbol: returns the symbol of its calls, unless they are traced. fingerprint: returns the
    hash of everything that its behaviour depends on.
    """

    function: ModuleForward
    verify: Callable[[Sequence[torch.Tensor]], Decision]
    symbol: Callable[[], Symbol]
    fingerprint: Callable[[], Fingerprint]


class ModuleExecutor(Executor, ABC):
    """Runner of module calls by layers. The layer of a call is selected while it is captured."""

    @abstractmethod
    def see(self, kind: type[torch.nn.Module]) -> None:
        """Note a class of modules that the program calls."""

    @abstractmethod
    def layers_for(self, module: torch.nn.Module) -> Sequence[Any]:
        """Return the layers that exist for a module, whatever the device; empty for most modules."""

    @abstractmethod
    def find(self, module: torch.nn.Module, device: torch.device, training: bool) -> Layer | Declined:
        """Return the layer for a call of a module on a device; Declined with the reason if there is none."""

    @abstractmethod
    def override(
        self,
        layer: Layer,
        module: torch.nn.Module,
        call: tuple[tuple, dict[str, Any]],
        names: Sequence[str],
        shapes: Sequence[Sequence[Any]],
        *,
        training: bool,
    ) -> ModuleOverride:
        """Return a layer for a call of a module. call: its arguments, with a TensorSlot for each tensor. names, shapes:
        of its tensors."""
