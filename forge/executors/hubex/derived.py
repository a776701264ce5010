"""A program of one call of a kernel's symbol, with its backward, for verification and for eager execution."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge import clang
from forge.compiler.claim import chooser
from forge.compiler.standalone import claim
from forge.executors.executor import Executor
from forge.ir import Symbol, Trace, recording
from forge.ir.pytree import tensors
from forge.torch_internals.pytree import torch_pytree
from forge.transforms.grad import differentiate
from forge.transforms.split import backward_of, backward_of_saved, split


def record_call(
    symbol: Symbol, args: tuple, kwargs: dict[str, Any], names: Iterable[str] = (), *, strides_known: bool = True
) -> tuple[Trace, tuple, dict[str, Any]]:
    """Return a program of one call of a symbol on tensors like these, and the call's arguments in the program. names:
    the names of the tensors."""
    trace = Trace("call")
    remaining = iter(names)

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        strides = tuple(leaf.stride()) if strides_known else None
        return trace.add_input(
            trace.tensor(leaf.shape, leaf.dtype, leaf.device, name=next(remaining, "t"), strides=strides)
        )

    with recording(trace, clang.language):
        args, kwargs = torch_pytree.tree_map(stand_in, (args, kwargs))
        trace.output = symbol(*args, **kwargs)
    return trace, args, kwargs


@dataclass(frozen=True)
class CallWithBackward:
    """A forward that returns (outputs, saved tensors, saved numbers), and its backward, which takes the saved values
    and the gradients of the `active` outputs."""

    forward: Trace
    backward: Trace
    active: list[bool]


def with_backward(trace: Trace, names: Sequence[str], executors: Sequence[Executor]) -> CallWithBackward | None:
    """Return the program with its backward to the inputs `names`, or None if no gradient reaches them."""
    joint = differentiate(trace, names, chooser(executors, {}))
    joint.forward.output = tuple(tensors(joint.forward.output))
    outputs = [output for output in joint.forward.output if output.name in joint.active]
    if not outputs:
        return None
    inputs = [proxy for proxy in joint.forward.inputs if proxy.name in names]
    full, *_ = backward_of(joint, outputs, inputs)
    parts = split(joint.forward, full)
    backward = backward_of_saved(joint, parts, outputs, inputs)
    active = [output.name in joint.active for output in joint.forward.output]
    return CallWithBackward(claim(parts.forward, executors)[0], claim(backward, executors)[0], active)
