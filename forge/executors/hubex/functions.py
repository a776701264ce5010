"""Custom operators as symbols: the operators of manifests (`func`) and of a user's torch.library.

A call of torch.ops.acme.f in a program is recorded as one call of the symbol of that name. Its decomposition is the
reference, if there is one; else it is one opaque call, which torch runs.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from forge import prims, torchlang
from forge.hub.manifest import ManifestError, Mark, OpEntry, Problem, Signature, from_schema
from forge.hub.manifest.signatures import parsed_schema
from forge.hub.manifest.validate import NO_META
from forge.ir import Symbol, Tag, TensorProxy, check, current_trace, set_language
from forge.ir.memory import Memory
from forge.ir.pytree import leaves, tensors, tree_map
from forge.prims.library import empty_like, fake_tensor_mode
from forge.torch_internals.dispatch import (
    DisableTorchFunction,
    OpOverload,
    dispatch_has_kernel_for_dispatch_key,
    find_packet_name,
    find_schema,
    get_schema,
)
from forge.torch_internals.tensors import storage_id

_UNTRACEABLE = (NotImplementedError, TypeError, AttributeError)
_EXAMPLES = {"int": 1, "bool": False, "str": "", "float": 1e-5, "number": 1}


class Function:
    """A custom operator.

    text: its schema as declared. reference: its implementation in plain torch. fake: its fake implementation. mark: the
    location of its declaration in a manifest. foreign: whether third-party code registered it and its kernel in torch.
    """

    def __init__(
        self,
        text: str,
        schema: Any,
        *,
        reference: Callable | None = None,
        fake: Callable | None = None,
        mark: Mark | None = None,
        foreign: bool = False,
    ) -> None:
        self.text = text
        self.schema = schema
        self.reference = reference
        self.fake = fake
        self.mark = mark
        self.foreign = foreign
        self._metadata: Callable = fake or reference or self._no_function
        self.signature: Signature = from_schema(schema)
        self.name = self.signature.name
        base = schema.name.partition("::")[2]
        place = f"torch.ops.{self.name.replace('::', '.')}"
        self.symbol = Symbol(base, place, body=lambda *args, **kwargs: self._body(args, kwargs))
        self.symbol.__doc__ = (reference or fake).__doc__ if reference or fake else None

    @property
    def is_reproducible(self) -> bool:
        """Return whether another process has the operator after it read the same manifests."""
        return not self.foreign or self.reference is not None

    def is_run_by(self, function: Any) -> bool:
        """Return whether a kernel's function is this operator itself."""
        schema = find_schema(function)
        name = find_packet_name(function) if schema is None else schema.name
        return name == self.schema.name

    @property
    def operator(self) -> OpOverload:
        """Return torch's object for the operator."""
        namespace, _, base = self.schema.name.partition("::")
        return getattr(getattr(getattr(torch.ops, namespace), base), self.schema.overload_name or "default")

    def _no_function(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.name} has no function in Python")

    # calls

    def values(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, in order, with defaults, converted to the declared types.

        Raises TypeError for surplus, unknown or missing arguments.
        """
        positional = [p.name for p in self.signature.parameters if not p.keyword_only]
        unknown = [name for name in kwargs if name not in self.signature.by_name]
        check(
            len(args) <= len(positional) and not unknown,
            lambda: f"{self.name} takes {', '.join(self.signature.by_name)}, not {unknown or args[len(positional) :]}",
            TypeError,
        )
        arguments = self.signature.bind(args, kwargs)
        missing = [name for name in self.signature.by_name if name not in arguments]
        check(not missing, lambda: f"{self.name} is called without {', '.join(missing)}", TypeError)
        return {name: _as_declared(arguments[name], kind) for name, kind in self._types.items()}

    def call(self, values: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return arguments by name as (args, kwargs) of a call."""
        args = tuple(values[p.name] for p in self.signature.parameters if not p.keyword_only)
        return args, {p.name: values[p.name] for p in self.signature.parameters if p.keyword_only}

    @cached_property
    def _types(self) -> dict[str, str]:
        return {each.name: str(each.type).removeprefix("Optional[").removesuffix("]") for each in self.schema.arguments}

    def example(self, name: str) -> Any:
        """Return a value for an argument that is no tensor and has no default."""
        return _EXAMPLES.get(self._types[name])

    # the symbol

    def enter(self, symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> Any:
        """Record a call in a program, as torchlang's handler."""
        args, kwargs = self.call(self.values(args, kwargs))
        return symbol(*memory.read_all(args), **memory.read_all(kwargs))

    def _body(self, args: tuple, kwargs: dict) -> Any:
        trace = current_trace()
        if self.reference is not None:
            try:
                with trace.collecting() as calls:
                    output = self._expand(self.reference, args, kwargs)
            except _UNTRACEABLE:  # the reference uses operations that torchlang lacks; torch runs it
                pass
            else:
                for bound in calls:
                    trace.record(bound)
                return output
        runs = self.operator if self.reference is None else self.plain
        place = f"opaque.{self.symbol.id}"
        return Symbol(self.symbol.name, place, meta=self.meta, op=runs, tags=frozenset({Tag.OPAQUE}))(*args, **kwargs)

    def _expand(self, reference: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the reference on proxies, in a separate memory scope: its results are new tensors."""
        trace = current_trace()
        before, trace.memory = trace.memory, Memory()
        inputs = [trace.memory.ref(proxy).storage for proxy in tensors([args, kwargs])]
        try:
            with set_language(torchlang.language), torchlang.RecordFactories():
                results = self._results(reference(*args, **kwargs))
            changed = [storage.root.name for storage in inputs if storage.version]
            check(not changed, lambda: f"{self.name}: its reference changes its arguments {', '.join(changed)}")
            storages = [*inputs]
            return self.as_results([_own(result, trace.memory, storages) for result in results])
        finally:
            trace.memory = before

    def _results(self, returned: Any) -> list[Any]:
        """Return the results of a reference, a fake implementation or a kernel, in the number of the schema."""
        results = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        count = len(self.schema.returns)
        check(
            len(results) == count and all(isinstance(each, (torch.Tensor, TensorProxy)) for each in results),
            lambda: (
                f"{self.name}: {', '.join(type(each).__name__ for each in results) or 'nothing'} was returned, but its "
                f"schema says {'one tensor' if count == 1 else f'{count} tensors'}"
            ),
            RuntimeError,
        )
        return results

    def as_results(self, results: list[Any]) -> Any:
        """Return results in the operator's return structure."""
        return results[0] if len(results) == 1 else tuple(results)

    def meta(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results of the fake implementation."""
        return meta_of(self.operator, args, kwargs)

    # implementations that torch calls

    def run_fake(self, *args: Any, **kwargs: Any) -> Any:
        """Run the declared fake implementation, else the reference. Results are contiguous."""
        args, kwargs = self.call(self.values(args, kwargs))
        results = self._results(self._metadata(*args, **kwargs))
        if self.foreign:
            return self.as_results(results)
        return self.as_results([torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in results])

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the reference on real tensors."""
        values = self.values(args, kwargs)
        args, kwargs = self.call(values)
        inputs = [leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
        return self.fresh((self.reference or self._no_function)(*args, **kwargs), inputs)

    def fresh(self, returned: Any, inputs: list[torch.Tensor]) -> Any:
        """Return results as torch requires them from an operator: contiguous, and without aliases of arguments or of
        each other."""
        storages = {storage_id(each) for each in inputs}
        results = []
        for result in self._results(returned):
            storage = storage_id(result)
            own = result.clone(memory_format=torch.contiguous_format) if storage in storages else result.contiguous()
            storages.add(storage)
            results.append(own)
        return self.as_results(results)


def _as_declared(value: Any, kind: str) -> Any:
    """Convert a number to its declared type, as torch converts 1 to 1.0 for a float."""
    if kind == "float" and type(value) is int:
        return float(value)
    if isinstance(value, (tuple, list)) and not tensors(value) and not any(map(_is_tensor, leaves(value))):
        return tuple(value)
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _own(handle: TensorProxy, memory: Memory, storages: list[Any]) -> TensorProxy:
    """Return a result of the reference, contiguous, and copied if it aliases one of the `storages`."""
    value = memory.read(handle)
    storage = memory.ref(handle).storage
    if storage in storages or storage.ambiguous is not None:
        return prims.clone(value, torch.contiguous_format)
    storages.append(storage)
    return prims.contiguous(value)


def meta_of(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Return the metadata of a function's results for a call on proxies, by a run on fake tensors."""
    trace = current_trace()
    with DisableTorchFunction(), torch.no_grad(), fake_tensor_mode((args, kwargs)):
        args, kwargs = tree_map(empty_like, (args, kwargs))
        returned = function(*args, **kwargs)
    return tree_map(
        lambda leaf: trace.tensor(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf,
        returned,
    )


# declarations


_functions: dict[str, Function] = {}


class Declarations:
    """Operators declared while sources are read; they are defined after all sources were read."""

    def __init__(self) -> None:
        self.new: dict[str, Function] = {}

    def find(self, name: str) -> Function | None:
        """Return a function by its name."""
        return self.new.get(name) or _functions.get(name)

    def declare(self, entries: list[OpEntry], find: Callable[[str], Any]) -> None:
        """Declare the `func` entries of one manifest, or raise ManifestError with every problem and declare none."""
        problems, functions = [], {}
        for op in entries:
            reference, fake = (find(name) if name else None for name in (op.reference, op.fake))
            declaration = op.schema or ""
            schema = parsed_schema(declaration, namespace="aten")
            text = declaration.strip().partition("::")[2]
            reasons = [*_schema_problems(schema)]
            if not reasons:
                foreign = _foreign(schema)
                function = Function(text, schema, reference=reference, fake=fake, mark=op.mark, foreign=foreign)
                reasons = [*self._conflicts(function)]
                functions[function.name] = function
            problems += [Problem(op.mark, f"func {op.name} {text}") for text in reasons]
        if problems:
            raise ManifestError(problems)
        self.new.update((name, function) for name, function in functions.items() if not self._is_known(function))

    def _is_known(self, function: Function) -> bool:
        existing = self.find(function.name)
        return existing is not None and existing.mark is not None

    def _conflicts(self, function: Function) -> Iterator[str]:
        """Yield the conflicts of a declaration with existing operators."""
        existing = self.find(function.name)
        if existing is not None and existing.mark is not None:
            if existing.schema != function.schema:
                yield f"is declared with another schema at {existing.mark}: {existing.text}"
            for what in ("reference", "fake"):
                if _code_of(getattr(existing, what)) != _code_of(getattr(function, what)):
                    yield f"is declared with another {what} at {existing.mark}; one of the two needs another name"
            return
        schema = _existing_schema(function.schema)
        if schema is not None and schema != function.schema:
            yield f"is in torch.ops with another schema: {schema}"
        elif not function.reference and not function.fake and not (schema and has_fake(function.name)):
            yield NO_META

    def find_existing(self, name: str) -> Function | None:
        """Return an operator that a manifest or third-party code defined, or None.

        Raises NotImplementedError with the reason why it cannot be a symbol.
        """
        existing = self.find(name)
        if existing is not None:
            return existing
        base, _, overload = name.partition(".")
        schema = _get_schema(base, overload)
        if schema is None:
            return None
        reasons = [*_schema_problems(schema), *([] if has_fake(name) else ["has no fake implementation"])]
        check(not reasons, lambda: f"forge has no symbol for {name}: it {', and '.join(reasons)}", NotImplementedError)
        function = self.new[name] = Function("", schema, foreign=True)
        return function


def _get_schema(base: str, overload: str) -> Any:
    try:
        return get_schema(base, overload)
    except RuntimeError:
        return None


def _existing_schema(schema: Any) -> Any:
    return _get_schema(schema.name, schema.overload_name)


def _foreign(schema: Any) -> bool:
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    existing = _functions.get(name)
    return _existing_schema(schema) is not None and (existing is None or existing.foreign)


def has_fake(name: str) -> bool:
    """Return whether torch infers an operator's metadata without its kernel: by a meta kernel or a composite."""
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def _schema_problems(schema: Any) -> Iterator[str]:
    """Yield the reasons why an operator cannot be a symbol."""
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            other = "" if "out" not in schema.overload_name else f", or register {schema.name} in torch.library"
            yield f"writes to {argument.name}; declare what it computes, and say 'out' in its kernels{other}"
        elif argument.kwarg_only and "Tensor" in str(argument.type):
            yield f"has the keyword-only tensor {argument.name}, which has no gradient in torch; put it before the *"
    if not schema.returns or any(str(each.type) != "Tensor" for each in schema.returns):
        yield "returns something else than tensors: write Tensor, or (Tensor, Tensor)"
    elif any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
        yield "returns a view; its results must be tensors of their own"


def _code_of(function: Any, visited: frozenset[Any] = frozenset()) -> Any:
    """Return the code of a Python function and of the functions of its package that it calls, for a comparison with
    another version of it."""
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, types.FunctionType) or function in visited:
        return function if function not in visited else None
    visited = visited | {function}
    names = sorted(_names_in(function.__code__))
    beside = [function.__globals__.get(name) for name in names]
    package = function.__module__.partition(".")[0]
    callees = [each for each in beside if getattr(each, "__module__", "").partition(".")[0] == package]
    return (
        _text_of(function.__code__),
        function.__defaults__,
        [_code_of(each, visited) for each in callees if isinstance(each, types.FunctionType)],
    )


def _names_in(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _text_of(code: types.CodeType) -> tuple:
    constants = [_text_of(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames


def find_function(name: str) -> Function | None:
    """Return the function that this process registered by this name."""
    return _functions.get(name)


def register(function: Function) -> None:
    """Register a function, so that calls of its operator become calls of its symbol."""
    _functions[function.name] = function
    torchlang.register_operator(function.symbol, function.operator, function.enter)
