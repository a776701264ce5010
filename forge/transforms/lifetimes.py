"""Lifetimes: values are deleted after their last use."""

from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.ir.printing import DEL
from forge.ir.pytree import tensors


def delete_last_used(trace: Trace, *, own_inputs: bool = False) -> Trace:
    """Return the trace with a `del` after the last use of each tensor; of its inputs too if the trace owns them."""
    alive = set(trace.output_names) | set(trace.constants)
    if not own_inputs:
        alive.update(trace.input_names)
    calls: list[BoundSymbol] = []
    for bound in reversed(trace.bound_symbols):
        dying: dict[str, TensorProxy] = {}
        for proxy in [*tensors(bound.output), *tensors(bound.args), *tensors(bound.kwargs)]:
            if proxy.name not in alive:
                alive.add(proxy.name)
                dying[proxy.name] = proxy
        if dying:
            calls.append(BoundSymbol(DEL, tuple(dying.values()), {}, None))
        calls.append(bound)
    unread = [proxy for proxy in tensors(trace.inputs) if own_inputs and proxy.name not in alive]
    if unread:
        calls.append(BoundSymbol(DEL, tuple(unread), {}, None))
    calls.reverse()
    return trace.derive("lifetimes", calls)


def read_positions(trace: Trace) -> list[int]:
    """Return the positions of the inputs that the trace reads."""
    read = {name for bound in trace.bound_symbols if bound.symbol is not DEL for name in bound.inputs}
    read.update(trace.output_names)
    return [index for index, name in enumerate(trace.input_names) if name in read]
