"""Scatters into zeros write to the zeros' memory.

    zeros = full(shape, 0)                             zeros = full(shape, 0)
    spread = scatter_reduce(zeros, 1, index, g)   ->   spread = scatter_reduce_(zeros, 1, index, g)

The gradients of gather, of take and of an index are such scatters, of a part of their result. torch copies the zeros
first: twice the memory, whose pages a CPU's operating system has to map again at each step.
"""

from collections.abc import Callable, Mapping

from forge import prims
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace
from forge.transforms.dce import live_calls


def scatter_in_place(
    trace: Trace, operators: Mapping[Symbol, Symbol], in_torch: Callable[[BoundSymbol], bool]
) -> Trace:
    """Return a program in which each scatter into a filled tensor has its own tensor, which it writes to.

    Args:
        trace: The program, with the gradients in it.
        operators: By operation, the operator with the same arguments that writes to the first one.
        in_torch: Returns whether a call runs as torch runs it.
    """
    makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
    new = trace.derive("scatter_in_place", [])
    for bound in trace.bound_symbols:
        filled = _filled(bound, makers) if bound.symbol in operators and in_torch(bound) else None
        if filled is None:
            new.bound_symbols.append(bound)
            continue
        x, *others = bound.args
        own = new.tensor(x.shape, x.dtype, x.device)
        call = BoundSymbol(
            operators[bound.symbol], (own, *others), bound.kwargs, bound.output, source=bound.source, tags=bound.tags
        )
        new.bound_symbols += [filled.replace(output=own), call]
    if len(new.bound_symbols) == len(trace.bound_symbols):
        return trace
    new.bound_symbols[:] = live_calls(new.bound_symbols, new.output_names)
    return new


def _filled(bound: BoundSymbol, makers: Mapping[str, BoundSymbol]) -> BoundSymbol | None:
    """Return the call of prims.full that makes a call's first argument; None if there is none."""
    x = bound.args[0]
    maker = makers.get(x.name) if isinstance(x, TensorProxy) else None
    return maker if maker is not None and maker.symbol is prims.full else None
