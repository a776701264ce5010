"""One call of a kernel's symbol with its backward, as it would run in a program: to be verified, or to run in eager."""

from collections.abc import Sequence
from dataclasses import dataclass

from forge.executors.claim import choose, claim
from forge.executors.executor import Executor
from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.ir.pytree import tensors
from forge.transforms.grad import Choice, backward, differentiate
from forge.transforms.opaque import opaque_rule
from forge.transforms.split import recompute, simplify_backward, split


@dataclass(frozen=True)
class Derived:
    """A forward that returns (outputs, saved tensors, saved numbers), and its backward, which takes those and the
    gradients of the `active` outputs."""

    forward: Trace
    backward: Trace
    active: list[bool]


def derived(trace: Trace, names: Sequence[str], executors: Sequence[Executor]) -> Derived | None:
    """The program with its backward to the inputs `names`; None where no gradient reaches them."""

    def choice(bound: BoundSymbol) -> Choice:
        chosen = choose(bound, executors, [])
        if chosen is None:
            return Choice(opaque_rule(bound))
        return Choice(chosen[1].grad_transform, whole=chosen[1].grad == "recompute")

    joint = differentiate(trace, names, choice)
    outputs = [output for output in tensors(joint.forward.output) if output.name in joint.active]
    if not outputs:
        return None
    joint.forward.output = tuple(tensors(joint.forward.output))
    seeds = {o.name: TensorProxy(f"grad_{o.name}", o.shape, o.dtype, o.device) for o in outputs}
    wanted = [proxy for proxy in joint.forward.inputs if proxy.name in names]
    calls = joint.forward.bound_symbols
    full = simplify_backward(calls, backward(joint, seeds, wanted))
    parts = split(joint.forward, full, [])
    saved = {proxy.name for proxy in parts.saved_tensors}
    visible = [bound for bound in parts.forward.bound_symbols if not saved.isdisjoint(bound.outputs)]
    last = recompute(parts.forward.bound_symbols, simplify_backward(visible, backward(joint, seeds, wanted)))
    given = [*parts.saved_tensors, *parts.saved_numbers, *last.inputs]
    last = last.derive("backward", last.bound_symbols, inputs=given)
    active = [output.name in seeds for output in joint.forward.output]
    return Derived(claim(parts.forward, executors)[0], claim(last, executors)[0], active)
