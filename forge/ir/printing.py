"""Calls and values as Python: one writer for the text that people read and for the code that runs.

The two differ in the names of callees: `torch.nn.functional.linear` in text, a flat global bound to the same object
in the code that runs (no attribute look-ups per call).
"""

import inspect
import linecache
import math
import operator
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from forge.ir import pytree
from forge.ir.proxies import SYMBOLIC_TYPES, Proxy, TensorProxy
from forge.ir.source import Source
from forge.ir.symbol import BoundSymbol, Symbol
from forge.torch_internals.dispatch import OpOverload, OpOverloadPacket, overload_name, packet_name, schema_of
from forge.torch_internals.functions import torch_nn_module
from forge.torch_internals.sympy import PythonPrinter

DEL = Symbol("del", "python.del", meta=lambda *proxies: None)
BOX = Symbol("box", "python.box", meta=lambda *proxies: None)  # a list of one tuple, which YIELD empties
YIELD = Symbol("yield", "python.yield", meta=lambda *proxies: None)
STATEMENTS = frozenset({BOX, DEL, YIELD})  # of Python: they have no runtime function

_LITERALS = (bool, int, str, bytes, type(None), type(Ellipsis))
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)

# Objects without a literal (a tensor constant, a Python function of the user's) are printed as
# `forge.ir.printing.printed_object(n)`; a trace owns the objects that it names, so it runs during its lifetime.
_holders: "weakref.WeakValueDictionary[int, _Holder]" = weakref.WeakValueDictionary()
_holder_ids = count()


class _Holder:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.number = next(_holder_ids)


def printed_object(number: int) -> Any:
    """Return the object that a printed trace refers to. Raises KeyError once its trace is gone."""
    holder = _holders.get(number)
    if holder is None:
        raise KeyError(f"object {number} of a printed trace is gone: it lives as long as the trace that names it")
    return holder.value


def qualified_name(function: Any) -> str | None:
    """Return the dotted name under which `import torch` (or the function's own module) finds `function`, or None."""
    if isinstance(function, OpOverload):
        return f"torch.ops.{function.namespace}.{schema_of(function).name.split('::')[1]}.{overload_name(function)}"
    if isinstance(function, OpOverloadPacket):
        return f"torch.ops.{packet_name(function).replace('::', '.')}"
    name = getattr(function, "__name__", None)
    if name is None or not name.isidentifier():
        return None
    for path, owner in _WELL_KNOWN:
        for candidate in (name, name.removeprefix(path.rpartition(".")[2] + "_")):
            if getattr(owner, candidate, None) is function:
                return f"{path}.{candidate}"
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module is None or module == "__main__" or module.startswith(_GENERATED) or "<locals>" in qualname:
        return None
    target: Any = inspect.getmodule(function)
    for part in qualname.split("."):
        target = getattr(target, part, None)
    return f"{module}.{qualname}" if target is function else None


def origin_of(function: Any) -> str:
    """Return the module and qualified name of a function without a global name, as a comment, else nothing."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    is_unknown = module is None or name is None or module.startswith(_GENERATED)
    return "" if is_unknown or qualified_name(function) is not None else f"  # {module}:{name}"


_GENERATED = "torch._inductor.runtime.compile_tasks."  # modules that Inductor writes, named by a hash
_IMPORTED = frozenset({"forge", "math", "operator", "torch"})
_WELL_KNOWN = (
    ("torch", torch),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.Tensor", torch.Tensor),
    ("torch._C._nn", torch_nn_module),
    ("torch.special", torch.special),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("operator", operator),
)


class Writer:
    """Writer of values, calls and functions; collects the imports and objects that the text needs.

    used_names: the names of values, which the globals of the text must not have.
    `callees` are the functions without a global name, by their name in the text.
    """

    def __init__(self, *, flat: bool, used_names: Collection[str] = ()) -> None:
        self.flat = flat
        self.used_names = used_names
        self.imports: set[str] = {"torch"}
        self.globals: dict[str, Any] = {"math": math, "torch": torch}
        self.holders: list[_Holder] = []
        self.callees: dict[str, Callable[..., Any] | None] = {}
        self._flat_names: dict[tuple[Any, ...], str] = {}

    def value(self, value: Any) -> str:
        """Return a proxy as its name, everything else as a Python expression."""
        if isinstance(value, Proxy):
            return value.name
        if isinstance(value, float):
            return repr(value) if value == value and abs(value) != float("inf") else f"float('{value}')"
        if isinstance(value, _LITERALS):
            return "..." if value is Ellipsis else repr(value)
        if isinstance(value, complex):
            return f"complex({self.value(value.real)}, {self.value(value.imag)})"
        if isinstance(value, SYMBOLIC_TYPES):
            text = symbolic_expression(value)
            self.imports |= {"math"} if "math." in text else set()
            return text
        if isinstance(value, slice):
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        if isinstance(value, list):
            return f"[{', '.join(self.value(item) for item in value)}]"
        if isinstance(value, tuple):
            inside = ", ".join(self.value(item) for item in value)
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, torch.device):
            return self._bind(value, f"device_{value}") if self.flat else f"torch.device({str(value)!r})"
        if isinstance(value, _TORCH_CONSTANTS):
            return str(value)
        return self.object(value, "object")

    def object(self, value: Any, hint: str) -> str:
        """Return an expression for an object without a literal."""
        if self.flat:
            return self._bind(value, hint)
        name = qualified_name(value)
        if name is not None:
            self.imports.add(name.rsplit(".", 1)[0] if not name.startswith("torch.") else "torch")
            return name
        holder = next((each for each in self.holders if each.value is value), None)
        if holder is None:
            holder = _Holder(value)
            _holders[holder.number] = holder
            self.holders.append(holder)
        self.imports.add("forge.ir.printing")
        return f"forge.ir.printing.printed_object({holder.number})"

    def _bind(self, value: Any, hint: str, *also: Any) -> str:
        """Return the name of a global for an object; different ones for different owners."""
        key = (id(value), *map(id, also))
        if key not in self._flat_names:
            name = re.sub(r"\W", "_", hint)
            while name in self.globals or name in self.used_names:
                name += "_"
            self._flat_names[key] = name
            self.globals[name] = value
        return self._flat_names[key]

    def callee(self, symbol: Symbol) -> str:
        if symbol.op is None:
            return symbol.id
        if self.flat:
            return self._bind(symbol.op, "call_" + symbol.name, symbol.fallback)
        return self.object(symbol.op, symbol.name) if qualified_name(symbol.op) else self._callee(symbol)

    def _callee(self, symbol: Symbol) -> str:
        """Return a name for a function without a global one, such as a region's; the same for the same function."""
        for existing, function in self.callees.items():
            if function is symbol.op:
                return existing
        name = re.sub(r"\W", "_", symbol.name)
        while name in self.callees or name in self.used_names or name in _IMPORTED:
            name += "_"
        self.callees[name] = symbol.op
        return name

    def operand(self, value: Any) -> str:
        """Return an operand of an infix operator, which must not bind tighter than the operand."""
        return f"({self.value(value)})" if isinstance(value, SYMBOLIC_TYPES) else self.value(value)

    def call(self, bound: BoundSymbol) -> str:
        """Return a call as one statement."""
        if bound.symbol is DEL:
            return f"del {', '.join(bound.inputs)}"
        if bound.symbol is BOX:
            return f"{bound.output.name} = [{self.value(bound.args)}]"
        if bound.symbol is YIELD:
            return f"yield {bound.args[0].name}.pop()"
        args = [self.value(arg) for arg in bound.args]
        args += [f"{key}={self.value(value)}" for key, value in bound.kwargs.items()]
        op = bound.symbol.op
        if op in _INFIX and _reads_infix(bound):
            left, right = [self.operand(arg) for arg in bound.args]
            text = f"{left} {_INFIX[op]} {right}"
        elif property_name(op) is not None:
            text = f"{args[0]}.{property_name(op)}"
        elif op is not None and _is_method(op) and bound.args and isinstance(bound.args[0], TensorProxy):
            text = f"{args[0]}.{op.__name__}({', '.join(args[1:])})"
        else:
            text = f"{self.callee(bound.symbol)}({', '.join(args)})"
        if bound.symbol.out:
            return f"{text}; {self._from_arguments(bound)}"
        target = _target(bound.output, set(bound.inputs))
        return f"{target} = {text}" if bound.outputs else text

    def with_fallback(self, bound: BoundSymbol) -> list[str]:
        """Return the statements of a call that is replaced by its fallback once it raises; they cost nothing until
        then. Its callee is a global that they assign."""
        failure = "failure"
        while failure in self.used_names:
            failure += "_"
        fallback = self._bind(bound.symbol.fallback, f"fallback_{bound.symbol.name}")
        args = ", ".join([failure, *map(self.value, bound.args)])
        replaced = f"{self.callee(bound.symbol)}, ({_target(bound.output, set(bound.inputs))})"
        return [
            "try:",
            f"    {self.call(bound)}",
            f"except Exception as {failure}:",
            f"    {replaced} = {fallback}({args})",
        ]

    def _from_arguments(self, bound: BoundSymbol) -> str:
        """Return the results of a call that wrote them to its arguments."""
        memory = [bound.args[place] if isinstance(place, int) else bound.kwargs[place] for place in bound.symbol.out]
        results = [proxy.name for proxy in pytree.proxies(bound.output)]
        return f"{', '.join(results)} = {', '.join(map(self.value, memory))}"


def _reads_infix(bound: BoundSymbol) -> bool:
    """Return whether the call can be printed with an infix operator: Python itself adds two numbers, and a number
    divided by a tensor is rounded twice."""
    if len(bound.args) != 2 or bound.kwargs:
        return False
    if isinstance(bound.args[0], TensorProxy):
        return True
    return isinstance(bound.args[1], TensorProxy) and _INFIX[bound.symbol.op] != "/"


_INFIX: dict[Callable[..., Any] | None, str] = {
    torch.add: "+",
    torch.sub: "-",
    torch.mul: "*",
    torch.true_divide: "/",
    torch.div: "/",
    torch.matmul: "@",
    torch.bitwise_and: "&",
    torch.bitwise_or: "|",
    torch.bitwise_xor: "^",
    torch.eq: "==",
    torch.ne: "!=",
    torch.lt: "<",
    torch.le: "<=",
    torch.gt: ">",
    torch.ge: ">=",
}


def property_name(function: Any) -> str | None:
    """Return 'T' for torch.Tensor.T.__get__, Dynamo's target for x.T; None for anything but a property."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.GetSetDescriptorType) and function.__name__ == "__get__":
        return owner.__name__
    return None


def _is_method(op: Callable[..., Any]) -> bool:
    return getattr(torch.Tensor, getattr(op, "__name__", ""), None) is op


def _target(output: Any, read: set[str]) -> str:
    if isinstance(output, (tuple, list)):
        inside = ", ".join(_nested_target(item, read) for item in output)
        return f"{inside}," if len(output) == 1 else inside
    return _nested_target(output, read)


def _nested_target(output: Any, read: set[str]) -> str:
    if isinstance(output, (tuple, list)):
        return f"({_target(output, read)})" if output else "_"
    return output.name if isinstance(output, Proxy) and output.name not in read else "_"


def symbolic_expression(number: Any) -> str:
    """Return a torch.SymInt, SymFloat or SymBool as a Python expression over its symbols."""
    return str(_sympy_printer.doprint(number.node.expr))


_sympy_printer = PythonPrinter()


def _comment(bound: BoundSymbol) -> str:
    metadata = [in_words(proxy) for proxy in pytree.proxies(bound.output)]
    return "  # " + ", ".join(metadata) if metadata and bound.symbol not in STATEMENTS else ""


def in_words(proxy: Proxy) -> str:
    """Return a value's metadata: `f32[2, 4]`, with the device unless that is the CPU."""
    return repr(proxy).split(": ", 1)[1].removesuffix(" cpu") if isinstance(proxy, TensorProxy) else "number"


INSIDE = "    #   "  # begins the line of a nested call


def statements(
    writer: Writer,
    calls: Iterable[BoundSymbol],
    depth: int,
    should_expand: Callable[[BoundSymbol], bool] = lambda bound: False,
) -> list[str]:
    """Return the calls as lines of a function: the module and the user's line above each, its metadata beside it, and
    `depth - 1` levels of its decomposition below, as comments. should_expand: whether to print at least one level."""
    lines: list[str] = []
    last = ""
    for bound in calls:
        place = str(bound.source or "")
        if place and place != last:
            last = place
            lines.append(f"    # {place}")
        lines.append(f"    {writer.call(bound)}{_comment(bound)}")
        lines.extend(_decomposition(bound, max(depth - 1, int(should_expand(bound))), writer))
    return lines


def _decomposition(bound: BoundSymbol, depth: int, writer: Writer, indent: str = INSIDE) -> list[str]:
    if depth <= 0:
        return []
    lines = []
    for sub in bound.subsymbols:
        lines.append(f"{indent}{writer.call(sub)}{_comment(sub)}")
        lines.extend(_decomposition(sub, depth - 1, writer, indent + "  "))
    return lines


class Code(NamedTuple):
    """The lines of a generated function, its globals, and the source locations of its calls, by line: a region has
    several."""

    lines: list[str]
    scope: dict[str, Any]
    sources: Mapping[int, Sequence[Source]]


_compiled = count()
_sources: dict[str, Mapping[int, Sequence[Source]]] = {}  # of the generated functions that are alive, by path


def compile_function(name: str, code: Code) -> Callable[..., Any]:
    """Compile the function that the code defines. Tracebacks quote it during its lifetime."""
    text = "\n".join([*code.lines, ""])
    path = f"<forge {name} {next(_compiled)}>"
    exec(compile(text, path, "exec"), code.scope)
    function: Callable[..., Any] = code.scope[name]
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    _sources[path] = code.sources
    weakref.finalize(function, _forget, path).atexit = False
    return function


def _forget(path: str) -> None:
    linecache.cache.pop(path, None)
    _sources.pop(path, None)


def sources_of(bound: BoundSymbol) -> list[Source]:
    """Return the source location of a call, or those of a region's calls."""
    return list(dict.fromkeys(each.source for each in (bound, *bound.subsymbols) if each.source is not None))


_LONGEST_CALL = 100  # characters of a call in a message
_MOST_LINES = 8


def location_of(error: BaseException) -> tuple[list[Source], str] | None:
    """Return the user's source locations of the generated call that raised an error, several for a region, and the call
    itself; None if no generated call did."""
    path, number = None, 0
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename in _sources:
            path, number = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    if path is None:
        return None
    sources = sources_at(path, number)
    return (sources, linecache.getline(path, number).strip()) if sources else None


def sources_at(path: str, number: int) -> list[Source]:
    """Return the user's source locations of a line of a generated function, several for a region; none for other
    code."""
    return list({source.line: source for source in _sources.get(path, {}).get(number, ()) if source.line}.values())


def note_location(error: BaseException) -> None:
    """Add a note to an error of a generated function: the user's line, or those of a region's calls, and the generated
    call."""
    location = location_of(error)
    if location is None:
        return
    sources, call = location
    lines = [source.line for source in sources if source.line]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"one of {len(lines) - _MOST_LINES} other lines"]
    call = call if len(call) <= _LONGEST_CALL else f"{call[: _LONGEST_CALL - 1]}…"
    note = "\nor ".join(["at " + lines[0], *lines[1:]]) + f", in {call}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines of aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def quantity(count: int, noun: str) -> str:
    """Return `1 graph`, `2 graphs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def in_seconds(seconds: float) -> str:
    """Return `12.3 µs`, `4.56 ms`, `7.89 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
