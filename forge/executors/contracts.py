"""The contract of a user's executor: its function accepts the arguments of a call, checked when it is claimed, does not
write to them, and returns new memory with the metadata of its results, checked the first time that the program runs.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from forge.executors.errors import ContractError, OverwrittenArgumentError
from forge.executors.executor import Executor, FusionExecutor, is_own
from forge.executors.fingerprint import name_in_torch
from forge.ir import BoundSymbol, Proxy, Symbol, Tag, TensorProxy, Trace
from forge.ir.checks import check
from forge.ir.printing import in_words, qualified_name, quantity
from forge.ir.proxies import short_type
from forge.ir.pytree import leaves, names, proxies
from forge.torch_internals.dispatch import OpOverload, schema_of
from forge.torch_internals.tensors import storage_id, version_of
from forge.transforms.shared_memory import SharedMemory

_WRITES = frozenset({Tag.EFFECT, Tag.DONATES, Tag.IN_PLACE})


def call_in_words(bound: BoundSymbol) -> str:
    """Return a call with the metadata of its tensors: `torch.silu(x: f32[2, 3])`."""
    args = [str(arg) for arg in bound.args] + [f"{name}={value}" for name, value in bound.kwargs.items()]
    place = bound.source.line if bound.source is not None else None
    return f"{bound.symbol.id}({', '.join(args)}){f' ({place})' if place else ''}"


def check_arguments(executor: str, function: Callable, bound: BoundSymbol) -> None:
    """Raise TypeError if a torch function writes to an argument that the call does not mutate, or a user's function
    does not accept the arguments of the call that it must run."""
    if is_own(function):
        check(
            not _is_in_place(function)
            or not _WRITES.isdisjoint(bound.all_tags)
            or bound.symbol.id == qualified_name(function),  # such as detach_, which writes no values
            lambda: (
                f"executor {executor}: {qualified_name(function)} is to run {call_in_words(bound)}, but overwrites its "
                "argument; use the function that returns a new tensor"
            ),
            TypeError,
        )
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


def _is_in_place(function: Callable) -> bool:
    """Return whether a torch function is the in-place form of another one, by its name."""
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name_in_torch(function) is not None


def check_metadata(what: str, output: Any, bound: BoundSymbol) -> None:
    """Raise ValueError unless the proxies that `what` returns have the metadata of the call that it runs."""
    results, expected = list(proxies(output)), list(proxies(bound.output))
    check(
        len(results) == len(expected) and all(map(_is_like, results, expected)),
        lambda: f"{what} gives {_format(results)} for {call_in_words(bound)}, but must give {_format(expected)}",
    )


def _format(values: Sequence[Any]) -> str:
    return ", ".join(in_words(each) if isinstance(each, Proxy) else _format_one(each) for each in values) or "nothing"


def _format_one(value: Any) -> str:
    return short_type(value) if isinstance(value, torch.Tensor) else repr(value)


def _is_like(value: Any, expected: Any) -> bool:
    """Return whether a tensor, or the proxy of one, matches a proxy, as far as that is known."""
    if not isinstance(expected, TensorProxy):
        return not isinstance(value, torch.Tensor)
    if not isinstance(value, (torch.Tensor, TensorProxy)) or (value.dtype, value.ndim) != (
        expected.dtype,
        expected.ndim,
    ):
        return False
    sizes = zip(value.shape, expected.shape, strict=True)
    return all(one == other for one, other in sizes if type(one) is type(other) is int)


# at run time


class _ContractCheck:
    """A user's function in a generated program, in whose globals it is `name`, until each of its calls has returned the
    promised metadata. `writable`: the values of the program that its calls may overwrite."""

    def __init__(
        self, scope: dict[str, Any], name: str, function: Callable, calls: Sequence[BoundSymbol], writable: set[str]
    ) -> None:
        self.scope = scope
        self.name = name
        self.function = function
        self.calls = calls
        self.writable = writable
        self.checked = 0  # calls
        self.when_broken: Callable[[], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.calls[self.checked] if self.checked < len(self.calls) else None
        if bound is None or not _fits([args, kwargs], [bound.args, bound.kwargs]):  # the program restarted
            if self.scope[self.name] is self:
                self.scope[self.name] = self.function
            return self.function(*args, **kwargs)
        checked, self.checked = self.checked, 0  # if this call fails, the program restarts
        try:
            result = self.call(bound, args, kwargs)
        except ContractError:
            if self.when_broken is not None:
                self.when_broken()
            raise
        self.checked = checked + 1
        return result

    def call(self, bound: BoundSymbol, args: Any, kwargs: Any) -> Any:
        """Return the function's result for a call. Raises ContractError unless it matches the call."""
        arguments = _Arguments(bound, [args, kwargs], self.writable)
        try:
            result = self.function(*args, **kwargs)
        except Exception as error:
            self.check_arguments(bound, arguments)
            if not isinstance(bound.symbol.executor, FusionExecutor):  # regions are named in the call
                owner, function, call = self.parties(bound)
                error.add_note(f"raised by executor {owner}: {function}, for {call}")
            raise
        self.check_arguments(bound, arguments)
        self.check_metadata(bound, result)
        self.check_memory(bound, arguments, result)
        return result

    def parties(self, bound: BoundSymbol) -> tuple[str, str, str]:
        """Return the names of the executor and of its function, and the call that this runs, in words."""
        function = getattr(self.function, "__qualname__", repr(self.function))
        if isinstance(bound.symbol.executor, FusionExecutor):
            call = f"{bound.symbol.id}, a region of {quantity(len(bound.subsymbols), 'call')}"
        else:
            call = call_in_words(next(iter(bound.subsymbols), bound))
        return getattr(bound.symbol.executor, "name", ""), function, call

    def check_metadata(self, bound: BoundSymbol, result: Any) -> None:
        """Raise ContractError unless each result has the metadata of the call."""
        expected = list(proxies(bound.output))
        results = [leaf for leaf in leaves(result) if leaf is not None]
        several = isinstance(bound.output, (tuple, list))
        alike = len(results) == len(expected) and all(map(_is_like, results, expected))
        is_nested = isinstance(result, (tuple, list)) == several
        if alike and is_nested:
            return
        kind = f"a {type(result).__name__} of " if alike else ""
        count = f"return a tuple of {quantity(len(expected), 'result')}, " if several and not is_nested else "give "
        owner, function, call = self.parties(bound)
        raise ContractError(
            f"executor {owner}: {function} gives {kind}{_format(results)} for {call}, "
            f"but must {count}{_format(expected)}"
        )

    def check_arguments(self, bound: BoundSymbol, arguments: "_Arguments") -> None:
        """Raise OverwrittenArgumentError if the function has mutated an argument."""
        name = next(arguments.overwritten(), None)
        if name is not None:
            owner, function, call = self.parties(bound)
            raise OverwrittenArgumentError(
                f"executor {owner}: {function} overwrites its argument {parameter_of(bound, name)} in {call}; "
                "a function may not change what it is given: let it copy that first"
            )

    def check_memory(self, bound: BoundSymbol, arguments: "_Arguments", result: Any) -> None:
        """Raise ContractError if a result aliases an argument or another result, and the call's symbol declares no
        view."""
        alias = next(arguments.shared_by(result), None)
        if alias is not None:
            owner, function, call = self.parties(bound)
            raise ContractError(
                f"executor {owner}: {function} returns the memory of {alias} for {call}, where torch returns new "
                "memory, which the program may change: let it copy that first"
            )


class _Arguments:
    """The tensor arguments of a user's function before the call, by their names in the program."""

    def __init__(self, bound: BoundSymbol, values: Any, writable: set[str]) -> None:
        pairs = zip(leaves([bound.args, bound.kwargs]), leaves(values), strict=True)
        tensors = {proxy.name: value for proxy, value in pairs if isinstance(proxy, TensorProxy)}
        self.bound = bound
        self.tensors: dict[str, torch.Tensor] = {}
        if _WRITES.isdisjoint(bound.all_tags):
            self.tensors = {name: value for name, value in tensors.items() if name not in writable}
        self.states = {name: _state(value) for name, value in self.tensors.items()}

    def overwritten(self) -> Iterator[str]:
        """Yield the mutated ones."""
        for name, before in self.states.items():
            now = self.tensors[name]
            if version_of(now) != before if isinstance(before, int) else not _is_same(now, before):
                yield name

    def shared_by(self, result: Any) -> Iterator[str]:
        """Yield, in words, the tensors that a result aliases without being declared a view of them, and results that
        alias each other."""
        memory = SharedMemory([self.bound])
        earlier: dict[Any, str] = {}
        results = [leaf for leaf in leaves(result) if leaf is not None]
        for proxy, value in zip(proxies(self.bound.output), results, strict=True):
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.numel():
                continue
            aliases = memory.of([proxy.name])
            for name, argument in self.tensors.items():
                if (
                    name not in aliases
                    and argument.layout == torch.strided
                    and storage_id(argument) == storage_id(value)
                ):
                    yield f"its argument {parameter_of(self.bound, name)}"
            other = earlier.setdefault((storage_id(value), value.storage_offset()), proxy.name)
            if other not in aliases and aliases.isdisjoint(self.tensors):
                yield "another of its results"


def _state(tensor: torch.Tensor) -> int | torch.Tensor:
    """Return the version of a tensor, or a copy of one that has no version."""
    return tensor.clone() if tensor.is_inference() else version_of(tensor)


def _is_same(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    return bool(((tensor == before) | ((tensor != tensor) & (before != before))).all())


def parameter_of(bound: BoundSymbol, name: str) -> str:
    """Return the name of the parameter that gets the value `name` in a call's function."""
    op = bound.symbol.op
    assert op is not None, "a call that runs has a function"
    try:
        if isinstance(op, OpOverload):
            parameters = [argument.name for argument in schema_of(op).arguments]
            arguments = {**dict(zip(parameters, bound.args, strict=False)), **bound.kwargs}
        else:
            arguments = inspect.signature(op).bind(*bound.args, **bound.kwargs).arguments
    except (TypeError, ValueError):  # a function without a signature
        arguments = {**{str(index): value for index, value in enumerate(bound.args)}, **bound.kwargs}
    return next((each for each, value in arguments.items() if name in names([value])), name)


def _is_users(symbol: Symbol) -> bool:
    """Return whether a call runs by a user's executor, kernels excepted: these are verified."""
    if isinstance(symbol.executor, FusionExecutor):
        return not type(symbol.executor).__module__.startswith("forge.")
    return isinstance(symbol.executor, Executor) and not is_own(symbol.op)


def _fits(values: Any, expected: Any) -> bool:
    values, expected = list(leaves(values)), list(leaves(expected))
    tensors = [pair for pair in zip(values, expected, strict=False) if isinstance(pair[1], TensorProxy)]
    return len(values) == len(expected) and all(_is_like(value, proxy) for value, proxy in tensors)


def expect(function: Callable, trace: Trace) -> None:
    """Check the results of the users' functions that a generated function calls, at its first run."""
    calls: dict[int, list[BoundSymbol]] = {}
    writable: set[str] = set()
    for bound in trace.bound_symbols:
        if Tag.UNINITIALIZED in bound.all_tags:
            writable.update(bound.outputs)
        if _is_users(bound.symbol) and not bound.symbol.out:
            calls.setdefault(id(bound.symbol.op), []).append(bound)
    scope = function.__globals__
    for name, value in list(scope.items()):
        if id(value) in calls:
            scope[name] = _ContractCheck(scope, name, value, calls[id(value)], writable)


def when_broken(function: Callable, act: Callable[[], None]) -> None:
    """Call `act` if a user's function that a generated function calls breaks its contract."""
    for value in getattr(function, "__globals__", {}).values():
        if isinstance(value, _ContractCheck):
            value.when_broken = act
