"""The gradient transform: gradient rules run over a trace, forward in order, backward in reverse.

`differentiate` runs the rule of every call that needs one (the claiming executor's, the symbol's own, else its
decomposition's), which yields the forward calls and, for each rule, the calls of its backward. `backward` then
joins those in reverse order. Both precede claiming and splitting, so that every later pass sees the joint program.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

from forge import clang, prims
from forge.ir import BoundSymbol, Dim, Proxy, Tag, TensorProxy, Trace, check, differentiable, recording
from forge.ir.grad_rules import RuleCall, grad_rule, run_rule
from forge.ir.pytree import tensors
from forge.ir.symbol import substitute
from forge.transforms.transposed_products import transpose_products


class Choice(NamedTuple):
    """How the executor that will claim a call wants it differentiated: by its own rule; decomposed, if the backward
    reads a value from inside it; or as one call, with such values recomputed. A rule returns NotImplemented if it has
    no gradient of an argument that needs one; then, too, the call stays one. An error of the rule is passed to
    `blame`."""

    rule: Callable[..., Any] | None = None
    recompute: bool = False
    blame: Callable[[Exception], None] | None = None


Choose = Callable[[BoundSymbol, Collection[str]], Choice]  # of a call and of the names through which gradients flow


class RuleRun:
    """One run of a rule: the gradients it takes and returns, and the calls between the two."""

    __slots__ = ("calls", "gets", "puts")

    def __init__(self, call: RuleCall, calls: list[BoundSymbol]) -> None:
        self.gets = call.gets
        self.puts = call.puts
        self.calls = calls


class Joint(NamedTuple):
    """A differentiated trace: `forward` computes its output, `runs` hold the calls of its backward, in forward order.

    `active` names the values through which gradients flow, `decomposed` the results of decomposed calls, and values
    computed from these: their strides may differ from those of the calls' own results.
    """

    forward: Trace
    runs: list[RuleRun]
    active: set[str]
    decomposed: Collection[str] = frozenset()


def differentiate(
    trace: Trace, targets: Sequence[str], choose: Choose = lambda bound, active: Choice(), *, again: bool = False
) -> Joint:
    """Run the gradient rules of every call on a path from the inputs `targets`.

    again: the backward will be differentiated, or the trace is such a backward. A backward may read any value, so that
    gradients flow to outputs for which the call's own rule takes none (the statistics of a norm): there the
    decomposition's rules run.
    Raises NotImplementedError naming a prim without a rule.
    """
    new = trace.derive("differentiate")
    walker = _Forward(new, set(targets), choose, again)
    decomposed: set[str] = set()
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            calls = walker.visit(bound)
            new.bound_symbols.extend(calls)
            if not _stays_whole(bound, calls) or not decomposed.isdisjoint(bound.inputs):
                decomposed.update(bound.outputs)
    return Joint(new, walker.runs, walker.active, decomposed)


def active_names(trace: Trace) -> set[str]:
    """Return the names of the values through which gradients may flow; the rules may take fewer."""
    active = {x.name for x in trace.differentiable_inputs}
    for bound in trace.bound_symbols:
        if not active.isdisjoint(bound.inputs) and is_differentiated(bound):
            active.update(output.name for output in tensors(bound.output) if differentiable(output))
    return active


def is_differentiated(bound: BoundSymbol) -> bool:
    """Return whether gradients may flow through a call, if one flows to an argument."""
    return Tag.NO_GRAD not in bound.tags and Tag.NOT_DIFFERENTIABLE not in bound.symbol.tags


def _reached_names(bound: BoundSymbol, names: Collection[str]) -> set[str]:
    """Return these names and those of the values that a call computes from them, inside of it too."""
    result = set(names)
    for call in bound.subsymbols or [bound]:
        if call is bound or not result.isdisjoint(call.inputs):
            result.update(_reached_names(call, result) if call.subsymbols else call.outputs)
    return result


def _stays_whole(bound: BoundSymbol, calls: Sequence[BoundSymbol]) -> bool:
    return len(calls) == 1 and (calls[0] is bound or Tag.OPAQUE_TO_PASSES in calls[0].tags)


class _Forward:
    def __init__(self, trace: Trace, active: set[str], choose: Choose, again: bool) -> None:
        self.trace = trace
        self.active = active
        self.choose = choose
        self.again = again
        self.runs: list[RuleRun] = []

    def visit(self, bound: BoundSymbol) -> list[BoundSymbol]:
        """Return the forward calls that replace `bound`; its outputs keep their names."""
        if Tag.LEAF_VIEW in bound.tags and not self.active.isdisjoint(bound.inputs):
            names = _reached_names(bound, self.active)
            self.active.update(
                output.name for output in tensors(bound.output) if differentiable(output) and output.name in names
            )
        if not is_differentiated(bound):
            return [bound]
        if self.active.isdisjoint(bound.inputs) or not any(differentiable(out) for out in tensors(bound.output)):
            return [bound]
        bound = bound.replace(tags=bound.tags | {Tag.DIFFERENTIATED})
        choice = self.choose(bound, self.active)
        if choice.rule is not None:
            try:
                calls = self.apply(choice.rule, bound)
            except Exception as error:
                if choice.blame is not None:
                    choice.blame(error)
                raise
            if calls is not None:
                return calls
        calls = self.differentiate(bound, grad_rule(bound.symbol))
        if (choice.recompute or choice.rule is not None) and calls != [bound]:
            inside = [_with_tag(call, Tag.RECOMPUTE) for each in calls for call in each.subsymbols or [each]]
            return [bound.replace(subsymbols=inside, tags=bound.tags | {Tag.OPAQUE_TO_PASSES})]
        return calls

    def differentiate(self, bound: BoundSymbol, rule: Callable[..., Any] | None) -> list[BoundSymbol]:
        """Differentiate a call by a rule, or by its decomposition's rules."""
        calls = None if rule is None else self.apply(rule, bound)
        if calls is not None:
            return calls
        check(
            bool(bound.subsymbols),
            lambda: (
                f"{bound.symbol.id} has no gradient rule: register one with @register_grad beside its definition"
                f"{_package_of(bound)}, or detach its input"
            ),
            NotImplementedError,
        )
        children = [call for sub in bound.subsymbols for call in self.visit(sub)]
        return [bound.replace(subsymbols=children)]

    def apply(self, rule: Callable[..., Any], bound: BoundSymbol) -> list[BoundSymbol] | None:
        """Apply a rule; return None if it returns NotImplemented, having no gradient of an argument that needs one, or
        if it cannot be differentiated again."""
        call = RuleCall(lambda argument: argument.name in self.active)
        with self.trace.collecting() as recorded, self.trace.set_tags(bound.tags, bound.source):
            output = run_rule(rule, call, bound.args, bound.kwargs)
        if output is NotImplemented:
            return None
        results = tensors(output)
        fault = next(_faults(bound, call, results, recorded), None)
        name = getattr(rule, "__qualname__", rule)
        check(fault is None, lambda: f"{name}: the gradient rule of {bound.symbol.id} {fault}", RuntimeError)
        if self.again and bound.subsymbols and rule is not bound.symbol.rule and _ignores_an_output(results, call):
            return None
        for new, old in zip(results, tensors(bound.output), strict=True):
            self.trace.names.discard(new.name)
            new.name = old.name
        forward, backward = _divide(recorded, {proxy.name for proxy in results}, call.before)
        if call.puts or call.ends:
            self.active.update(output.name for output, _ in call.gets)
        if call.puts:
            self.runs.append(RuleRun(call, backward))
        if len(forward) == 1 and forward[0].symbol is bound.symbol:
            return [bound.replace(tags=forward[0].tags)]
        return [bound.replace(subsymbols=forward)] if bound.symbol.body is not None else forward


def _faults(
    bound: BoundSymbol, call: RuleCall, results: Sequence[TensorProxy], recorded: Sequence[BoundSymbol]
) -> Iterator[str]:
    """Yield what is wrong with the run of a rule, in words. A result that is an argument would delete the call, and an
    argument without a gradient would be a weight that does not learn."""
    arguments, originals = tensors((bound.args, bound.kwargs)), tensors(bound.output)
    new = {each.name for one in recorded for each in tensors(one.output)}.difference(bound.inputs)
    if len(results) != len(originals):
        yield f"returned {len(results)} tensors, but it has {len(originals)}"
    names: dict[str, str] = {}
    for result, old in zip(results, originals, strict=True):
        is_right = result.name in new if old.name in bound.outputs else result.name == old.name
        if not is_right or names.setdefault(result.name, old.name) != old.name:
            yield f"returns {result}, which is not a new value in the place of {old}: return what the rule computes"
    for output, _ in call.gets:
        if not any(output is each for each in results):
            yield f"reads the gradient of {output}, which is none of the values that it returns"
    for target in call.targets:
        if target.name not in bound.inputs:
            yield f"gives a gradient to {target}, which is none of its arguments"
    for argument in arguments:
        if call.active(argument) and not any(argument is each for each in call.targets):
            yield (
                f"gives {_argument_name(argument, bound)}, which is {argument}, no gradient: call put_grad(argument, "
                "gradient), or put_grad(argument, None) if it has none"
            )
    for argument, gradient, _ in call.puts:
        if not isinstance(gradient, TensorProxy) or not sums_to(gradient.shape, argument.shape):
            what = "another shape" if isinstance(gradient, TensorProxy) else f"type {type(gradient).__name__}"
            yield f"gives {_argument_name(argument, bound)}, which is {argument}, a gradient of {what}: {gradient}"
    if call.puts and not call.gets:
        yield "gives gradients, but reads none of its results: call get_grad(result)"


def sums_to(gradient: Sequence[Dim], shape: Sequence[Dim]) -> bool:
    """Return whether autograd sums a gradient of the one shape to the other."""
    extra = len(gradient) - len(shape)
    pairs = zip(shape, gradient[max(extra, 0) :], strict=False)
    return extra >= 0 and all(prims.same(size, own) or prims.same(size, 1) for size, own in pairs)


def _argument_name(argument: TensorProxy, bound: BoundSymbol) -> str:
    """Return the user's name for an argument of a call: its position, or its name."""
    places = [*((f"argument {i}", each) for i, each in enumerate(bound.args)), *bound.kwargs.items()]
    return next((place for place, each in places if any(argument is one for one in tensors(each))), "a value")


def _ignores_an_output(outputs: Sequence[TensorProxy], call: RuleCall) -> bool:
    used_names = {output.name for output, _ in call.gets}
    return any(differentiable(output) and output.name not in used_names for output in outputs)


def _package_of(bound: BoundSymbol) -> str:
    """Return the file of a forge prim's definition, in words."""
    return " in forge/prims" if bound.symbol.definition.__module__.startswith("forge.") else ""


def _with_tag(bound: BoundSymbol, tag: Tag) -> BoundSymbol:
    """Return the call, and those inside it, with one more tag."""
    return bound.replace(tags=bound.tags | {tag}, subsymbols=[_with_tag(sub, tag) for sub in bound.subsymbols])


def _divide(
    calls: list[BoundSymbol], needed: set[str], before: int | None
) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """Return a rule's calls that its result needs, and the others, which belong to the backward. A random call stays
    where the rule makes it: in the forward if it comes `before` the rule reads a gradient."""
    forward, backward = [], []
    for i, bound in reversed(list(enumerate(calls))):
        random = Tag.RANDOM in bound.all_tags and (before is None or i < before)
        if not needed.isdisjoint(bound.outputs) or random:
            needed.update(bound.inputs)
            forward.append(bound)
        else:
            backward.append(bound)
    return forward[::-1], backward[::-1]


def without_gradients(joint: Joint, unreached: Callable[[BoundSymbol], Collection[str]]) -> Joint:
    """Return the joint program without those results of the backward's calls that are no gradients; `unreached`
    returns their names for a call."""
    runs = []
    for run in joint.runs:
        dropped = {name for bound in run.calls for name in unreached(bound)}
        clone = copy(run)
        clone.puts = [put for put in run.puts if put[1].name not in dropped]
        if clone.puts:
            runs.append(clone)
    return joint._replace(runs=runs)


def backward(joint: Joint, seeds: dict[str, TensorProxy], targets: Sequence[Proxy]) -> Trace:
    """Return the backward program: from gradients of outputs (`seeds`, by the output's name) to gradients of `targets`.

    Its inputs are the seeds; it also reads names of the forward. The gradient of an input that none reaches is None.
    """
    trace = joint.forward.derive("backward", name="backward", inputs=list(seeds.values()), output=None)
    walker = _Backward(trace)
    with recording(trace, clang.language):
        for name, seed in seeds.items():
            walker.gradients.setdefault(name, []).append(seed)
        for run in reversed(joint.runs):
            walker.visit(run)
        trace.output = tuple(walker.take(proxy) if isinstance(proxy, TensorProxy) else None for proxy in targets)
    return transpose_products(trace, targets)


class _Backward:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.gradients: dict[str, list[TensorProxy]] = {}
        self.slices: dict[str, BoundSymbol] = {}

    def visit(self, run: RuleRun) -> None:
        """Record the backward of one rule, unless no gradient reaches it."""
        incoming = [(self.take(output), output, stand_in) for output, stand_in in run.gets]
        if all(gradient is None for gradient, _, _ in incoming):
            return
        env: dict[str, Any] = {}
        for gradient, output, stand_in in incoming:
            if gradient is None:
                gradient = prims.full(output.shape, 0, output.dtype, output.device)
            env[stand_in.name] = gradient
        for bound in run.calls:
            new = substitute(bound, env)
            self.trace.record(new)
            if new.symbol is prims.slice_backward:
                self.slices[new.output.name] = new
        missing = {output.name for gradient, output, _ in incoming if gradient is None}
        for argument, gradient, of in run.puts:
            if not missing.isdisjoint(output.name for output in of):
                continue
            gradient = env.get(gradient.name, gradient)
            self.gradients.setdefault(argument.name, []).append(self.fit(gradient, argument))

    def fit(self, gradient: TensorProxy, argument: TensorProxy) -> TensorProxy:
        """Return the gradient summed to the argument's shape, in its dtype, on its device; the real part for a real
        one."""
        if gradient.dtype.is_complex and not argument.dtype.is_complex:
            gradient = prims.real(gradient)  # before it is summed
        extra = gradient.ndim - argument.ndim
        dims = tuple(range(extra)) + tuple(
            dim + extra
            for dim, size in enumerate(argument.shape)
            if size is not gradient.shape[dim + extra]
            and prims.statically_true(size == 1)
            and not prims.statically_true(gradient.shape[dim + extra] == 1)
        )
        if dims and not extra:
            gradient = clang.sum(gradient, dims, True)
        elif dims:
            gradient = clang.reshape(prims.sum(gradient, dims), argument.shape)
        gradient = clang.convert(gradient, argument.dtype)
        if gradient.device != argument.device:  # a 0-d CPU tensor combined with tensors on another device
            gradient = prims.device_put(gradient, argument.device)
        return gradient

    def take(self, proxy: TensorProxy) -> TensorProxy | None:
        """Return the sum of a value's accumulated gradients."""
        gradients = self.gradients.pop(proxy.name, None)
        if not gradients:
            return None
        gradients = self.join_slices(gradients)
        total = gradients[0]
        for gradient in gradients[1:]:
            total = clang.add(total, gradient)
        self.gradients[proxy.name] = [total]
        return total

    def join_slices(self, gradients: list[TensorProxy]) -> list[TensorProxy]:
        """Return the gradients with those of slices that tile a dim as one concatenation, not a sum of padded ones."""
        parts = [self.slices[gradient.name] for gradient in gradients if gradient.name in self.slices]
        if len(parts) < 2:
            return gradients
        pieces = sorted((bound.args for bound in parts), key=lambda args: (str(args[2]), str(args[3]).zfill(12)))
        dim, size = pieces[0][2], pieces[0][1][pieces[0][2]]
        position = 0
        for _, _, piece_dim, start, stop, step in (tuple(args) + (1,) * (6 - len(args)) for args in pieces):
            if piece_dim != dim or step != 1 or not isinstance(start, int) or start != position:
                return gradients
            position = stop
        if not isinstance(size, int) or position != size:
            return gradients
        joined = prims.cat([args[0] for args in pieces], dim)
        return [joined, *[gradient for gradient in gradients if gradient.name not in self.slices]]
