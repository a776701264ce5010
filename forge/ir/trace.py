"""A trace: a straight-line program of bound symbols."""

import keyword
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from forge.ir import printing, pytree
from forge.ir.memory import Memory
from forge.ir.proxies import Dim, NumberProxy, Proxy, TensorProxy
from forge.ir.source import Source
from forge.ir.state import LanguageContext, recorder, state
from forge.ir.symbol import NO_TAGS, BoundSymbol, Tag, union
from forge.support.deprecation import RenamedMember

P = TypeVar("P", bound=Proxy)

# names that a printed trace uses itself, so that no value may have them
RESERVED = frozenset(
    {
        *keyword.kwlist,
        *("_", "boxed", "forge", "math", "operator", "torch"),
        *("abs", "complex", "float", "max", "min", "round", "slice"),
    }
)


class Trace:
    """A straight-line program: inputs, bound symbols in order, and an output.

    Printing a trace yields the Python that runs. A transform returns a new trace (`derive`) and never changes its
    input.

    Args:
        name: The name of the printed function.
        stage: The pass that produced the trace.

    Attributes:
        inputs: Proxies.
        output: A pytree of proxies and literals.
        constants: Tensors that the program reads and that are not inputs (hoisted calls, tensors a model closes over),
            by name.
    """

    def __init__(self, name: str = "computation", *, stage: str = "recorded") -> None:
        self.name = name
        self.stage = stage
        self.inputs: list[Proxy] = []
        self.output: Any = None
        self.bound_symbols: list[BoundSymbol] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.boxed = False  # the function takes its inputs in one list, which it empties
        self.names: set[str] = set(RESERVED)
        self.source: Source | None = None  # of the call that is being recorded
        self.tags: frozenset[Tag] = NO_TAGS  # on every call recorded now
        self.follows_grad_mode = False  # True where a front end records it: torch's grad mode is the program's
        self.holders: list[Any] = []  # objects that its printed text names, without a literal
        self.text: str | None = None  # the edited source, which runs in its place
        self.memory = Memory()  # aliasing of values, while the trace is recorded
        self._scopes: list[list[BoundSymbol]] = [self.bound_symbols]
        self.counter = 0

    # recording

    def record(self, bound: BoundSymbol) -> None:
        """Append a call to the innermost open scope."""
        if bound.source is None:
            bound.source = self.source
        if self.tags:
            bound.tags = union(bound.tags, self.tags)
        self._scopes[-1].append(bound)

    def adopt(self, calls: Iterable[BoundSymbol]) -> None:
        """Append calls of another trace. Their names, and those of nested calls, are taken for `fresh_name`."""
        calls = list(calls)
        self._scopes[-1].extend(calls)
        while calls:
            bound = calls.pop()
            self.names.update(bound.inputs, bound.outputs)
            calls += bound.subsymbols

    def open_scope(self) -> list[BoundSymbol]:
        """Open a scope and return its list: calls recorded until `close_scope` go there."""
        scope: list[BoundSymbol] = []
        self._scopes.append(scope)
        return scope

    def close_scope(self) -> None:
        self._scopes.pop()

    @property
    def calls_in_scope(self) -> int:
        """Return the number of calls recorded into the innermost open scope."""
        return len(self._scopes[-1])

    @property
    def last_call(self) -> BoundSymbol | None:
        """The last call recorded into the innermost open scope; None if there is none."""
        return self._scopes[-1][-1] if self._scopes[-1] else None

    @contextmanager
    def collecting(self) -> Iterator[list[BoundSymbol]]:
        """Collect the calls recorded in this context in the list that it yields, and nowhere else."""
        scope = self.open_scope()
        try:
            yield scope
        finally:
            self.close_scope()

    @contextmanager
    def set_tags(self, tags: Iterable[Tag], source: Source | None = None) -> Iterator[None]:
        """Set the tags and the source of calls recorded in this context to exactly these."""
        before = self.tags, self.source
        self.tags = frozenset(tags)
        self.source = source or self.source
        try:
            yield
        finally:
            self.tags, self.source = before

    tagged = RenamedMember("set_tags")

    def fresh_name(self, hint: str = "t") -> str:
        """Return an unused name in the trace: `hint` itself for a user's name, else numbered."""
        if hint != "t" and hint not in self.names:
            self.names.add(hint)
            return hint
        while True:
            name = f"t{self.counter}" if hint == "t" else f"{hint}_{self.counter}"
            self.counter += 1
            if name not in self.names:
                self.names.add(name)
                return name

    def tensor(
        self, shape: Iterable[Dim], dtype: torch.dtype, device: torch.device, *, name: str = "t", **metadata: Any
    ) -> TensorProxy:
        """Return a new tensor proxy of this trace."""
        return TensorProxy(self.fresh_name(name), tuple(shape), dtype, device, **metadata)

    def add_input(self, proxy: P) -> P:
        """Declare an input whose name is already unique."""
        self.names.add(proxy.name)
        self.inputs.append(proxy)
        return proxy

    def add_constant(self, value: torch.Tensor, name: str = "constant") -> TensorProxy:
        """Return a proxy for a tensor that the program closes over; the same name for the same tensor."""
        for key, tensor in self.constants.items():
            if tensor is value:
                return TensorProxy(key, tuple(value.shape), value.dtype, value.device, strides=tuple(value.stride()))
        proxy = self.tensor(value.shape, value.dtype, value.device, name=name, strides=tuple(value.stride()))
        self.constants[proxy.name] = value
        return proxy

    def rename(self, proxy: Proxy, hint: str) -> None:
        """Give a newly made proxy the user's name."""
        self.names.discard(proxy.name)
        proxy.name = self.fresh_name(hint)

    # transforming

    def derive(
        self,
        stage: str,
        bound_symbols: list[BoundSymbol] | None = None,
        *,
        name: str | None = None,
        inputs: list[Proxy] | None = None,
        output: Any = ...,
    ) -> "Trace":
        """Return a new trace with the same inputs, output, names and constants unless given."""
        new = Trace(name or self.name, stage=stage)
        new.inputs = list(self.inputs if inputs is None else inputs)
        new.output = self.output if output is ... else output
        new.bound_symbols.extend(() if bound_symbols is None else bound_symbols)
        new.constants = dict(self.constants)
        new.boxed = self.boxed
        new.names = set(self.names)
        new.counter = self.counter
        return new

    # reading

    @property
    def input_names(self) -> list[str]:
        return [proxy.name for proxy in self.inputs]

    @property
    def differentiable_inputs(self) -> list[TensorProxy]:
        """The inputs that require a gradient."""
        return [each for each in self.inputs if isinstance(each, TensorProxy) and each.requires_grad]

    @property
    def output_names(self) -> list[str]:
        return pytree.names(self.output)

    def show(self, depth: int = 1) -> str:
        """Return the trace as Python, with `depth - 1` levels of each call's decomposition as comments; an edited one
        in its edited form.

        It runs once every call is an executor's.
        """
        return self.text or self._as_text(depth)[0]

    def as_file(self, should_expand: Callable[[BoundSymbol], bool]) -> tuple[str, dict[str, Any]]:
        """Return the trace as Python that is the same in every process, and the objects without a name that it
        reads.

        should_expand: Selects calls to print with their nested calls below, as comments.
        """
        text, holders = self._as_text(1, should_expand)
        scope = {}
        for i, holder in enumerate(holders):
            name = f"held_{i}"
            while name in self.names:
                name += "_"
            text = text.replace(f"forge.ir.printing.printed_object({holder.number})", name)
            scope[name] = holder.value
        return text.replace("import forge.ir.printing\n", "") if "forge.ir.printing." not in text else text, scope

    def _as_text(
        self, depth: int, should_expand: Callable[[BoundSymbol], bool] = lambda bound: False
    ) -> tuple[str, list[Any]]:
        writer = printing.Writer(flat=False, used_names=self.names.union(self.input_names))
        writer.holders = self.holders  # an object has the same number each time the trace is printed
        body = printing.statements(writer, self.bound_symbols, depth, should_expand)
        body.append(f"    return {writer.value(self.output)}")
        bindings = {**self._read_constants(), **writer.callees}
        constants = [
            f"{name} = {writer.object(value, name)}{printing.origin_of(value)}" for name, value in bindings.items()
        ]
        signature, unboxing = self._signature()
        metadata = ", ".join(repr(proxy) for proxy in self.inputs if isinstance(proxy, (TensorProxy, NumberProxy)))
        head = [f"# {self.name}, {self.stage}: {printing.quantity(len(self.bound_symbols), 'call')}"]
        head += sorted(f"import {module}" for module in writer.imports)
        text = "\n".join([*head, *constants, "", f"def {self.name}({signature}):  # {metadata}", *unboxing, *body, ""])
        return text, writer.holders

    def constant_proxy(self, name: str) -> TensorProxy:
        """Return a proxy of one of its constants, as an input of another trace."""
        value = self.constants[name]
        return TensorProxy(name, tuple(value.shape), value.dtype, value.device)

    def python_callable(self) -> Callable[..., Any]:
        """Return the program, compiled once. Every call must be an executor's (its symbol has an `op`)."""
        return printing.compile_function(self.name, self.python_source())

    def python_source(self) -> printing.Code:
        """Return the function that runs."""
        names = {*self.input_names, *(name for bound in self.bound_symbols for name in bound.outputs)}
        writer = printing.Writer(flat=True, used_names=names)
        writer.globals.update(self._read_constants())
        signature, body = self._signature()
        guarded = [bound for bound in self.bound_symbols if bound.symbol.fallback is not None]
        if guarded:
            replaced = dict.fromkeys(writer.callee(bound.symbol) for bound in guarded)
            body.insert(0, f"    global {', '.join(replaced)}")
        sources = {}
        for bound in self.bound_symbols:
            runs = bound.symbol.op is not None or bound.symbol in printing.STATEMENTS
            assert runs, f"{bound.symbol.id} was not claimed"
            statements = [writer.call(bound)] if bound.symbol.fallback is None else writer.with_fallback(bound)
            locations = printing.sources_of(bound)
            for statement in statements:
                body.append(f"    {statement}")
                sources[len(body) + 1] = locations  # the signature is above
        body.append(f"    return {writer.value(self.output)}")
        return printing.Code([f"def {self.name}({signature}):", *body], writer.globals, sources)

    def _signature(self) -> tuple[str, list[str]]:
        """Return the function's parameters, and the lines that unpack them if they come in one list."""
        names = ", ".join(self.input_names)
        if not self.boxed:
            return names, []
        return "boxed", [f"    {names}{',' if len(self.inputs) == 1 else ''} = boxed", "    boxed.clear()"]

    def _read_constants(self) -> dict[str, torch.Tensor]:
        read = {name for bound in self.bound_symbols for name in bound.inputs}.union(self.output_names)
        return {name: value for name, value in self.constants.items() if name in read}

    def __str__(self) -> str:
        return self.show()

    def __repr__(self) -> str:
        return f"<trace {self.name}, {self.stage}, {len(self.bound_symbols)} calls>"


def current_trace() -> Trace:
    """Return the trace that symbol calls record into. Raises RuntimeError outside of one."""
    return recorder()  # type: ignore[return-value]  # a Trace is the one Recorder; state.py may not import it


@contextmanager
def outside_regions(when: bool = True) -> Iterator[None]:
    """Record calls in this context that read values from memory, rounded to their dtype; nothing changes unless `when`.

    Within a region a value may have a wider dtype, or be recomputed with another rounding, so that it differs from
    the one that earlier results were computed from.
    """
    trace = current_trace()
    with trace.set_tags({*trace.tags, Tag.NO_FUSE} if when else trace.tags):
        yield


@contextmanager
def recording(trace: Trace, language: LanguageContext | None = None) -> Iterator[Trace]:
    """Record symbol calls in this context into `trace`; operators on proxies have the meaning of `language`."""
    before = state.trace, state.language
    state.trace, state.language = trace, language or state.language
    try:
        yield trace
    finally:
        state.trace, state.language = before
