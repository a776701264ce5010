"""Concatenations that leave a region are written part by part.

Inductor computes a concatenation of values that are not in memory as one loop over the whole, which evaluates each part
for every element and selects one. The two halves of the gradient of a gated layer read the same memory: written by one
loop over a half, each element is read and computed once, also for what else the region computes of it. So it is with
parts that are long to compute, such as interpolated images: an H200 took 3.6 ms for four in one loop.
"""

from typing import Any

from torch._inductor import ir, lowering

from forge.torch_internals.inductor.codegen import V
from forge.torch_internals.patch import Scope, patch

_VIEWS = frozenset("view _unsafe_view reshape permute transpose t unsqueeze squeeze expand alias".split())
_MANY = 30  # operations: as many as Inductor computes again for each reader
_SUMS = frozenset({"sum"})  # a bias has one for its gradient


@patch(
    lowering,
    "pointwise_cat",
    scope=Scope.COMPILE,
    why="a concatenation of computed values that a region returns evaluates each part for every element",
    issue="not reported: it is no bug; torch 2.13 has a like condition for parts that others read",
    upstream="torch/_inductor/lowering.py:2160@2.13.0, cat",
    not_probed="it changes no result; test_concatenation.py looks at the generated code",
)
def write_parts(inputs: Any, dim: int = 0) -> Any:
    """Lower a concatenation: by a loop over each part where one is long to compute, or where the parts are of one size
    and read the same memory, and nothing in the region reads the whole."""
    if any(map(_is_long, inputs)) or (_is_returned(V.current_node) and _reads_alike(inputs)):
        return ir.TensorBox(ir.ConcatKernel.create(inputs, dim))
    return write_parts.original(inputs, dim)


def _is_returned(node: Any) -> bool:
    """Return whether a graph returns a node, and reads it for sums alone, through views too."""
    if node is None:
        return False
    users, is_returned = list(node.users), False
    for user in users:
        name = _name(user.target)
        if user.op == "output":
            is_returned = True
        elif name in _VIEWS:
            users += user.users
        elif name not in _SUMS:
            return False
    return is_returned


def _name(target: Any) -> str:
    return getattr(getattr(target, "overloadpacket", None), "__name__", "")


def _reads_alike(inputs: Any) -> bool:
    """Return whether parts of one size are computed of memory that two of them read."""
    first, *others = inputs
    if not all(_is_computed(each) for each in inputs):
        return False
    if any(list(each.get_size()) != list(first.get_size()) for each in others):
        return False
    read = first.get_read_names()
    return all(not read.isdisjoint(each.get_read_names()) for each in others)


def _is_computed(tensor: Any) -> bool:
    """Return whether a value is computed where it is read, and not in memory."""
    return isinstance(_data_of(tensor), ir.Pointwise)


def _is_long(tensor: Any) -> bool:
    """Return whether a value is computed where it is read, by many operations."""
    data = _data_of(tensor)
    return isinstance(data, ir.Pointwise) and data.inner_fn_opcount().num_ops > _MANY


def _data_of(tensor: Any) -> Any:
    data = tensor
    while isinstance(data, (ir.TensorBox, ir.StorageBox, ir.BaseView)):
        data = data.data
    return data
