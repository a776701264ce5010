"""Symbols, the operations that a trace can call, and bound symbols, single calls."""

import inspect
import warnings
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, Generic

from typing_extensions import TypeVar

from forge.ir import pytree
from forge.ir.proxies import TorchFunctionError
from forge.ir.source import Source
from forge.ir.state import recorder
from forge.support.deprecation import RenamedMember


class Tag(Enum):
    """Properties of a symbol or of one call that transforms must respect."""

    VIEW = auto()  # the prim's output shares the first argument's memory; a composite may have such a prim inside
    MAY_BE_VIEW = auto()  # the result is an argument, a view of one or a copy, known only at run time
    RANDOM = auto()  # draws from a generator: never merged, hoisted, reordered or dropped
    EFFECT = auto()  # changes something outside the trace: kept, in order
    SENDS = auto()  # starts a message to other processes: such calls keep their order
    AWAITS = auto()  # waits for one
    UNINITIALIZED = auto()  # two calls return different contents: never merged or hoisted
    DONATES = auto()  # writes to an argument's memory if it knows, at run time, that nothing reads that again
    IN_PLACE = auto()  # writes to its first argument, a tensor or several, which has no other user
    SYNCHRONIZING = auto()  # reads a tensor's data back to Python
    NOT_DIFFERENTIABLE = auto()  # no gradient flows through it, as in eager
    ZERO_GRAD = auto()  # the gradients of its arguments are zeros, and its result a constant, as in eager
    ONCE_DIFFERENTIABLE = auto()  # a user's backward that is, or may be, not differentiable
    NO_GRAD = auto()  # this call ran under torch.no_grad
    LEAF_VIEW = auto()  # so did this one, and returned a view: a leaf that requires grad if its base does
    RECOMPUTE = auto()  # the backward recomputes this call's results instead of saving them (a checkpoint's calls)
    DIFFERENTIATED = auto()  # gradients flow through this call
    OPAQUE_TO_PASSES = auto()  # this composite stays one call, whatever is read from inside it
    IN_BOUNDS = auto()  # reads by indices that are within bounds for all inputs
    NO_FUSE = auto()  # outside of regions: torch's autograd records it, or it must alias memory or round as in eager
    OPAQUE = auto()  # run by torch, differentiated by torch's autograd

    ATOMIC = RenamedMember("OPAQUE_TO_PASSES")
    MAY_WRITE = RenamedMember("DONATES")
    SINGLE = RenamedMember("NO_FUSE")

    __hash__ = object.__hash__  # each is one object; Enum's own hashes the name, in Python


NO_TAGS: frozenset[Tag] = frozenset()
MODES = frozenset({Tag.NO_GRAD, Tag.RECOMPUTE})  # of a call: its value has no gradient; it is not saved
_unions: dict[tuple[frozenset[Tag], frozenset[Tag]], frozenset[Tag]] = {}


def union(tags: frozenset[Tag], more: frozenset[Tag]) -> frozenset[Tag]:
    """Return the union, as one object for all calls with these tags: there are few sets of tags, and many calls."""
    if not more:
        return tags
    result = _unions.get((tags, more))
    if result is None:
        joined = tags | more
        result = _unions[tags, more] = _unions.setdefault((joined, joined), joined)
    return result


R_co = TypeVar("R_co", covariant=True, default=Any)


class Symbol(Generic[R_co]):
    """An operation that a trace can call: a prim, a composite or an operator of an executor.

    A symbol has either `meta` or `body`, its `definition`. Symbols made for one call, such as a user's
    torch.autograd.Function, share an id; only the symbols themselves distinguish their computations.

    Args:
        name: The last part of `id`.
        id: The key of every table about symbols.
        meta: Maps input metadata to output metadata (prims and operators of executors).
        body: The decomposition into other symbols (composites).
        tags: Properties that passes query.
        executor: The executor whose operator the symbol is, or None.
        op: The function that an operator of an executor calls.
        rule: The gradient rule of a symbol made for one call; others are in forge/ir/grad_rules.py.
        out: Arguments, by position or name, that `op` writes its results to; they become the output of the call.
        fallback: Called with the error and the arguments if `op` raises; returns the replacement of `op` for later
            calls, and the output of this one.
    """

    def __init__(  # noqa: PLR0913  a record's fields
        self,
        name: str,
        id: str,
        *,
        meta: Callable[..., R_co] | None = None,
        body: Callable[..., R_co] | None = None,
        tags: frozenset[Tag] = NO_TAGS,
        executor: Any = None,
        op: Callable[..., Any] | None = None,
        rule: Callable[..., Any] | None = None,
        out: tuple[int | str, ...] = (),
        fallback: Callable[..., Any] | None = None,
    ) -> None:
        definition = meta if body is None else body
        assert definition is not None and (meta is None or body is None), f"{id}: a symbol has a meta or a body"
        self.name = self.__name__ = name
        self.id = id
        self.meta = meta
        self.body = body
        self.definition = definition
        self.tags = frozenset(tags)
        self.executor = executor
        self.op = op
        self.rule = rule
        self.out = out
        self.fallback = fallback
        self.__doc__ = definition.__doc__

    @property
    def is_prim(self) -> bool:
        return self.body is None

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        trace = recorder()
        if self.body is None:
            output = self.definition(*args, **kwargs) if self.executor is None else self._metadata(args, kwargs)
            trace.record(BoundSymbol(self, args, kwargs, output))
            return output
        scope = trace.open_scope()
        try:
            output = self.body(*args, **kwargs)
        except TorchFunctionError as error:
            error.body = error.body or self.id
            raise
        finally:
            trace.close_scope()
        if scope:  # an identity (x.to(same dtype), dropout(p=0)) records nothing
            trace.record(BoundSymbol(self, args, kwargs, output, scope))
        return output

    def _metadata(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R_co:
        """Return the meta's result. Calls that it makes, to compute with proxies, are not the operator's."""
        trace = recorder()
        trace.open_scope()
        try:
            return self.definition(*args, **kwargs)
        finally:
            trace.close_scope()

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, with defaults."""
        bound = inspect.signature(self.definition).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def __repr__(self) -> str:
        return f"<symbol {self.id}>"


class BoundSymbol:
    """One call in a trace. It is immutable once the trace is recorded; `replace` returns a changed copy.

    Args:
        symbol: The operation.
        args: Positional arguments: pytrees of proxies and literals.
        kwargs: Keyword arguments.
        output: A pytree of proxies.
        subsymbols: Calls made by the body of a composite.
        source: The line of the user's program.
        tags: Properties of this call, beyond those of its symbol.
    """

    __slots__ = (
        "_all_tags",
        "_names_in",
        "_names_out",
        "args",
        "kwargs",
        "output",
        "source",
        "subsymbols",
        "symbol",
        "tags",
    )

    def __init__(
        self,
        symbol: Symbol,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        subsymbols: list["BoundSymbol"] | tuple["BoundSymbol", ...] = (),
        source: Source | None = None,
        tags: frozenset[Tag] = NO_TAGS,
    ) -> None:
        self.symbol = symbol
        self.args = args
        self.kwargs = kwargs
        self.output = output
        self.subsymbols = subsymbols
        self.source = source
        self.tags = union(tags, tags) if tags else NO_TAGS
        self._names_in: list[str] | None = None
        self._names_out: list[str] | None = None
        self._all_tags: frozenset[Tag] | None = None

    @property
    def inputs(self) -> list[str]:
        """The names that this call reads, without repetitions."""
        if self._names_in is None:
            names = pytree.names(self.args)
            if self.kwargs:
                names += pytree.names(self.kwargs)
            self._names_in = list(dict.fromkeys(names))
        return self._names_in

    @property
    def outputs(self) -> list[str]:
        """The names that this call defines (an output that is an input is not defined here)."""
        if self._names_out is None:
            read = self.inputs
            names = [proxy.name for proxy in pytree.proxies(self.output)]
            self._names_out = [name for name in dict.fromkeys(names) if name not in read]
        return self._names_out

    def reads(self, lengths: Collection[str]) -> list[str]:
        """Return the inputs; of `lengths`, the symbols in shapes, also those that only a nested call reads:
        they come with the shapes of this call's arguments."""
        names = dict.fromkeys(self.inputs)
        for sub in self.subsymbols if lengths else ():
            names.update((name, None) for name in sub.reads(lengths) if name in lengths)
        return list(names)

    def replace(self, **changes: Any) -> "BoundSymbol":
        """Return this call with some fields changed."""
        new = BoundSymbol(self.symbol, self.args, self.kwargs, self.output, self.subsymbols, self.source, self.tags)
        for field, value in changes.items():
            assert field in _FIELDS, f"a call has no {field}"
            setattr(new, field, union(value, value) if field == "tags" else value)
        return new

    @property
    def mode(self) -> frozenset[Tag]:
        """The mode of the call: Tag.NO_GRAD, Tag.RECOMPUTE, both or neither. A call may replace another only if
        their modes are equal: a value under no_grad has no gradient, and a checkpoint's is not saved."""
        return self.tags & MODES

    def has_tag(self, tag: Tag) -> bool:
        """Return whether `all_tags` has `tag`. Deprecated: use `all_tags`."""
        message = "BoundSymbol.has_tag(tag) is now tag in BoundSymbol.all_tags; the old name goes with the next version"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return tag in self.all_tags

    @property
    def all_tags(self) -> frozenset[Tag]:
        """The tags of the call, of its symbol and of the calls inside it.

        Tag.VIEW among them does not say that the call returns a view: linear has it for the transposed weight inside.
        `innermost` (forge/transforms/makers.py) yields the prims: one whose symbol has it returns a view, and reshape
        and contiguous may return one.
        """
        if self._all_tags is None:
            tags = union(self.tags, self.symbol.tags)
            for sub in self.subsymbols:
                tags = union(tags, sub.all_tags)
            self._all_tags = tags
        return self._all_tags

    def __repr__(self) -> str:
        values = (*map(_short, self.args), *(f"{name}={_short(value)}" for name, value in self.kwargs.items()))
        return f"{', '.join(self.outputs)} = {self.symbol.id}({', '.join(values)})"


def _short(value: Any) -> str:
    """Return an argument as text: a proxy by its name."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_short, value))}]"
    return value.name if isinstance(getattr(value, "name", None), str) else repr(value)


_FIELDS = frozenset({"symbol", "args", "kwargs", "output", "subsymbols", "source", "tags"})


def substitute(bound: BoundSymbol, env: dict[str, Any]) -> BoundSymbol:
    """Return the call with every proxy whose name is in `env` replaced by its value there, in subsymbols too."""
    if not env or not any(name in env for name in (*bound.inputs, *bound.outputs)):
        return bound  # its subsymbols read only the call's arguments
    return bound.replace(
        args=pytree.rename(bound.args, env),
        kwargs=pytree.rename(bound.kwargs, env) if bound.kwargs else bound.kwargs,
        output=pytree.rename(bound.output, env),
        subsymbols=[substitute(sub, env) for sub in bound.subsymbols],
    )
