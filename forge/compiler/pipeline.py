"""The pipeline: every pass, in order, from a captured program to generated code.

`PIPELINE` alone decides the order. A captured program enters at Form.TORCH and leaves as code. A backward
(forge/compiler/backwards.py) and an epilogue enter at Form.PROGRAM, and the body of a CUDA graph at Form.FUSED. The
computation of folded weights is a separate trace (Kind.FOLDED), and `forge.executors.claim` runs the passes from
Form.PROGRAM to Form.FUSED (standalone.py). A whole program for AOTInductor is claimed and not fused
(aot/entry_point.py). `compile_until_stable` (region_artifacts.py) repeats the passes from Form.PROGRAM on, without the
regions that failed to compile. The second tier of a program (forge/runtime/tiering.py) repeats them with another
config. Layers are replaced before (forge/capture/layers.py), and the wrappers of a call are a separate list (WRAPPERS
in forge/runtime/plan.py).

These call the algorithms of forge/transforms directly, because their traces are not programs yet, or parts of a pass:
`split` runs cse and dce on a backward together with its forward, repeatedly, until the backward reads only saved
values; forge/transforms/double.py and forge/capture/nested.py make a program of a gradient; hubex/derived.py makes the
forward and backward of one call, to verify its kernel; compiler/fallback.py prints the calls of a region that raised;
debug/eager_check.py shortens a reference.

A row states the condition of its pass; a pass does not itself decide whether it applies. A condition that needs an
analysis has an earlier row, which leaves the result in the context (`gradient_rules`).

A stage, one of the traces that forge.last_traces returns, has the name of the pass that made it. A trace that enters
the pipeline has its own name ("recorded", "backward, cse, dce"). Users name their stages: transforms and edited files,
which `user_transforms` and `codegen` add; `fold_weights` adds the text of the computation that it folds.

docs/how-to/adding-a-pass.md explains how to add a pass.

A pass before `differentiate` preserves aliasing. Gradient rules read the same inputs and results of the program as
before, or views of them: changing one of these between forward and backward is an error, as in eager, and changing
another is not. A result with its own memory keeps it: a view that replaces it is cloned (rewrite).

One file, though long: the order of the passes is read together with their conditions and entry points.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from forge import prims
from forge.compiler import passes
from forge.compiler.autotune import Autotuner, CompiledCall
from forge.compiler.backwards import BackwardCompiler
from forge.compiler.claim import Claim, Selection
from forge.compiler.config import Config
from forge.compiler.context import Buckets, Context, Form, Kind
from forge.compiler.cuda_graph_partition import can_record, has_symbolic_sizes
from forge.compiler.executable import Executable, SecondTier
from forge.compiler.freezing import freezing_of
from forge.compiler.program import Program
from forge.compiler.region_artifacts import FusedRegion, compile_until_stable
from forge.compiler.report import CompileReport, LayerUse
from forge.executors.errors import RegionError
from forge.executors.executor import Executor, decline
from forge.executors.torchex.indexing import SCATTERS
from forge.executors.torchex.windows import ATTENDING
from forge.ir import Tag, Trace
from forge.ir.interpreter import paused_gc
from forge.ir.pytree import names
from forge.ir.verifier import verify
from forge.runtime.buckets import bucket_bytes
from forge.runtime.cuda_recorder import recorder
from forge.runtime.plan import CallBoundary, CompiledPlan, GeneratedFunction, ProgramCall, TrainingPlan
from forge.runtime.tiering import CALLS_TO_RECORD, TierResult, hidden_seconds
from forge.runtime.torch_state import preserve_torch_state
from forge.support import progress
from forge.support.background import is_background_enabled
from forge.support.owner_only_store import is_on
from forge.torchlang import autocast_mode
from forge.transforms import Freezing
from forge.transforms.collective_schedule import has_messages
from forge.transforms.join_copies import is_copy
from forge.transforms.overlap_calls import is_start
from forge.transforms.reduce_in_place import is_reduction
from forge.transforms.split import leaf_calls
from forge.transforms.sum_few_rows import adds_rows
from forge.transforms.unshards import is_unshard


class LoweredProgram(NamedTuple):
    """A lowered program: its plan, and the contexts in which its forward and its backward were lowered."""

    plan: CompiledPlan
    context: Context
    backward: Context | None = None

    @property
    def backward_stages(self) -> list[Trace]:
        """The stages of its backward, if it has one."""
        return [] if self.backward is None else self.backward.stages

    @property
    def backward_claims(self) -> list[Claim]:
        """The claims of its backward, if it has one."""
        return [] if self.backward is None else self.backward.claims


class Pass(NamedTuple):
    """A pass: run(trace, context) returns a trace. It runs on traces of the form `takes`, if `when` holds, and leaves
    them in the form `gives`, by default `takes`.

    phase: where its time is counted. is_stage: whether a new trace that it returns is one of the stages that
    forge.last_traces returns.
    """

    run: Callable[[Trace, Context], Trace]
    takes: Form
    when: Callable[[Trace, Context], bool]
    phase: str
    gives: Form | None = None
    is_stage: bool = True


def _always(trace: Trace, context: Context) -> bool:
    return True


def _is(*kinds: Kind) -> Callable[[Trace, Context], bool]:
    return lambda trace, context: context.kind in kinds


_is_program = _is(Kind.PROGRAM)
_WITH_GRADIENTS = (Kind.PROGRAM, Kind.DOUBLE_BACKWARD, Kind.BACKWARD)  # whole programs and their backwards


def _has_transforms(trace: Trace, context: Context) -> bool:
    return _is_program(trace, context) and bool(context.config.transforms)


def _has_patterns(trace: Trace, context: Context) -> bool:
    return _is_program(trace, context) and any(each.patterns for each in context.config.executors)


def _freezes(trace: Trace, context: Context) -> bool:
    return _is_program(trace, context) and bool(context.freezing.weights)


def _fuses(trace: Trace, context: Context) -> bool:
    return _is_program(trace, context) and bool(context.config.fusion_executors)


def _may_round_otherwise(trace: Trace, context: Context) -> bool:
    return _fuses(trace, context) and context.config.numerics == "fast"


def _may_be_differentiated(trace: Trace, context: Context) -> bool:
    if context.kind is Kind.FOLDED or not trace.differentiable_inputs:
        return False
    active = set(names(trace.differentiable_inputs))
    for bound in trace.bound_symbols:
        if active.isdisjoint(bound.inputs):
            continue
        if Tag.NO_GRAD not in bound.tags:
            return True
        if Tag.LEAF_VIEW in bound.tags:
            active.update(bound.outputs)
    return False


def _infers(trace: Trace, context: Context) -> bool:
    return _may_round_otherwise(trace, context) and not _may_be_differentiated(trace, context)


def _has_flowing_gradients(trace: Trace, context: Context) -> bool:
    return context.joint is not None and not context.joint.active.isdisjoint(trace.output_names)


def _is_differentiated(trace: Trace, context: Context) -> bool:
    return context.derivative_or_none is not None


def _may_compute_again(trace: Trace, context: Context) -> bool:
    """Return whether calls of the forward may be recomputed: under memory="speed", only gathers of parameters."""
    if not _is_differentiated(trace, context):
        return False
    return context.config.memory != "speed" or any(map(is_unshard, trace.bound_symbols))


def _has_no_gradients(trace: Trace, context: Context) -> bool:
    return not _is_differentiated(trace, context) and context.kind is not Kind.FOLDED  # which has no effects


def _writes_inputs(trace: Trace, context: Context) -> bool:
    """Return whether a program without gradients writes to its inputs, and is not compared with eager."""
    if context.config.comparison is not None or not _has_no_gradients(trace, context):
        return False
    return any(bound.symbol is prims.copy_ for bound in trace.bound_symbols)


def _measures_products(trace: Trace, context: Context) -> bool:
    """Return whether products are measured with their consumers; those of one call that is measured are not."""
    return bool(context.config.product_executors) and context.kind in _WITH_GRADIENTS


def _copies_several(trace: Trace, context: Context) -> bool:
    """Return whether there are copies to join. An epilogue's stay separate: torch's autograd records them."""
    return context.kind is not Kind.EPILOGUE and sum(map(is_copy, trace.bound_symbols)) > 1


def _returns_to_caller(trace: Trace, context: Context) -> bool:
    return bool(context.returned)


def _has_reference(trace: Trace, context: Context) -> bool:
    if context.config.comparison is None or context.reference is None:
        return False
    return context.reference.input_names == trace.input_names


def _records_cuda_graphs(trace: Trace, context: Context) -> bool:
    """Return whether calls are recorded. An epilogue's are not: torch's autograd records them."""
    if not context.config.records_graphs or context.config.comparison is not None or context.kind is Kind.EPILOGUE:
        return False
    return not _has_messages(trace, context)  # a graph would copy the gathered tensors


def _sends_gradients(trace: Trace, context: Context) -> bool:
    """Return whether DistributedDataParallel sends the gradients in buckets; all are tensors, of calls that run one by
    one."""
    if context.buckets is None or not context.buckets.are_sent or context.config.comparison is not None:
        return False
    return not (context.is_batched or context.is_partial or context.derivative.has_opaque_graphs)


def _gathers_parameters(trace: Trace, context: Context) -> bool:
    """Return whether parameters are gathered, or gradients reduced, by calls that are not compared with eager."""
    return context.kind in _WITH_GRADIENTS and context.config.comparison is None and has_messages(trace)


def _has_collectives(trace: Trace, context: Context) -> bool:
    return any(Tag.EFFECT in bound.all_tags and is_start(bound) for bound in trace.bound_symbols)


def _may_add_otherwise(context: Context) -> bool:
    """Return whether sums may be reordered: they are not compared with eager and need not be bitwise equal to it."""
    config = context.config
    return config.comparison is None and config.numerics == "fast" and bool(config.fusion_executors)


def _sums_rows(trace: Trace, context: Context) -> bool:
    """Return whether there are gradients of rows, which may be added in another order."""
    if not _may_add_otherwise(context):
        return False
    return any(bound.symbol is prims.embedding_backward for bound in trace.bound_symbols)


def _adds_rows(trace: Trace, context: Context) -> bool:
    """Return whether a program or a backward adds rows by index, which may be added in another order."""
    if context.kind not in _WITH_GRADIENTS or not _may_add_otherwise(context):
        return False
    return any(map(adds_rows, trace.bound_symbols))


def _scatters(trace: Trace, context: Context) -> bool:
    """Return whether a program or a backward has scatters, and is not compared with eager. Regions have no
    scatters that write to their arguments."""
    if context.kind not in _WITH_GRADIENTS or context.config.comparison is not None:
        return False
    return any(bound.symbol in SCATTERS for bound in trace.bound_symbols)


def _multiplies_batches(trace: Trace, context: Context) -> bool:
    """Return whether neighbouring ops of products are fused, in a program or in a backward."""
    return (
        context.kind in _WITH_GRADIENTS and bool(context.config.fusion_executors) and context.config.comparison is None
    )


def _reduces(trace: Trace, context: Context) -> bool:
    """Return whether there are reductions, and their inputs are not compared with eager."""
    return context.config.comparison is None and any(map(is_reduction, trace.bound_symbols))


def _has_messages(trace: Trace, context: Context) -> bool:
    return any(Tag.SENDS in bound.symbol.tags for bound in trace.bound_symbols)


_torch_pass = partial(Pass, takes=Form.TORCH, phase="optimize")
_fused_pass = partial(Pass, takes=Form.FUSED, phase="claim and generate")

PIPELINE: tuple[Pass, ...] = (
    _torch_pass(passes.user_transforms, when=_has_transforms, is_stage=False),
    _torch_pass(passes.dce, when=_is_program),
    _torch_pass(passes.separate_sinks, when=_may_round_otherwise),
    _torch_pass(passes.fuse_attention, when=_may_round_otherwise),  # whose masks layers share
    _torch_pass(passes.cse, when=_is(Kind.PROGRAM, Kind.DOUBLE_BACKWARD)),
    _torch_pass(passes.move_indices, when=_is_program),
    _torch_pass(passes.slice_counted, when=_may_round_otherwise),
    _torch_pass(passes.inline_attention, when=_may_round_otherwise),
    _torch_pass(passes.attention_masks, when=_is_program),
    _torch_pass(passes.grouped_queries, when=_is_program),
    _torch_pass(passes.attention_blocks, when=_may_round_otherwise),
    _torch_pass(passes.patterns, when=_has_patterns),
    _torch_pass(passes.decompose_attention, when=_may_round_otherwise),
    _torch_pass(passes.fused_linear_cross_entropy, when=_is_program),
    _torch_pass(passes.decompose_cross_entropy, when=_may_round_otherwise),
    _torch_pass(passes.fold_norms, when=_freezes),
    _torch_pass(passes.join_products, when=_freezes),
    _torch_pass(passes.contract, when=_may_round_otherwise),
    _torch_pass(passes.split_groups, when=_may_round_otherwise),
    _torch_pass(passes.channels_last, when=_fuses),
    _torch_pass(passes.row_major, when=_fuses),
    _torch_pass(passes.masks_in_rows, when=_fuses),
    _torch_pass(passes.fuse_biases, when=_may_round_otherwise),
    _torch_pass(passes.unfuse_addends, when=_may_round_otherwise),
    _torch_pass(passes.row_products, when=_infers),
    _torch_pass(passes.fold_constants, when=_is(Kind.PROGRAM, Kind.DOUBLE_BACKWARD, Kind.FOLDED)),
    _torch_pass(passes.fold_weights, when=_freezes),
    _torch_pass(passes.mark_bounded, when=_fuses, is_stage=False),
    Pass(passes.gradient_rules, Form.TORCH, _may_be_differentiated, "gradients", is_stage=False),
    Pass(passes.differentiate, Form.TORCH, _has_flowing_gradients, "gradients", Form.JOINT),
    Pass(passes.rematerialize, Form.JOINT, _may_compute_again, "rematerialize"),
    Pass(passes.split, Form.JOINT, _is_differentiated, "split", Form.PROGRAM),
    Pass(passes.inline_effects, Form.JOINT, _has_no_gradients, "optimize", Form.PROGRAM, is_stage=False),
    Pass(passes.write_in_place, Form.PROGRAM, _writes_inputs, "optimize"),
    Pass(passes.add_rows_in_place, Form.PROGRAM, _sums_rows, "optimize"),
    Pass(passes.sum_few_rows, Form.PROGRAM, _adds_rows, "optimize"),
    Pass(passes.scatter_in_place, Form.PROGRAM, _scatters, "optimize"),
    Pass(passes.contiguous_batches, Form.PROGRAM, _multiplies_batches, "optimize"),
    Pass(passes.decoding_attention, Form.PROGRAM, _infers, "optimize"),
    Pass(passes.join_quantized, Form.PROGRAM, _infers, "optimize"),
    Pass(passes.products, Form.PROGRAM, _measures_products, "claim and generate"),
    Pass(passes.bucket_collectives, Form.PROGRAM, _gathers_parameters, "optimize"),
    Pass(passes.claim, Form.PROGRAM, _always, "claim and generate", Form.CLAIMED),
    Pass(passes.fuse, Form.CLAIMED, _always, "claim and generate", Form.FUSED),
    _fused_pass(passes.restride_outputs, when=_returns_to_caller, is_stage=False),
    _fused_pass(passes.join_copies, when=_copies_several),
    _fused_pass(passes.overlap_calls, when=_has_collectives),
    _fused_pass(passes.reduce_in_place, when=_reduces),
    _fused_pass(passes.compare, when=_has_reference, is_stage=False),
    _fused_pass(passes.overlap_collectives, when=_has_messages),
    _fused_pass(passes.bucket_gradients, when=_sends_gradients, is_stage=False),
    _fused_pass(passes.cuda_graphs, when=_records_cuda_graphs, is_stage=False),
    _fused_pass(passes.lifetimes, when=_always),
    _fused_pass(passes.codegen, when=_always, gives=Form.CODE, is_stage=False),
)


def run_passes(trace: Trace, context: Context, start: Form, end: Form) -> Trace:
    """Return the trace after the passes that bring it from the form `start` to `end`; under `forge.jit(check=…)`,
    the result of each pass is verified (forge/ir/verifier.py)."""
    for each in PIPELINE:
        if not (start <= each.takes < end and each.when(trace, context)):
            continue
        if context.times_passes:
            with context.report.time_phase(each.phase):
                new = each.run(trace, context)
        else:
            new = each.run(trace, context)
        if each.is_stage and new is not trace:
            assert new.stage == each.run.__name__, f"pass {each.run.__name__} names its stage {new.stage!r}"
            context.stages.append(new)
        if context.config.checks and new is not trace:
            verify(new)
        trace = new
    return trace


_run_to_code = partial(run_passes, start=Form.PROGRAM, end=Form.CODE)  # the function is context.generated


def compile(
    program: Program,
    config: Config,
    boundary: CallBoundary = CallBoundary(),
    *,
    opaque_calls: Sequence[str] = (),
    layers: Sequence[LayerUse] = (),
    seconds: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Executable, CompileReport]:
    """Compile a captured program; gradients flow to the inputs that require them.

    The trace states the conversions of autocast, so passes and compiled code run without it; `boundary.eager` does not.

    Args:
        program: The captured program.
        config: The resolved options.
        boundary: The front end's additions to a call, such as the eager function that runs if an assumption of the
            program does not hold.
        opaque_calls: For the report, the names of functions without torchlang symbols.
        layers: For the report, the modules with layers.
        seconds: For the report, the time spent before, by phase.

    Returns:
        The callable, and the report of its compilation.
    """
    freezing = freezing_of(program) if config.freeze else Freezing(())
    report = CompileReport(
        opaque_calls=opaque_calls,
        layers=layers,
        uses_cuda_graphs=config.records_graphs,
        frozen=freezing.folds,
        unfrozen=freezing.misses,
        seconds=dict(seconds),
    )
    context = context_of(Kind.PROGRAM, _with_selection(config, report), program, report)
    context.freezing = freezing
    with autocast_mode.disable(), progress.display():
        plan, second_tier = lower(optimize(program.trace, context), context)
    report.shorten()
    tiered = second_tier.tiered_program() if second_tier is not None and is_background_enabled() else None
    parts = ProgramCall(plan, None, tiered, program.mutated, _assumes(program), boundary)
    call, wrappers = parts.assemble()
    report.wrappers += wrappers
    return Executable(call, plan, second_tier, tiered), report


def context_of(kind: Kind, config: Config, program: Program, report: CompileReport) -> Context:
    """Return the context in which a trace enters the pipeline."""
    return Context(kind=kind, config=config, program=program, report_of=weakref.ref(report), run_passes=run_passes)


def _assumes(program: Program) -> bool:
    checks = (call for call in leaf_calls(program.trace.bound_symbols) if call.symbol is prims.require)
    return any(call.args[2] is prims.ViolatedAssumption for call in checks)


def optimize(trace: Trace, context: Context) -> Trace:
    """Return a trace of torch's functions optimized, and differentiated if gradients flow; its stages go to the
    report."""
    report = context.report
    context.stages.append(trace)
    trace = run_passes(trace, context, Form.TORCH, Form.PROGRAM)
    report.traces += context.stages
    context.stages = []  # only the report keeps them alive
    if context.derivative_or_none is not None:
        report.saved += context.derivative.parts.saved_values()
    context.reference = context.program.trace
    return trace


def lower(trace: Trace, context: Context) -> tuple[CompiledPlan, SecondTier | None]:
    """Return an optimized trace as code, and its second tier; its stages and claims go to the report."""
    lowered = compile_until_stable(partial(_lower_once, trace, context, context.config))
    own = lowered.context
    context.report.add_lowered(own.stages, own.claims, lowered.backward_stages, lowered.backward_claims)
    return lowered.plan, _second_tier(trace, context, lowered)


def _lower_once(
    trace: Trace, context: Context, config: Config, first: CompiledPlan | None = None
) -> tuple[LoweredProgram, list[FusedRegion]]:
    """Return the program and its fused regions. first: the plan of the first tier, if this is the second: it shares
    the epilogue, and the backwards that are compiled on first use."""
    context = context.attempt(config, times_passes=first is None)
    _run_to_code(trace, context)
    forward = context.generated
    if context.derivative_or_none is None:
        sets_mode = _sets_mode(trace)
        plan = CompiledPlan(forward, context.program.grad, sets_mode, folded_weights=context.folded_weights)
        return LoweredProgram(plan, context), context.regions
    shared = None if first is None else first.training
    buckets = Buckets(bucket_bytes()) if shared is None else Buckets(positions=shared.buckets)
    backwards = BackwardCompiler(context, _compile_double_backward, buckets)
    backward, own = backwards.compile_usual(context)
    if first is None or shared is None:
        plan = _training_plan(forward, backward, backwards, context)
    else:
        plan = first._replace(forward=forward, training=shared._replace(backward=backward))
    return LoweredProgram(plan, context, own), context.regions


def _training_plan(
    forward: GeneratedFunction, backward: GeneratedFunction, backwards: BackwardCompiler, context: Context
) -> CompiledPlan:
    derived = context.derivative
    epilogue, sets_mode = None, False
    if derived.epilogue is not None:
        own = context.of_another(Kind.EPILOGUE)
        _run_to_code(derived.epilogue, own)
        epilogue = own.generated
        sets_mode = _sets_mode(derived.epilogue)
    training = TrainingPlan(
        backward,
        backwards.usual,
        epilogue,
        [i for i in range(len(derived.outputs)) if i not in derived.flowing],
        backwards.sources(),
        backwards,
        split=derived.parts.forward,
        buckets=backwards.buckets.positions or (),
    )
    return CompiledPlan(forward, context.program.grad, sets_mode, training)


def _sets_mode(trace: Trace) -> bool:
    return any(bound.symbol is prims.set_grad_enabled for bound in trace.bound_symbols)


# the second tier


def _second_tier(trace: Trace, context: Context, first: LoweredProgram) -> SecondTier | None:
    """Return the second tier of a program that was lowered, if launches may cost more than their kernels: CUDA
    graphs if most of its calls can be recorded, else larger regions."""
    config, layouts = context.config, first.context.layouts
    assert layouts is not None
    lowered = [stages[-1] for stages in (first.context.stages, first.backward_stages) if stages]
    is_symbolic = any(map(has_symbolic_sizes, lowered))
    records = config.may_record_later and all(map(can_record, lowered))
    records = records and not any(map(is_unshard, context.program.trace.bound_symbols))
    records = records and not (is_symbolic and len(lowered) > 1)  # each size would keep its own memory
    hidden = None
    if records or _may_enlarge_regions(config, first.plan):
        hidden = hidden_seconds(lowered[0], layouts.flops, may_be_symbolic=records)
    if hidden is None:
        return None
    calls = CALLS_TO_RECORD if records else None
    return SecondTier(partial(_compile_second_tier, trace, context, first.plan, records), hidden, calls)


def _may_enlarge_regions(config: Config, first: CompiledPlan) -> bool:
    """Return whether there are larger regions, and gradients do not leave the backward in buckets: larger regions
    would return them all at the end."""
    return config.has_second_tier and not (first.training is not None and first.training.buckets)


def _compile_second_tier(
    trace: Trace, context: Context, first: CompiledPlan, records: bool, tier: SecondTier, call: Callable[..., Any]
) -> TierResult:
    report, config = context.report, context.config
    records = records and recorder().has_room()
    if not records and not _may_enlarge_regions(config, first):
        return TierResult(call, lambda: decline("the device has little memory left"), lambda: None)
    config = config.with_cuda_graphs() if records else config.larger_regions()
    phase = "CUDA graphs" if records else "larger regions"
    with paused_gc(), preserve_torch_state(), autocast_mode.disable(), report.time_phase(phase):
        second = compile_until_stable(partial(_lower_once, trace, context, config, first))
    stages, claims = second.context.stages, second.context.claims
    attends = not ATTENDING.isdisjoint(claim.operation for claim in (*claims, *second.backward_claims))
    plan = second.plan._replace(attends=attends)

    def install() -> None:
        if records:  # graphs belong to one process
            report.uses_cuda_graphs = True
            report.recorded = [each[-1] for each in (stages, second.backward_stages) if each]
            return
        report.add_lowered(stages, claims, second.backward_stages, second.backward_claims)
        if tier.on_promote is not None:
            tier.on_promote(plan, config.executors)

    return TierResult(ProgramCall(plan, call).assemble()[0], config.is_ready, install)


# programs of other kinds


def _compile_double_backward(trace: Trace, config: Config) -> tuple[Callable[..., Any], Trace, CompileReport]:
    """Return (the function, the program, the report) of a differentiable backward."""
    program, report = Program(trace, None, [], grad=True), CompileReport()
    context = context_of(Kind.DOUBLE_BACKWARD, config, program, report)
    plan, _ = lower(optimize(trace, context), context)
    call, _ = ProgramCall(plan).assemble()
    return call if plan.training is not None else torch.no_grad()(call), context.optimized, report


def _with_selection(config: Config, report: CompileReport) -> Config:
    """Return the config of one program: under select="measured", with the selection that measures its calls."""
    if config.select == "order":
        return config
    measuring = Autotuner(
        partial(_compile_alone, config), config.memory, report.measured, on_disk=config.cache and is_on()
    )
    executors = tuple([each.without_speed_hints() for each in config.executors])
    return config.replace(selection=measuring, executors=executors)


def _compile_alone(config: Config, trace: Trace, executors: Sequence[Executor], selection: Selection) -> CompiledCall:
    """Return a program of one call, to be called now; a candidate that fails is dropped."""
    program, report = Program(trace, None, [], grad=True), CompileReport()
    config = config.for_single_call(executors, selection)
    context = context_of(Kind.CALL, config, program, report)
    try:
        plan, _ = lower(optimize(trace, context), context)
    except RegionError as error:  # its region is the measured call alone
        assert error.__cause__ is not None
        raise error.__cause__ from None
    forward, training = plan.forward.function, plan.training
    if training is None:
        return CompiledCall(forward, None, (), report.claims)
    return CompiledCall(forward, training.backward.function, training.usual, report.claims)
