"""The registry of torch's functions, methods and operators as symbols, and the entry point of torch calls.

Both front ends use `call(function, args, kwargs)`, which applies a torch function to proxies. The file is long because
the registry and the calls through it share the entries.
"""

import inspect
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from forge import clang, prims
from forge.ir import (
    LanguageContext,
    NumberProxy,
    Symbol,
    Tag,
    TensorProxy,
    check,
    current_trace,
    set_language,
    short_dtype,
)
from forge.ir.memory import Memory, ViewStep
from forge.ir.printing import qualified_name
from forge.ir.proxies import hint_of
from forge.ir.pytree import leaves, tensors, tree_map
from forge.prims.core import same_shape, torch_check, with_tensor_checks
from forge.torch_internals.dispatch import OpOverload, OpOverloadPacket, jit_resolve_packet, packet_name, schema_of
from forge.torch_internals.functions import (
    VariableFunctions,
    nn_gelu,
    torch_fft_module,
    torch_linalg_module,
    torch_nn_module,
    torch_special_module,
)
from forge.torchlang import autocast_casts, autocast_mode, foreach, grad_mode, out

_R = TypeVar("_R")

language = LanguageContext("torchlang")


class View(Enum):
    """The cases in which a symbol's output shares its first argument's memory."""

    NEVER = "never"
    ALWAYS = "always"
    MAYBE = "maybe"  # depends on strides or on the arguments (reshape, contiguous, to, indexing)


Invert = Callable[..., TensorProxy]
Handler = Callable[[Symbol, tuple, dict, Memory], Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """The meaning of a torch function: its symbol, and the behaviour of its in-place form and views."""

    symbol: Symbol
    inplace: bool
    inplace_position: int | None
    view: View | Callable[[tuple, dict], View]
    invert: Invert | None
    handler: Handler | None


_entries: dict[Any, Entry] = {}
_methods: dict[str, Entry] = {}
_symbols: dict[str, Symbol] = {}
_functions: dict[str, Callable] = {}
_factories: set[Callable] = set()
_method_names: dict[Callable, list[str]] = {}  # a method of torch.Tensor may have several names: abs is __abs__ too
for _name in dir(torch.Tensor):
    if callable(_method := getattr(torch.Tensor, _name)):
        _method_names.setdefault(_method, []).append(_name)


def torchsymbol(
    *functions: Callable,
    inplace: Callable | Iterable[Callable] = (),
    methods: Iterable[str] = (),
    inplace_position: int | None = None,
    view: View | Callable[[tuple, dict], View] = View.NEVER,
    invert: Invert | None = None,
    handler: Handler | None = None,
    tags: Iterable[Tag] = (),
    id: str | None = None,
    factory: bool = False,
) -> Callable[[Callable[..., _R]], Symbol[_R]]:
    """Make the decorated function the meaning of torch functions, methods and operators.

    functions: the torch functions; the first names the symbol, and is run by the torch executor. Functions of
    torch.Tensor are methods, too.
    inplace: forms that write the result into their first argument (torch.relu_, operator.iadd).
    inplace_position: the position of the argument `inplace` of torch's function (1 for F.relu); the decorated function
    does not have it.
    methods: further names of the proxies' method.
    view: whether the output shares the first argument's memory, or a function of (args, kwargs) that returns it.
    `invert(x, new, *args)` returns x with the viewed elements replaced by `new`; prims.view_scatter by default.
    handler: called with (symbol, args, kwargs, memory) in place of the symbol, for functions that change other
    arguments than the first (batch_norm's statistics).
    factory: whether it makes a tensor from no tensor (torch.arange).

    An argument that is annotated as a TensorProxy must be one. Raises ValueError if a function has a meaning already.
    """

    def decorate(body: Callable[..., _R]) -> Symbol[_R]:
        name = id or qualified_name(functions[0])
        assert name is not None, f"torchsymbol: {functions[0]} has no name; give its id"
        check(name not in _symbols, lambda: f"torchsymbol: {name} is defined twice")
        _check_parameters(name, functions[0], body)
        op = name.removesuffix(".default").rpartition(".")[2]
        if body.__name__ == "body":  # made by a function for each member of a family
            body.__name__ = op
        body = with_tensor_checks(f"linalg.{op}" if ".linalg." in name else op, body, check_tensor)
        symbol = _symbols[name] = Symbol(body.__name__, name, body=body, tags=frozenset(tags))
        _functions[name] = functions[0]
        _factories.update(functions if factory else ())
        in_place = tuple(inplace) if isinstance(inplace, (tuple, list)) else (inplace,) if inplace else ()
        for function in (*functions, *in_place):
            entry = Entry(symbol, function in in_place, inplace_position, view, invert, handler)
            _add(_entries, function, entry)
            for method in _method_names.get(function, ()):
                _add(_methods, method, entry)
            if getattr(function, "__module__", "") == "_operator":
                _methods.setdefault(function.__name__, entry)
        for method in methods:
            _add(_methods, method, entry)
        return symbol

    return decorate


def _check_parameters(name: str, function: Any, body: Callable) -> None:
    """Raise TypeError if a body lacks parameters of its operator's schema."""
    overload = getattr(function, *function.overloads()) if has_one_overload(function) else function
    if not isinstance(overload, OpOverload):
        return
    parameters = inspect.signature(body).parameters.values()
    takes = {each.name for each in parameters}
    missing = [each.name for each in schema_of(overload).arguments if each.name not in takes]
    check(
        not missing or any(each.kind is each.VAR_KEYWORD for each in parameters),
        lambda: (
            f"torchsymbol: {name}: its body does not take {', '.join(missing)}, which the operator's schema has: "
            f"{schema_of(overload)}"
        ),
        TypeError,
    )


def check_tensor(op: str, **arguments: object) -> None:
    """Raise TypeError, in torch's words, naming the first argument that is not a tensor."""
    for name, value in arguments.items():
        check(
            isinstance(value, TensorProxy),
            lambda name=name, value=value: f"{op}(): argument '{name}' must be Tensor, not {type(value).__name__}",
            TypeError,
        )


def getter(name: str) -> Callable:
    """Return the function that reads a property of torch.Tensor, as Dynamo passes it."""
    return getattr(torch.Tensor, name).__get__


def _add(table: dict, key: Any, entry: Entry) -> None:
    check(
        key not in table,
        lambda: f"torchsymbol: {key} is {table[key].symbol.id} already, and cannot be {entry.symbol.id} too",
    )
    table[key] = entry


class _MethodDoors(dict):
    """The methods of proxies while torch code is traced directly: each goes through `call`."""

    def __missing__(self, name: str) -> Callable:
        door = self[name] = lambda *args, **kwargs: _enter(name, args, kwargs)
        return door

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in _methods else default

    def __contains__(self, name: object) -> bool:
        return name in _methods


language.methods = _MethodDoors()
language.call_torch_function = lambda function, args, kwargs: _enter(function, args, kwargs)


# queries of a tensor's metadata in torch code
_ASKED: dict[Callable, Callable[[TensorProxy], Any]] = {
    torch.is_floating_point: TensorProxy.is_floating_point,
    torch.is_complex: TensorProxy.is_complex,
    torch.is_signed: lambda x: x.dtype.is_signed,
    torch.numel: TensorProxy.numel,
}


def _enter(function: Callable | str, args: tuple, kwargs: dict) -> Any:
    """Record a call from directly traced code: tensors in its closure are constants of the trace."""
    if function in _ASKED:
        return _ASKED[function](*args, **kwargs)
    trace = current_trace()

    def lift(leaf: Any) -> Any:
        return trace.add_constant(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return call(function, tree_map(lift, args), tree_map(lift, kwargs), memory=trace.memory)


class RecordFactories(TorchFunctionMode):
    """A mode that records, while torch code is traced directly, calls without proxies: functions without a tensor
    (torch.arange), and torch.as_tensor."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        arguments = list(leaves((args, kwargs)))
        kinds = [kind for kind in (torch.Tensor, TensorProxy) if any(isinstance(leaf, kind) for leaf in arguments)]
        if not is_factory(function) or kinds == [torch.Tensor]:
            return function(*args, **kwargs)
        return _enter(function, args, kwargs)


def register_operator(symbol: Symbol, operator: OpOverload, handler: Handler) -> None:
    """Make a symbol the meaning of an operator that is not torch's own; calls of it go through `handler`.

    It replaces an earlier meaning of the operator. It is not part of torchlang, and not in all_symbols.
    """
    _entries[operator] = Entry(symbol, False, None, View.NEVER, None, handler)


def stands_for(function: Callable, target: Callable) -> None:
    """Make a function an alias of another function."""
    _add(_entries, function, _entries[target])


def all_symbols() -> dict[str, Symbol]:
    """Return every symbol by id (the torch name of its first function)."""
    return dict(_symbols)


def torch_function_of(symbol: Symbol) -> Callable:
    """Return the torch function that a torchlang symbol stands for."""
    return _functions[symbol.id]


def is_factory(function: Any) -> bool:
    """Return whether a torch function makes a tensor from no tensor."""
    return function in _factories


def find(function: Any) -> Symbol | None:
    """Return the symbol of a torch function or a method's name, in-place forms included, or None.

    A statically known symbol is an attribute: torchlang.matmul is that of torch.matmul.
    """
    entry = _entry_of(function)
    return entry.symbol if entry else None


def _entry_of(function: Any) -> Entry | None:
    """Return the entry of a function or of a method's name; torch.ops.acme.f means its overload if it has only one."""
    if isinstance(function, str):
        return _methods.get(function)
    if function in _entries:
        return _entries[function]
    if has_one_overload(function):
        return _entry_of(getattr(function, *function.overloads()))
    if isinstance(function, OpOverload) and has_one_overload(function.overloadpacket):
        return _entries.get(function.overloadpacket) or _entries.get(_builtin(function))
    return _entries.get(_builtin(function)) if isinstance(function, OpOverload) else None


# the modules of functions that torch generates from the schemas of aten's operators
_BUILTINS = (
    VariableFunctions,
    torch.Tensor,
    torch_nn_module,
    torch_special_module,
    torch_linalg_module,
    torch_fft_module,
)


def _builtin(function: OpOverload) -> Callable | None:
    """Return the function of torch that is generated from an aten operator's schema and takes its arguments."""
    if function.namespace != "aten" or torch.Tag.out_variant in getattr(function, "tags", ()):
        return None
    name = schema_of(function).name.removeprefix("aten::")
    candidates = (getattr(owner, name, None) for owner in _BUILTINS)
    return next((each for each in candidates if each in _entries and type(each) in _C_FUNCTIONS), None)


_C_FUNCTIONS = (type(torch.relu), type(torch.Tensor.relu), type(nn_gelu))


def has_one_overload(function: Any) -> bool:
    """Return whether a function is a torch.ops.acme.f of one overload."""
    return isinstance(function, OpOverloadPacket) and len(function.overloads()) == 1


def overload_of(function: Any, args: tuple, kwargs: dict) -> Any:
    """Return the overload that torch chooses for a call of torch.ops.acme.f; any other function unchanged."""
    if not isinstance(function, OpOverloadPacket) or _entry_of(function) is not None:
        return function
    args, kwargs = tree_map(_example, (args, kwargs))
    try:
        return getattr(function, jit_resolve_packet(packet_name(function), *args, **kwargs))
    except (RuntimeError, TypeError):  # torch raises the error when the call is made
        return function


def _example(leaf: Any) -> Any:
    """Return a value of a proxy's type."""
    if isinstance(leaf, TensorProxy):
        return torch.empty(0)
    leaf = leaf.value if isinstance(leaf, NumberProxy) else leaf
    kinds = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
    return kinds.get(type(leaf), leaf)


def call(function: Callable | str, args: tuple, kwargs: dict, *, memory: Memory, aliased: bool | None = None) -> Any:
    """Apply a torch function, or a method by name, to proxies: record it, functionalized, and return its result.

    aliased: whether the output shares the first argument's memory, if known from Dynamo's fake tensors; None asks the
    symbol. Raises NotImplementedError if torchlang does not have the function.
    """
    function = overload_of(function, args, kwargs)
    each_call = foreach.each_call(function, args, kwargs)
    if each_call is not None:
        with autocast_mode.disable():  # which does not apply to torch._foreach functions
            results = [call(*each, memory=memory, aliased=False) for each in each_call]
        return results if foreach.returns_arguments(function) else tuple(results)
    entry = _entry_of(function)
    if entry is None:
        raise NotImplementedError(f"torchlang does not have {function_name(function)}")
    if not kwargs.keys().isdisjoint(_OF_NUMPY):
        kwargs = _rename(entry.symbol, kwargs)
    if not kwargs.keys().isdisjoint(_OF_OVERLOADS):
        args, kwargs = _by_position(entry.symbol, args, kwargs)
    grad_mode.note(current_trace())
    if autocast_mode.is_enabled():
        args, kwargs = _autocast(function, args, kwargs, memory)
    with set_language(clang.language):
        if "out" in kwargs:  # torch's own Python functions pass out=None on
            target = kwargs["out"]
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
            if target is not None:
                return _call_out(entry, target, args, kwargs, memory)
        inplace = entry.inplace
        if entry.inplace_position is not None:
            args, kwargs, inplace = _without_inplace(entry, entry.inplace_position, args, kwargs)
        if entry.handler is not None:
            return entry.handler(entry.symbol, args, kwargs, memory)
        if inplace:
            return _call_inplace(entry, args, kwargs, memory)
        output = _call(entry, args, kwargs, memory, aliased)
        memory.note_mode(output)
        return output


# NumPy's argument names, which torch's functions accept for their own
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x1": "input", "a": "input", "x2": "other"}


def _rename(symbol: Symbol, kwargs: dict) -> dict:
    """Return the arguments by the symbol's names, with NumPy's names replaced."""
    parameters = inspect.signature(symbol.definition).parameters
    names = {name: torchs for name, torchs in _OF_NUMPY.items() if name not in parameters and torchs in parameters}
    return {names.get(name, name): value for name, value in kwargs.items()}


# argument names that differ between overloads of one function
_OF_OVERLOADS = {
    "indices": "indices_or_sections",
    "sections": "indices_or_sections",
    "tensor_indices_or_sections": "indices_or_sections",
    "element": "elements",
    "test_element": "test_elements",
}


def _by_position(symbol: Symbol, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments with those passed by position that an overload names differently from the symbol."""
    parameters = list(inspect.signature(symbol.definition).parameters)
    names = {name: _OF_OVERLOADS.get(name) for name in kwargs if name not in parameters}
    positions = [parameters.index(own) for own in names.values() if own in parameters]
    if not positions:
        return args, kwargs
    by_name = {names.get(name) or name: value for name, value in kwargs.items()}
    return (*args, *[by_name.pop(name) for name in parameters[len(args) : max(positions) + 1]]), by_name


def _autocast(function: Callable | str, args: tuple, kwargs: dict, memory: Memory) -> tuple[tuple, dict]:
    """Return the arguments in autocast's dtypes. Raises NotImplementedError if no conversion reproduces autocast."""

    def convert(tensor: TensorProxy, dtype: torch.dtype) -> TensorProxy:
        with set_language(clang.language):
            return _call(_methods["to"], (tensor, dtype), {}, memory, None)

    result = autocast_casts.cast_arguments(_callable(function, args), args, kwargs, convert)
    if result is None:
        raise NotImplementedError(f"torchlang does not have {function_name(function)} under torch.autocast")
    return result


def _callable(function: Callable | str, args: tuple) -> Callable:
    """Return the callable of a function or a method's name; a method of a number is a reflected operator (1.0 + x)."""
    if not isinstance(function, str):
        return function
    if not isinstance(args[0], TensorProxy):
        return getattr(operator, function)
    attribute = getattr(torch.Tensor, function, None) or getattr(operator, function)
    return attribute if callable(attribute) else attribute.__get__


def function_name(function: Any) -> str:
    """Return a torch function's name as users know it."""
    if isinstance(function, str):
        return f"torch.Tensor.{function}"
    return qualified_name(function) or getattr(function, "__name__", None) or repr(function)


def _without_inplace(entry: Entry, position: int, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """Return the arguments without `inplace`, and whether it or the function's name requests an in-place call."""
    inplace = entry.inplace or bool(kwargs.get("inplace"))
    if len(args) > position:
        inplace = inplace or bool(args[position])
        args = (*args[:position], *args[position + 1 :])
    return args, {key: value for key, value in kwargs.items() if key != "inplace"}, inplace


def _call(entry: Entry, args: tuple, kwargs: dict, memory: Memory, aliased: bool | None) -> Any:
    read_args, read_kwargs = memory.read_all(args), memory.read_all(kwargs)
    output = entry.symbol(*read_args, **read_kwargs)
    handles = {proxy.name: handle for proxy, handle in zip(tensors(read_args), tensors(args), strict=True)}
    how = View.NEVER
    if aliased is not False and args and isinstance(args[0], TensorProxy):
        how = entry.view if isinstance(entry.view, View) else entry.view(args, kwargs)
    is_new = how is View.ALWAYS or entry.symbol.name in ("reshape", "reshape_as")  # a tensor that does not change
    is_apart = aliased is None and is_new and not torch.is_grad_enabled()

    def handle_of(leaf: Any) -> Any:
        """Return an argument that a function returns, as a new tensor if it has no gradient."""
        handle = handles.get(getattr(leaf, "name", ""))
        if handle is None:
            return leaf
        return memory.another(handle, alias_step()) if is_apart else handle

    if isinstance(output, TensorProxy) and output.name in handles:
        return handle_of(output)
    if how is not View.NEVER:
        how = View.ALWAYS if aliased and how is View.MAYBE else how
        _alias(entry, output, args, kwargs, memory, how, handles.keys())
    if isinstance(output, (tuple, list)) and any(getattr(leaf, "name", None) in handles for leaf in output):
        return tree_map(handle_of, output)
    return output


def _alias(
    entry: Entry, output: Any, args: tuple, kwargs: dict, memory: Memory, how: View, argument_names: Collection[str]
) -> None:
    """Record which memory the results share. argument_names: the names of argument values, which may be returned."""
    base = args[0]
    single = isinstance(output, TensorProxy)
    for index, view in enumerate([output] if single else output):
        if (
            not isinstance(view, TensorProxy)
            or view.name in argument_names
            or view.name == base.name
            or how is View.NEVER
        ):
            continue
        if how is View.ALWAYS:
            memory.alias(view, base, view_step(entry, args[1:], kwargs, None if single else index))
        else:
            memory.share(view, base, entry.symbol.id)


def alias_step() -> ViewStep:
    """Return the step of a view of a whole tensor."""
    return ViewStep(prims.alias, (), {}, None, lambda x, new: new)


def view_step(entry: Entry, args: tuple, kwargs: dict, index: int | None) -> ViewStep:
    """Return the step that computes and inverts one view."""
    symbol = entry.symbol
    invert = entry.invert
    if invert is not None and index is None:
        hides_history = Tag.NOT_DIFFERENTIABLE in symbol.tags
        return ViewStep(symbol, args, kwargs, None, lambda x, new: invert(x, new, *args, **kwargs), hides_history)
    return scatter_step(symbol, args, kwargs, index)


def scatter_step(symbol: Symbol, args: tuple, kwargs: dict, index: int | None) -> ViewStep:
    """Return the step of a view that is inverted by copying into a clone."""
    hides_history = Tag.NOT_DIFFERENTIABLE in symbol.tags

    def invert(x: TensorProxy, new: TensorProxy) -> TensorProxy:
        result = prims.view_scatter(x, new, symbol, args, kwargs, index)
        return prims.with_data(x, result) if hides_history else result

    return ViewStep(symbol, args, kwargs, index, invert, hides_history)


def _call_inplace(entry: Entry, args: tuple, kwargs: dict, memory: Memory) -> TensorProxy:
    target = args[0]
    new = entry.symbol(*memory.read_all(args), **memory.read_all(kwargs))
    if entry.symbol.name in _IN_ROW_MAJOR and isinstance(target, TensorProxy):
        new = _in_order_of(target, new)
    write(target, new, memory, entry.symbol.name)
    return target


# functions that return contiguous results, whatever the layout of their arguments
_IN_ROW_MAJOR = frozenset(
    "addmm baddbmm copy cumprod cumsum fill_diagonal index_add index_copy index_reduce masked_fill masked_scatter "
    "renorm scatter scatter_add scatter_reduce setitem tril triu".split()
)


def _in_order_of(target: TensorProxy, new: TensorProxy) -> TensorProxy:
    """Return `new` with the target's order of dims in memory, because an in-place call does not change the layout."""
    if target.strides is None or len(target.strides) != new.ndim:
        return new
    strides = [hint_of(step) for step in target.strides]
    order = sorted(range(new.ndim), key=lambda dim: strides[dim], reverse=True)
    several = [dim for dim in order if hint_of(new.shape[dim]) != 1]
    if several == sorted(several):
        return new
    result = prims.contiguous(clang.permute(new, order))
    return clang.permute(result, [order.index(dim) for dim in range(new.ndim)])


def _call_out(entry: Entry, target: Any, args: tuple, kwargs: dict, memory: Memory) -> Any:
    out.check_apart(entry.symbol.id, target, (args, kwargs), memory)
    kwargs = out.with_dtype(entry.symbol.id, target, kwargs)
    new = entry.symbol(*memory.read_all(args), **memory.read_all(kwargs))
    out.check_dtypes(entry.symbol.id, target, new)
    for handle, value in zip(tensors(target), tensors(new), strict=True):
        write(handle, value, memory, entry.symbol.name)
    return target


def write(target: TensorProxy, new: TensorProxy, memory: Memory, op: str) -> None:
    """Write a result into a handle, under torch's conditions on its shape and dtype."""
    torch_check(
        same_shape(new.shape, target.shape),
        lambda: (
            f"{op}: output with shape {list(target.shape)} doesn't match the broadcast shape {list(new.shape)}: "
            "an in-place operation cannot change its tensor's shape"
        ),
    )
    torch_check(
        clang.category(new.dtype) <= clang.category(target.dtype),
        lambda: (
            f"{op}: result type {short_dtype(new.dtype)} can't be cast to the desired output type "
            f"{short_dtype(target.dtype)} of {target}"
        ),
    )
    new = clang.convert(new, target.dtype)
    trace = current_trace()
    silently = Tag.NO_GRAD in trace.tags
    with trace.set_tags(trace.tags - {Tag.NO_GRAD}):
        memory.write(target, new, silently=silently, keep_history=prims.with_data if silently else None)
