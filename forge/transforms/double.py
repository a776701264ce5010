"""The backward as a program of the forward's own inputs, so that it can be differentiated again: double backward.

An ordinary backward reads the forward's residuals, which have no history. `differentiable_backward` recomputes
the forward: one pure trace from a program's inputs and the gradients of its outputs to the gradients of the
inputs. It uses every call's own gradient rule (or its decomposition's), and no executor's, so that all of its calls
have rules; it is compiled and differentiated as any program is, to any order.

Values that must not be recomputed are its inputs: the forward's random draws, and results of opaque calls without a
gradient.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from forge import clang, prims
from forge.ir import BoundSymbol, Proxy, Symbol, Tag, TensorProxy, Trace, check, recording
from forge.ir.grad_rules import grad_rule
from forge.ir.pytree import proxies, rename, tensors
from forge.ir.symbol import substitute
from forge.torchlang.opaque import Pullback, keeps_graph, repeated_rule
from forge.transforms.dce import dce, live_calls
from forge.transforms.grad import Choice, Choose, Joint, backward, differentiate, without_gradients
from forge.transforms.split import free_names, unfold

F = TypeVar("F", bound=Callable[..., Any])
_redraws: dict[Symbol, Callable[..., Any]] = {}


def register_redraw(symbol: Symbol) -> Callable[[F], F]:
    """Register how a differentiable random call's result is computed from its draws.

    The decorated function takes the call's output, of which only tensors that are not floating point are known, and
    its arguments; it returns the output.
    """

    def register(function: F) -> F:
        check(symbol not in _redraws, lambda: f"register_redraw: {symbol.id} is registered already")
        _redraws[symbol] = function
        return function

    return register


class ForwardCall:
    """A call that runs once, in the forward, and the values of its output that a differentiable backward takes.

    values: None if it is not known how its result depends on its arguments.
    """

    __slots__ = ("bound", "values")

    def __init__(self, bound: BoundSymbol, active: set[str]) -> None:
        self.bound = bound
        outputs = [proxy for proxy in proxies(bound.output) if proxy.name in bound.outputs]
        self.values: list[Proxy] | None = outputs
        if Tag.ZERO_GRAD not in bound.symbol.tags and not active.isdisjoint(bound.outputs):
            redrawn = bound.symbol in _redraws
            self.values = [proxy for proxy in outputs if not _is_inexact(proxy)] if redrawn else None


def _is_inexact(proxy: Proxy) -> bool:
    return isinstance(proxy, TensorProxy) and (proxy.dtype.is_floating_point or proxy.dtype.is_complex)


def forward_calls_of(joint: Joint, repeated: Collection[str] = ()) -> list[ForwardCall]:
    """Return the calls of a forward that must not be recomputed, in order: random ones, and opaque ones without a
    gradient.

    repeated: names of results of opaque calls that are recomputed.
    """
    return [ForwardCall(bound, joint.active) for bound in _run_once(joint.forward.bound_symbols, repeated)]


def _run_once(calls: Iterable[BoundSymbol], repeated: Collection[str]) -> Iterator[BoundSymbol]:
    for bound in calls:
        if _runs_once(bound, repeated):
            yield bound
        elif _holds_one(bound):
            yield from _run_once(bound.subsymbols, repeated)


def _runs_once(bound: BoundSymbol, repeated: Collection[str]) -> bool:
    if Tag.OPAQUE in bound.symbol.tags:
        return not keeps_graph(bound) and not any(name in repeated for name in bound.outputs)
    if bound.symbol.rule is not None and not bound.all_tags.isdisjoint((Tag.RANDOM, Tag.OPAQUE)):
        return True
    if Tag.RANDOM not in bound.all_tags:
        return False
    if Tag.DIFFERENTIATED not in bound.tags or Tag.ZERO_GRAD in bound.symbol.tags:
        return True
    return not bound.subsymbols or Tag.OPAQUE_TO_PASSES in bound.tags or bound.symbol in _redraws


def _holds_one(bound: BoundSymbol) -> bool:
    return bool(bound.subsymbols) and not bound.all_tags.isdisjoint((Tag.RANDOM, Tag.OPAQUE))


def readable_inputs(trace: Trace, outputs: Iterable[str]) -> set[str]:
    """Return the names of the inputs that a differentiable backward from these outputs may read."""
    live = live_calls([part for bound in trace.bound_symbols for part in _differentiated_parts(bound)], outputs)
    return {name for bound in live for name in bound.inputs}.intersection(trace.input_names)


def _differentiated_parts(bound: BoundSymbol) -> Iterator[BoundSymbol]:
    """Yield the prims of a call, and the composites whose gradients are not their prims'. The rule of such a composite
    may read all of its arguments."""
    stays = Tag.OPAQUE_TO_PASSES in bound.tags or Tag.RANDOM in bound.all_tags or grad_rule(bound.symbol) is not None
    if stays or not bound.subsymbols:
        yield bound
        return
    for sub in bound.subsymbols:
        yield from _differentiated_parts(sub)


def differentiable_backward(
    trace: Trace,
    targets: Sequence[str],
    seeds: dict[str, TensorProxy],
    choose: Choose,
    forward_calls: Sequence[ForwardCall],
    unreached: Mapping[str, Sequence[int]] = MappingProxyType({}),
    missing: Collection[str] = (),
) -> Trace:
    """Return the backward of `trace` as a program: inputs are the trace's, the values of `forward_calls`, and the
    gradients of outputs (`seeds`, by the output's name); its output is None for an input that no gradient reaches.

    choose: the executors' choices, which hold for random calls. forward_calls: those of the forward that ran.
    unreached: by the names of opaque calls' results, which of their gradients are None.
    missing: the names of inputs that are None at run time: no composite is called with one.
    Raises NotImplementedError naming a call without a gradient rule, or one that would have to draw again.
    """
    repeated: set[str] = set()

    def choice(bound: BoundSymbol, active: Collection[str]) -> Choice:
        check(
            Tag.ONCE_DIFFERENTIABLE not in bound.symbol.tags,
            lambda: (
                "trying to differentiate twice a function that was marked with @once_differentiable, or whose "
                f"backward calls another torch.autograd.Function ({bound})"
            ),
            RuntimeError,
        )
        rule = repeated_rule(bound)
        if rule is not None:
            repeated.update(bound.outputs)
            return Choice(rule)
        return choose(bound, active) if Tag.RANDOM in bound.all_tags else Choice()

    joint = differentiate(trace, targets, choice, again=True)
    if unreached:
        dropped = set(_unreached_gradients(joint, unreached))
        joint = without_gradients(joint, lambda bound: dropped.intersection(bound.outputs))
    back = backward(joint, seeds, trace.inputs)
    program = back.derive("differentiable backward", name="backward", inputs=[], output=None)
    replacer = _Replacer(program, forward_calls_of(joint, repeated), forward_calls, repeated)
    with recording(program, clang.language):
        forward = list(replacer.replace(joint.forward.bound_symbols))
    forward, copied = show_inside(program, forward, {*free_names(back, set())})
    program.bound_symbols.extend([*forward, *[substitute(bound, copied) for bound in back.bound_symbols]])
    program.inputs = [*trace.inputs, *replacer.inputs, *seeds.values()]
    with recording(program):
        program.output = _own_values(program, rename(back.output, copied))
    program.bound_symbols[:] = _without_arguments(program.bound_symbols, missing)
    return dce(program)


def _without_arguments(calls: Iterable[BoundSymbol], missing: Collection[str]) -> Iterator[BoundSymbol]:
    """Yield the calls, with composites that take a missing input decomposed: the parts that read the input are dead
    code."""
    for bound in calls:
        if not bound.subsymbols or bound.symbol.rule is not None or not any(name in missing for name in bound.inputs):
            yield bound
        else:
            yield from _without_arguments(bound.subsymbols, missing)


def _unreached_gradients(joint: Joint, unreached: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield the names of the results of an opaque call's backward that are None."""
    for run in joint.runs:
        places = {place for output, _ in run.gets for place in unreached.get(output.name, ())}
        for bound in run.calls:
            if isinstance(bound.symbol.op, Pullback):
                yield from (bound.output[place].name for place in places)


def show_inside(
    trace: Trace, calls: Iterable[BoundSymbol], targets: set[str]
) -> tuple[list[BoundSymbol], dict[str, TensorProxy]]:
    """Return the calls with the composites decomposed whose inner values are needed, and the new names of those values.

    A call with a user's rule (torch.autograd.Function) stays one, since its decomposition has another gradient: the
    inner values that its backward reads are computed beside it, and are constants, as in eager.
    """
    flat: list[BoundSymbol] = []
    copied: dict[str, TensorProxy] = {}
    for bound in calls:
        parts = unfold([bound], targets)
        if parts == [bound]:
            flat.append(bound)
        elif bound.symbol.rule is None:
            more, renamed = show_inside(trace, bound.subsymbols, targets)
            flat += more
            copied.update(renamed)
        else:
            inside = {proxy.name: proxy for part in parts for proxy in tensors(part.output)}
            fresh = {
                name: trace.tensor(proxy.shape, proxy.dtype, proxy.device)
                for name, proxy in inside.items()
                if name not in bound.inputs
            }
            copied.update((name, proxy) for name, proxy in fresh.items() if name not in bound.outputs)
            flat += [bound, *[_constant(substitute(part, fresh)) for part in parts]]
    return flat, copied


def _constant(bound: BoundSymbol) -> BoundSymbol:
    return bound.replace(tags=bound.tags | {Tag.NO_GRAD})


class _Replacer:
    """Substitution of the forward's draws for the calls that drew them."""

    def __init__(
        self, trace: Trace, own: Sequence[ForwardCall], forward_calls: Sequence[ForwardCall], repeated: Collection[str]
    ) -> None:
        ids = [[each.bound.symbol.id for each in calls] for calls in (own, forward_calls)]
        assert ids[0] == ids[1], f"the forward's calls and those of its differentiable backward differ: {ids}"
        self.trace = trace
        self.repeated = repeated
        self.partner = {id(ours.bound): theirs for ours, theirs in zip(own, forward_calls, strict=True)}
        self.inputs: list[Proxy] = []

    def replace(self, calls: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
        for bound in calls:
            if _runs_once(bound, self.repeated):
                yield from self.substitute(bound, self.partner[id(bound)])
            elif _holds_one(bound):
                yield from self.replace(bound.subsymbols)
            else:
                yield bound

    def substitute(self, bound: BoundSymbol, theirs: ForwardCall) -> list[BoundSymbol]:
        """Return the replacement of a call: no calls if all its results are inputs."""
        if theirs.values is None:
            raise NotImplementedError(
                f"double backward (create_graph=True) through {bound.symbol.id}: it draws random numbers, or may, "
                "which cannot be drawn again; run it in eager, or without its randomness"
            )
        names = {proxy.name for proxy in theirs.values}
        pairs = zip(proxies(bound.output), proxies(theirs.bound.output), strict=True)
        self.inputs += [ours for ours, other in pairs if other.name in names]
        redraw = _redraws.get(bound.symbol)
        if redraw is None or len(names) == len(bound.outputs):
            return []
        input_names = {proxy.name for proxy in self.inputs}
        with self.trace.collecting() as calls, self.trace.set_tags(bound.tags, bound.source):
            output = redraw(bound.output, *bound.args, **bound.kwargs)
        for new, old in zip(tensors(output), tensors(bound.output), strict=True):
            if old.name not in input_names:
                new.name = old.name
        return calls


def _own_values(program: Trace, output: Sequence[TensorProxy | None]) -> tuple[TensorProxy | None, ...]:
    """Return the output with a copy of each value that is an input, a constant, or a duplicate."""
    used_names = set(program.input_names) | set(program.constants)
    values: list[TensorProxy | None] = []
    for value in output:
        if value is not None and value.name in used_names:
            value = prims.clone(value)
        if value is not None:
            used_names.add(value.name)
        values.append(value)
    return tuple(values)
