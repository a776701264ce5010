"""The contract of a user's executor: its function takes the arguments of a call, checked when it is claimed, and
returns the metadata of its results, checked the first time that the program runs."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from forge.executors.executor import Executor, FusionExecutor, is_own
from forge.ir import BoundSymbol, Proxy, Symbol, TensorProxy, Trace
from forge.ir.checks import check
from forge.ir.printing import in_words, quantity
from forge.ir.proxies import short_type
from forge.ir.pytree import leaves, proxies


def call_in_words(bound: BoundSymbol) -> str:
    """Return a call with the metadata of its tensors: `torch.silu(x: f32[2, 3])`."""
    args = [str(arg) for arg in bound.args] + [f"{name}={value}" for name, value in bound.kwargs.items()]
    place = bound.source.line if bound.source is not None else None
    return f"{bound.symbol.id}({', '.join(args)}){f' ({place})' if place else ''}"


def check_arguments(executor: str, function: Callable, bound: BoundSymbol) -> None:
    """Raise TypeError where a user's function does not take the arguments of the call that it is to run."""
    if is_own(function):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return
    try:
        signature.bind(*bound.args, **bound.kwargs)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"executor {executor}: {name}{signature} is to run {call_in_words(bound)}, but does not take these "
            f"arguments: {error}; an operator takes those of the symbol that it implements"
        ) from None


def check_metadata(what: str, output: Any, bound: BoundSymbol) -> None:
    """Raise ValueError where the proxies that `what` returns do not have the metadata of the call that it runs."""
    made, wanted = list(proxies(output)), list(proxies(bound.output))
    check(
        len(made) == len(wanted) and all(map(_is_like, made, wanted)),
        lambda: f"{what} gives {_format(made)} for {call_in_words(bound)}, but must give {_format(wanted)}",
    )


def _format(values: Sequence[Any]) -> str:
    return ", ".join(in_words(each) if isinstance(each, Proxy) else _format_one(each) for each in values) or "nothing"


def _format_one(value: Any) -> str:
    return short_type(value) if isinstance(value, torch.Tensor) else repr(value)


def _is_like(made: Any, wanted: Any) -> bool:
    """Return whether a tensor, or the proxy of one, is as a proxy says, as far as that is known."""
    if not isinstance(wanted, TensorProxy):
        return not isinstance(made, torch.Tensor)
    if not isinstance(made, (torch.Tensor, TensorProxy)) or (made.dtype, made.ndim) != (wanted.dtype, wanted.ndim):
        return False
    sizes = zip(made.shape, wanted.shape, strict=True)
    return all(one == other for one, other in sizes if type(one) is type(other) is int)


# when the program runs


class _ContractCheck:
    """A user's function in a generated program, in whose globals it is `name`, until each of its calls has given what
    it says it gives."""

    def __init__(self, scope: dict[str, Any], name: str, function: Callable, calls: Iterator[BoundSymbol]) -> None:
        self.scope = scope
        self.name = name
        self.function = function
        self.calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = next(self.calls, None)
        if bound is None or not _fits([args, kwargs], [bound.args, bound.kwargs]):  # the program began again
            if self.scope[self.name] is self:
                self.scope[self.name] = self.function
            return self.function(*args, **kwargs)
        try:
            result = self.function(*args, **kwargs)
        except Exception as error:
            if not isinstance(bound.symbol.executor, FusionExecutor):  # whose regions are named in the call
                owner, function, called = self.parties(bound)
                error.add_note(f"raised by executor {owner}: {function}, for {called}")
            raise
        self.check(bound, result)
        return result

    def parties(self, bound: BoundSymbol) -> tuple[str, str, str]:
        """Return the names of the executor and of its function, and the call that this runs, in words."""
        function = getattr(self.function, "__qualname__", repr(self.function))
        if isinstance(bound.symbol.executor, FusionExecutor):
            called = f"{bound.symbol.id}, a region of {quantity(len(bound.subsymbols), 'call')}"
        else:
            called = call_in_words(next(iter(bound.subsymbols), bound))
        return getattr(bound.symbol.executor, "name", ""), function, called

    def check(self, bound: BoundSymbol, result: Any) -> None:
        wanted = list(proxies(bound.output))
        made = [leaf for leaf in leaves(result) if leaf is not None]
        several = isinstance(result, (tuple, list))
        alike = len(made) == len(wanted) and all(map(_is_like, made, wanted))
        if alike and several == isinstance(bound.output, (tuple, list)):
            return
        kind = f"a {type(result).__name__} of " if alike and several else ""
        owner, function, called = self.parties(bound)
        raise ValueError(
            f"executor {owner}: {function} gives {kind}{_format(made)} for {called}, but must give {_format(wanted)}"
        )


def _is_users(symbol: Symbol) -> bool:
    """Return whether a user's executor runs a call of it, which is no kernel: these are verified."""
    if isinstance(symbol.executor, FusionExecutor):
        return not type(symbol.executor).__module__.startswith("forge.")
    return isinstance(symbol.executor, Executor) and not is_own(symbol.op)


def _fits(given: Any, wanted: Any) -> bool:
    given, wanted = list(leaves(given)), list(leaves(wanted))
    tensors = [pair for pair in zip(given, wanted, strict=False) if isinstance(pair[1], TensorProxy)]
    return len(given) == len(wanted) and all(_is_like(made, proxy) for made, proxy in tensors)


def expect(function: Callable, trace: Trace) -> None:
    """Check the results of users' executors' functions that a generated function calls, at its first run."""
    calls: dict[int, list[BoundSymbol]] = {}
    for bound in trace.bound_symbols:
        if _is_users(bound.symbol) and not bound.symbol.out:
            calls.setdefault(id(bound.symbol.op), []).append(bound)
    scope = function.__globals__
    for name, value in list(scope.items()):
        if id(value) in calls:
            scope[name] = _ContractCheck(scope, name, value, iter(calls[id(value)]))
