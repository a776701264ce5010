"""The executor API: operator and fusion executors, which run the calls of a trace.

An operator executor is a table from symbols to implementations:

    import torch

    import forge
    from forge import torchlang
    from forge.executors import OperatorExecutor, decline


    def my_silu(x):
        return x / (1 + torch.exp(-x))


    def takes(x):
        return x.dtype == torch.float32 or decline(f"my_silu computes in float32, and the input is {x.dtype}")


    mine = OperatorExecutor("mine")
    fast_silu = mine.register_operator("fast_silu", like=torchlang.silu, fn=my_silu)
    mine.register_implementation(torchlang.silu, fast_silu, checker=takes)
    jitted = forge.jit(model, executors=[mine, "torch"])

If gradients flow, `grad_transform` is the executor's own rule; without one the symbol's own rule is used, or its
decomposition's, which decomposes the call if the backward reads a value from inside it.

A fusion executor takes regions of neighbouring calls and compiles each into one function:

    import forge
    from forge.executors import FusionExecutor, claim, decline, resolve_executors


    class Elementwise(FusionExecutor):
        def can_fuse(self, bound):
            return bound.symbol.name in ("add", "mul", "silu") or decline(f"{bound.symbol.id} is not elementwise")

        def fuse(self, region):
            print(region)  # generate a kernel from it; here torch runs it
            claimed, _ = claim(region, resolve_executors(["torch"]))
            return claimed.python_callable()


    jitted = forge.jit(model, executors=[Elementwise("fuser"), "torch"])

One file, though long: an executor's author reads all of it, and operator and fusion executors share it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from forge import torchlang
from forge.executors.fingerprint import Fingerprint, fingerprint_of, name_in_torch, owner_of_module
from forge.ir import BoundSymbol, Symbol, Tag, Trace, check
from forge.ir.bounded import BoundedDict
from forge.ir.proxies import UnknownValueError
from forge.ir.state import state
from forge.ir.structure import metadata_key
from forge.ir.unresolved import UnresolvedSymInt, without_specialization
from forge.patterns import Pattern
from forge.patterns.builtin import by_name
from forge.support.deprecation import RenamedMembers
from forge.transforms.products import ProductSymbol

_MAX_DECLINED = 4096  # calls of one executor
_OWN = frozenset({"torch", "forge", "builtins", "operator", "_operator", "math"})  # run on fake tensors


def is_own(function: Any) -> bool:
    """Return whether a function is torch's, forge's or Python's: others may launch a kernel on a tensor's address,
    which a fake tensor does not have."""
    function = getattr(function, "func", function)  # of a functools.partial
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] in _OWN


@dataclass(slots=True, eq=False, repr=False)
class Declined:
    """A checker's refusal of a call, created by `decline`. It is False in a condition.

    Attributes:
        reason: The text of the report.
        parts: True if executors may take the calls of the refused call's decomposition.
        error: The error that a fusion executor's compiler raised, or None.
    """

    reason: str
    parts: bool = field(default=True, kw_only=True)
    error: Exception | None = field(default=None, kw_only=True)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Declined({self.reason!r})"


def decline(reason: str, *, parts: bool = True, error: Exception | None = None) -> Declined:
    """Return a checker's refusal of a call.

    Args:
        reason: The text of the report, such as "H = 100 is not a multiple of 8".
        parts: False if a fusion executor may not take the call's decomposition either, since the decomposition does not
            raise where the call does.
        error: The error that kept a fusion executor from compiling a region. It becomes a warning, or with `strict` the
            cause of a RegionError.
    """
    return Declined(reason, parts=parts, error=error)


def call_checker(checker: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an executor's own function, and return its result, or Declined if it depends on symbolic sizes."""
    try:
        return without_specialization(_checked_call, checker, *args, **kwargs)
    except UnresolvedSymInt as reason:
        return decline(str(reason))


_METADATA_ALONE = "but a checker reads the shapes, dtypes and devices of its arguments alone"


def _checked_call(checker: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    trace = state.trace
    before = trace and trace.last_call
    error = None
    try:
        answer = checker(*args, **kwargs)
    except UnknownValueError:
        error, answer = f"reads the value of a tensor, {_METADATA_ALONE}", None
    if error is None and trace is not None and trace.last_call is not before:
        error = f"computes {trace.last_call}, {_METADATA_ALONE}"
    elif isinstance(answer, str):
        expectation = f"must answer True, or decline with the reason: forge.executors.decline({answer!r})"
        error = f"answers {answer!r}, but {expectation}"
    if error is not None:
        raise TypeError(f"{getattr(checker, '__qualname__', repr(checker))} {error}")
    return bool(answer) if isinstance(answer, torch.SymBool) else answer


Decision = bool | Declined
Checker = Callable[..., Decision]


GRADS = ("decompose", "recompute", "none")
NO_GRADIENT = "the implementation has no gradient, and one is needed"


@dataclass(slots=True, eq=False, repr=False)
class Implementation:
    """An executor's implementation of a symbol.

    `op` is called instead of the symbol with its arguments; or `execution_transform`, called with the symbol's
    arguments while a trace is recorded, calls the executor's operators. `checker` is called first, with the arguments.
    `grad_transform` is a gradient rule (forge/ir/grad_rules.py) used in place of the symbol's own. Without one, `grad`
    selects the gradient: "decompose" uses the decomposition's, and decomposes the call if the
    backward reads a value from inside it; "recompute" uses it too, but the call stays one and the backward
    recomputes those values; "none" declines if a gradient is needed. low_priority: whether forge's own transforms of
    several calls (a head in chunks, attention of groups) take precedence, as over torch's implementation, which no user
    selected.
    """

    symbol: Symbol
    op: Symbol | None
    checker: Checker | None = None
    execution_transform: Callable | None = None
    grad_transform: Callable | None = None
    _: KW_ONLY
    grad: str = "decompose"
    name: str | None = None
    low_priority: bool = False

    def __post_init__(self) -> None:
        check(
            self.grad in GRADS,
            lambda: f"{self.symbol.id}: grad is {self.grad!r}, but must be one of {', '.join(GRADS)}",
        )

    def decide(self, bound: BoundSymbol) -> Decision:
        """Return True, or Declined with the reason."""
        if self.grad == "none" and self.grad_transform is None and Tag.DIFFERENTIATED in bound.tags:
            return decline(NO_GRADIENT)
        if self.checker is None:
            return True
        decision = call_checker(self.checker, *bound.args, **bound.kwargs)
        if isinstance(decision, Declined):
            return decision
        return True if decision else decline("the checker declined without a reason")


class Executor(RenamedMembers):
    """The base of operator and fusion executors.

    Args:
        name: The name by which `forge.jit(executors=[…])` finds it once it is registered.

    Attributes:
        patterns: The patterns (`forge.Pattern`) to match in a trace before calls are claimed.
    """

    patterns: Sequence[Any] = ()
    renamed_members = MappingProxyType(
        {
            "by_parts": "fuses_decompositions",
            "checking": "with_region_checks",
            "checks": "checks_regions",
            "ignoring_speed_hints": "without_speed_hints",
            "later": "second_tier",
            "pays": "is_profitable",
            "ready": "is_ready",
            "rounding": "with_eager_numerics",
        }
    )

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple:
        """Pickled by its name: its functions and symbols are this process's own."""
        registry = import_module("forge.executors.registry")  # which imports this module
        check(
            registry.known_executors().get(self.name) is self,
            lambda: (
                f"cannot pickle executor {self.name!r}, which is not registered: call "
                "forge.executors.register_executor(executor) here and where it is read"
            ),
            TypeError,
        )
        return registry.registered_executor, (self.name,)

    def is_available(self) -> Decision:
        """Return True if it can run, or Declined with the reason (no GPU, not installed)."""
        return True

    def identity(self) -> str | Declined:
        """Return a text of all that programs depend on beside the executor's name and forge's version: its own version
        and its settings. Its patterns are added. Every process that compiles the same returns the same text;
        Declined if there is none: then programs are not cached on disk."""
        return decline(f"executor {self.name} does not say what its programs depend on")

    def candidates(self, symbol: Symbol) -> Sequence["Implementation"]:
        """Return the implementations of a symbol, in the order in which they are tried."""
        return ()

    def named_functions(self) -> Iterator[tuple[tuple[str, ...], Callable]]:
        """Yield the functions that programs with this executor call, each with a name that is the same in every
        process, by which a program cached on disk refers to them."""
        yield from ()

    def without_speed_hints(self) -> "Executor":
        """Return the executor that accepts calls even if they are declared slow. Called under select="measured",
        which measures their speed."""
        return self

    def with_eager_numerics(self) -> "Executor | None":
        """Return the executor for numerics="eager": each value is rounded to its dtype, as torch's functions do. Called
        when options are resolved. None is an error for the user. Operator executors round what they return."""
        return self

    def __repr__(self) -> str:
        return f"<executor {self.name}>"


class OperatorExecutor(Executor):
    """An executor that runs single calls: a table from symbols to implementations.

    Args:
        name: The name by which forge.jit(executors=[...]) finds it once registered.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.implementations: dict[str, Implementation] = {}
        self._operators: dict[str, Symbol] = {}
        self._identity: tuple[int, str] = (0, "")  # with the size of the table

    def register_operator(
        self,
        name: str,
        *,
        fn: Callable,
        meta: Callable | None = None,
        like: Symbol | None = None,
        tags: Iterable[Tag] = (),
    ) -> Symbol:
        """Register an operator of this executor: `fn` runs, `meta` maps input metadata to output metadata.

        `like` uses the metadata of a symbol's body or meta instead. Raises ValueError if the name is taken or
        unless exactly one of `meta` and `like` is set.
        """
        check(name not in self._operators, lambda: f"{self.name}: operator {name!r} is registered twice")
        check(
            (meta is None) != (like is None),
            lambda: f"{self.name}.register_operator({name!r}): give exactly one of meta and like",
        )
        meta = meta if like is None else like.definition
        symbol = Symbol(name, f"{self.name}.{name}", meta=meta, tags=frozenset(tags), executor=self, op=fn)
        self._operators[name] = symbol
        return symbol

    def register_implementation(
        self,
        symbol: Symbol | Pattern | Callable | str,
        op: Symbol | Callable | None = None,
        *,
        checker: Checker | None = None,
        execution_transform: Callable | None = None,
        grad_transform: Callable | None = None,
        grad: str = "decompose",
        low_priority: bool = False,
    ) -> None:
        """Register this executor's implementation of `symbol`.

        Args:
            symbol: An operation of the trace, its torch function (torch.nn.functional.gelu), a pattern, which is then
                matched for this executor, or the name of forge's own ("pattern:rms_norm").
            op: An operator, or a plain function called with the symbol's arguments.
            checker: Returns whether the implementation accepts these arguments: True, or False or a reason (`decline`).
                By default it accepts all.
            execution_transform: In place of `op`, a function whose calls replace the call of the symbol.
            grad_transform: The gradient rule of the implementation; by default the symbol's own.
            grad: Without a `grad_transform`, "decompose" (by the symbol's decomposition), "recompute" or "none".
            low_priority: Whether forge's own transforms of several calls take precedence, as over torch's functions.

        Raises:
            ValueError: If the symbol already has an implementation here.
            KeyError: If forge has no pattern of the name.
            TypeError: If `symbol` is not a symbol and has none, `op` is not a function, or neither or both of `op` and
                `execution_transform` are set.
        """
        pattern = _pattern_of(symbol)
        implemented = _symbol_of(symbol, self.name) if pattern is None else pattern.symbol
        check(
            implemented.id not in self.implementations,
            lambda: f"{self.name}: {implemented.id} has an implementation already",
        )
        check(
            (op is None) != (execution_transform is None),
            lambda: f"{self.name}: {implemented.id} needs exactly one of op and execution_transform",
            TypeError,
        )
        check(
            op is None or isinstance(op, Symbol) or callable(op),
            lambda: f"{self.name}: {implemented.id} is to be run by {op!r}, which is no function",
            TypeError,
        )
        if op is not None and not isinstance(op, Symbol):
            op = Symbol(
                implemented.name,
                f"{self.name}.{implemented.id}",
                meta=_never,
                tags=implemented.tags,
                executor=self,
                op=op,
            )
        self.implementations[implemented.id] = Implementation(
            implemented, op, checker, execution_transform, grad_transform, grad=grad, low_priority=low_priority
        )
        if pattern is not None and pattern not in self.patterns:
            self.patterns = [*self.patterns, pattern]

    def candidates(self, symbol: Symbol) -> Sequence[Implementation]:
        """Return the implementations of a symbol, in the order in which they are tried."""
        implementation = self.implementations.get(symbol.id)
        return () if implementation is None else (implementation,)

    _register_implementation = register_implementation  # the name in Thunder, from which executors are ported

    def named_functions(self) -> Iterator[tuple[tuple[str, ...], Callable]]:
        """Yield its operators, and the functions of its implementations."""
        for name, symbol in self._operators.items():
            if symbol.op is not None:
                yield ("operator", name), symbol.op
        for name, implementation in self.implementations.items():
            if implementation.op is not None and implementation.op.op is not None:
                yield ("implementation", name), implementation.op.op

    def identity(self) -> str | Declined:
        """Return the functions of the table as text. Those of forge, torch and Python are identified by their versions.

        A subclass that decides by more than the table must add that.
        """
        if type(self) is not OperatorExecutor:
            return super().identity()
        size = len(self._operators) + len(self.implementations)
        cached_size, text = self._identity
        if cached_size == size:
            return text
        rows = list(self._rows())
        foreign = [each for row in rows for each in row if callable(each) and _is_foreign(each)]
        fingerprint = fingerprint_of(foreign)
        if not fingerprint.is_lasting:
            return decline(f"a function of executor {self.name} is known to this process only")
        names = [[each if isinstance(each, str) else _qualified_name(each) for each in row] for row in rows]
        text = repr((fingerprint.digest, names))
        if not foreign:
            self._identity = size, text
        return text

    def _rows(self) -> Iterator[tuple]:
        for name, symbol in self._operators.items():
            yield name, symbol.op, symbol.meta, *sorted(map(str, symbol.tags))
        for name, each in self.implementations.items():
            op = each.op and each.op.op
            yield name, op, each.checker, each.execution_transform, each.grad_transform, each.grad

    def fingerprint(self, implementation: Implementation) -> Fingerprint:
        """Return the hash of everything that the time of one of its implementations depends on."""
        each = implementation
        functions = (each.op and each.op.op, each.checker, each.execution_transform, each.grad_transform)
        about = (self.name, each.symbol.id, each.grad)
        return fingerprint_of(*[function for function in functions if function is not None], about=about)


def _is_foreign(function: Callable) -> bool:
    """Return whether a function is the user's, so that no version identifies it."""
    return owner_of_module(getattr(function, "__module__", None)) is None and name_in_torch(function) is None


def _qualified_name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def operators_of(executors: Iterable[Executor]) -> list[OperatorExecutor]:
    """Return the executors that run single calls."""
    return [each for each in executors if isinstance(each, OperatorExecutor)]


class FusionExecutor(Executor):
    """An executor that compiles regions: it selects the calls that it can fuse, and compiles a region to one operator.

    Attributes:
        strided: True if its code is compiled for the strides of a region's inputs and returns the strides that torch's
            functions return. Each input then has its strides in the trace, and at run time.
        boxed: True if the compiled function takes its inputs in one list.
        fuses_decompositions: True if it compiles the decompositions of calls. Later executors' operators with a
            gradient would hide these, so calls that it accepts are differentiated by the symbols' own rules.
        checks_regions: True if it checks the inputs of its regions instead of compiling them; values without promised
            strides get random ones.
    """

    strided = False
    boxed = False
    fuses_decompositions = False
    checks_regions = False

    def can_fuse(self, bound: BoundSymbol) -> Decision:
        """Return whether a call may be in a region, or Declined with the reason. The claim pass queries each call.

        If the call may not, but all calls of its decomposition may, these are fused instead.
        """
        raise NotImplementedError(f"{type(self).__name__}.can_fuse(bound): return whether a call may be in a region")

    def is_profitable(self, calls: Sequence[BoundSymbol]) -> bool:
        """Return whether a region of these calls is faster than the calls. The fusion pass queries it before `fuse`,
        and leaves the calls of an unprofitable region to later executors."""
        return len(calls) > 1

    def fuse(self, region: Trace) -> Callable | Declined:
        """Return a function of the region's inputs that returns the tuple of its outputs, or Declined, which leaves the
        region unfused. The fusion pass calls it once for regions that are identical but for names. An exception counts
        as a failure of this executor, as does `decline(error=)`."""
        raise NotImplementedError(f"{type(self).__name__}.fuse(region): return a function of the region's inputs")

    def finish(self) -> Mapping[Callable, Callable | Declined]:
        """Wait for the work that `fuse` has started in threads and processes. Return those of its functions that cannot
        be called after all, with their replacements or the reasons. Called when a program has been lowered, before its
        functions run."""
        return {}

    def dump(self, function: Callable) -> bytes | Declined:
        """Serialize a function that `fuse` returned to bytes, for `load` in another process. Declined keeps its
        programs off the disk. Called after `finish`. forge passes to `load` only results of `dump`: they are as trusted
        as code."""
        return decline(f"executor {self.name} does not keep its regions for another process")

    def load(self, data: bytes) -> Callable:
        """Deserialize a dumped function. Any error makes forge recompile the program."""
        raise NotImplementedError

    def files_of(self, data: bytes) -> Mapping[str, bytes]:
        """Return the contents of the files that dumped bytes refer to, by path: forge.export adds them to its file.
        Raises OSError if one is gone."""
        return {}

    def with_files(self, data: bytes, paths: Mapping[str, str]) -> bytes:
        """Return dumped bytes that refer to the same files at other paths: `paths` maps old to new ones."""
        return data

    def prepare(self) -> None:
        """Start slow work that depends on no program, without waiting for it. Called before each capture."""

    def second_tier(self) -> "FusionExecutor | None":
        """Return an executor of larger regions for the second tier of small programs, or None.

        Called when a program has been lowered, and again once the program has run often. The executor compiles in the
        background: its functions replace this executor's once its `is_ready` returns True, and never if it declines.
        """
        return None

    def is_ready(self) -> Decision:
        """Return whether all functions that `fuse` has returned can be called; Declined if one never can. A program
        asks the executors of its second tier while its first tier runs."""
        return True

    def product_executor(self) -> "ProductExecutor | None":
        """Return the executor of matrix products with their epilogues, for select="measured", or None."""
        return None

    def with_region_checks(self) -> "FusionExecutor":
        """Return the executor for check="regions": it forms the same regions, runs them by torch's operators and checks
        the promises at their edges. Called when options are resolved. An executor without one returns itself."""
        return self

    def with_eager_numerics(self) -> "FusionExecutor | None":
        return None


class ProductExecutor(FusionExecutor):
    """A fusion executor of matrix products, each in a region with its epilogue.

    Under select="measured" each such region is one call of the trace (forge/transforms/products.py), which this
    executor runs if it measured faster than the product and its epilogue on the other executors. If a region is
    declined after all, such as one of symbolic sizes, `can_fuse` declines the call from then on, and the program is
    lowered again, with its epilogue in the regions of others.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._declined_calls: BoundedDict = BoundedDict(_MAX_DECLINED)
        self._declined_regions: weakref.WeakKeyDictionary[Callable, Declined] = weakref.WeakKeyDictionary()

    def is_product(self, bound: BoundSymbol) -> Decision:
        """Return whether a call is a product with which a region may begin."""
        raise NotImplementedError

    def is_epilogue(self, bound: BoundSymbol) -> Decision:
        """Return whether a call may be in the epilogue of a product."""
        raise NotImplementedError

    def fuse_product(self, region: Trace) -> Callable | Declined:
        """Return the function of a region, as `fuse` does; the region is one call."""
        raise NotImplementedError

    def can_fuse(self, bound: BoundSymbol) -> Decision:
        if not isinstance(bound.symbol, ProductSymbol):
            return decline("the call is no product with what follows it")
        declined: Declined | None = self._declined_calls.get(metadata_key(bound))
        return True if declined is None else declined

    def is_profitable(self, calls: Sequence[BoundSymbol]) -> bool:
        return True  # as it was measured

    def fuse(self, region: Trace) -> Callable | Declined:
        function = self.fuse_product(region)
        if not isinstance(function, Declined):
            return function
        (call,) = region.bound_symbols
        self._declined_calls[metadata_key(call)] = function
        placeholder = partial(_declined_region, call.symbol.id)
        self._declined_regions[placeholder] = function
        return placeholder

    def finish(self) -> Mapping[Callable, Callable | Declined]:
        return self._declined_regions


def _declined_region(operation: str, *inputs: Any) -> Any:
    raise AssertionError(f"the region of {operation} was declined, and its program is lowered again")


def _pattern_of(operation: Any) -> Pattern | None:
    """Return a pattern, or the shipped one that a name means; None for other operations."""
    if isinstance(operation, str) and operation.startswith("pattern:"):
        return by_name(operation.removeprefix("pattern:"))
    return operation if isinstance(operation, Pattern) else None


def _symbol_of(function: Any, executor: str) -> Symbol:
    """Return a symbol, or that of a torch function. Raises TypeError if there is none."""
    symbol = function if isinstance(function, Symbol) else torchlang.find(function) if callable(function) else None
    if symbol is None:
        raise TypeError(
            f"{executor}: register_implementation got {function!r}, but must get a symbol, or a torch function that "
            "has one, such as torch.nn.functional.gelu"
        )
    return symbol


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("an implementation's operator is placed by the claim pass, not called while tracing")
