"""Return a layer as a kernel for the calls of one kind of module."""

from collections.abc import Sequence
from typing import Any

from forge.executors.hubex.functions import meta_of
from forge.executors.hubex.kernels import Kernel, Origin
from forge.executors.hubex.operators import Target
from forge.executors.modules import ModuleForward
from forge.hub.manifest import DimOrder, Grad, KernelEntry, Layout, from_function
from forge.hub.manifest.shapes import DimPattern, ShapePattern
from forge.ir import SYMBOLIC_TYPES, Symbol, Tag


class OwnForward:
    """The module's own forward, which a layer is compared with. It stands in the place of a pattern."""

    size = 0

    def __init__(self, reference: ModuleForward) -> None:
        self.reference = reference
        self.name = reference.__name__
        self.tensors = list(reference.names)


def symbol_of(reference: ModuleForward, id: str) -> Symbol:
    """Return the symbol of a module's call; where no layer takes it, torch runs the module's own forward."""

    def meta(*tensors: Any) -> Any:
        return meta_of(reference, tensors, {})

    def body(*tensors: Any) -> Any:
        own = Symbol(reference.__name__, f"opaque.{id}", meta=meta, op=reference, tags=frozenset({Tag.OPAQUE}))
        return own(*tensors)

    return Symbol(reference.__name__, id, body=body)


def layer_kernel(
    layer: ModuleForward,
    reference: ModuleForward,
    shapes: Sequence[Sequence[Any]],
    *,
    name: str,
    library: str,
    content: str,
    grad: str,
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
        entry, signature, target, layer, pattern=OwnForward(reference), origin=Origin(content=content), particular=True
    )


def _pattern(shape: Sequence[Any]) -> ShapePattern:
    """Return a shape as a pattern, in which symbolic lengths are named dims."""
    dims = (DimPattern(name=_name(dim)) if isinstance(dim, SYMBOLIC_TYPES) else DimPattern(length=dim) for dim in shape)
    return ShapePattern(tuple(dims))


def _name(dim: Any) -> str | None:
    text = str(dim.node.expr)
    return text if text.isidentifier() else None
