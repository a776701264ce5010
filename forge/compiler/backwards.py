"""The backwards of a program, each compiled on first use for the outputs that have a gradient then."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from forge.compiler.claim import chooser
from forge.compiler.config import Config
from forge.compiler.context import Buckets, Context, Form, Kind
from forge.compiler.region_artifacts import FusedRegion, compile_until_stable
from forge.compiler.report import CompileReport
from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.ir.interpreter import paused_gc
from forge.ir.pytree import names
from forge.runtime.autograd import DifferentiableBackward, Sources
from forge.runtime.plan import GeneratedFunction
from forge.runtime.torch_state import preserve_torch_state
from forge.torchlang.opaque import keeps_graph, run_opaque_backward
from forge.transforms.double import differentiable_backward, readable_inputs
from forge.transforms.grad import Joint, without_gradients
from forge.transforms.lifetimes import read_positions
from forge.transforms.split import Split, backward_of_saved, leaf_calls, seeds_of

Missing = frozenset[tuple[int, int]]  # (index of an opaque call's graph, argument) of each gradient that is None
CompileProgram = Callable[[Trace, Config], tuple[Callable[..., Any], Trace, CompileReport]]


class BackwardCompiler:
    """Compiler of the backwards of one program (forge.runtime.plan.Backwards).

    compile_program: compiles a differentiable backward as a separate program. buckets: the gradients that leave a
    backward together.
    """

    def __init__(self, context: Context, compile_program: CompileProgram, buckets: Buckets) -> None:
        self._context = context.without_results()  # only the report keeps its stages alive
        self._config = context.config
        self._derivative = context.derivative
        self._compile_program = compile_program
        self.buckets = buckets

    @property
    def _parts(self) -> Split:
        return self._derivative.parts

    @property
    def usual(self) -> tuple[bool, ...]:
        """The outputs most likely to get a gradient: the losses, if some outputs are losses."""
        outputs, flowing = self._derivative.outputs, self._derivative.flowing
        losses = [i for i in flowing if outputs[i].ndim == 0] or flowing
        return tuple([i in losses for i in range(len(outputs))])

    def compile_usual(self, context: Context) -> tuple[GeneratedFunction, Context]:
        """Return the backward of the usual outputs, lowered in `context` together with its forward, and its context."""
        timed = context.report.time_phase("backward") if context.times_passes else nullcontext()
        with timed:
            return self._compile(self.usual, (), context)

    def compile(self, present: tuple[Any, ...], *, batched: bool = False) -> GeneratedFunction:
        """Return the backward of the outputs that are `present`, without the gradients of opaque calls that are None
        for these; `batched`: by torch's own functions alone."""
        outputs, report = self._derivative.outputs, self._context.report
        mask, missing = present[: len(outputs)], present[len(outputs) :]
        config = self._config.in_torch() if batched else self._config

        def attempt() -> tuple[tuple[GeneratedFunction, Context], list[FusedRegion]]:
            context = self._context.without_results(config, times_passes=False)
            function, own = self._compile(mask, missing, context, batched=batched)
            return (function, own), context.regions

        with paused_gc(), preserve_torch_state(), report.time_phase("backward"):
            function, own = compile_until_stable(attempt)
        if not batched:
            report.replace_backward(own.stages, own.claims)
        report.shorten()
        return function

    def _compile(
        self, mask: Sequence[bool], missing: Sequence[Missing], context: Context, *, batched: bool = False
    ) -> tuple[GeneratedFunction, Context]:
        """Return a function of one list, which it empties: the saved tensors, the saved numbers, a gradient of each
        output."""
        derived, parts = self._derivative, self._parts
        outputs = [output for i, output in derived.flowing.items() if mask[i]]
        joint = _without_unreached(derived.joint, parts, missing)
        trace = backward_of_saved(joint, parts, outputs, joint.forward.inputs)
        trace.boxed = True
        assert context.layouts is not None
        layouts = context.layouts.copy()
        for saved, value in zip(parts.saved_tensors, parts.forward.output[1], strict=True):
            if value.name != saved.name:  # a copy, which is dense
                layouts.replace(saved, value.name)
        for gradient, output in zip(trace.inputs[-len(outputs) :], outputs, strict=True):
            layouts.add(gradient, like=output)
        own = context.of_another(
            Kind.BACKWARD,
            derivative_or_none=derived,
            layouts=layouts,
            reference=trace,
            buckets=self.buckets,
            is_batched=batched,
            is_partial=bool(missing),
            stages=[trace],
        )
        context.run_passes(trace, own, Form.PROGRAM, Form.CODE)
        function = own.generated
        assert function.trace is not None
        read = read_positions(function.trace) if context.config.is_plain else None
        return function._replace(read=read), own

    def compile_differentiable(self, key: tuple[Any, ...]) -> DifferentiableBackward:
        """Return the backward compiled as a program of the inputs. key: see forge.runtime.plan.Backwards."""
        (present, recorded, special), missing = key[:3], key[3:]
        derived, report = self._derivative, self._context.report
        trace, config = derived.trace, self._config.in_torch() if special else self._config
        with paused_gc(), preserve_torch_state(), report.time_phase("backward"):
            outputs = [output for i, output in enumerate(derived.outputs) if present[i]]
            seeds = seeds_of(trace, outputs, recorded)
            targets = names(trace.differentiable_inputs)
            choose = chooser(config.executors, {}, config.selection)
            unreached = _unreached_results(self._parts, missing)
            sources = self.sources()
            sources_of = {*sources.saved, *sources.remembered, *sources.mutated, *sources.numbers}
            unavailable = [name for i, name in enumerate(trace.input_names) if i not in sources_of]
            backward = differentiable_backward(
                trace, targets, seeds, choose, derived.forward_calls, unreached, unavailable
            )
            positions = [i for i, gradient in enumerate(backward.output) if gradient is not None]
            if not positions:
                return DifferentiableBackward(lambda *args: (), [], [], [])
            output = tuple(backward.output[i] for i in positions)
            program = backward.derive(backward.stage, backward.bound_symbols, output=output)
            call, program, own = self._compile_program(program, config)
        report.double_backwards.append(own)
        own.shorten()
        read = {name for bound in program.bound_symbols for name in bound.inputs}
        reads = [i for i, proxy in enumerate(trace.inputs) if proxy.name in read]
        saved = [*self._parts.saved_tensors, *self._parts.saved_numbers]
        places = {proxy.name: index for index, proxy in enumerate(saved)}
        draws = [places[value.name] for each in derived.forward_calls for value in each.values or ()]
        return DifferentiableBackward(call, reads, draws, positions)

    def numbers(self) -> list[Any]:
        """Return the symbolic inputs of the program."""
        inputs = self._derivative.trace.inputs
        return [getattr(each, "value", None) for each in inputs if not isinstance(each, TensorProxy)]

    def sources(self) -> Sources:
        """Return the sources of the inputs that a differentiable backward may read."""
        derived = self._derivative
        mutated = self._context.program.mutated
        return _sources(derived.trace, self._parts, mutated, list(derived.flowing.values()), derived.inputs_with_grad)


def _without_unreached(joint: Joint, parts: Split, missing: Sequence[Missing]) -> Joint:
    """Return the joint program without the gradients of opaque calls that are None, if there are any."""
    if not missing:
        return joint
    graphs = {parts.saved_numbers[place].name: place for place, _ in missing[0]}

    def unreached_results(bound: BoundSymbol) -> list[str]:
        if bound.symbol.op is not run_opaque_backward:
            return []
        place = graphs.get(bound.args[0].name)
        return [result.name for i, result in enumerate(bound.output) if (place, i) in missing[0]]

    return without_gradients(joint, unreached_results)


def _unreached_results(parts: Split, missing: Sequence[Missing]) -> Mapping[str, list[int]]:
    """Return, by the name of each opaque call's result, the indices of the arguments whose gradients are None."""
    result: dict[str, list[int]] = {}
    places = {each.name: place for place, each in enumerate(parts.saved_numbers)}
    for bound in leaf_calls(parts.forward.bound_symbols) if missing else ():
        place = next((places[name] for name in bound.outputs if name in places), None)
        if place is not None and keeps_graph(bound):
            arguments = [i for graph, i in missing[0] if graph == place]
            result |= dict.fromkeys(bound.outputs, arguments)
    return result


def _sources(
    trace: Trace, parts: Split, mutated: list[int], outputs: list[TensorProxy], reached: Collection[int]
) -> Sources:
    """Return the sources of the inputs that a differentiable backward may read. reached: the inputs that have a
    gradient."""
    saved = {proxy.name: index for index, proxy in enumerate(parts.forward.output[1])}  # a copy has no autograd history
    read = readable_inputs(trace, names(outputs))
    sources = Sources({}, [], [], [], [])
    for position, proxy in enumerate(trace.inputs):
        if reached and isinstance(proxy, TensorProxy) and proxy.requires_grad and position not in reached:
            sources.detached.append(position)
        if not isinstance(proxy, TensorProxy):
            sources.numbers.append(position)
        elif proxy.name in saved:
            sources.saved[position] = saved[proxy.name]
        elif proxy.name in read:
            (sources.mutated if position in mutated else sources.remembered).append(position)
    return sources
