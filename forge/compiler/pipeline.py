"""From a recorded program to a function: the passes, in order."""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from forge import prims
from forge.compiler.autotune import Alone, Measured, Measuring
from forge.compiler.claim import Claim, Reasons, Selection, chooser, claim, runs_in_torch, strides_in_torch
from forge.compiler.config import Options, selecting
from forge.compiler.cuda_graph_partition import record
from forge.compiler.executable import Compiled
from forge.compiler.freezing import fold_weights, freezing_of
from forge.compiler.fusion import apart, settled
from forge.compiler.layout import Layouts, with_strides
from forge.compiler.program import Program, inline_epilogue, write_early
from forge.debug.eager_check import Checked
from forge.debug.edited import edited
from forge.executors.errors import RegionError
from forge.executors.executor import (
    Executor,
    FusionExecutor,
)
from forge.executors.hubex.kernels import HubExecutor
from forge.executors.torchex.attention import ATTENDING, takes_groups
from forge.ir import BoundSymbol, Tag, TensorProxy, Trace
from forge.ir.interpreter import paused_gc
from forge.ir.pytree import names
from forge.runtime.autograd import Again, Sources
from forge.runtime.buckets import bucket_bytes
from forge.runtime.cuda_graphs import Pool
from forge.runtime.frozen import Folded
from forge.runtime.plan import Generated, Recipe, Training, assemble, finished
from forge.runtime.tiering import Replacement, is_small
from forge.runtime.torch_state import restored
from forge.support.owner_only_store import is_on
from forge.torchlang import autocast_mode
from forge.torchlang.opaque import keeps_graph, run_opaque_backward
from forge.transforms import (
    Freezing,
    attention_masks,
    channels_last,
    cse,
    dce,
    delete_last_used,
    fold_norms,
    grouped_queries,
    heads,
    hoist,
    join_products,
)
from forge.transforms.dce import live_calls
from forge.transforms.double import Given, differentiable_backward, given_calls
from forge.transforms.grad import Joint, differentiate, without_gradients
from forge.transforms.lifetimes import read_places
from forge.transforms.parts import find_parts, in_parts
from forge.transforms.rematerialize import rematerialize
from forge.transforms.split import Split, backward_of, backward_of_saved, innermost, seeds_of, split
from forge.transforms.users import Transform, run_users

_FORWARDS, _BACKWARDS = Pool(), Pool()  # a forward runs again while the gradients of the last step are there


def _of_a_program(options: Options, found: list[Measured]) -> Options:
    """The same options for one program, which tells `found` what was measured for it."""
    if options.select == "order":
        return options
    on_disk = options.cache and is_on()
    executors = [each.regardless() if isinstance(each, HubExecutor) else each for each in options.executors]
    measuring = Measuring(partial(_compile_alone, options), options.memory, found, on_disk=on_disk)
    return selecting(options, measuring, executors=executors)


def _compile_alone(options: Options, trace: Trace, executors: Sequence[Executor], selection: Selection) -> Alone:
    """A program of one call, to be called now; what fails is dropped."""
    how = {"strict": True, "cuda_graphs": False, "check": None, "edit": None}
    options = selecting(options, selection, executors=executors, **how)

    def compile() -> Compiled:
        compiled = Compiled()
        _compile_optimized(trace, Program(trace, None, [], grad=True), options, compiled)
        return compiled

    try:
        compiled = apart(compile)
    except RegionError as error:  # the call that is measured is all of its region
        raise error.__cause__ from None
    forward, training = compiled.recipe.forward.function, compiled.recipe.training
    if training is None:
        return Alone(forward, None, (), compiled.claims)
    return Alone(forward, training.backward.function, training.usual, compiled.claims)


def compile_program(program: Program, options: Options, *, eager: Callable | None = None) -> Compiled:
    """Compiles a recorded program; gradients flow to the inputs that require them.

    `eager` runs in its place when an input that the program changes shares memory with another one, and when what was
    assumed of its numbers does not hold. What autocast does is written in the program, so neither the passes nor what
    they make run under it; `eager` does.
    """
    with autocast_mode.disabled():
        compiled = settled(partial(_compile, program, options))
    compiled.shorten()
    checks = (call for call in innermost(program.trace.bound_symbols) if call.symbol is prims.require)
    assumes = any(call.args[2] is prims.Violated for call in checks)
    compiled.call = finished(compiled.assembled(), program.mutated, eager, assumes=assumes)
    return compiled


def _compile(program: Program, options: Options) -> Compiled:
    compiled = Compiled()
    compiled.records = options.cuda_graphs
    freezing = freezing_of(program) if options.freeze else None
    folded = None
    options = _of_a_program(options, compiled.measured)
    with compiled.timed("optimize"):
        trace = _optimize(program.trace, options, compiled.traces, freezing)
        if freezing is not None and freezing.weights:
            run_now = partial(_run_now, options=options)
            trace, folded = fold_weights(trace, freezing, options.operator_executors, run_now, compiled.traces)
    if freezing is not None:
        compiled.frozen, compiled.unfrozen = freezing.done, freezing.left
        if folded is not None:
            compiled.folded = weakref.ref(folded)
    _compile_optimized(trace, program, options, compiled, folded=folded)
    return compiled


def _compile_optimized(
    trace: Trace,
    program: Program,
    options: Options,
    compiled: Compiled,
    *,
    again: bool = False,
    folded: Folded | None = None,
) -> bool:
    """Makes the recipe of what `compiled` calls; whether gradients flow through it. again: the trace is a backward.
    folded: what it takes beside the program's inputs."""
    wanted = [proxy for proxy in trace.inputs if isinstance(proxy, TensorProxy) and proxy.requires_grad]
    joint = None
    if wanted and any(Tag.NO_GRAD not in bound.tags for bound in trace.bound_symbols):
        with compiled.timed("gradients"):
            choose = chooser(options.executors, compiled.declined, options.selection)
            joint = differentiate(trace, [proxy.name for proxy in wanted], choose, again=again)
    flows = joint is not None and not joint.active.isdisjoint(trace.output_names)
    if flows:
        compiled.recipe = _compile_training(trace, joint, program, options, compiled)
    else:
        whole = dce(inline_epilogue(program, trace))
        with compiled.timed("claim and generate"):
            layouts = Layouts(whole.inputs)
            kept = whole.output_names
            forward = _generate(
                whole,
                options,
                compiled.traces,
                compiled.claims,
                layouts=layouts,
                kept=kept,
                reference=program.trace,
            )
        recipe = compiled.recipe = Recipe(forward, program.grad, _sets_mode(whole), folded=folded)

        def grow(later: Options, made: "_Made") -> Recipe:
            forward = _generate(whole, later, made.traces, made.claims, layouts=Layouts(whole.inputs), kept=kept)
            return recipe._replace(forward=forward)

        _let_grow(compiled, options, layouts, grow)
    return flows


class _Made(NamedTuple):
    """The stages and claims of larger regions."""

    traces: list[Trace]
    claims: list[Claim]
    backward_traces: list[Trace]
    backward_claims: list[Claim]


def _let_grow(compiled: Compiled, options: Options, layouts: Layouts, grow: Callable[[Options, _Made], Recipe]) -> None:
    """Has a program that was just claimed get larger regions later, where that is worth it. `grow` makes its recipe
    with the executors of those."""
    if not (options.has_later and is_small(compiled.traces[-1], layouts.flops)):
        return

    def make(call: Callable) -> Replacement:
        later, made = options.later(), _Made([], [], [], [])
        with paused_gc(), restored(), autocast_mode.disabled(), compiled.timed("larger regions"):
            recipe = grow(later, made)
        attends = not ATTENDING.isdisjoint(claim.operation for claim in made.claims)
        recipe = recipe._replace(attends=attends)

        def install() -> None:
            compiled.replace(*made)
            if compiled.keep is not None:
                compiled.keep(recipe, later.executors)

        return Replacement(assemble(recipe, call), later.ready, install)

    compiled.grow = make


def _optimize(trace: Trace, options: Options, stages: list[Trace], freezing: Freezing | None = None) -> Trace:
    """The user's transforms, then forge's own that keep a trace's meaning."""
    stages.append(trace)
    trace = run_users(options.transforms, trace, stages)
    run_now = partial(_run_now, options=options)
    plain = partial(runs_in_torch, executors=options.operator_executors)
    requires_grad = any(isinstance(proxy, TensorProxy) and proxy.requires_grad for proxy in trace.inputs)
    groups = partial(grouped_queries, takes=partial(takes_groups, requires_grad=requires_grad), plain=plain)
    found = (partial(attention_masks, run=run_now), groups, options.find_patterns, partial(heads, plain=plain))
    frozen = _FOLDS if freezing is not None and freezing.weights else ()
    frozen = [partial(each, freezing=freezing, plain=plain) for each in frozen]
    fuses = any(isinstance(each, FusionExecutor) for each in options.executors)
    laid_out = [partial(channels_last, strides=strides_in_torch, plain=plain)] if fuses else ()
    return _apply((dce, cse, *found, *frozen, *laid_out, partial(hoist, run=run_now)), trace, stages)


_FOLDS = (fold_norms, join_products)


def _apply(transforms: Sequence[Transform], trace: Trace, stages: list[Trace]) -> Trace:
    for transform in transforms:
        trace = transform(trace)
        if trace is not stages[-1]:
            stages.append(trace)
    return trace


def _run_now(program: Trace, options: Options) -> tuple[torch.Tensor, ...]:
    claimed, _ = claim(program, options.operator_executors)
    with torch.no_grad():
        return claimed.python_callable()()


def _generate(
    trace: Trace,
    options: Options,
    stages: list[Trace],
    claims: list[Claim],
    *,
    declined: Mapping[str, Reasons] = MappingProxyType({}),
    own_inputs: bool = False,
    layouts: Layouts | None = None,
    kept: Sequence[str] = (),
    reference: Trace | None = None,
    strided: Collection[str] = (),
    divide: Callable[[Trace], Trace] | None = None,
) -> Generated:
    """Claims a trace, ends each value's life at its last use, and compiles it. The outputs `kept` are the caller's,
    `strided` those that get the strides of eager's, as those of `kept` do whose calls are taken apart. reference: what
    the values are compared with where that is wanted. divide: has the claimed trace give its results in parts."""
    strict = options.strict or options.check is not None
    claimed, made = claim(trace, options.executors, declined, layouts, options.selection, strict=strict)
    claims.extend(made)
    stages.append(claimed)
    apart = [name for each in made if each.level for name in each.outputs if name in kept]
    claimed = with_strides(claimed, {*strided, *apart}, layouts)
    checked = None
    if options.compares and reference is not None and reference.input_names == claimed.input_names:
        checked = Checked(claimed, made, reference, "backward" if own_inputs else "forward")
        claimed = checked.trace
    elif options.cuda_graphs:
        claimed = record(claimed, _BACKWARDS if own_inputs else _FORWARDS, kept)
    if divide is not None:
        claimed = divide(claimed)
    final = delete_last_used(claimed, own_inputs=own_inputs)
    function, final = (final.python_callable(), final) if options.edit is None else edited(final, options.edit)
    stages.append(final)
    if checked is not None:
        return Generated(checked.around(function), final)
    return Generated(function, final, read_places(final) if own_inputs and options.edit is None else None)


def _compile_training(trace: Trace, joint: Joint, program: Program, options: Options, compiled: Compiled) -> Recipe:
    outputs: list[TensorProxy] = list(joint.forward.output)
    flowing = {i: output for i, output in enumerate(outputs) if output.name in joint.active}
    given = given_calls(joint)
    mutated = [program.trace.inputs[i].name for i in program.mutated]
    with compiled.timed("gradients"):
        weights = [program.trace.inputs[i] for i in (*program.weights, *program.unversioned)]
        parameters = [weight.name for weight in weights if weight.requires_grad]
        full, copied, unread = backward_of(joint, list(flowing.values()), joint.forward.inputs, mutated, parameters)
    reached = [i for i, gradient in enumerate(full.output) if gradient is not None]
    if options.memory != "speed":
        with compiled.timed("rematerialize"):
            forward = rematerialize(joint.forward, full, options.may_run_again, copied, unread)
            joint = Joint(forward, joint.runs, joint.active, joint.parted)
    with compiled.timed("split"):
        parts = split(joint.forward, full, copied, [value for each in given for value in each.values or ()])
        effects = program.epilogue
        if effects is not None:
            effects, parts.forward = write_early(effects, parts.forward, joint.active)
    compiled.traces += [joint.forward, parts.forward]
    compiled.saved = parts.saved()
    layouts = Layouts(parts.forward.inputs)
    outside = names(parts.forward.output[0])
    strided = [name for name in outside if name in joint.parted]
    with compiled.timed("claim and generate"):
        forward = _generate(
            parts.forward,
            options,
            compiled.traces,
            compiled.claims,
            declined=compiled.declined,
            layouts=layouts,
            kept=outside,
            strided=strided,
            reference=program.trace,
        )

    graphs = any(map(keeps_graph, innermost(parts.forward.bound_symbols)))  # which have None for some gradients
    limit = None if options.cuda_graphs or options.compares or graphs else bucket_bytes()
    found: list[list[int]] | None = None  # the parts, once a backward was claimed

    def divide(claimed: Trace) -> Trace:
        nonlocal found
        if found is None:
            found = find_parts(claimed, limit, reached)
        return in_parts(claimed, found) if found else claimed

    def backward_for(present: tuple, *, batched: bool = False) -> Generated:
        chosen = [output for i, output in flowing.items() if present[i]]
        with paused_gc(), restored(), compiled.timed("backward"):
            stages, claims = ([], []) if batched else (compiled.backward_traces, compiled.backward_claims)
            by = options.in_torch() if batched else options
            reached = _without_unreached(joint, parts, present[len(outputs) :])
            how = None if limit is None or batched or present[len(outputs) :] else divide
            made = settled(partial(_compile_backward, reached, parts, chosen, by, stages, claims, layouts, how))
        compiled.shorten()
        return made

    def again_for(key: tuple) -> Again:
        present, recorded, special, *missing = key
        by = options.in_torch() if special else options
        chosen = [output for i, output in enumerate(outputs) if present[i]]
        with paused_gc(), restored(), compiled.timed("backward"):
            seeds = seeds_of(trace, chosen, recorded)
            unreached = _unreached_results(parts, missing)
            make = partial(_differentiable_backward, trace, parts, given, seeds, by, compiled, unreached)
            return settled(make)

    constants = [i for i in range(len(outputs)) if i not in flowing]
    sources = _sources(trace, parts, program.mutated, list(flowing.values()), reached)
    usual = _usual(outputs, flowing)
    numbers = [getattr(trace.inputs[i], "value", None) for i in sources.numbers]
    backward = backward_for(usual)
    epilogue = None if effects is None else _generate(effects, options, [], [])
    sets_mode = effects is not None and _sets_mode(effects)
    later = backward_for, again_for, parts.forward, lambda: numbers
    training = Training(backward, usual, epilogue, constants, sources, *later, parts=found or ())
    recipe = Recipe(forward, program.grad, sets_mode, training)
    if found:  # larger regions would give all gradients at their end
        return recipe

    def grow(later: Options, made: _Made) -> Recipe:
        known, chosen = Layouts(parts.forward.inputs), [output for i, output in flowing.items() if usual[i]]
        how = {"declined": compiled.declined, "layouts": known, "strided": strided, "kept": outside}
        forward = _generate(parts.forward, later, made.traces, made.claims, **how)
        backward = _compile_backward(joint, parts, chosen, later, made.backward_traces, made.backward_claims, known)
        return recipe._replace(forward=forward, training=training._replace(backward=backward))

    _let_grow(compiled, options, layouts, grow)
    return recipe


def _without_unreached(joint: Joint, parts: Split, missing: Sequence[frozenset[tuple[int, int]]]) -> Joint:
    """missing: the (place of the graph, input) of opaque calls whose gradients are None, where there are some."""
    if not missing:
        return joint
    graphs = {parts.saved_numbers[place].name: place for place, _ in missing[0]}

    def unreached(bound: BoundSymbol) -> list[str]:
        if bound.symbol.op is not run_opaque_backward:
            return []
        place = graphs.get(bound.args[0].name)
        return [result.name for i, result in enumerate(bound.output) if (place, i) in missing[0]]

    return without_gradients(joint, unreached)


def _unreached_results(parts: Split, missing: Sequence[frozenset[tuple[int, int]]]) -> dict[str, list[int]]:
    """Of opaque calls, by the names of their results: the places of the arguments whose gradients are None."""
    found: dict[str, list[int]] = {}
    places = {each.name: place for place, each in enumerate(parts.saved_numbers)}
    for bound in innermost(parts.forward.bound_symbols) if missing else ():
        place = next((places[name] for name in bound.outputs if name in places), None)
        if place is not None and keeps_graph(bound):
            arguments = [i for graph, i in missing[0] if graph == place]
            found |= dict.fromkeys(bound.outputs, arguments)
    return found


def _usual(outputs: Sequence[TensorProxy], flowing: Collection[int]) -> tuple[bool, ...]:
    """Which outputs most likely get a gradient: the losses, where there are some among others."""
    losses = [i for i in flowing if outputs[i].ndim == 0] or flowing
    return tuple([i in losses for i in range(len(outputs))])


def _sets_mode(trace: Trace) -> bool:
    return any(bound.symbol is prims.set_grad_enabled for bound in trace.bound_symbols)


def _sources(
    trace: Trace, parts: Split, mutated: list[int], outputs: list[TensorProxy], reached: Collection[int]
) -> Sources:
    """Where a differentiable backward finds the inputs that it may read. reached: those that have a gradient."""
    saved = {proxy.name: place for place, proxy in enumerate(parts.forward.output[1])}  # a copy has no history
    live = live_calls(list(innermost(trace.bound_symbols)), names(outputs))
    live += live_calls(trace.bound_symbols, names(outputs))  # a composite is given what its parts may not read
    read = {name for bound in live for name in bound.inputs}
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


def _differentiable_backward(
    trace: Trace,
    parts: Split,
    given: list[Given],
    seeds: dict[str, TensorProxy],
    options: Options,
    compiled: Compiled,
    unreached: Mapping[str, Sequence[int]],
) -> Again:
    """The backward as a program of the inputs, compiled as one."""
    wanted = [proxy.name for proxy in trace.inputs if isinstance(proxy, TensorProxy) and proxy.requires_grad]
    choose = chooser(options.executors, {}, options.selection)
    backward = differentiable_backward(trace, wanted, seeds, choose, given, unreached)
    found = [i for i, gradient in enumerate(backward.output) if gradient is not None]
    if not found:
        return Again(lambda *given: (), [], [], [])
    program = backward.derive(backward.stage, backward.bound_symbols, output=tuple(backward.output[i] for i in found))
    again = Compiled()
    again.traces.append(program)
    program = _apply((cse, partial(hoist, run=partial(_run_now, options=options))), program, again.traces)
    differentiable = _compile_optimized(program, Program(program, None, [], grad=True), options, again, again=True)
    read = {name for bound in program.bound_symbols for name in bound.inputs}
    reads = [i for i, proxy in enumerate(trace.inputs) if proxy.name in read]
    places = {proxy.name: place for place, proxy in enumerate([*parts.saved_tensors, *parts.saved_numbers])}
    drawn = [places[value.name] for each in given for value in each.values]
    compiled.again.append(again)
    call = assemble(again.recipe)
    again.recipe = None
    again.shorten()
    return Again(call if differentiable else torch.no_grad()(call), reads, drawn, found)


def _compile_backward(
    joint: Joint,
    parts: Split,
    outputs: list[TensorProxy],
    options: Options,
    stages: list[Trace],
    claims: list[Claim],
    layouts: Layouts,
    divide: Callable[[Trace], Trace] | None = None,
) -> Generated:
    """A function of one list, which it empties: the saved tensors, the saved numbers, a gradient of each output."""
    trace = backward_of_saved(joint, parts, outputs, joint.forward.inputs)
    trace.boxed = True
    layouts = layouts.copy()
    for saved, handed in zip(parts.saved_tensors, parts.forward.output[1], strict=True):
        if handed.name != saved.name:  # a copy, which has no gaps between its elements
            layouts.replace(saved, handed.name)
    for gradient, output in zip(trace.inputs[-len(outputs) :], outputs, strict=True):
        layouts.add(gradient, like=output)
    stages[:] = [trace]
    claims.clear()
    return _generate(trace, options, stages, claims, own_inputs=True, layouts=layouts, reference=trace, divide=divide)
