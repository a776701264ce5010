"""Weights folded ahead of time (forge.jit(freeze=True)): which are constants, and which values they determine."""

from collections.abc import Callable
from typing import Any

from forge.compiler.layout import Layouts
from forge.compiler.program import Program
from forge.ir import Tag, TensorProxy, Trace
from forge.ir.printing import quantity
from forge.ir.pytree import names, tensors
from forge.runtime.frozen import FoldedWeights
from forge.transforms import Freezing, partition_by_weights


def freezing_of(program: Program) -> Freezing:
    """Return the weights of a program that may be constants: none if gradients may be needed, and none that the
    program mutates."""
    inputs = program.trace.inputs
    name = _differentiable_input(program.trace)
    if name is not None:
        return Freezing((), misses=[f"all weights: gradients are needed (grad mode is on, and {name} requires grad)"])
    still = tensors([inputs[i] for i in program.weights if i not in program.mutated])
    freezing = Freezing({x.name for x in still if all(isinstance(size, int) for size in x.shape)})
    changed = [inputs[i].name for i in program.weights if i in program.mutated]
    freezing.misses += [f"{name}: the program changes it" for name in changed]
    freezing.misses += [f"{inputs[i].name}: no version tells when it changes" for i in program.unversioned]
    return freezing


def _differentiable_input(trace: Trace) -> str | None:
    """Return an input that requires a gradient, if an output may have one."""
    inputs = names(trace.differentiable_inputs)
    flowing = set(inputs)
    for bound in trace.bound_symbols:
        if Tag.NO_GRAD not in bound.tags and not flowing.isdisjoint(bound.inputs):
            flowing.update(x.name for x in tensors(bound.output) if x.is_floating_point() or x.is_complex())
    return inputs[0] if not flowing.isdisjoint(trace.output_names) else None


def fold_weights(
    trace: Trace,
    freezing: Freezing,
    lower: Callable[[Trace], tuple[Trace, Callable[..., Any]]],
) -> tuple[Trace, FoldedWeights | None]:
    """Return the trace, with the values that weights alone determine as its last inputs, and the function that
    computes them; `lower` returns a claimed trace and its function."""
    hoisted = partition_by_weights(trace, freezing.weights)
    if not hoisted.values:
        return trace, None
    claimed, function = lower(hoisted.ahead)
    layouts = Layouts.of(claimed)
    strides = [layouts.values[proxy.name].strides for proxy in hoisted.values]
    values = [
        TensorProxy(x.name, x.shape, x.dtype, x.device, strides=own)
        for x, own in zip(hoisted.values, strides, strict=True)
    ]
    reads = [trace.input_names.index(name) for name in claimed.input_names]
    new = trace.derive("fold_weights", hoisted.rest, inputs=[*trace.inputs, *values])
    freezing.folds.append(f"{quantity(len(values), 'value')} of {quantity(len(reads), 'weight')} computed ahead")
    return new, FoldedWeights(function, reads, strides)
