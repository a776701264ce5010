"""Common subexpression elimination."""

from typing import Any

from forge.ir import BoundSymbol, Proxy, Tag, TensorProxy, Trace
from forge.ir.grad_rules import grad_rule
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.pytree import proxies, rename
from forge.ir.symbol import substitute
from forge.transforms.shared_memory import returned_names

UNMERGEABLE = frozenset({Tag.RANDOM, Tag.EFFECT, Tag.UNINITIALIZED, Tag.OPAQUE, Tag.SYNCHRONIZING})

_NUMBERS = frozenset({bool, int, float, complex})


def call_key(bound: BoundSymbol) -> tuple[Any, ...] | None:
    """Return a key, equal for calls that compute the same value; None for a call that must not be merged.

    A composite that only forwards to one call has that call's key, so that torch.mul matches clang.mul; unless it has
    its own gradient rule, which may distinguish equivalent calls.
    """
    if not UNMERGEABLE.isdisjoint(bound.all_tags):
        return None
    while len(bound.subsymbols) == 1 and bound.subsymbols[0].output is bound.output and not grad_rule(bound.symbol):
        bound = bound.subsymbols[0]
    return bound.symbol, argument_key(bound.args), argument_key(bound.kwargs), bound.mode


def argument_key(value: Any) -> Any:
    """Return a hashable key, equal for arguments with the same meaning: 1, 1.0 and True differ."""
    kind = type(value)
    if kind is TensorProxy or isinstance(value, Proxy):
        return ("%", value.name)
    if kind in _NUMBERS:
        return kind.__name__, repr(value)  # 1, 1.0, True and -0.0 differ
    if kind is str or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return tuple([argument_key(item) for item in value])
    if isinstance(value, dict):
        return tuple(sorted((name, argument_key(item)) for name, item in value.items()))
    if isinstance(value, slice):
        return ("slice", argument_key(value.start), argument_key(value.stop), argument_key(value.step))
    if isinstance(value, SYMBOLIC_TYPES):
        return ("$", str(value.node.expr))
    if isinstance(value, (bool, int, float, complex)):
        return kind.__name__, repr(value)
    try:
        hash(value)
    except TypeError:
        return ("id", id(value))
    return value


def cse(trace: Trace) -> Trace:
    """Return the trace with each value computed once. Outputs of the trace keep their own memory."""
    calls, renamed = merge_calls(trace.bound_symbols, protected=returned_names(trace))
    return trace.derive("cse", calls, output=rename(trace.output, renamed))


def merge_calls(
    calls: list[BoundSymbol], *, protected: set[str], available: dict[tuple[Any, ...], BoundSymbol] | None = None
) -> tuple[list[BoundSymbol], dict[str, Proxy]]:
    """Return the calls without repetitions, and the replacements of the dropped names.

    `protected` names are never replaced by another's value nor replace one. `available` holds earlier calls.
    """
    available = {} if available is None else available
    renamed: dict[str, Proxy] = {}
    result = []
    for bound in calls:
        bound = substitute(bound, renamed) if renamed else bound
        key = call_key(bound)
        if key is None or not protected.isdisjoint(bound.outputs):
            result.append(bound)
            continue
        first = available.setdefault(key, bound)
        if first is bound:
            result.append(bound)
        else:
            renamed.update(
                (old.name, new) for old, new in zip(proxies(bound.output), proxies(first.output), strict=True)
            )
    return result, renamed
