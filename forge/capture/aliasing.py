"""Aliasing of values, from Dynamo's fake tensors, which know what each of torch's functions returns.

torchlang defines how its views are computed and inverted; if it does not know a view, or Dynamo's fake tensors
disagree, they are right: a view unknown to torchlang is expressed by its strides.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from forge import prims, torchlang
from forge.capture.fields import Fields
from forge.ir import TensorProxy
from forge.ir.memory import Memory, Ref, ViewStep
from forge.ir.proxies import hint_of
from forge.ir.pytree import leaves
from forge.ir.strides import is_expanded
from forge.torch_internals.dispatch import (
    OpOverload,
    OpOverloadPacket,
    dispatch_has_kernel,
    dispatch_has_kernel_for_dispatch_key,
    schema_of,
)
from forge.torch_internals.tensors import storage_id

Pair = tuple[TensorProxy, torch.Tensor]


def reconcile(memory: Memory, operands: Sequence[Pair], output: Any, example: Any, call: str) -> Any:
    """Return the output of a call, with `memory` updated to the aliasing of the fake tensors.

    operands: the handles of the call's operands, with their fake tensors; example: the fake tensors of its output;
    call: its name, "" if it writes to its out=. A handle of the output that is one of the arguments, although torch
    returns another tensor that aliases it, becomes a new handle.
    """
    if not operands:
        return output
    if isinstance(output, (tuple, list)) and isinstance(example, (tuple, list)):
        own = operands if len(operands) == len(output) else [None] * len(output)  # as of torch.meshgrid
        each = zip(output, example, own, strict=True)
        results = [_reconcile(memory, operands, out, fake, call, first) for out, fake, first in each]
        return results if isinstance(output, list) else tuple(results)
    return _reconcile(memory, operands, output, example, call)


def _reconcile(
    memory: Memory, operands: Sequence[Pair], output: Any, example: Any, call: str, first: Pair | None = None
) -> Any:
    if not isinstance(example, torch.Tensor):
        return output
    same = [handle for handle, fake in operands if fake is example]
    allocates = isinstance(output, TensorProxy) and _allocates(call)
    if any(output is handle for handle in same) or (same and not allocates):  # torch returned its operand
        given_back = output if any(output is handle for handle in same) else same[0]
        return prims.clone(given_back) if allocates else given_back
    there = _find_handle(example, operands if first is None else [first, *operands])
    shared = None if allocates else there
    ref = memory.refs.get(output.name)
    itself = any(handle is output for handle, _ in operands)
    if itself:
        if there is None and 0 not in example.shape:  # without elements, a view may have its own memory
            return prims.clone(output) if allocates else output
        return memory.another(output, torchlang.alias_step())
    if shared is None:
        if ref is not None and ref.chain:
            memory.refs[output.name] = Ref.own(output)
        return output
    base, fake = shared
    if _follows(ref, memory.ref(base)):
        return output
    if is_expanded(fake) or (example.dtype, example.is_conj(), example.is_neg()) != (
        fake.dtype,
        fake.is_conj(),
        fake.is_neg(),
    ):
        memory.share(output, base, call)
    else:
        memory.alias(output, base, strided_step(example, fake))
    return output


@functools.cache
def _allocates(call: str) -> bool:
    """Return whether the operator of this name allocates its results, by its schema: if its fake tensors are made
    by a decomposition in Python, they may alias its operands (torch.native_dropout's without training).

    The schema of a composite operator may be wrong about aliasing: only operators with kernels count.
    """
    inside = call.removeprefix("torch.").removeprefix("ops.aten.").removeprefix("Tensor.")
    name, _, overload = inside.partition(".")  # of torch.masked.prod it is "masked": no operator
    packet = getattr(torch.ops.aten, name, None)
    if not call.startswith("torch.") or not isinstance(packet, OpOverloadPacket):
        return False
    names = [overload] if overload else [each for each in packet.overloads() if not each.endswith("out")]
    overloads = [each for each in (getattr(packet, name) for name in names) if _has_kernel(each)]
    return bool(overloads) and not any(map(_may_alias, overloads))


def _has_kernel(overload: OpOverload) -> bool:
    """Return whether an overload has a kernel; others are TorchScript's, of numbers and lists."""
    return dispatch_has_kernel(overload.name())


def _may_alias(overload: OpOverload) -> bool:
    composite = dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
    returns = schema_of(overload).returns
    return composite or not returns or any(each.alias_info is not None for each in returns)  # or the arguments


def _find_handle(example: torch.Tensor, operands: Sequence[Pair]) -> Pair | None:
    """Return the handle that a call's result is a view of: of those that share its memory (two rows of one tensor,
    say) the first whose extent includes the result's."""
    sharing = [pair for pair in operands if _storage_id(pair[1]) == _storage_id(example)]
    if len(sharing) < 2:
        return sharing[0] if sharing else None
    start, end = _reach(example)
    reaching = (pair for pair in sharing if _reach(pair[1])[0] <= start and end <= _reach(pair[1])[1])
    return next(reaching, sharing[0])


def _storage_id(fake: torch.Tensor) -> int:
    return storage_id(fake)


def _reach(fake: torch.Tensor) -> tuple[int, int]:
    """Return the offsets of its first and last element in its memory."""
    start, ends = hint_of(fake.storage_offset()), zip(fake.shape, fake.stride(), strict=True)
    return start, start + sum((hint_of(size) - 1) * hint_of(stride) for size, stride in ends)


def _follows(ref: Ref | None, base: Ref) -> bool:
    """Return whether a view of the base is known, by steps that need no tensor but the memory's first handle."""
    if ref is None or ref.storage is not base.storage:
        return False
    return all(tensor is ref.storage.root for step in ref.chain for tensor in step.tensors)


def strided_step(example: torch.Tensor, base: torch.Tensor) -> ViewStep:
    """Return the strided view step from `base` to `example`."""
    offset = example.storage_offset() - base.storage_offset()
    args = (tuple(example.shape), tuple(example.stride()), offset, tuple(base.stride()))
    return ViewStep(
        prims.as_strided, args, {}, None, lambda x, new: prims.view_scatter(x, new, prims.as_strided, args, {}, None)
    )


def pairs(env: Mapping[Node, Any], arguments: Any) -> list[Pair]:
    """Return the handles of a node's arguments with their fake tensors, those in objects too. A node that is not in
    `env`, such as one of vmap's levels, has no handle."""
    result: list[Pair] = []
    for node in leaves(arguments):
        value = env.get(node) if isinstance(node, Node) else None
        if isinstance(value, TensorProxy):
            result.append((value, node.meta["example_value"]))
        elif isinstance(value, Fields):
            result += pairs(env, node.kwargs)
    return result
