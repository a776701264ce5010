"""Serialization of the objects that a program's text names, one at a time, as JSON.

A function is stored as its qualified name, or its index in an executor of the program; a tensor as its bytes; a region
as its executor's dump; an object of forge's own classes as its attributes. Nothing is pickled.
"""

import functools
import importlib
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from forge.cache.graphs import Uncacheable
from forge.cache.store import Entry
from forge.compiler.fallback import Fallback
from forge.executors.executor import Declined, Executor, FusionExecutor
from forge.ir import Symbol
from forge.ir.printing import Code, qualified_name
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.source import Source
from forge.ir.strides import extent
from forge.torch_internals.dispatch import disable_current_modes

TENSOR_BYTES = 64 * 2**20  # of a program's constants
_PLAIN = (type(None), bool, int, str)
_TORCHS = (torch.dtype, torch.layout, torch.memory_format)


class Writer:
    """Serializer of objects for an entry. `regions` are functions of fusion executors, by id; `lines` are the numbers
    of lines of the user's program."""

    def __init__(
        self,
        entry: Entry,
        executors: Sequence[Executor],
        regions: Mapping[int, FusionExecutor],
        lines: Mapping[Source, int],
    ) -> None:
        self.entry = entry
        self.executors = executors
        self.regions = regions
        self.lines = lines
        self._places = {
            id(function): (number, *name)
            for number, executor in enumerate(executors)
            for name, function in executor.named_functions()
        }
        self._tensor_bytes = 0

    def code(self, code: Code) -> dict[str, Any]:
        """Describe a generated function."""
        return {
            "lines": code.lines,
            "table": {name: self.describe(each) for name, each in code.scope.items()},
            "sources": [
                [line, [self.lines[each] for each in sources if each in self.lines]]
                for line, sources in code.sources.items()
            ],
        }

    def describe(self, value: Any) -> list:
        """Return a value as plain data. Raises Uncacheable, with the reason, if another process cannot rebuild
        it."""
        kind = type(value)
        if kind in _PLAIN:
            return ["plain", value]
        if kind in (float, complex):
            return [kind.__name__, repr(value)]
        if isinstance(value, _TORCHS):
            return ["torch", str(value).removeprefix("torch.")]
        if kind is torch.device:
            return ["device", str(value)]
        if kind is types.ModuleType:
            return ["module", value.__name__]
        if kind in (tuple, list):
            return [kind.__name__, *map(self.describe, value)]
        if kind is torch.Size:
            return ["tuple", *map(self.describe, value)]
        if kind is dict:
            return ["dict", *([self.describe(key), self.describe(each)] for key, each in value.items())]
        if kind is slice:
            return ["slice", *map(self.describe, (value.start, value.stop, value.step))]
        if isinstance(value, SYMBOLIC_TYPES):
            raise Uncacheable("the program's sizes are symbolic")
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return self._object(value)

    def _object(self, value: Any) -> list:
        fuser = self.regions.get(id(value))
        if fuser is not None:
            return self._region(value, fuser)
        if isinstance(value, Fallback):
            return self._fallback(value)
        name = _name_of_symbol(value) if isinstance(value, Symbol) else qualified_name(value)
        if name is not None and _is_same(name, value):
            return ["name", name]
        if id(value) in self._places:
            return ["place", *self._places[id(value)]]
        if type(value) is functools.partial:
            return ["partial", *map(self.describe, (value.func, value.args, value.keywords))]
        owner = qualified_name(type(value))
        if owner is not None and owner.startswith("forge."):
            return ["made", owner, *([name, self.describe(each)] for name, each in _attributes(value))]
        raise Uncacheable(f"the program calls {_describe(value)}, which another process cannot find by a name")

    def _region(self, function: Callable, fuser: FusionExecutor) -> list:
        data = fuser.dump(function)
        if isinstance(data, Declined):
            raise Uncacheable(data.reason)
        return ["region", self.executors.index(fuser), self.entry.add(data)]

    def _fallback(self, fallback: Fallback) -> list:
        """Store the fallback as a separate blob, which is parsed only if it runs."""
        code = json.dumps(self.code(fallback.code())).encode()
        return ["fallback", fallback.executor, fallback.strict, fallback.regions, self.entry.add(code)]

    def _tensor(self, tensor: torch.Tensor) -> list:
        """Store a constant of the program, with its strides."""
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            raise Uncacheable("a constant of it is no plain tensor")
        size = extent(tensor)
        self._tensor_bytes += size * tensor.element_size()
        if self._tensor_bytes > TENSOR_BYTES:
            raise Uncacheable(f"the program's constants are more than {TENSOR_BYTES >> 20} MiB")
        flat = tensor.detach().as_strided((size,), (1,), tensor.storage_offset()).cpu().contiguous()
        data = flat.view(torch.uint8).numpy().tobytes() if size else b""
        number = self.entry.add(data)
        how = [self.describe(each) for each in (tensor.dtype, tensor.device)]
        return ["tensor", *how, list(tensor.shape), list(tensor.stride()), number]


class Reader:
    """Deserializer of an entry's objects. `lines`: those of the user's program, by number."""

    def __init__(
        self,
        entry: Entry,
        executors: Sequence[Executor],
        load: Callable[[FusionExecutor, bytes], Any],
        lines: Mapping[int, Source],
    ) -> None:
        self.entry = entry
        self.executors = executors
        self.lines = lines
        self._load = load
        self._regions: dict[int, Any] = {}
        self._tensors: dict[int, Any] = {}
        self._places: dict[int, dict[tuple, Any]] = {}

    def find(self, described: list) -> Any:
        """Return the object. Raises an error of any kind if this process does not have it."""
        kind, *parts = described
        return _FINDERS[kind](self, *parts)

    def code(self, lines: list[str], table: Mapping[str, list], sources: list[list]) -> Code:
        """Return a described generated function."""
        scope = {key: self.find(each) for key, each in table.items()}
        return Code(lines, scope, {line: [self.lines[number] for number in numbers] for line, numbers in sources})

    def _fallback(self, executor: str, strict: bool, regions: list[str], number: int) -> Fallback:
        reader = Reader(Entry({}), self.executors, self._load, self.lines)  # the other blobs are not kept alive
        data = self.entry.blobs[number]
        return Fallback(executor, lambda: reader.code(**json.loads(data)), strict=strict, regions=regions)

    def _dict(self, *items: list) -> dict:
        return {self.find(key): self.find(each) for key, each in items}

    def _region(self, executor: int, number: int) -> Callable:
        if number not in self._regions:
            fuser = self.executors[executor]
            assert isinstance(fuser, FusionExecutor)
            self._regions[number] = self._load(fuser, self.entry.blobs[number])
        return self._regions[number]

    def _place(self, number: int, *place: str) -> Any:
        if number not in self._places:
            self._places[number] = dict(self.executors[number].named_functions())
        return self._places[number][place]

    def _construct(self, owner: str, *attributes: list) -> Any:
        cls = resolve(owner)
        result = cls.__new__(cls)
        for name, each in attributes:
            object.__setattr__(result, name, self.find(each))
        return result

    def _partial(self, function: list, args: list, keywords: list) -> functools.partial:
        return functools.partial(self.find(function), *self.find(args), **self.find(keywords))

    def _tensor(self, dtype: list, device: list, shape: list[int], strides: list[int], number: int) -> torch.Tensor:
        data = bytearray(self.entry.blobs[number])
        kind: torch.dtype = self.find(dtype)
        with disable_current_modes(), torch.inference_mode(False):
            flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
            return flat.to(self.find(device)).as_strided(shape, strides)


_FINDERS: dict[str, Callable] = {
    "plain": lambda reader, value: value,
    "float": lambda reader, text: float(text),
    "complex": lambda reader, text: complex(text),
    "torch": lambda reader, name: getattr(torch, name),
    "device": lambda reader, name: torch.device(name),
    "module": lambda reader, name: importlib.import_module(name),
    "tuple": lambda reader, *parts: tuple(map(reader.find, parts)),
    "list": lambda reader, *parts: list(map(reader.find, parts)),
    "slice": lambda reader, *parts: slice(*map(reader.find, parts)),
    "name": lambda reader, name: resolve(name),
    "dict": Reader._dict,
    "region": Reader._region,
    "fallback": Reader._fallback,
    "place": Reader._place,
    "made": Reader._construct,
    "partial": Reader._partial,
    "tensor": Reader._tensor,
}


def resolve(name: str) -> Any:
    """Return the object of a qualified name. Raises ImportError or AttributeError if there is none."""
    parts = name.split(".")
    depth = next((i for i in range(len(parts) - 1, 0, -1) if ".".join(parts[:i]) in sys.modules), 0)
    if not depth:
        importlib.import_module(parts[0])
        return resolve(name)
    value = sys.modules[".".join(parts[:depth])]
    for i, part in enumerate(parts[depth:], start=depth):
        if not hasattr(value, part) and isinstance(value, types.ModuleType):
            importlib.import_module(".".join(parts[: i + 1]))
        value = getattr(value, part)
    return value


def _is_same(name: str, value: Any) -> bool:
    try:
        return resolve(name) is value
    except (ImportError, AttributeError):
        return False


def _name_of_symbol(symbol: Symbol) -> str | None:
    """Return the name of the function that a symbol was declared with, and replaces."""
    function = symbol.body or symbol.meta
    return None if function is None else f"{function.__module__}.{function.__qualname__}"


def _attributes(value: Any) -> list[tuple[str, Any]]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return list({**own, **getattr(value, "__dict__", {})}.items())


def _describe(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{name}" if name is not None else f"a {type(value).__qualname__}"
