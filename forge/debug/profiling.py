"""forge.explain(profile=True): the time and memory of each call of a compiled program.

The program runs again, on tensors with the metadata that it was compiled for: random floats, zeros for integers, which
may be indices, and symbolic sizes at their hints from capture. A clock is read after each call; on a GPU it is a device
event, so that a call lasts until the device has finished it or, if the device waits for Python, until the next begins.
An opaque call runs if it is torch's own and takes such values; else a stub returns values like its results, and it is
not measured. Calls that communicate are not measured either: other processes do not run the program again.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from types import GeneratorType
from typing import Any, NamedTuple, cast

import torch

from forge import prims
from forge.compiler.autotune import random_values
from forge.compiler.collectives import communicates
from forge.debug.eager_check import same_random_numbers
from forge.debug.instrument import instrument
from forge.executors.calls import Meta, with_strides
from forge.executors.executor import Decision, decline
from forge.ir import BoundSymbol, NumberProxy, Proxy, Symbol, Tag, TensorProxy, Trace
from forge.ir.checks import in_one_line
from forge.ir.printing import STATEMENTS, qualified_name
from forge.ir.proxies import Dim, hint_of
from forge.ir.pytree import tensors, tree_map
from forge.ir.strides import contiguous
from forge.runtime.cuda_graphs import Graph
from forge.torch_internals.dispatch import disable_current_modes
from forge.torch_internals.tensors import storage_id, version_of
from forge.torchlang.opaque import run_opaque_backward, run_opaque_forward
from forge.transforms.makers import innermost

_TORCHS = ("torch.ops.aten.", "torch.ops.prims.", "operator.", "math.")
SECONDS = 1.0  # the approximate time for which a program is run
_OWN = frozenset({prims.copy_, prims.copy_data_, prims.set_grad_enabled, prims.no_derivative})  # on its own tensors
_WARM, _FEWEST, _MOST = 2, 3, 25


class Opaque:
    """An opaque call of a profiled program. A function that is not torch's may have side effects, so it does not run.

    left_out: why values like its results replace it. is_backward: it is the backward of another, and runs if that did.
    """

    def __init__(self, bound: BoundSymbol) -> None:
        op = bound.symbol.op
        assert op is not None, "a call that runs has a function"
        self._op, self._output = op, bound.output
        self.is_backward = op is run_opaque_backward
        function = bound.args[0] if op is run_opaque_forward else op
        self.name = qualified_name(function) or bound.symbol.id.removeprefix("opaque.")
        self.left_out = None if self.is_backward or _is_torchs(function) else "the function may do more than compute"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_backward and args[0] is None:
            self.left_out = "the forward did not run"
        if self.left_out is None:
            try:
                return self._op(*args, **kwargs)
            except Exception as error:  # a matrix that is not positive definite, say
                self.left_out = f"the function takes no random values: {in_one_line(error)}"
        return tree_map(_result, self._output)


def _is_torchs(function: Any) -> bool:
    """Return whether a function, or every function that a graph calls, is torch's own."""
    while hasattr(function, "function"):  # unwrap grad mode, autocast, copies of arguments
        function = function.function
    if isinstance(function, torch.fx.GraphModule):
        return all(isinstance(node.target, str) or _is_torchs(node.target) for node in function.graph.nodes)
    name = qualified_name(function) or ""
    return name.startswith(_TORCHS) or (name.startswith("torch.") and not name.startswith("torch.ops."))


def _result(leaf: Any) -> Any:
    """Return a value like a result; None for a call's autograd graph."""
    if isinstance(leaf, (TensorProxy, NumberProxy)):
        return _value(leaf)
    return None if isinstance(leaf, Proxy) else leaf


class Stub:
    """The stub of a call that communicates: it returns values like its results."""

    def __init__(self, bound: BoundSymbol) -> None:
        self._output = bound.output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(_result, self._output)


def _with_stubs(trace: Trace) -> Trace:
    """Return the trace with each opaque call replaced by an Opaque, and each communicating call by a Stub."""

    def replace(bound: BoundSymbol) -> BoundSymbol:
        opaque = Tag.OPAQUE in bound.all_tags
        if not opaque and not communicates(bound):
            return bound
        symbol, op = bound.symbol, Opaque(bound) if opaque else Stub(bound)
        return bound.replace(symbol=Symbol(symbol.name, symbol.id, meta=symbol.meta, tags=symbol.tags, op=op))

    return trace.derive(trace.stage, list(map(replace, trace.bound_symbols)))


class Cost(NamedTuple):
    """Time and memory of one call. outputs: the names of its results. seconds: the median over runs. bytes: the memory
    of its results that is not its arguments'."""

    call: str
    outputs: tuple[str, ...]
    seconds: float
    bytes: int


def can_profile(*traces: Trace) -> Decision:
    """Return whether a program can run again without side effects, on separate tensors."""
    for bound in (bound for trace in traces for bound in trace.bound_symbols):
        if isinstance(bound.symbol.op, Graph):
            return decline("the program runs as CUDA graphs, which are one call")
        stubbed = Tag.OPAQUE in bound.all_tags or communicates(bound)
        for call in innermost(bound) if not stubbed else ():
            if Tag.EFFECT in call.all_tags and call.symbol not in _OWN:
                return decline(f"{call.symbol.id} has an effect")
    return True


def costs(forward: Trace, backward: Trace | None) -> tuple[tuple[list[Cost], list[Cost]], list[str]]:
    """Return the costs of the calls of a program and its backward, in execution order; and the opaque calls that were
    not measured, with the reasons.

    forward, backward: the claimed traces that run. If there is a backward, the forward returns (outputs, saved tensors,
    saved numbers), and the backward takes one list of the saved values and the gradients.
    """
    forward, backward = _with_stubs(forward), backward and _with_stubs(backward)
    devices = {proxy.device for trace in (forward, backward) if trace is not None for proxy in _all_tensors(trace)}
    gpu = next((device for device in devices if device.type == "cuda"), None)
    clocks = [None if trace is None else _Clock(trace, gpu) for trace in (forward, backward)]
    with disable_current_modes(), torch.no_grad(), same_random_numbers():
        inputs = [_value(proxy) for proxy in forward.inputs]
        sizes = [None if trace is None else _Sizes(trace) for trace in (forward, backward)]
        counters = _Counters(inputs)
        _run(sizes, inputs)
        for _ in range(_WARM):
            counters.restore()
            _run(clocks, inputs)
        start = time.perf_counter()
        for clock in clocks:
            if clock is not None:
                clock.forget()
        for count in range(_MOST):
            if count >= _FEWEST and time.perf_counter() - start > SECONDS:
                break
            counters.restore()
            _run(clocks, inputs)
    of_forward, of_backward = (
        [] if clock is None or size is None else clock.costs(size.bytes)
        for clock, size in zip(clocks, sizes, strict=True)
    )
    every = [bound.symbol.op for trace in (forward, backward) if trace is not None for bound in trace.bound_symbols]
    left_out = [each for each in every if isinstance(each, Opaque) and not each.is_backward and each.left_out]
    return (of_forward, of_backward), [f"{each.name} is an opaque call: {each.left_out}" for each in left_out]


class _Counters:
    """The integer tensors to which a program writes. They may be indices, such as the position in a cache, which each
    run advances. Created before the first run."""

    def __init__(self, inputs: list[Any]) -> None:
        whole = [x for x in inputs if isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex())]
        self._before = [(x, x.clone(), version_of(x)) for x in whole]

    def restore(self) -> None:
        """Restore the initial values of the tensors that were written."""
        for x, before, version in self._before:
            if version_of(x) != version:
                x.copy_(before)


def _all_tensors(trace: Trace) -> list[TensorProxy]:
    return tensors([trace.inputs, [bound.output for bound in trace.bound_symbols]])


def _run(watched: Sequence["_Clock | _Sizes | None"], inputs: list[Any]) -> None:
    forward, backward = watched
    assert forward is not None, "a program has a forward"
    result = forward.run(inputs)
    if backward is not None:
        _, saved, numbers = result
        arguments = [*saved, *numbers]
        del result
        arguments += [_value(proxy) for proxy in backward.trace.inputs[len(arguments) :]]
        backward.run([arguments])


def _value(proxy: Proxy) -> Any:
    """Return a value for an input, like the one for which the program was compiled."""
    if isinstance(proxy, NumberProxy):
        return hint_of(cast(Dim, proxy.value))  # for a number that is not symbolic, its value
    assert isinstance(proxy, TensorProxy)
    shape = tuple(map(hint_of, proxy.shape))
    strides = tuple(map(hint_of, contiguous(shape) if proxy.strides is None else proxy.strides))
    return with_strides(random_values(Meta(shape, proxy.dtype, proxy.device)), strides)


class _InstrumentedTrace:
    """A trace that runs with a note after each of its calls."""

    def __init__(self, trace: Trace) -> None:
        self.trace = instrument(
            trace, "profiled", lambda number, bound: (partial(self.see, number), self.note_arguments(bound))
        )
        self.calls = list(trace.bound_symbols)
        self._function = self.trace.python_callable()

    def note_arguments(self, bound: BoundSymbol) -> tuple:
        """Return the program's values that the note of a call takes."""
        return ()

    def see(self, number: int, *values: Any) -> None:
        """Record the state after call `number`."""
        raise NotImplementedError

    def run(self, inputs: list[Any]) -> Any:
        """Run the program. For a backward, `inputs` is one list. A program that yields its results in parts returns
        None."""
        result = self._function(*inputs)
        if isinstance(result, GeneratorType):
            for _ in result:
                pass
            return None
        return result


class _Sizes(_InstrumentedTrace):
    """The memory of each call. bytes: by number, the memory of its results that is not its arguments'."""

    def __init__(self, trace: Trace) -> None:
        self.bytes: dict[int, int] = {}
        super().__init__(trace)

    def note_arguments(self, bound: BoundSymbol) -> tuple:
        if bound.symbol in STATEMENTS:
            return ()
        return (tuple(tensors(bound.output)), tuple(tensors((bound.args, bound.kwargs))))

    def see(self, number: int, outputs: tuple = (), inputs: tuple = ()) -> None:
        existing = {storage_id(each) for each in inputs if each is not None}
        storages = {storage_id(each): each.untyped_storage() for each in outputs if each is not None}
        self.bytes[number] = sum(each.nbytes() for key, each in storages.items() if key not in existing)


class _Clock(_InstrumentedTrace):
    """The time of each call, except calls that only delete or forward values."""

    def __init__(self, trace: Trace, gpu: torch.device | None) -> None:
        self._gpu = gpu
        self._times: dict[int, list[float]] = {}
        self._read: list[tuple[int, Any]] = []
        super().__init__(trace)

    def forget(self) -> None:
        self._times.clear()

    def see(self, number: int) -> None:
        if self._gpu is None:
            self._read.append((number, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._read.append((number, event))

    def run(self, inputs: list[Any]) -> Any:
        self._read.clear()
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        self.see(-1)
        result = super().run(inputs)
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        for (_, before), (number, after) in zip(self._read, self._read[1:], strict=False):
            passed = after - before if self._gpu is None else 1e-3 * before.elapsed_time(after)
            self._times.setdefault(number, []).append(passed)
        return result

    def costs(self, sizes: dict[int, int]) -> list[Cost]:
        """Return the costs of the calls that are not deletions."""
        return [
            Cost(bound.symbol.id, tuple(bound.outputs), statistics.median(self._times[number]), sizes.get(number, 0))
            for number, bound in enumerate(self.calls)
            if bound.symbol not in STATEMENTS and not _is_left_out(bound.symbol.op)
        ]


def _is_left_out(op: Any) -> bool:
    return isinstance(op, Stub) or getattr(op, "left_out", None) is not None
