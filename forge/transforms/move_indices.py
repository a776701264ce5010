"""Index tensors on a CPU are moved once to the device of the tensors that they index.

    table[positions] = table[positions.to(table.device)]

torch moves them at each call, and waits for the copy. Positions that a model computes without naming a device depend on
no input: they become constants on the device, and the index is a call of its program like any other.
"""

from typing import Any

from forge import torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.ir.pytree import tensors, tree_map
from forge.transforms.replacement import rewrite

_INDEXED = {
    torchlang.getitem: "key",
    torchlang.setitem: "key",
    torchlang.index_put: "indices",
    torchlang.aten_index: "indices",
}


def move_indices(trace: Trace) -> Trace:
    """Return the trace with indices on the devices of the tensors that they index; numbers are not moved."""
    if all(bound.symbol not in _INDEXED for bound in trace.bound_symbols):
        return trace
    copies: dict[tuple[str, str], TensorProxy] = {}

    def index(bound: BoundSymbol) -> TensorProxy | None:
        name = _INDEXED.get(bound.symbol)
        if name is None:
            return None
        arguments = bound.symbol.bind(bound.args, bound.kwargs)
        device = next(iter(arguments.values())).device
        if not any(_is_elsewhere(leaf, device.type) for leaf in tensors(arguments[name])):
            return None

        def on_device(leaf: Any) -> Any:
            if not _is_elsewhere(leaf, device.type):
                return leaf
            place = leaf.name, str(device)
            if place not in copies:
                copies[place] = torchlang.to(leaf, device)
            return copies[place]

        result: TensorProxy = bound.symbol(*{**arguments, name: tree_map(on_device, arguments[name])}.values())
        return result

    return rewrite(trace, "move_indices", index)


def _is_elsewhere(leaf: Any, device: str) -> bool:
    """Return whether a leaf is a CPU tensor with dims that indexes a tensor on another device."""
    return isinstance(leaf, TensorProxy) and leaf.device.type == "cpu" != device and leaf.ndim > 0
