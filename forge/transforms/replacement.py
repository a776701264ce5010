"""Replacement of calls by others with equivalent results."""

from collections.abc import Callable, Sequence
from typing import Any

from forge import torchlang
from forge.ir import BoundSymbol, LanguageContext, Proxy, TensorProxy, Trace, check, recording
from forge.ir.memory import Memory
from forge.ir.printing import in_words
from forge.ir.pytree import leaves, proxies
from forge.ir.symbol import substitute
from forge.transforms.dce import live_calls
from forge.transforms.shared_memory import SharedMemory

Rule = Callable[[BoundSymbol], Any]


def rewrite(trace: Trace, stage: str, rule: Rule, *, language: LanguageContext = torchlang.language) -> Trace:
    """Return the trace with the calls that `rule` replaces replaced; unchanged if it replaces none.

    `rule(call)` runs on each call, in order. It returns None to keep the call, or else the value to read in place
    of its result, which has the same shape, dtype and device:

    - an earlier value, which drops the call;
    - the result of calls that the rule makes, by torch's functions or by symbols. They replace the call, with its tags,
      its line of the user's program and the names of its results. They may change new values in place, and no other.

    The tags decide whether calls have a gradient, not torch.no_grad in the rule: `detach` ends one there.

    Later calls and the output read the new value. A result that the program returns keeps its own memory: its
    replacement is cloned if it may alias another value. Calls without remaining users are dropped.

    Args:
        trace: A program of torch's functions.
        stage: The name of the new trace.
        rule: Called with each call, whose arguments are those that it has after the replacements before it.
        language: The meaning of operators and methods of proxies in `rule`: torch's by default.

    Raises:
        ValueError: A replacement has another shape, dtype or device, or changes an earlier value in place.
    """
    new, values, changed = trace.derive(stage), _Values(trace), False
    with recording(new, language):
        for bound in trace.bound_symbols:
            call = substitute(bound, values.replaced)
            with new.collecting() as recorded, new.set_tags(bound.tags, bound.source):
                result = new.memory.read_all(rule(call))
                _check_writes(stage, call, new.memory, recorded)
                if result is not None:
                    _check(stage, call, result)
                    outputs = values.with_own_memory(bound, proxies(result), recorded)
            if result is None:
                new.record(call)
                continue
            changed = True
            for each in values.replace(bound, outputs, recorded):
                new.record(each)
    if not changed:
        return trace
    new.bound_symbols[:] = live_calls(new.bound_symbols, new.output_names)
    return new


class _Values:
    """The values of a trace that are replaced by others, by name."""

    def __init__(self, trace: Trace) -> None:
        self.replaced: dict[str, Proxy] = {}
        self._returned = frozenset(trace.output_names)

    def with_own_memory(self, bound: BoundSymbol, results: list[Proxy], recorded: list[BoundSymbol]) -> list[Proxy]:
        """Return the new results of a call; those that the program returns are cloned if they alias another value."""
        outputs, used_memory = list(results), set[str]()
        new = {name for call in recorded for name in call.outputs}
        for index, (old, now) in enumerate(zip(proxies(bound.output), results, strict=True)):
            if old.name in self._returned.intersection(bound.outputs) and isinstance(now, TensorProxy):
                memory = SharedMemory(recorded).of([now.name])
                if not memory <= new or not memory.isdisjoint(used_memory):
                    outputs[index] = torchlang.clone(now)
                used_memory |= memory
        return outputs

    def replace(self, bound: BoundSymbol, results: list[Proxy], recorded: list[BoundSymbol]) -> list[BoundSymbol]:
        """Return the recorded calls with the names of the results that they replace; record the other replacements."""
        new = {name for call in recorded for name in call.outputs}
        renamed = dict(self.replaced)
        for old, now in zip(proxies(bound.output), results, strict=True):
            if old.name not in bound.outputs or old.name == now.name:
                continue
            if now.name in new and now.name not in renamed:
                renamed[now.name] = old
            else:
                self.replaced[old.name] = renamed.get(now.name, now)
        return [substitute(call, renamed) for call in recorded]


def _check_writes(stage: str, bound: BoundSymbol, memory: Memory, recorded: list[BoundSymbol]) -> None:
    """Raise ValueError if a rule changed a value in place that its calls did not make."""
    new = {name for call in recorded for name in call.outputs} if memory.dirty else ()
    for root in (storage.root for storage in memory.dirty):
        check(
            root.name in new,
            lambda root=root: f"{stage}: the replacement of {bound!r} changes {root} in place: return a new value",
        )
    memory.dirty.clear()


def _check(stage: str, bound: BoundSymbol, result: Any) -> None:
    results, originals = proxies(result), proxies(bound.output)
    check(
        len(results) == len(originals) and all(map(_is_like, results, originals)),
        lambda: (
            f"{stage}: {bound!r} gives {_in_words(originals)}, but its replacement gives "
            f"{_in_words([*leaves(result)])}: return values of the same shapes, dtypes and devices, or None to keep "
            "the call"
        ),
    )


def _is_like(result: Proxy, original: Proxy) -> bool:
    if not isinstance(result, TensorProxy) or not isinstance(original, TensorProxy):
        return type(result) is type(original)
    if (result.dtype, result.device, result.ndim) != (original.dtype, original.device, original.ndim):
        return False
    sizes = zip(result.shape, original.shape, strict=True)
    return all(one == other for one, other in sizes if type(one) is type(other) is int)


def _in_words(values: Sequence[Any]) -> str:
    words = (
        in_words(each)
        if isinstance(each, Proxy)
        else f"a {type(each).__name__} that is no value of the program (forge.torchlang.full makes one)"
        for each in values
    )
    return ", ".join(words) or "nothing"


def record_as(new: Trace, output: Proxy, make: Callable[[], Proxy]) -> None:
    """Record the calls that `make` makes; later calls read its result as `output`. `new` is being recorded."""
    with new.collecting() as recorded:
        result = make()
    for call in recorded:
        new.record(substitute(call, {result.name: output}))
