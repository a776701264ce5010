"""Regions for fusion executors: runs of neighbouring calls that an executor says it can fuse."""

from collections.abc import Callable

from forge.executors.executor import Declined, FusionExecutor
from forge.ir import BoundSymbol, NumberProxy, Proxy, Symbol, Trace
from forge.ir.pytree import proxies

SMALLEST_REGION = 2


def fuse_regions(trace: Trace, executor: FusionExecutor) -> Trace:
    """The trace with the executor's regions replaced by one call each."""
    new = trace.derive(f"fused by {executor.name}")
    fused = 0
    read_later, numbers = _readers(trace), _numbers(trace)
    run: list[BoundSymbol] = []
    for position, bound in enumerate([*trace.bound_symbols, None]):
        if bound is not None and bound.symbol.op is None and executor.can_fuse(bound):
            run.append(bound)
            continue
        if run:
            call = _fuse(trace, run, position, read_later, numbers, executor, fused)
            new.bound_symbols.extend(run if call is None else [call])
            fused += call is not None
            run = []
        if bound is not None:
            new.bound_symbols.append(bound)
    return new


def _readers(trace: Trace) -> dict[str, int]:
    """The position of the last call that reads each name; the trace's output is read after all of them."""
    last = {name: position for position, bound in enumerate(trace.bound_symbols) for name in bound.inputs}
    last.update((name, len(trace.bound_symbols)) for name in trace.output_names)
    return last


def _numbers(trace: Trace) -> dict[str, Proxy]:
    """The symbolic numbers of a trace by name, which arguments hold in expressions."""
    known = [*trace.inputs, *(proxy for bound in trace.bound_symbols for proxy in proxies(bound.output))]
    return {proxy.name: proxy for proxy in known if isinstance(proxy, NumberProxy)}


def _fuse(
    trace: Trace,
    run: list[BoundSymbol],
    end: int,
    read_later: dict[str, int],
    numbers: dict[str, Proxy],
    executor: FusionExecutor,
    number: int,
) -> BoundSymbol | None:
    if len(run) < SMALLEST_REGION:
        return None
    made = {proxy.name: proxy for bound in run for proxy in proxies(bound.output)}
    inputs: dict[str, Proxy] = {}
    for bound in run:
        read = [numbers[name] for name in bound.reads(numbers) if name in numbers]
        for proxy in (*proxies([bound.args, bound.kwargs]), *read):
            if proxy.name not in made:
                inputs.setdefault(proxy.name, proxy)
    outputs = tuple(proxy for name, proxy in made.items() if read_later.get(name, -1) >= end)
    region = trace.derive(
        f"region of {executor.name}", run, name="region", inputs=list(inputs.values()), output=outputs
    )
    region.boxed = False  # a region of a backward takes its inputs one by one
    function = executor.fuse(region)
    if isinstance(function, Declined):
        return None
    name = f"fusion{number}"
    symbol = Symbol(
        name, f"{executor.name}.{name}", meta=lambda *args: outputs, executor=executor, op=_named(function, name)
    )
    return BoundSymbol(symbol, tuple(inputs.values()), {}, outputs, run, source=run[0].source)


def _named(function: Callable, name: str) -> Callable:
    def region(*args: object) -> tuple:
        return function(*args)

    region.__name__ = region.__qualname__ = name
    return region
