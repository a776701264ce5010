"""forge.jit(select="measured"): run each call by the fastest executor, measured on tensors like the call's.

Candidates are the implementations that accept a call (of Hub kernels, all that do) and the fusion executors that would
take it. A call is measured if one of them is neither a fusion executor's nor torch's: between those two, the time of a
single call says little, since a region pays by what it saves across its calls. A product with its consumers
(forge/transforms/products.py) is a region by itself, and is measured against its parts. Each candidate runs as a
program of that one call, compiled as if it had been selected: with its backward, if a gradient flows through the call;
a fusion executor's as one region, even where a region of one call would not pay. The losing candidates are excluded
from the call, with the times as the reason.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from forge import clang
from forge.compiler import autotune_store
from forge.compiler.autotune_store import CandidateTime
from forge.compiler.claim import Candidate, Claim, Excluded, Selection, fusible
from forge.executors.calls import Meta, NotReproducible, call_of, with_strides
from forge.executors.executor import (
    Decision,
    Declined,
    Executor,
    FusionExecutor,
    OperatorExecutor,
    ProductExecutor,
    operators_of,
)
from forge.executors.fingerprint import verifier_versions
from forge.executors.torchex.core import torch_prims, torchex
from forge.ir import BoundSymbol, Symbol, Tag, TensorProxy, Trace, recording
from forge.ir.checks import in_one_line
from forge.ir.locks import new_lock
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.pytree import proxies, tensors
from forge.ir.structure import key_of, settings
from forge.support import progress, timing
from forge.support.dtypes import dtype_name
from forge.support.machine import device_name, processor
from forge.torch_internals.dispatch import disable_current_modes
from forge.torch_internals.pytree import torch_pytree

PARTS = "its parts"  # the calls of the decomposition, each run by its own executor
_PATIENCE = 60.0  # seconds that a thread waits for another thread's measurements
_UNMEASURED = {
    Tag.RANDOM: "the call draws random numbers",
    Tag.EFFECT: "the call has an effect",
    Tag.OPAQUE: "the call is an opaque call",
    Tag.SYNCHRONIZING: "the call reads values back to Python",
    Tag.UNINITIALIZED: "the call gives memory that others write to",
}
_torchs = (torchex, torch_prims)
_measuring = new_lock()


class CompiledCall(NamedTuple):
    """A compiled program of one call.

    forward: returns the outputs; with a backward, (outputs, saved tensors, saved numbers). backward: takes one list of
    the saved values and a gradient of each output that is `usual`.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    usual: Sequence[bool]
    claims: Sequence[Claim]


Build = Callable[[Trace, Sequence[Executor], Selection], CompiledCall]


@dataclass
class Measurement:
    """The times of the candidates for equivalent calls.

    operation: the symbol. arguments: their dtypes and shapes. gradients: whether the backward is part of it.
    choice: the candidate that was selected. calls: the number of calls. why_not: why nothing was measured, so that the
    order decided.
    """

    operation: str
    arguments: str
    gradients: bool
    candidates: list[CandidateTime]
    choice: str
    calls: int = 1
    why_not: str | None = None

    def __post_init__(self) -> None:
        self.candidates = [CandidateTime(*each) for each in self.candidates]  # JSON has lists

    def __str__(self) -> str:
        count = f"{self.calls} calls of {self.operation}" if self.calls > 1 else self.operation
        what = f"{count}({self.arguments}){', forward and backward' if self.gradients else ''}"
        if self.why_not is not None:
            return f"{what}: {self.choice} by order, since {self.why_not}"
        return f"{what}: {', '.join(map(self._describe, self.candidates))}"

    def _describe(self, timed: CandidateTime) -> str:
        took = timed.reason or (microseconds(timed.seconds) if timed.seconds is not None else "alone")
        return f"{timed.name} {took}{' (kept)' if timed.name == self.choice else ''}"


def microseconds(seconds: float) -> str:
    """Return '41.2 µs'."""
    return f"{1e6 * seconds:.1f} µs"


class _NotMeasurable(Exception):
    """A call that cannot be measured; carries the reason."""


class _Option(NamedTuple):
    """One candidate for a call; `candidate` is None for the call's decomposition."""

    name: str
    executor: Executor | None
    candidate: Candidate | None


class _Decision(NamedTuple):
    """The executors excluded from a call. fusers: why all fusion executors, including later tiers', are excluded."""

    excluded: Excluded
    fusers: str | None = None

    def of(self, executors: Sequence[Executor]) -> Excluded:
        if self.fusers is None:
            return self.excluded
        return {**self.excluded, **{each: self.fusers for each in executors if isinstance(each, FusionExecutor)}}


class Autotuner:
    """Selection by measurement, for one program.

    build: compiles a program of one call. about: the options that times depend on. measurements: the list
    to which its own are appended. on_disk: whether times are stored for other processes.
    """

    def __init__(self, build: Build, about: str, measurements: list[Measurement], *, on_disk: bool) -> None:
        self._measurements = measurements
        self._build = build
        self._about = about
        self._on_disk = on_disk
        self._decided: dict[tuple[Any, ...], _Decision] = {}
        self._alike: dict[str, Measurement] = {}

    def __call__(
        self,
        bound: BoundSymbol,
        executors: Sequence[Executor],
        active: Collection[str] = (),
        measured: BoundSymbol | None = None,
    ) -> Excluded:
        """Return the executors excluded from a call; decided at the first query, which precedes differentiation."""
        if bound.symbol.op is not None or not _has_kernels(bound, executors):
            return {}
        metadata = [(each.name, key_of(each.shape), each.dtype) for each in tensors((bound.args, bound.kwargs))]
        key = (bound.symbol.id, *bound.outputs, *metadata)
        if key not in self._decided:
            active = [name for name in bound.inputs if name in active]
            self._decided[key] = self._decide(bound, executors, active, measured or bound)
        return self._decided[key].of(executors)

    def _decide(
        self, bound: BoundSymbol, executors: Sequence[Executor], active: list[str], measured: BoundSymbol
    ) -> _Decision:
        options = _options(bound, executors)
        if len(options) < 2:
            return _Decision({})
        try:
            about, timed, arguments = self._time_candidates(bound.symbol, executors, options, active, measured)
        except _NotMeasurable as reason:
            products = [each.candidate for each in options if isinstance(each.candidate, ProductExecutor)]
            first = next(each.name for each in options if each.candidate not in products)
            self._measurements.append(Measurement(bound.symbol.id, "", bool(active), [], first, why_not=str(reason)))
            return _Decision(dict.fromkeys(products, f"not measured: {reason}"))  # the parts are the default
        best = _fastest(timed)
        if about in self._alike:
            self._alike[about].calls += 1
        else:
            measurement = Measurement(bound.symbol.id, arguments, bool(active), timed, options[best].name)
            self._alike[about] = measurement
            self._measurements.append(measurement)
        hint = f" at {arguments}" if _is_symbolic(bound) else ""
        reasons = [_reason(each, timed[best], hint) for each in timed[:best]]
        return _decision(options, best, reasons)

    def _time_candidates(
        self,
        symbol: Symbol,
        executors: Sequence[Executor],
        options: list[_Option],
        active: list[str],
        measured: BoundSymbol,
    ) -> tuple[str, list[CandidateTime], str]:
        for tag in measured.all_tags:
            if tag in _UNMEASURED:
                raise _NotMeasurable(_UNMEASURED[tag])
        program = _Program(measured, active)
        about, lasting = self._key(program, executors, options)
        on_disk = self._on_disk and lasting
        waited = _measuring.acquire(timeout=_PATIENCE)  # one at a time: others would distort it
        try:
            timed = autotune_store.read(about, on_disk=on_disk)
            if timed is None or [each.name for each in timed] != [each.name for each in options]:
                timed = self._measure(program, symbol, executors, options)
                autotune_store.write(about, timed, on_disk=on_disk)
        finally:
            if waited:
                _measuring.release()
        return about, timed, program.arguments

    def _key(self, program: "_Program", executors: Sequence[Executor], options: list[_Option]) -> tuple[str, bool]:
        """Return the key that times depend on, and whether it is the same in another process."""
        identities = [_identity(each) for each in options]
        fusers = [_identity_of(each) for each in executors if isinstance(each, FusionExecutor)]  # for the parts
        where = [processor(), torch.get_num_threads(), *sorted({device_name(m.device) for m in program.metas})]
        parts = (*verifier_versions(), *where, *settings(), self._about, *program.words, identities, fusers)
        return repr(parts), all(lasting for _, lasting in [*identities, *fusers])

    def _measure(
        self, program: "_Program", symbol: Symbol, executors: Sequence[Executor], options: list[_Option]
    ) -> list[CandidateTime]:
        """Return the times; a candidate that fails is dropped. Raises _NotMeasurable if memory runs out or timing
        fails."""
        progress.expect(1)
        runs: dict[str, Callable[[], Any]] = {}
        dropped: dict[str, str] = {}
        try:
            with disable_current_modes(), torch.no_grad():
                inputs = program.inputs()
                for index, option in enumerate(options):
                    try:
                        runs[option.name] = self._run_of(program, symbol, executors, options, index, inputs)
                    except (MemoryError, torch.OutOfMemoryError):  # the machine's fault, not the candidate's
                        raise
                    except Exception as error:  # the candidate's fault
                        dropped[option.name] = str(error) if isinstance(error, _NotMeasurable) else in_one_line(error)
                seconds = timing.time_candidates(runs, inputs[0].device) if len(runs) > 1 else {}
        except Exception as error:
            raise _NotMeasurable(f"measuring failed: {in_one_line(error)}") from error
        finally:
            progress.advance()
        return [CandidateTime(option.name, seconds.get(option.name), dropped.get(option.name)) for option in options]

    def _run_of(
        self,
        program: "_Program",
        symbol: Symbol,
        executors: Sequence[Executor],
        options: list[_Option],
        place: int,
        inputs: list[Any],
    ) -> Callable[[], Any]:
        """Return the candidate's run function, after one correct run. Raises _NotMeasurable if the result is not
        correct."""
        option = options[place]
        others = {each.candidate: "it is not its turn" for each in options[:place] if each.candidate is not None}
        forced = option.candidate if _gains_with_neighbours(option.executor) else None
        executors = [ForcedFusion(each) if each is forced else each for each in executors]
        alone = self._build(program.trace, executors, lambda bound, *_, **__: others if bound.symbol is symbol else {})
        _check_claims(alone.claims, option)
        if alone.backward is None:
            run = partial(_forward, alone.forward, inputs)
            program.check(run(), None)
            return run
        outputs = [each for each, usual in zip(alone.forward(*inputs)[0], alone.usual, strict=True) if usual]
        run = partial(_forward_and_backward, alone, inputs, [torch.rand_like(each) for each in outputs])
        program.check(*run())
        return run


def _forward(forward: Callable[..., Any], inputs: list[torch.Tensor]) -> Any:
    return forward(*inputs)


def _forward_and_backward(
    alone: CompiledCall, inputs: list[torch.Tensor], gradients: list[torch.Tensor]
) -> tuple[Any, Any]:
    outputs, saved, numbers = alone.forward(*inputs)
    assert alone.backward is not None
    return outputs, alone.backward([*saved, *numbers, *gradients])


class _Program:
    """A program of one call like one of a trace's; symbolic sizes have their values of this run.

    Raises _NotMeasurable for a call that cannot run by itself.
    """

    def __init__(self, bound: BoundSymbol, active: Collection[str]) -> None:
        self.symbol = bound.symbol
        self.trace = Trace("measured")
        try:
            call = call_of(bound.args, bound.kwargs)
        except NotReproducible as reason:
            raise _NotMeasurable(str(reason)) from reason
        self.metas: list[Meta] = []
        leaves, spec = torch_pytree.tree_flatten((bound.args, bound.kwargs))
        described = torch_pytree.tree_leaves((call.args, call.kwargs))
        inputs: dict[str, TensorProxy] = {}
        with recording(self.trace, clang.language), self.trace.set_tags(bound.tags - {Tag.DIFFERENTIATED}):
            pairs = zip(leaves, described, strict=True)
            arguments = [
                self._input(leaf, meta, inputs, active) if isinstance(meta, Meta) else meta for leaf, meta in pairs
            ]
            args, kwargs = torch_pytree.tree_unflatten(arguments, spec)
            self.trace.output = tuple(tensors(self._record(args, kwargs)))
        names = {each.name: index for index, each in enumerate(inputs.values())}
        places = [names[each.name] if isinstance(each, TensorProxy) else each for each in arguments]
        requires_grad = [each.requires_grad for each in inputs.values()]
        self.words = (
            self.symbol.id,
            str(spec),
            repr(places),
            repr(self.metas),
            repr(requires_grad),
            *_tag_names(bound.tags),
        )
        if not self.metas or not self.trace.output:
            raise _NotMeasurable("it has no tensor among its inputs or outputs")

    def _input(self, leaf: Any, meta: Meta, inputs: dict[str, TensorProxy], active: Collection[str]) -> TensorProxy:
        if leaf.name not in inputs:
            proxy = self.trace.tensor(meta.shape, meta.dtype, meta.device, name=leaf.name, strides=meta.strides)
            proxy.requires_grad = leaf.name in active
            self.trace.add_input(proxy)
            inputs[leaf.name] = proxy
            self.metas.append(meta)
        return inputs[leaf.name]

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            output = self.symbol(*args, **kwargs)
        except Exception as error:  # a body that depends on the call's context
            raise _NotMeasurable(f"it cannot be compiled alone: {in_one_line(error)}") from error
        if [bound.symbol for bound in self.trace.bound_symbols] != [self.symbol]:
            raise _NotMeasurable("it does nothing")
        return output

    @property
    def arguments(self) -> str:
        """'float32[2, 8], float32[8]'."""
        return ", ".join(map(_describe_tensor, self.metas))

    def inputs(self) -> list[torch.Tensor]:
        """Return tensors like the call's: random floats, and zeros where they may be indices."""
        return [with_strides(random_values(meta), meta.strides) for meta in self.metas]

    def check(self, outputs: Any, gradients: Any) -> None:
        """Raise _NotMeasurable unless outputs and gradients have the metadata that the call promises."""
        inputs = self.trace.differentiable_inputs
        if gradients is not None:
            names = {proxy.name for proxy in inputs}
            pairs = zip(gradients, self.trace.input_names, strict=True)
            gradients = [each for each, name in pairs if name in names]
        for what, values, promised in (("result", outputs, self.trace.output), ("gradient", gradients or (), inputs)):
            for value, proxy in zip(values, promised, strict=what == "result"):
                if value is not None and (value.shape, value.dtype) != (torch.Size(proxy.shape), proxy.dtype):
                    raise _NotMeasurable(
                        f"its {what} is {_describe_tensor(value)}, but must be {_describe_tensor(proxy)}"
                    )


class ForcedFusion(FusionExecutor):
    """A fusion executor that makes a region of every call it accepts, even of a single one."""

    def __init__(self, fuser: FusionExecutor) -> None:
        super().__init__(fuser.name)
        self.strided, self.boxed = fuser.strided, fuser.boxed
        self.fuses_decompositions = fuser.fuses_decompositions
        self._fuser = fuser

    def can_fuse(self, bound: BoundSymbol) -> Decision:
        return self._fuser.can_fuse(bound)

    def fuse(self, region: Trace) -> Callable[..., Any] | Declined:
        return self._fuser.fuse(region)

    def finish(self) -> Mapping[Callable[..., Any], Callable[..., Any] | Declined]:
        return self._fuser.finish()

    def is_profitable(self, calls: Sequence[BoundSymbol]) -> bool:
        return True


def _describe_tensor(value: Any) -> str:
    return f"{dtype_name(value.dtype)}{list(value.shape)}"


def random_values(meta: Meta) -> torch.Tensor:
    """Return random floats, and zeros where the values may be indices."""
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        values = torch.rand(meta.shape, device=meta.device)
        return values.to(meta.dtype)
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def _tag_names(tags: Collection[Tag]) -> list[str]:
    return sorted(tag.name for tag in tags)


def _has_kernels(bound: BoundSymbol, executors: Sequence[Executor]) -> bool:
    """Return whether an executor other than torch and the fusion executors may take a call, or whether the call is a
    product with its consumers."""
    others = [each for each in operators_of(executors) if each not in _torchs]
    products = [each for each in executors if isinstance(each, ProductExecutor)]
    return any(each.candidates(bound.symbol) for each in others) or any(each.can_fuse(bound) for each in products)


def _gains_with_neighbours(executor: Executor | None) -> bool:
    """Return whether an executor's regions have several calls, so that the time of a single call says little."""
    return isinstance(executor, FusionExecutor) and not isinstance(executor, ProductExecutor)


def _options(bound: BoundSymbol, executors: Sequence[Executor]) -> list[_Option]:
    """Return the candidates that accept a call, in order; none if all are torch's or fusion executors."""
    options: list[_Option] = []
    for executor in executors:
        if isinstance(executor, FusionExecutor):
            if fusible(bound, executor, []):
                options.append(_Option(executor.name, executor, executor))
        else:
            accepting = [each for each in executor.candidates(bound.symbol) if each.decide(bound)]
            options += [_Option(each.name or executor.name, executor, each) for each in accepting]
    owned = [each for each in options if _gains_with_neighbours(each.executor) or each.executor in _torchs]
    if len(owned) == len(options):
        return []
    if not owned and bound.subsymbols:
        options.append(_Option(PARTS, None, None))
    return _with_unique_names(options)


def _with_unique_names(options: list[_Option]) -> list[_Option]:
    """Return the options with unique names: kernels of two repositories may share one."""
    totals: dict[str, int] = {}
    for option in options:
        totals[option.name] = totals.get(option.name, 0) + 1
    counts = dict.fromkeys(totals, 0)
    result = []
    for option in options:
        counts[option.name] += 1
        suffix = f" ({counts[option.name]})" if totals[option.name] > 1 else ""
        result.append(option._replace(name=f"{option.name}{suffix}"))
    return result


def _check_claims(claims: Sequence[Claim], option: _Option) -> None:
    """Raise _NotMeasurable, with the reason, if another executor runs the call."""
    name = getattr(option.candidate, "name", None) or getattr(option.executor, "name", PARTS)
    if any(claim.executor == name for claim in claims):
        return
    for claim in claims:
        for who, reason in claim.declined:
            if who == name:
                raise _NotMeasurable(reason)


def _fastest(timed: list[CandidateTime]) -> int:
    """Return the index of the fastest candidate; without times, that of the first that was not dropped."""
    if any(each.seconds is not None for each in timed):
        return min((each.seconds, index) for index, each in enumerate(timed) if each.seconds is not None)[1]
    return next((index for index, each in enumerate(timed) if each.reason is None), 0)


def _reason(timed: CandidateTime, best: CandidateTime, hint: str) -> str:
    if timed.seconds is None or best.seconds is None:
        return f"measured{hint}: {timed.reason}"
    return f"measured{hint}: {microseconds(timed.seconds)} against {microseconds(best.seconds)} of {best.name}"


def _decision(options: list[_Option], best: int, reasons: list[str]) -> _Decision:
    excluded = {option.candidate: reason for option, reason in zip(options, reasons, strict=False) if option.candidate}
    fusers = [reason for candidate, reason in excluded.items() if isinstance(candidate, FusionExecutor)]
    is_fuser = isinstance(options[best].candidate, FusionExecutor)
    return _Decision(excluded, fusers[0] if fusers and not is_fuser else None)


def _is_symbolic(bound: BoundSymbol) -> bool:
    sizes = [size for each in tensors((bound.args, bound.kwargs)) for size in each.shape]
    numbers = [each for each in proxies((bound.args, bound.kwargs)) if not isinstance(each, TensorProxy)]
    return bool(numbers) or any(isinstance(size, SYMBOLIC_TYPES) for size in sizes)


# identities of candidates


def _identity(option: _Option) -> tuple[str, bool]:
    """Return the key that a candidate's time depends on, and whether it is the same in another process."""
    executor, candidate = option.executor, option.candidate
    if executor is None:
        return PARTS, True
    if isinstance(candidate, FusionExecutor):
        return _identity_of(candidate)
    assert isinstance(executor, OperatorExecutor) and candidate is not None
    fingerprint = executor.fingerprint(candidate)
    return repr((executor.name, option.name, fingerprint)), fingerprint.is_lasting


def _identity_of(fuser: FusionExecutor) -> tuple[str, bool]:
    identity = fuser.identity()
    if isinstance(identity, Declined):
        return f"{fuser.name} {id(fuser)}", False
    return f"{fuser.name} {identity}", True
