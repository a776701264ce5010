"""Execution of a compiled program on fake tensors: the operators of each call, and the live memory.

Nothing is allocated, computed or sent. The generated text runs, so that lifetimes are the same as on a device. A fused
region counts as one operator that allocates its results, and so does a function that is neither torch's nor forge's:
their temporary memory is unknown.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from forge.compiler.fusion import REINTERPRETED
from forge.compiler.layout import flops_of
from forge.debug.instrument import instrument
from forge.executors.executor import Decision, FusionExecutor, is_own
from forge.executors.torchex.linear_cross_entropy import chunks_of_a_gpu
from forge.ir import BoundSymbol, NumberProxy, Proxy, Symbol, Tag, TensorProxy, Trace
from forge.ir.printing import STATEMENTS
from forge.ir.proxies import bytes_of, hint_of
from forge.ir.pytree import leaves, tensors, tree_map
from forge.ir.strides import contiguous
from forge.torch_internals.dispatch import TorchDispatchMode
from forge.torch_internals.fake_tensors import FakeTensorMode
from forge.torch_internals.tensors import storage_id

aten = torch.ops.aten
_ALLOCATE = frozenset({aten.empty, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.empty_like})
_LOOK_UP = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather})  # read as much as they return
TEMPORARIES, ACTIVATIONS, GATHERED, REDUCING, GRADIENTS = (
    "temporaries",
    "activations",
    "gathered parameters",
    "gradients being reduced",
    "gradients",
)


class PlannedRegions(FusionExecutor):
    """A fusion executor that forms the regions of another one without compiling them: each allocates its results."""

    def __init__(self, planned: FusionExecutor) -> None:
        super().__init__(planned.name)
        self._planned = planned
        self.strided, self.boxed = planned.strided, planned.boxed
        self.fuses_decompositions = planned.fuses_decompositions

    def can_fuse(self, bound: BoundSymbol) -> Decision:
        return self._planned.can_fuse(bound)

    def is_profitable(self, calls: Sequence[BoundSymbol]) -> bool:
        return self._planned.is_profitable(calls)

    def fuse(self, region: Trace) -> Callable:
        return partial(_region, tuple(region.output), self.boxed)

    def with_eager_numerics(self) -> "PlannedRegions | None":
        rounded = self._planned.with_eager_numerics()
        return None if rounded is None else PlannedRegions(rounded)


def _region(outputs: Sequence[TensorProxy], boxed: bool, *inputs: Any) -> tuple[torch.Tensor, ...]:
    results = tuple(map(_empty, outputs))
    if boxed:
        inputs[0].clear()
    return results


def _empty(proxy: TensorProxy) -> torch.Tensor:
    shape = tuple(map(hint_of, proxy.shape))
    strides = tuple(map(hint_of, contiguous(shape) if proxy.strides is None else proxy.strides))
    return torch.empty_strided(shape, strides, dtype=proxy.dtype, device=proxy.device)


def _value(leaf: Any) -> Any:
    """Return a value for a proxy: a tensor, or the number at capture time."""
    if isinstance(leaf, TensorProxy):
        return _empty(leaf)
    if isinstance(leaf, NumberProxy):
        return hint_of(leaf.value)  # type: ignore[arg-type]
    return None if isinstance(leaf, Proxy) else leaf


class Kernel(NamedTuple):
    """An operator that runs on the device: its floating-point operations, their dtype, and the bytes that it reads and
    writes."""

    flops: int
    dtype: torch.dtype
    bytes: int


class Peak(NamedTuple):
    """The peak of live bytes, without the program's inputs, by use."""

    bytes: int
    by_use: dict[str, int]


class FakeCall(NamedTuple):
    """A call of a program that ran on fake tensors, by its position in the trace."""

    position: int
    kernels: list[Kernel]


class FakeRun(NamedTuple):
    """A trace that ran on fake tensors. end: the bytes alive after it, by use."""

    calls: list[FakeCall]
    peak: Peak
    end: dict[str, int]


class _Watch(TorchDispatchMode):
    """A dispatch mode that records each operator and the memory of its results over their lifetime."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.alive: Counter[str] = Counter()
        self._uses: dict[int, str] = {}
        self._inputs = {storage_id(each) for each in inputs}
        self.peak = Peak(0, {})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [each for each in leaves(result) if isinstance(each, torch.Tensor)]
        for each in results:
            self.hold(each)
        if func.overloadpacket not in _ALLOCATE and not func.is_view and func.namespace != "_c10d_functional":
            inputs = [each for each in leaves((args, kwargs or {})) if isinstance(each, torch.Tensor)]
            read = inputs if func.overloadpacket not in _LOOK_UP else [*inputs[1:], *results]
            dtype = inputs[0].dtype if inputs else torch.float32
            self.kernels.append(Kernel(flops_of(func, args, kwargs or {}, result), dtype, _bytes([*read, *results])))
        return result

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key in self._uses or key in self._inputs:
            return
        self._uses[key] = TEMPORARIES
        size = storage.nbytes()
        self.alive[TEMPORARIES] += size
        weakref.finalize(storage, self._free, key, size).atexit = False
        self._note_peak()

    def _free(self, key: int, size: int) -> None:
        self.alive[self._uses.pop(key)] -= size

    def _note_peak(self) -> None:
        total = self.alive.total()
        if total > self.peak.bytes:
            self.peak = Peak(total, {use: size for use, size in self.alive.items() if size})

    def use(self, values: Iterable[Any], use: str, instead_of: Sequence[str]) -> None:
        """Reassign the memory of tensors to another use."""
        for each in values:
            key = storage_id(each) if isinstance(each, torch.Tensor) else None
            if key is not None and self._uses.get(key) in instead_of:
                size = each.untyped_storage().nbytes()
                self.alive[self._uses[key]] -= size
                self.alive[use] += size
                self._uses[key] = use

    def begin(self) -> None:
        """Begin another trace: reset the peak to the memory that is live now."""
        self.peak = Peak(0, {})
        self._note_peak()

    def take_kernels(self) -> list[Kernel]:
        kernels, self.kernels = self.kernels, []
        return kernels


def _bytes(values: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; expanded dims count once."""
    return sum(min(each.numel() * each.element_size(), each.untyped_storage().nbytes()) for each in values)


class _Runner:
    """The run of one trace under a watch."""

    def __init__(self, trace: Trace, watch: _Watch, saved: Iterable[str]) -> None:
        self.trace = trace.derive(trace.stage, list(map(_as_fake, trace.bound_symbols)))
        self.watch = watch
        self.saved = set(saved)
        self.calls: list[FakeCall] = []

    def run(self, inputs: list[Any]) -> tuple[Any, FakeRun]:
        """Return the results and the run. For a backward, `inputs` is one list, which it empties."""
        self.watch.begin()
        result = instrument(self.trace, "on fake tensors", self.note).python_callable()(*inputs)
        return result, FakeRun(
            self.calls, self.watch.peak, {use: size for use, size in self.watch.alive.items() if size}
        )

    def note(self, number: int, bound: BoundSymbol) -> tuple[Callable, tuple] | None:
        if bound.symbol in STATEMENTS:
            return None
        return partial(self.see, number, bound), (tuple(tensors(bound.output)),)

    def see(self, number: int, bound: BoundSymbol, results: Sequence[Any]) -> None:
        """Record the call that just ran, and the use of the memory that it allocated."""
        kernels = self.watch.take_kernels()
        if getattr(bound.symbol.op, "func", None) in (_region, _fake_results):
            read = tensors((bound.args, bound.kwargs, bound.output))
            kernels = [Kernel(0, torch.float32, sum(map(bytes_of, {each.name: each for each in read}.values())))]
        self.calls.append(FakeCall(number, kernels))
        if Tag.SENDS in bound.symbol.tags:
            use = GATHERED if "unshard" in bound.symbol.name else REDUCING
            message, _ = getattr(results[0], "_forge_pending", (None, None))
            self.watch.use([*results, *(message.payload if message is not None else ())], use, [TEMPORARIES])
        elif Tag.AWAITS in bound.symbol.tags:
            self.watch.use(results, GRADIENTS, [REDUCING])
        activations = [
            each for proxy, each in zip(tensors(bound.output), results, strict=True) if proxy.name in self.saved
        ]
        self.watch.use(activations, ACTIVATIONS, [TEMPORARIES])


def _as_fake(bound: BoundSymbol) -> BoundSymbol:
    """Return a call that runs on fake tensors: a third-party function becomes an allocation of its results."""
    symbol = bound.symbol
    if symbol is REINTERPRETED:
        return bound.replace(symbol=_with_op(symbol, _as_strided))
    if symbol in STATEMENTS or is_own(symbol.op):
        return bound if symbol.fallback is None else bound.replace(symbol=_with_op(symbol, symbol.op))
    return bound.replace(symbol=_with_op(symbol, partial(_fake_results, bound.output)))


def _as_strided(x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    """Return a view of a fake tensor, which has no memory to reinterpret."""
    return x.as_strided(shape, strides, x.storage_offset() + offset)


def _with_op(symbol: Symbol, op: Any) -> Symbol:
    return Symbol(symbol.name, symbol.id, meta=symbol.meta, tags=symbol.tags, executor=symbol.executor, op=op)


def _fake_results(output: Any, *args: Any, **kwargs: Any) -> Any:
    return tree_map(_value, output)


@contextmanager
def _watching(inputs: Callable[[], list[Any]]) -> Iterator[tuple[_Watch, list[Any]]]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), chunks_of_a_gpu():
        values = inputs()
        with _Watch(each for each in values if isinstance(each, torch.Tensor)) as watch:
            yield watch, values


def run_on_fake_tensors(forward: Trace, backward: Trace) -> tuple[FakeRun, FakeRun]:
    """Return the runs of a training program's final traces.

    The forward returns (results, saved tensors, saved numbers). Its results are freed before the backward, which takes
    one list of the saved values and the gradient of each result from which it starts.
    """
    saved = {each.name for each in tensors(forward.output[1])}
    with _watching(lambda: list(map(_value, forward.inputs))) as (watch, inputs):
        result, of_forward = _Runner(forward, watch, saved).run(inputs)
        arguments = [*result[1], *result[2]]
        del result
        arguments += list(map(_value, backward.inputs[len(arguments) :]))
        gradients, of_backward = _Runner(backward, watch, ()).run([arguments])
        del gradients
    return of_forward, of_backward
