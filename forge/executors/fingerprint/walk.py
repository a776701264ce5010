"""Functions and other objects as one hash: all that can change what they compute.

A Python function is its code, its defaults and its closure, and all that it reads: globals, and the functions,
classes, modules and values that are reached through them. An installed package (Python, torch, forge, distributions)
is its version, a Hub repository its hash, a native function the bytes of the shared object that has it.

An object that has no such hash (a lock, an object of C++, code that calls eval or reads a file) is identified in this
process alone, as that very object: programs that depend on it stay in this process, and are not written to disk.

A package whose objects need more than this (kernels, operators that a manifest declares) registers it:
`register_visitor`, `register_operators` and, for code that it loads itself, `owners.register_owner`.

One file, though long: the visitors of kinds of objects call each other.
"""

import collections
import ctypes
import enum
import functools
import hashlib
import importlib.util
import itertools
import logging
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge.executors.fingerprint import natives
from forge.executors.fingerprint.owners import (
    TORCHS,
    Owner,
    is_installed,
    owner_of_file,
    owner_of_module,
    registered_owner,
)
from forge.executors.fingerprint.reads import Import, reads_of
from forge.ir import Symbol
from forge.ir.grad_rules import grad_rule
from forge.patterns import Pattern
from forge.torch_internals.dispatch import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    custom_op_functions,
    custom_op_name,
    custom_ops,
    disable_current_modes,
    overload_name,
    packet_name,
    schema_of,
)
from forge.torch_internals.tensors import version_of

LIMIT = 20_000  # objects that are looked at
VALUE_BYTES = 1 << 20  # of a tensor or an array that is hashed by its values

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo)
_NATIVE = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_NAMESPACES = (type(torch.ops), type(torch.ops.aten))
_UNREAD = frozenset(("_backward_cls", "_abc_impl", "_autograd_function_id"))  # of classes: numbered by each process
_FIELD = type(vars(collections.namedtuple("_Example", "field"))["field"])
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by code, not by C
_MISSING = object()


@dataclass(frozen=True)
class Fingerprint:
    """digest: of what another process can find, too. local: the objects that only this one has, and their states;
    where there are none, the digest says all."""

    digest: str
    local: tuple[tuple[int, int], ...] = ()

    @property
    def is_lasting(self) -> bool:
        """Return whether the same digest means the same in another process."""
        return not self.local


def fingerprint_of(*values: Any, about: Iterable[str] = ()) -> Fingerprint:
    """Return the fingerprint of functions, or other objects, as they are now. `about`: what else the hash is of."""
    walk = Walk()
    walk.put(*about)
    with disable_current_modes():
        for value in values:
            try:
                walk.visit(value)
            except Exception:  # of the objects' own code, or one that leads too deep
                walk.add_unknown(value)
    return Fingerprint(walk.hash.hexdigest(), tuple(walk.local))


class Walk:
    """One walk over all that is reached, each object once."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.local: list[tuple[int, int]] = []
        self.visited: dict[int, tuple[int, Any]] = {}

    def put(self, *parts: str | bytes) -> None:
        """Add parts to the hash, each with its length."""
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            self.hash.update(f"{len(data)}:".encode() + data)

    def visit(self, value: Any) -> None:
        """Add a value and what is reached through it."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _TORCH_PLAIN):
            self.put(kind.__name__, repr(value))
        elif kind in (tuple, torch.Size):
            self._items("tuple", value)
        elif isinstance(value, (set, frozenset)):
            self.put("set", *sorted(map(self._digest, value)))
        elif id(value) in self.visited:
            self.put("seen", str(self.visited[id(value)][0]))
        elif len(self.visited) >= LIMIT:
            self.add_unknown(value)
        else:
            self.visited[id(value)] = len(self.visited), value
            visitor = next((each for types_, each in _VISITORS if isinstance(value, types_)), Walk._instance)
            visitor(self, value)

    def add_unknown(self, value: Any, state: int = 0) -> None:
        """Add an object that only this process knows."""
        self.put("unknown", type(value).__qualname__)
        self.local.append((_number_of(value), state))

    def _digest(self, member: Any) -> str:
        """Return the digest of a member of a set, whose order differs between processes."""
        walk = Walk()
        walk.visit(member)
        self.local += walk.local
        return walk.hash.hexdigest()

    def _items(self, kind: str, values: Iterable[Any]) -> None:
        values = list(values)
        self.put(kind, str(len(values)))
        for each in values:
            self.visit(each)

    def _list(self, value: list) -> None:
        self._items("list", value)
        self._state(value)

    def _mapping(self, value: Mapping) -> None:
        self.put("dict", str(len(value)))
        for key, each in value.items():
            self.visit(key)
            self.visit(each)
        self._state(value)

    def _tuple(self, value: tuple) -> None:
        self._items("tuple", value)
        self.visit(type(value))

    def _namespace(self, value: types.SimpleNamespace) -> None:
        self.put("namespace")
        self.visit(vars(value))

    def _state(self, value: Any) -> None:
        """Add the class and attributes of an object of a subclass."""
        if type(value) not in (list, dict, types.MappingProxyType):
            self.visit(type(value))
            self.visit(getattr(value, "__dict__", None))

    # functions

    def _function(self, function: types.FunctionType) -> None:
        module: str = function.__globals__.get("__name__", "")
        owner = owner_of_file(function.__code__.co_filename) or owner_of_module(module)
        self.put("function", function.__qualname__, owner or "")
        loader = registered_owner(module)
        if loader is not None:
            self._imports_of(loader, module)
            return
        cells = dict(zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True))
        if owner is not None:
            self._items("closure", cells.values())
            return
        self._code(function.__code__)
        self._items("defaults", [function.__defaults__, function.__kwdefaults__, vars(function)])
        self._read(function.__code__, cells, function.__globals__, module)

    def _imports_of(self, owner: Owner, owned: str) -> None:
        """Add a registered owner's module's imports from elsewhere, which the owner's hash does not cover."""
        for name in owner.imports_of(owned):
            module = sys.modules.get(name)
            if module is not None:
                self.put("from elsewhere", name, owner_of_module(name) or "")
                self.visit(module)

    def _code(self, code: types.CodeType) -> None:
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        self.put("code", repr(counts), repr(names), code.co_code, code.co_exceptiontable)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.visit(constant)

    def _read(self, code: types.CodeType, cells: dict[str, Any], names: dict[str, Any], module: str | None) -> None:
        reads = reads_of(code)
        if reads.beyond is not None:
            self.put("beyond", reads.beyond)
            self.add_unknown(code)
        builtins = vars(sys.modules["builtins"])
        for read in reads.names:
            values = (each[read.name] for each in (cells, names, builtins) if read.name in each)
            value = next(values, _MISSING)
            if value is not _MISSING or read.name in code.co_names:  # else a variable of a function around another
                self.put("read", read.name, *read.path)
                self._read_path(value, read.path)
        for each in reads.imports:
            self._import(each, names.get("__package__") or module)

    def _read_path(self, value: Any, path: tuple[str, ...]) -> None:
        """Add a value, or a module's attribute by its path."""
        while path and isinstance(value, types.ModuleType):
            owner, (name, *rest) = value, path
            value, path = _attribute(owner, name), tuple(rest)
            if not isinstance(owner, _NAMESPACES) and is_installed(owner) and not _may_be_anothers(value):
                self.put("installed", f"{owner.__name__}.{name}", owner_of_module(owner.__name__) or "")
                return
        self.put("missing") if value is _MISSING else self.visit(value)

    def _import(self, each: Import, package: str | None) -> None:
        self.put("import", each.module, str(each.level), *each.names)
        try:
            name = importlib.util.resolve_name("." * each.level + each.module, package) if each.level else each.module
        except ImportError:
            name = each.module
        module = sys.modules.get(name)
        if module is not None:
            for path in [(name,) for name in each.names]:
                self._read_path(module, path)
            if not each.names:
                self._read_path(module, ())
        elif owner_of_module(name) is None:  # it is imported when the kernel runs
            self.add_unknown(each)

    def _method(self, method: types.MethodType) -> None:
        self.put("method")
        self.visit(method.__func__)
        self.visit(method.__self__)

    def _parts(self, value: Any) -> None:
        """Add an object made of functions: a property, a partial, a cache."""
        names = "__func__ __wrapped__ func args keywords fget fset fdel".split()
        self.put(type(value).__qualname__)
        self._items("parts", [getattr(value, name) for name in names if getattr(value, name, None) is not None])

    def _native(self, function: Any) -> None:
        """Add a function of C: of the instance that it is bound to, else of its module or class."""
        self.put("native", getattr(function, "__qualname__", ""), function.__name__)
        owner = getattr(function, "__self__", None)
        owner_class = getattr(function, "__objclass__", function)
        name = getattr(function, "__module__", None) or getattr(owner_class, "__module__", None)
        if name is None and owner is not None:
            self.visit(owner)
        else:
            self._shared_object(function, name)

    def _shared_object(self, value: Any, module: str | None) -> None:
        """Add the identity of a module's native code: its version, else the bytes of its file."""
        owner = owner_of_module(module)
        if owner is not None:
            self.put("installed", owner)
            return
        file = getattr(sys.modules.get(module or ""), "__file__", None)
        digest = natives.file_hash(file) if file is not None and not file.endswith(".py") else None
        self.add_unknown(value) if digest is None else self.put("shared object", digest)

    def _library(self, library: ctypes.CDLL) -> None:
        digest = natives.file_hash(library._name) if library._name else None
        self.add_unknown(library) if digest is None else self.put("shared object", digest)

    # operators

    def _packet(self, packet: OpOverloadPacket) -> None:
        self._operator(packet, packet_name(packet))

    def _overload(self, overload: OpOverload) -> None:
        self.put(overload_name(overload))
        self._operator(overload, schema_of(overload).name)

    def _custom(self, definition: Any) -> None:
        """Add an operator of torch.library.custom_op: its functions."""
        self.put("operator", custom_op_name(definition))
        self._items("functions", custom_op_functions(definition))

    def _operator(self, operator: Any, name: str) -> None:
        self.put("operator", name)
        namespace, _, base = name.partition("::")
        declared = next((parts for parts in (find(name) for find in _finders) if parts is not None), None)
        custom = _CUSTOM.get(name)
        if namespace in TORCHS:
            self.put(torch.__version__)
        elif declared is not None:
            self._items("declared", declared)
        elif custom is not None:
            self.visit(custom)
        else:
            digests = natives.operator_hashes(namespace, base)
            self.put("shared objects", *digests)
            if not digests:
                self.add_unknown(operator)

    # other objects

    def _class(self, cls: type) -> None:
        owner = owner_of_module(cls.__module__)
        self.put("class", cls.__module__ if owner else "", cls.__qualname__, owner or "")
        if owner is not None:
            loader = registered_owner(cls.__module__)
            if loader is not None:
                self._imports_of(loader, cls.__module__)
            return
        self._items("bases", cls.__mro__[1:])
        for name, value in sorted(vars(cls).items()):
            is_own = name.startswith("__") and name.endswith("__") and not callable(value)
            if not is_own and name not in _UNREAD:
                self.put(name)
                self.visit(value)

    def _module(self, module: types.ModuleType) -> None:
        owner = owner_of_module(module.__name__)
        self.put("module", module.__name__, owner or "")
        if isinstance(module, _NAMESPACES) and module.__name__.rpartition(".")[2] not in TORCHS:
            self.add_unknown(module)
        if owner is not None:
            return
        if not getattr(module, "__file__", ".py").endswith(".py"):
            self._shared_object(module, module.__name__)
        for name, value in sorted(vars(module).items()):
            if not (name.startswith("__") and name.endswith("__")):
                self.put(name)
                self.visit(value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.put(repr((tensor.dtype, tuple(tensor.shape), tensor.device, tensor.requires_grad)))
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if is_plain and tensor.device.type == "cpu" and tensor.nbytes <= VALUE_BYTES:
            values = tensor.detach().resolve_conj().resolve_neg().contiguous()
            self.put(repr(tensor.stride()), ctypes.string_at(values.data_ptr(), values.nbytes))
        else:
            self.add_unknown(tensor, 0 if tensor.is_inference() else version_of(tensor))

    def _pattern(self, pattern: Pattern) -> None:
        self.put("pattern", pattern.name)
        self.visit(pattern.reference)

    def _symbol(self, symbol: Symbol) -> None:
        """Add a symbol of a trace, with the gradient rule that is registered for it elsewhere."""
        self._instance(symbol)
        self.visit(grad_rule(symbol))

    def _text(self, value: Any) -> None:
        """Add a value that its class and its text identify."""
        self.put(repr((value.pattern, value.flags) if isinstance(value, re.Pattern) else value))
        self.visit(type(value))

    def _add_class(self, value: Any) -> None:
        """Add only the class of an object that changes no result."""
        self.put(type(value).__qualname__)

    def _instance(self, value: Any) -> None:
        """Add an object: its class and its attributes, where these are of Python."""
        if self._buffer(value):
            return
        cls = type(value)
        if f"{cls.__module__}.{cls.__qualname__}" in _TRITON:
            self._triton(value)
            return
        slots = [name for base in cls.__mro__ for name in _slots(base)]
        if any(not base.__flags__ & _HEAP for base in cls.__mro__[:-1]) or not (slots or hasattr(value, "__dict__")):
            module = getattr(value, "__module__", None)
            self._shared_object(value, module) if callable(value) and isinstance(module, str) else self.add_unknown(
                value
            )
            return
        self.put("instance")
        self.visit(cls)
        self.visit(getattr(value, "__dict__", None))
        self._items("slots", [getattr(value, name, None) for name in slots])

    def _buffer(self, value: Any) -> bool:
        """Add numbers in memory, as an array has them. Return whether the value is such."""
        try:
            view = memoryview(value)
        except TypeError:
            return False
        is_numbers = view.nbytes <= VALUE_BYTES and "O" not in view.format
        self.put(type(value).__qualname__, view.format, repr(view.shape), view.tobytes() if is_numbers else b"")
        if not is_numbers:
            self.add_unknown(value)
        return True

    def _triton(self, value: Any) -> None:
        """Add the parts that a Triton function was made of, without its compiled programs."""
        names = "fn configs keys values do_not_specialize do_not_specialize_on_alignment noinline debug".split()
        self.put(type(value).__qualname__)
        self._items("parts", [getattr(value, name, None) for name in names])


_TRITON = frozenset(
    (
        "triton.runtime.jit.JITFunction",
        "triton.runtime.autotuner.Autotuner",
        "triton.runtime.autotuner.Heuristics",
    )
)
_CUSTOM: Mapping[str, Any] = getattr(custom_ops, "OPDEFS", {})
Visitor = Callable[[Walk, Any], None]
_VISITORS: list[tuple[Any, Visitor]] = [
    (types.FunctionType, Walk._function),
    (types.MethodType, Walk._method),
    ((staticmethod, classmethod, property, functools.partial, functools._lru_cache_wrapper), Walk._parts),
    (functools.cached_property, Walk._parts),
    (_NATIVE, Walk._native),
    (type, Walk._class),
    (types.ModuleType, Walk._module),
    (list, Walk._list),
    ((dict, types.MappingProxyType), Walk._mapping),
    (OpOverloadPacket, Walk._packet),
    (OpOverload, Walk._overload),
    (CustomOpDef, Walk._custom),
    (torch.Tensor, Walk._tensor),
    (Pattern, Walk._pattern),
    (Symbol, Walk._symbol),
    (ctypes.CDLL, Walk._library),
    ((re.Pattern, pathlib.PurePath, enum.Enum, _FIELD, int, float, complex, str, bytes), Walk._text),
    (tuple, Walk._tuple),
    (types.SimpleNamespace, Walk._namespace),
    (logging.Logger, Walk._add_class),
]


def register_visitor(kind: type, visitor: Visitor) -> None:
    """Register `visitor(walk, object)` for a class of objects that has no visitor yet."""
    _VISITORS.append((kind, visitor))


FindOperator = Callable[[str], Iterable[Any] | None]
_finders: list[FindOperator] = []


def register_operators(find: FindOperator) -> None:
    """Register `find`, which returns the parts of an operator by its qualified name, and None for others."""
    _finders.append(find)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _attribute(owner: types.ModuleType, name: str) -> Any:
    """Return a module's attribute. Nothing is imported for it: only torch.ops looks its operators up."""
    if not isinstance(owner, _NAMESPACES):
        return vars(owner).get(name, _MISSING)
    try:
        return getattr(owner, name)
    except AttributeError:
        return _MISSING


def _may_be_anothers(value: Any) -> bool:
    """Return whether what an installed module has by a name is a module, or may be what somebody else put there."""
    return isinstance(value, (types.ModuleType, types.FunctionType, type))


def _slots(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


_numbers = itertools.count()
_numbered: dict[int, tuple[int, Callable[[], Any]]] = {}


def _number_of(value: Any) -> int:
    """Return a number that no other object of this process had or will have."""
    number, alive = _numbered.get(id(value), (0, lambda: None))
    if alive() is not value:
        try:
            alive = weakref.ref(value)
        except TypeError:
            alive = lambda: value
        number = next(_numbers)
        _numbered[id(value)] = number, alive
    return number
