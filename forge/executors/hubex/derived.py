"""One call of a kernel's symbol with its backward, as it would run in a program: to be verified, or to run in eager."""

from collections.abc import Sequence
from dataclasses import dataclass

from forge.compiler.claim import chooser, claim
from forge.executors.executor import Executor
from forge.ir import Trace
from forge.ir.pytree import tensors
from forge.transforms.grad import differentiate
from forge.transforms.split import backward_of, backward_of_saved, split


@dataclass(frozen=True)
class Derived:
    """A forward that returns (outputs, saved tensors, saved numbers), and its backward, which takes those and the
    gradients of the `active` outputs."""

    forward: Trace
    backward: Trace
    active: list[bool]


def derived(trace: Trace, names: Sequence[str], executors: Sequence[Executor]) -> Derived | None:
    """The program with its backward to the inputs `names`; None where no gradient reaches them."""
    joint = differentiate(trace, names, chooser(executors, {}))
    joint.forward.output = tuple(tensors(joint.forward.output))
    outputs = [output for output in joint.forward.output if output.name in joint.active]
    if not outputs:
        return None
    wanted = [proxy for proxy in joint.forward.inputs if proxy.name in names]
    full, *_ = backward_of(joint, outputs, wanted)
    parts = split(joint.forward, full)
    backward = backward_of_saved(joint, parts, outputs, wanted)
    active = [output.name in joint.active for output in joint.forward.output]
    return Derived(claim(parts.forward, executors)[0], claim(backward, executors)[0], active)
