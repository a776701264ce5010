"""The passes of the pipeline, in its order: each is a function of (trace, context) that returns a trace.

A pass that needs only a trace is in forge/transforms; its wrapper here reads the rest from the context.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from forge import transforms
from forge.compiler import cuda_graph_partition, freezing, layout
from forge.compiler.claim import Reasons, choose, chooser, claim_calls, first_fuser, note_declined, runs_in_torch
from forge.compiler.context import Context, Derivative, Form, Kind
from forge.compiler.fusion import fuse_claimed
from forge.compiler.layout import Layouts
from forge.compiler.program import inline_epilogue, write_early
from forge.executors.contracts import expect
from forge.executors.executor import Declined, Executor, FusionExecutor, call_checker, is_own
from forge.executors.torchex import distributed, memory
from forge.executors.torchex.attention import attention, has_no_kernel, takes_broadcast, takes_groups
from forge.executors.torchex.core import torchex
from forge.executors.torchex.indexing import ADD_ROWS, INDEX_COPY, SCATTERS, in_place_operator
from forge.executors.torchex.windows import WINDOWED
from forge.ir import BoundSymbol, Symbol, Tag, Trace
from forge.ir.proxies import Dim
from forge.ir.pytree import names
from forge.patterns import replace_patterns
from forge.runtime.cuda_memory import Pool
from forge.runtime.plan import GeneratedFunction
from forge.transforms import grad
from forge.transforms.collective_schedule import Operators, find_parameters
from forge.transforms.dce import live_calls
from forge.transforms.double import forward_calls_of
from forge.transforms.gradient_buckets import find_buckets, in_buckets
from forge.transforms.split import backward_of
from forge.transforms.split import split as split_forward
from forge.transforms.users import run_users

_GRAPHS = Pool()
MESSAGES = Operators(
    distributed.start_unshard, distributed.finish_unshard, distributed.start_reduce, distributed.finish_reduce
)


# of torch's functions


def user_transforms(trace: Trace, context: Context) -> Trace:
    """Run the user's transforms; each is checked and is a stage."""
    return run_users(context.config.transforms, trace, context.stages)


def dce(trace: Trace, context: Context) -> Trace:
    """Eliminate calls whose results nothing reads."""
    return transforms.dce(trace)


def separate_sinks(trace: Trace, context: Context) -> Trace:
    """Compute softmax of scores and attention sinks without joining them."""
    strides, in_torch = partial(_strides_in_torch, context=context), partial(_runs_in_torch, context=context)
    return transforms.separate_sinks(trace, strides, in_torch)


def fuse_attention(trace: Trace, context: Context) -> Trace:
    """Call attention where a model writes it out and torch has a kernel for it."""
    strides, in_torch = partial(_strides_in_torch, context=context), partial(_runs_in_torch, context=context)
    return transforms.fuse_attention(trace, has_no_kernel, strides, in_torch)


def cse(trace: Trace, context: Context) -> Trace:
    """Eliminate common subexpressions."""
    return transforms.cse(trace)


def move_indices(trace: Trace, context: Context) -> Trace:
    """Move index tensors from the CPU to the device of the tensors that they index."""
    return transforms.move_indices(trace)


def slice_counted(trace: Trace, context: Context) -> Trace:
    """Replace indices that are ranges by slices."""
    return transforms.slice_counted(trace, in_torch=partial(_runs_in_torch, context=context))


def inline_attention(trace: Trace, context: Context) -> Trace:
    """Replace attention composites by their decompositions."""
    return transforms.inline_attention(trace, in_torch=partial(_runs_in_torch, context=context))


def attention_masks(trace: Trace, context: Context) -> Trace:
    """Replace masks that depend on no input by equivalent flags, or the window, of attention."""
    return transforms.attention_masks(
        trace,
        run=partial(_run_now, context=context),
        takes=partial(_is_taken, context=context),
        in_torch=partial(_runs_in_torch, context=context),
    )


def grouped_queries(trace: Trace, context: Context) -> Trace:
    """Pass attention keys and values of fewer heads where they were repeated for it."""
    requires_grad = bool(trace.differentiable_inputs)
    return transforms.grouped_queries(
        trace,
        takes=partial(takes_groups, requires_grad=requires_grad),
        takes_broadcast=partial(takes_broadcast, requires_grad=requires_grad),
        in_torch=partial(_runs_in_torch, context=context),
    )


def attention_blocks(trace: Trace, context: Context) -> Trace:
    """Compute attention in blocks where its mask hides all but a band."""
    in_torch = partial(_runs_in_torch, context=context)
    return transforms.attention_blocks(trace, run=partial(_run_now, context=context), in_torch=in_torch)


def patterns(trace: Trace, context: Context) -> Trace:
    """Replace calls that match patterns of the executors' kernels, if one of the executors accepts the new call."""
    executors = [each for each in context.config.executors if each.patterns]
    active = grad.active_names(trace)

    def is_taken(bound: BoundSymbol) -> bool:
        reasons: Reasons = []
        if grad.is_differentiated(bound) and not active.isdisjoint(bound.inputs):
            bound = bound.replace(tags=bound.tags | {Tag.DIFFERENTIATED})
        is_supported = choose(bound, executors, reasons) is not None or first_fuser(bound, executors) is not None
        if not is_supported:
            note_declined(context.declined, bound, reasons)
        return is_supported

    candidates = [pattern for executor in executors for pattern in executor.patterns]
    return replace_patterns(trace, candidates, is_taken)[0]


def decompose_attention(trace: Trace, context: Context) -> Trace:
    """Decompose attention calls that torch would compose."""
    return transforms.decompose_attention(trace, has_no_kernel, in_torch=partial(_runs_in_torch, context=context))


def fused_linear_cross_entropy(trace: Trace, context: Context) -> Trace:
    """Compute a language model's head and its loss in chunks."""
    return transforms.fused_linear_cross_entropy(trace, in_torch=partial(_runs_in_torch, context=context))


def decompose_cross_entropy(trace: Trace, context: Context) -> Trace:
    """Compute losses of many scores without their softmax."""
    return transforms.decompose_cross_entropy(trace, in_torch=partial(_runs_in_torch, context=context))


def fold_norms(trace: Trace, context: Context) -> Trace:
    """Fold batch norms into the weights of the preceding layers."""
    in_torch = partial(_runs_in_torch, context=context)
    return transforms.fold_norms(trace, freezing=context.freezing, in_torch=in_torch)


def join_products(trace: Trace, context: Context) -> Trace:
    """Join linear layers of one input."""
    in_torch = partial(_runs_in_torch, context=context)
    return transforms.join_products(trace, freezing=context.freezing, in_torch=in_torch)


def contract(trace: Trace, context: Context) -> Trace:
    """Compute sums of broadcast products as matrix products, where neighbouring ops are fused."""
    in_torch = partial(_runs_in_torch, context=context)
    return transforms.contract(trace, strides=partial(_strides_in_torch, context=context), in_torch=in_torch)


def split_groups(trace: Trace, context: Context) -> Trace:
    """Compute the groups of convolutions apart where cuDNN computes them slowly together."""
    return transforms.split_groups(trace, partial(_runs_in_torch, context=context))


def channels_last(trace: Trace, context: Context) -> Trace:
    """Compute convolutions in channels-last where neighbouring ops are fused."""
    in_torch = partial(_runs_in_torch, context=context)
    return transforms.channels_last(trace, strides=partial(_strides_in_torch, context=context), in_torch=in_torch)


def row_major(trace: Trace, context: Context) -> Trace:
    """Lay out hidden states in row-major order where neighbouring ops are fused."""
    in_torch = partial(_runs_in_torch, context=context)
    return transforms.row_major(trace, strides=partial(_strides_in_torch, context=context), in_torch=in_torch)


def masks_in_rows(trace: Trace, context: Context) -> Trace:
    """Lay out attention masks in row-major order, once for all calls that share one."""
    in_torch = partial(_runs_in_torch, context=context)
    return transforms.masks_in_rows(trace, strides=partial(_strides_in_torch, context=context), in_torch=in_torch)


def fuse_biases(trace: Trace, context: Context) -> Trace:
    """Turn vectors added to linear layers into their biases."""
    return transforms.fuse_biases(trace, in_torch=partial(_runs_in_torch, context=context))


def unfuse_addends(trace: Trace, context: Context) -> Trace:
    """Split broadcast addends from products, so that a region adds them."""
    in_torch, strides = partial(_runs_in_torch, context=context), partial(_strides_in_torch, context=context)
    return transforms.unfuse_addends(trace, context.config.is_fused, strides=strides, in_torch=in_torch)


def row_products(trace: Trace, context: Context) -> Trace:
    """Compute linear layers of few rows in regions."""
    in_torch = partial(_runs_in_torch, context=context)
    return transforms.row_products(trace, context.config.is_fused, in_torch=in_torch)


def fold_constants(trace: Trace, context: Context) -> Trace:
    """Evaluate calls that depend on no input."""
    return transforms.fold_constants(trace, run=partial(_run_now, context=context))


def mark_bounded(trace: Trace, context: Context) -> Trace:
    """Mark reads whose indices are within bounds."""
    return transforms.mark_bounded(trace, trace.constants.keys() - context.program.trace.constants.keys())


def fold_weights(trace: Trace, context: Context) -> Trace:
    """Turn values that depend on weights alone into inputs, recomputed when a weight changes."""
    lower = partial(_lower_folded, context=context)
    trace, context.folded_weights = freezing.fold_weights(trace, context.freezing, lower)
    return trace


def _lower_folded(ahead: Trace, context: Context) -> tuple[Trace, Callable[..., Any]]:
    """Return the claimed trace that computes frozen weights, and its function; the function's text is a stage."""
    own = context.of_another(Kind.FOLDED, context.config.for_standalone(context.config.operator_executors))
    claimed = context.run_passes(ahead, own, Form.TORCH, Form.FUSED)
    context.stages.append(context.run_passes(claimed, own, Form.FUSED, Form.CODE))
    return claimed, own.generated.function


def _run_now(program: Trace, context: Context) -> tuple[torch.Tensor, ...]:
    function = _generate(program, Form.PROGRAM, context)
    with torch.no_grad():
        outputs: tuple[torch.Tensor, ...] = function()
    return outputs


def _generate(trace: Trace, form: Form, context: Context) -> Callable[..., Any]:
    """Return the function of a part of the program that runs by itself."""
    own = context.of_another(Kind.STANDALONE, context.config.for_standalone(context.config.operator_executors))
    context.run_passes(trace, own, form, Form.CODE)
    return own.generated.function


def _strides_in_torch(trace: Trace, context: Context) -> dict[str, tuple[Dim, ...]]:
    own = context.of_another(Kind.STANDALONE, context.config.for_standalone([torchex]))
    return Layouts.of(context.run_passes(trace, own, Form.PROGRAM, Form.FUSED)).strides()


def _is_taken(bound: BoundSymbol, context: Context) -> bool:
    """Return whether an executor accepts a call as it stands."""
    return choose(bound, context.config.operator_executors, []) is not None


def _runs_in_torch(bound: BoundSymbol, context: Context) -> bool:
    return runs_in_torch(bound, context.config.operator_executors)


# gradients


def gradient_rules(trace: Trace, context: Context) -> Trace:
    """Run the gradient rules, which determines where gradients flow; `differentiate` uses their result."""
    config, targets = context.config, names(trace.differentiable_inputs)
    rule_of = chooser(config.executors, context.declined, config.selection)
    context.joint = grad.differentiate(trace, targets, rule_of, again=context.kind is Kind.DOUBLE_BACKWARD)
    return trace


def differentiate(trace: Trace, context: Context) -> Trace:
    """Return the program with its gradient rules run, and build its backward."""
    program, joint = context.program, context.joint
    assert joint is not None
    context.optimized = trace
    flowing = {i: output for i, output in enumerate(joint.forward.output) if output.name in joint.active}
    mutated = [program.trace.inputs[i].name for i in program.mutated]
    weights = {program.trace.inputs[i].name for i in (*program.weights, *program.unversioned)}
    parameters = [x.name for x in program.trace.differentiable_inputs if x.name in weights]
    inputs = joint.forward.inputs
    backward, copied, unread = backward_of(joint, list(flowing.values()), inputs, mutated, parameters)
    context.derivative_or_none = Derivative(trace, joint, flowing, backward, copied, unread, forward_calls_of(joint))
    return joint.forward


def rematerialize(trace: Trace, context: Context) -> Trace:
    """Tag the calls that the backward recomputes instead of reading saved results."""
    derived, config = context.derivative, context.config
    forward = transforms.rematerialize(
        trace,
        derived.backward,
        config.can_recompute,
        derived.copied,
        derived.unread,
        fused=config.can_split,
        chains=config.memory == "smallest",
    )
    derived.joint = derived.joint._replace(forward=forward)
    return forward


def split(trace: Trace, context: Context) -> Trace:
    """Return the forward, with the values that its backward reads as a second output."""
    derived = context.derivative
    also = [value for each in derived.forward_calls for value in each.values or ()]
    parts = derived.parts = split_forward(trace, derived.backward, derived.copied, also)
    derived.epilogue = context.program.epilogue
    if derived.epilogue is not None:
        derived.epilogue, parts.forward = write_early(derived.epilogue, parts.forward, derived.joint.active)
    context.returned = names(parts.forward.output[0])
    context.eager_strides = [name for name in context.returned if name in derived.joint.decomposed]
    context.layouts = Layouts(parts.forward.inputs)
    return parts.forward


def inline_effects(trace: Trace, context: Context) -> Trace:
    """Inline the epilogue into a program through which no gradient flows."""
    context.optimized = trace
    whole = inline_epilogue(context.program, trace)
    whole = whole.derive("inline_effects", live_calls(whole.bound_symbols, whole.output_names))
    context.returned = whole.output_names
    context.layouts = Layouts(whole.inputs)
    return whole


def write_in_place(trace: Trace, context: Context) -> Trace:
    """Update a slice of an input in place."""

    def operator_of(bound: BoundSymbol) -> Symbol | None:
        return in_place_operator(bound) if _runs_in_torch(bound, context) else None

    return transforms.write_in_place(trace, operator_of)


def add_rows_in_place(trace: Trace, context: Context) -> Trace:
    """Add gradients of a table's rows in place, into the rest of the table's gradient."""
    return transforms.add_rows_in_place(trace, ADD_ROWS, partial(_runs_in_torch, context=context))


def sum_few_rows(trace: Trace, context: Context) -> Trace:
    """Compute gradients of tables of few rows as masked sums."""
    return transforms.sum_few_rows(trace, context.config.is_fused)


def scatter_in_place(trace: Trace, context: Context) -> Trace:
    """Scatter into the memory of the zeros that a scatter reads."""

    def in_torch(bound: BoundSymbol) -> bool:
        return _runs_in_torch(bound, context) and not context.config.is_fused(bound)

    return transforms.scatter_in_place(trace, SCATTERS, in_torch)


def contiguous_batches(trace: Trace, context: Context) -> Trace:
    """Lay out the factors of batched products contiguously where they are computed."""
    in_torch = partial(_runs_in_torch, context=context)

    def strides(trace: Trace) -> Mapping[str, tuple[Dim, ...]]:
        return _layouts_in_torch(trace, context).strides()

    return transforms.contiguous_batches(trace, context.config.is_fused, strides=strides, in_torch=in_torch)


def decoding_attention(trace: Trace, context: Context) -> Trace:
    """Compute attention of few queries by special kernels, which also write a static cache."""
    takes, in_torch = partial(_is_taken, context=context), partial(_runs_in_torch, context=context)
    return transforms.decoding_attention(trace, INDEX_COPY, takes, in_torch)


def join_quantized(trace: Trace, context: Context) -> Trace:
    """Join linear layers with quantized weights of one input, if one executor accepts them alone and joined."""
    executors = context.config.operator_executors

    def executor_of(bound: BoundSymbol) -> Executor | None:
        candidate = choose(bound, executors, [])
        return None if candidate is None else candidate[0]

    def takes(joined: BoundSymbol, layers: Sequence[BoundSymbol]) -> bool:
        executor = executor_of(joined)
        return executor is not None and all(executor_of(layer) is executor for layer in layers)

    return transforms.join_quantized(trace, takes)


# to executors' calls


def products(trace: Trace, context: Context) -> Trace:
    """Make one call of each matrix product and its consumers, where that was measured to be faster."""
    config = context.config
    executor = config.product_executors[0]
    layouts = _layouts_in_torch(trace, context)

    def note(bound: BoundSymbol, reason: str) -> None:
        for name in bound.outputs:
            context.declined[name] = [*context.declined.get(name, ()), (executor.name, reason)]

    def is_product(bound: BoundSymbol) -> bool:
        decision = call_checker(executor.is_product, bound)
        if isinstance(decision, Declined):
            note(bound, decision.reason)
        return bool(decision) and Tag.NO_FUSE not in bound.all_tags and _runs_in_torch(bound, context)

    def is_epilogue(bound: BoundSymbol) -> bool:
        return Tag.NO_FUSE not in bound.all_tags and bool(call_checker(executor.is_epilogue, bound))

    def wins(bound: BoundSymbol, measured: BoundSymbol) -> bool:
        decision = executor.can_fuse(bound)
        if isinstance(decision, Declined):
            note(bound.subsymbols[0], decision.reason)
            return False
        excluded = config.selection(bound, config.executors, measured=layouts.with_strides(measured))
        if executor in excluded:
            note(bound.subsymbols[0], excluded[executor])
        return executor not in excluded

    return transforms.products(
        trace,
        is_product=is_product,
        is_epilogue=is_epilogue,
        is_fused=config.is_fused,
        views=layouts.views,
        wins=wins,
    )


def _layouts_in_torch(trace: Trace, context: Context) -> Layouts:
    """Return the layouts of all values of a program, as torch's own functions return them."""
    assert context.layouts is not None
    own = context.of_another(Kind.STANDALONE, context.config.for_standalone([torchex]))
    return context.layouts.copy().run_all(context.run_passes(trace, own, Form.PROGRAM, Form.FUSED))


def bucket_collectives(trace: Trace, context: Context) -> Trace:
    """Bucket the collectives that gather parameters and reduce gradients, in the same order on all ranks."""
    parameters = find_parameters(context.program.trace)
    inputs = context.derivative.trace.input_names if context.kind is Kind.BACKWARD else None
    return transforms.bucket_collectives(trace, parameters, MESSAGES, inputs)


def claim(trace: Trace, context: Context) -> Trace:
    """Assign each call to an executor, trying the highest level first."""
    config = context.config
    trace, context.claimed = claim_calls(trace, config.executors, context.declined, config.selection)
    return trace


def fuse(trace: Trace, context: Context) -> Trace:
    """Make one call of each fused region, compiled by its fusion executor; record the strides of every value."""
    config = context.config
    strict = config.strict or config.checks
    trace, claims, regions = fuse_claimed(trace, context.claimed, config.executors, context.layouts, strict=strict)
    context.claimed = []
    context.claims += claims
    context.regions += regions
    return trace


def restride_outputs(trace: Trace, context: Context) -> Trace:
    """Restore eager's strides of outputs for which they were recorded, where other calls than eager's compute them, or
    a value that they depend on.

    Attention's outputs have eager's strides, and its backward reads them as its kernel wrote them."""
    others = [each for each in context.claims if each.level or each.operation in WINDOWED]
    apart = [name for each in others for name in each.outputs if name in context.returned]
    foreign = {name for bound in trace.bound_symbols if _runs_code_of_others(bound) for name in bound.outputs}
    attention_outputs = {name for each in context.claims if each.operation == attention.id for name in each.outputs}
    targets = {*context.eager_strides, *apart, *(context.returned if foreign else ())}
    return layout.with_strides(trace, targets - (attention_outputs - foreign), context.layouts)


def join_copies(trace: Trace, context: Context) -> Trace:
    """Join copies to inputs of one dtype and device into one call."""
    return transforms.join_copies(trace, memory.copies)


def overlap_calls(trace: Trace, context: Context) -> Trace:
    """Start the collectives of the program early and await them late."""
    return transforms.overlap_calls(trace)


def reduce_in_place(trace: Trace, context: Context) -> Trace:
    """Make reductions over processes write to their inputs' memory, if nothing reads the inputs again.

    A function that is not forge's or torch's may return its argument, or keep a reference to it."""
    others = [bound for bound in trace.bound_symbols if _runs_code_of_others(bound)]
    unknown = {name for bound in others for name in (*bound.inputs, *bound.outputs)}
    return transforms.reduce_in_place(trace, distributed.REDUCTION, unknown)


def _runs_code_of_others(bound: BoundSymbol) -> bool:
    executor, op = bound.symbol.executor, bound.symbol.op
    if isinstance(executor, FusionExecutor):
        return not type(executor).__module__.startswith("forge.")
    return op is not None and not is_own(op)


def compare(trace: Trace, context: Context) -> Trace:
    """Compare each value with the reference's, as both are computed (check="eager")."""
    phase = "backward" if context.kind is Kind.BACKWARD else "forward"
    assert context.config.comparison is not None
    assert context.reference is not None
    comparison = context.config.comparison(trace, context.claims, context.reference, phase)
    context.wrap = comparison.wrap
    return comparison.trace


def cuda_graphs(trace: Trace, context: Context) -> Trace:
    """Make one call of each run of calls that can be recorded as a CUDA graph."""
    generate = partial(_generate, form=Form.FUSED, context=context)
    trusted: list[str] = []
    gradients: set[str] = set()  # of the program's outputs
    if context.kind is Kind.PROGRAM:
        trusted = trace.input_names  # Dynamo guards these
    elif context.kind is Kind.BACKWARD:
        trusted = names(context.derivative.parts.saved_tensors)
        gradients = set(trace.input_names).difference(trusted)
    return cuda_graph_partition.record(
        trace,
        _GRAPHS,
        generate,
        context.returned,
        trusted,
        gradients,
        is_requested=context.config.cuda_graphs is True,
    )


def overlap_collectives(trace: Trace, context: Context) -> Trace:
    """Start messages that gather and reduce parameters early, and await them late, within the memory limit."""
    return transforms.overlap_collectives(trace, find_parameters(context.program.trace), MESSAGES)


def bucket_gradients(trace: Trace, context: Context) -> Trace:
    """Yield the gradients of a backward in buckets, each as soon as it is computed."""
    buckets = context.buckets
    assert buckets is not None
    if buckets.positions is None:
        assert buckets.limit is not None
        buckets.positions = find_buckets(trace, buckets.limit, context.derivative.inputs_with_grad)
    return in_buckets(trace, buckets.positions)


def lifetimes(trace: Trace, context: Context) -> Trace:
    """Delete each value after its last use."""
    return transforms.delete_last_used(trace, own_inputs=trace.boxed)


def codegen(trace: Trace, context: Context) -> Trace:
    """Print the trace as Python and compile it; a file that the user edited (edit=) is a stage."""
    edited = context.config.codegen
    function, final = (trace.python_callable(), trace) if edited is None else edited(trace)
    if final is not trace:
        context.stages.append(final)
    if context.kind is not Kind.CALL and context.wrap is None:  # else the results are compared with torch's
        expect(function, final)
    context.generated = GeneratedFunction(function if context.wrap is None else context.wrap(function), final)
    return final
