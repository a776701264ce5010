"""A module's call as a function of tensors alone, so that a layer, which lends its forward to modules, is a kernel."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge.executors.hubex.functions import meta_of
from forge.executors.hubex.kernels import Kernel, Origin
from forge.executors.hubex.operators import Target
from forge.hub.manifest import DimOrder, Grad, KernelEntry, Layout, from_function
from forge.hub.manifest.shapes import DimPattern, ShapePattern
from forge.ir import SYMBOLIC_TYPES, Symbol, Tag, check

TENSORS = ("_parameters", "_buffers")


@dataclass(frozen=True)
class Given:
    """The place of a tensor, among those that a call is given."""

    index: int


class Template:
    """What a module is without its tensors: its class, its other attributes, and the modules inside it.

    names: the parameters and buffers in the order in which `build` takes them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.kind = type(module)
        own = vars(module)
        self.state = {name: value for name, value in own.items() if name not in (*TENSORS, "_modules")}
        self.none = {which: [name for name, value in own[which].items() if value is None] for which in TENSORS}
        self.own = {which: [name for name, value in own[which].items() if value is not None] for which in TENSORS}
        modules = own["_modules"].items()
        self.inside = {name: None if each is None else Template(each) for name, each in modules}

    @property
    def names(self) -> list[str]:
        own = [name for which in TENSORS for name in self.own[which]]
        inside = [(name, each) for name, each in self.inside.items() if each is not None]
        return [*own, *(f"{name}.{each}" for name, template in inside for each in template.names)]

    def build(self, tensors: Sequence[Any]) -> torch.nn.Module:
        """A module of this kind with these tensors; nothing of it is shared with the one that it was made of but the
        values of its other attributes."""
        given = iter(tensors)
        module = self._build(given)
        check(next(given, None) is None, lambda: f"{self.kind.__name__} was given more tensors than it has")
        return module

    def _build(self, given: Any) -> torch.nn.Module:
        module = object.__new__(self.kind)
        state = dict(self.state)
        for which in TENSORS:
            state[which] = {**dict.fromkeys(self.none[which]), **{name: next(given) for name in self.own[which]}}
        state["_modules"] = {name: None if each is None else each._build(given) for name, each in self.inside.items()}
        object.__setattr__(module, "__dict__", state)
        return module

    def held(self) -> list[str]:
        """Attributes that hold tensors and are neither parameters nor buffers."""
        inside = [each for each in self.inside.values() if each is not None]
        own = [name for name, value in self.state.items() if isinstance(value, torch.Tensor)]
        return [*own, *(name for each in inside for name in each.held())]


class Lent:
    """`forward` of a module as a function of tensors: first the module's own, as `template.names` has them, then those
    of the call, whose arguments are `args` and `kwargs`, with a Given in the place of each tensor.

    contiguous: whether results are made contiguous, which those of the module are.
    """

    def __init__(
        self,
        forward: Callable,
        template: Template,
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
        given = tensors[self.own :]
        result = self.forward(module, *_filled(self.args, given), **_filled(self.kwargs, given))
        if not self.contiguous:
            return result
        if isinstance(result, tuple):
            return tuple(each.contiguous() for each in result)
        return result.contiguous()


def _filled(tree: Any, given: Sequence[Any]) -> Any:
    if isinstance(tree, Given):
        return given[tree.index]
    if type(tree) in (tuple, list):
        return type(tree)(_filled(each, given) for each in tree)
    if type(tree) is dict:
        return {name: _filled(each, given) for name, each in tree.items()}
    return tree


class Own:
    """What a layer is compared with, in the place of a pattern: the module's own forward."""

    size = 0

    def __init__(self, reference: Lent) -> None:
        self.reference = reference
        self.name = reference.__name__
        self.tensors = list(reference.names)


def symbol_of(reference: Lent, id: str) -> Symbol:
    """The symbol of a module's call; where no layer takes it, torch runs the module's own forward."""

    def meta(*tensors: Any) -> Any:
        return meta_of(reference, tensors, {})

    def body(*tensors: Any) -> Any:
        own = Symbol(reference.__name__, f"opaque.{id}", meta=meta, op=reference, tags=frozenset({Tag.OPAQUE}))
        return own(*tensors)

    return Symbol(reference.__name__, id, body=body)


def lent_kernel(
    layer: Lent, reference: Lent, shapes: Sequence[Sequence[Any]], *, name: str, library: str, content: str, grad: str
) -> Kernel:
    """A layer as a kernel for the calls of one kind of module; `shapes` are those of its tensors in the program, and
    `content` the hash of the layer's files. It gets contiguous tensors."""
    id = f"layer.{reference.__name__}"
    signature = from_function(reference, id)
    entry = KernelEntry(
        id,
        name,
        fn=layer,
        op_kind="layer",
        library=library,
        shape={name: _pattern(shape) for name, shape in zip(reference.names, shapes, strict=True)},
        layout=dict.fromkeys(reference.names, Layout(order=DimOrder())),
        grad=Grad(grad),
    )
    target = Target(symbol_of(reference, id), signature, {name: name for name in reference.names})
    return Kernel(
        entry, signature, target, layer, pattern=Own(reference), origin=Origin(content=content), particular=True
    )


def _pattern(shape: Sequence[Any]) -> ShapePattern:
    """Lengths that are symbols are named dims."""
    dims = (DimPattern(name=_name(dim)) if isinstance(dim, SYMBOLIC_TYPES) else DimPattern(length=dim) for dim in shape)
    return ShapePattern(tuple(dims))


def _name(dim: Any) -> str | None:
    text = str(dim.node.expr)
    return text if text.isidentifier() else None
