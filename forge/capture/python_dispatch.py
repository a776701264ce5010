"""Tensors and modes whose operators are not just their kernels: subclasses with __torch_dispatch__, fake and functional
tensors, dispatch modes.

A fused region's code and a kernel read memory by its address, which such a tensor does not have, and modes do not see
their work. A program with such a tensor among its inputs runs by torch's own functions, and a call under a mode runs in
eager.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from forge.capture.dtensor_placements import DTensor
from forge.ir.pytree import leaves
from forge.torch_internals.dispatch import (
    DispatchKey,
    TorchDispatchModeKey,
    dispatch_keys,
    get_dispatch_mode,
    is_traceable_wrapper_subclass,
    len_torch_dispatch_stack,
)
from forge.torch_internals.dispatch import get_dispatch_stack_at as _get_dispatch_stack_at
from forge.torch_internals.distributed import local_tensor

_KEYS = (DispatchKey.Python, DispatchKey.Functionalize)
_TRACES = TorchDispatchModeKey.PROXY
count_modes = len_torch_dispatch_stack


def is_dispatched(x: Any) -> bool:
    """Return whether a tensor's operators are more than their kernels."""
    if not isinstance(x, torch.Tensor):
        return False
    keys = dispatch_keys(x)
    return any(map(keys.has, _KEYS))


def find_dispatched_value(graph: GraphModule) -> tuple[Node, str] | None:
    """Return the first value of a Dynamo graph whose operators are more than their kernels, and its description."""
    for node in graph.graph.nodes:
        is_one = is_dispatched if node.op == "placeholder" else is_traceable_wrapper_subclass
        for value in leaves(_example(node)):
            if is_one(value):
                return node, "functional tensor" if type(value) is torch.Tensor else type(value).__name__
    return None


def _example(node: Node) -> Any:
    """Return an input's value at capture, for a DTensor its local tensor (forge/capture/dtensors.py); for another node,
    Dynamo's fake tensors."""
    if node.op != "placeholder":
        return node.meta.get("example_value")
    grapharg = node.meta.get("grapharg")
    example = grapharg and grapharg.example
    return local_tensor(example) if isinstance(example, DTensor) else example


def mode_around() -> str | None:
    """Return the class of an active dispatch mode that must see the operators of compiled programs, too. None if
    there is none, and while make_fx traces: the calls are part of its graph."""
    if get_dispatch_mode(_TRACES) is not None:
        return None
    modes = map(_get_dispatch_stack_at, range(count_modes()))
    candidates = (mode for mode in modes if mode.is_infra_mode() or not mode.ignore_compile_internals())
    return next((type(mode).__name__ for mode in candidates), None)
