"""forge.jit(check="regions"): regions that torch's operators run, with each promise at their edges checked.

A region follows Inductor's path up to its graph of aten operators: the same queries, partition, lowering, strides and
symbolic sizes. Then, instead of kernels, a function runs the graph by torch. It costs no compilation, so
that a whole test suite can run so, and it checks what Inductor's code assumes without checking:

- Inputs and results have the promised dtypes, shapes, strides and devices; their memory holds their values.
- Every size in a promise follows from the region's inputs, and is a number at run time.
- A result aliases no input and no other result.

Unspecified behaviour is randomized: uninitialized memory holds NaN, so does the memory of a region's result after its
last use, and if the kernel that torch selects decides the strides of a value (attention, convolutions), the value gets
others.
"""

import ast
import json
import math
import pickle
import pkgutil
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from forge.compiler.unspecified_strides import poison
from forge.executors.errors import CheckError
from forge.executors.executor import Decision, Declined, decline
from forge.executors.inductorex.aten_graph import results_of
from forge.executors.inductorex.graphs import PlainGraph, rebuild
from forge.executors.inductorex.strides import NO_STRIDES, Strides
from forge.ir.interpreter import skip_dynamo
from forge.ir.printing import qualified_name, symbolic_expression
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.torch_internals.dispatch import disable_current_modes
from forge.torch_internals.fake_tensors import FakeTensorMode
from forge.torch_internals.tensors import storage_address, storage_id, storage_use_count

aten = torch.ops.aten
_EMPTY = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided})
_OWN_REFERENCES = 4  # to a storage, inside of _poison_freed

Size = int | str  # a number, or a Python expression of the names of symbols


@dataclass(frozen=True)
class Promise:
    """The metadata of a tensor at a region's edge. dtype and device are written as torch prints them."""

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    dtype: str
    device: str

    @classmethod
    def of(cls, fake: torch.Tensor, strides: Iterable[Any] | None = None) -> "Promise":
        """Return the metadata of a fake tensor; `strides` replace its own."""
        shape, strides = (tuple(map(_size, each)) for each in (fake.shape, strides or fake.stride()))
        return cls(shape, strides, str(fake.dtype), str(fake.device))

    def symbols(self) -> set[str]:
        """Return the names of the symbols that a tensor of this shape defines."""
        return {each for each in self.shape if isinstance(each, str) and each.isidentifier()}

    def differs(self, value: torch.Tensor, sizes: Mapping[str, int]) -> str | None:
        """Return the difference between a tensor and its promised metadata, in words; None if there is none."""
        if not isinstance(value, torch.Tensor):
            return f"is a {type(value).__name__}, not a tensor"
        shape, strides = (tuple(_value(each, sizes) for each in edge) for edge in (self.shape, self.strides))
        if str(value.dtype) != self.dtype:
            return f"has dtype {value.dtype}, not {self.dtype}"
        if str(value.device) != self.device:
            return f"is on {value.device}, not {self.device}"
        if tuple(value.shape) != shape:
            return f"has shape {tuple(value.shape)}, not {shape}"
        if not all(type(each) is int for each in (*value.shape, *value.stride())):
            return f"has the symbolic sizes {tuple(value.shape)}, strides {tuple(value.stride())}"
        mismatch = any(
            one != other and size > 1 for one, other, size in zip(value.stride(), strides, shape, strict=True)
        )
        if mismatch and 0 not in shape:
            return f"has strides {value.stride()}, not {strides}"
        return "is conjugated or negated where it is read" if value.is_conj() or value.is_neg() else None


def _size(size: Any) -> Size:
    if not isinstance(size, SYMBOLIC_TYPES):
        return size if isinstance(size, str) else int(size)
    value = size.node.maybe_as_int()
    return symbolic_expression(size) if value is None else value


_OF_SIZES = {"int": int, "math": math, "max": max, "min": min, "round": round, "torch": torch}  # in their expressions


def _value(size: Size, sizes: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else int(eval(size, dict(_OF_SIZES), dict(sizes)))


class CheckedRegion:
    """A function of one list, which it empties, that runs a graph by torch's operators between two checks.

    code: the graph as fx prints it; scope: qualified names of its globals. inputs: a Promise for each tensor, an
    expression for each size. strides: those of results if the graph's differ. constants:
    tensors in the graph, by name.
    """

    def __init__(
        self,
        code: str,
        scope: Mapping[str, str],
        inputs: tuple[Promise | Size, ...],
        outputs: tuple[Promise, ...],
        strides: Strides = NO_STRIDES,
        constants: Mapping[str, torch.Tensor] = types.MappingProxyType({}),
    ) -> None:
        self.code = code
        self.scope = dict(scope)
        self.inputs = inputs
        self.outputs = outputs
        self.strides = strides
        self.constants = constants
        namespace = {name: _resolve(where) for name, where in scope.items()}
        exec(compile(code, "<forge checked region>", "exec"), namespace)
        forward = partial(namespace["forward"], types.SimpleNamespace(**constants))
        self._run = strides.wrap(partial(_call, forward))
        defined = set().union(*(each.symbols() for each in inputs if isinstance(each, Promise)))
        defined.update(each for each in inputs if isinstance(each, str))
        for number, each in enumerate((*inputs, *outputs)):
            for size in (*each.shape, *each.strides) if isinstance(each, Promise) else (each,):
                unknown = _names_in(size) - defined
                if unknown:
                    edge = f"input {number}" if number < len(inputs) else f"result {number - len(inputs)}"
                    raise self._error(f"the size {size} of {edge} reads {', '.join(unknown)}, which no input defines")

    @skip_dynamo
    def __call__(self, boxed: list[Any]) -> list[torch.Tensor]:
        inputs, sizes = list(boxed), self._sizes(boxed)
        for number, (value, promise) in enumerate(zip(inputs, self.inputs, strict=True)):
            reason = promise.differs(value, sizes) if isinstance(promise, Promise) else None
            if reason is not None:
                raise self._error(f"input {number} {reason}")
        results = list(self._run(list(inputs)))
        memory = {storage_id(each): f"input {i}" for i, each in enumerate(inputs) if _is_tensor(each)}
        for number, (value, promise) in enumerate(zip(results, self.outputs, strict=True)):
            reason = promise.differs(value, sizes)
            if reason is not None:
                raise self._error(f"result {number} {reason}")
            other = memory.setdefault(storage_id(value), f"result {number}")
            if other != f"result {number}":
                raise self._error(f"result {number} shares memory with {other}")
        boxed.clear()
        for value in results:
            _poison_when_freed(value)
        return results

    def _sizes(self, inputs: list[Any]) -> dict[str, int]:
        """Return the value of each symbol that the inputs define."""
        sizes: dict[str, int] = {}
        for number, (value, promise) in enumerate(zip(inputs, self.inputs, strict=True)):
            if isinstance(promise, Promise):
                if isinstance(value, torch.Tensor) and value.ndim == len(promise.shape):
                    pairs = zip(promise.shape, value.shape, strict=True)
                    sizes.update((name, size) for name, size in pairs if name in promise.symbols())
            elif type(value) is not int:
                raise self._error(f"input {number}, the size {promise}, is {value!r}, not an int")
            elif isinstance(promise, str) and promise.isidentifier():
                sizes[promise] = value
        return sizes

    def _error(self, reason: str) -> CheckError:
        return CheckError(f"{reason}; the region computes\n{self.code}", check="regions")

    def dump(self) -> bytes | Declined:
        """Return the JSON from which `load` rebuilds the region."""
        if self.constants:
            return decline("a region holds constants")
        inputs = [asdict(each) if isinstance(each, Promise) else each for each in self.inputs]
        fields = {
            "code": self.code,
            "scope": self.scope,
            "inputs": inputs,
            "outputs": list(map(asdict, self.outputs)),
            "strides": [list(self.strides.results.items()), dict(self.strides.sizes)],
        }
        return json.dumps(fields).encode()


def load(data: bytes) -> CheckedRegion:
    """Return the region that `CheckedRegion.dump` serialized."""
    fields = json.loads(data)
    results, sizes = fields["strides"]
    inputs = tuple(_promise(each) if isinstance(each, dict) else each for each in fields["inputs"])
    return CheckedRegion(
        fields["code"], fields["scope"], inputs, tuple(map(_promise, fields["outputs"])), Strides(dict(results), sizes)
    )


def _promise(fields: Mapping[str, Any]) -> Promise:
    return Promise(tuple(fields["shape"]), tuple(fields["strides"]), fields["dtype"], fields["device"])


def check_region(
    graph: torch.fx.GraphModule, inputs: list[Any], fake: FakeTensorMode, strides: Strides, *, whole_program: bool
) -> CheckedRegion | Declined:
    """Return a region's graph as a function that torch runs; the arguments are those of Inductor's code generator.

    Declined if the graph reads an object without a name.
    """
    _count_from_inputs(graph.graph)
    for node in list(graph.graph.nodes):
        if getattr(node.target, "overloadpacket", None) in _EMPTY:
            with graph.graph.inserting_after(node):
                filled = graph.graph.call_function(poison, (node,))
            node.replace_all_uses_with(filled, delete_user_cb=lambda user, filled=filled: user is not filled)
    python = graph.graph.python_code("self")
    read = {node.id for node in ast.walk(ast.parse(python.src)) if isinstance(node, ast.Name)}
    names = {name: _name_of(value) for name, value in python.globals.items() if name in read}
    scope = {name: path for name, path in names.items() if path is not None}
    unnamed = ", ".join(name for name in names if name not in scope)
    if unnamed:
        return decline(f"the region's graph reads {unnamed}, which is not a module-level name")
    constants = {node.target: getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")}
    promises = [Promise.of(node.meta["val"], strides.results.get(i)) for i, node in enumerate(results_of(graph))]
    edges = tuple(Promise.of(each) if isinstance(each, torch.Tensor) else _size(each) for each in inputs)
    return CheckedRegion(python.src, scope, edges, tuple(promises), strides, constants)


def _count_from_inputs(graph: torch.fx.Graph) -> None:
    """Make as_strided count from an input's first element, as Inductor's code does, which reads by address."""
    inputs = {
        storage_id(node.meta["val"]): node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        base = inputs.get(storage_id(node.args[0].meta["val"]))
        if base is not None and len(node.args) == 4:
            node.target, node.args = as_strided_of, (base, *node.args)


def as_strided_of(base: torch.Tensor, x: torch.Tensor, size: Any, stride: Any, storage_offset: int) -> torch.Tensor:
    """Return torch.as_strided of `x`, a view of `base`; storage_offset counts from the first element of `base`."""
    before = base.storage_offset() * base.element_size() // x.element_size()
    return x.as_strided(size, stride, before + storage_offset)


class CheckedProgram:
    """A whole program as one checked region, in place of one that another process compiles."""

    on_cpu = True

    def __init__(self, graph: PlainGraph, strides: Strides) -> None:
        self.function = check_region(*rebuild(pickle.loads(pickle.dumps(graph))), strides, whole_program=True)

    def __call__(self, boxed: list[Any]) -> list[torch.Tensor]:
        assert not isinstance(self.function, Declined)
        return self.function(boxed)

    def state(self) -> Decision:
        """Return True if it can be called, Declined otherwise."""
        return self.function if isinstance(self.function, Declined) else True


def _call(forward: Callable, boxed: list[Any]) -> list[torch.Tensor]:
    # torch's conversions to another dtype preserve requires_grad of a leaf, under no_grad too
    inputs = [each.detach() if _is_tensor(each) else each for each in boxed]
    boxed.clear()
    with torch.no_grad():
        return list(forward(*inputs))


def _poison_when_freed(value: torch.Tensor) -> None:
    """Overwrite a region's result when its memory is freed, so that later reads are detected."""
    storage = value.untyped_storage()
    weakref.finalize(value, _poison_freed, storage, value.dtype).atexit = False


@skip_dynamo
def _poison_freed(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    others = storage_use_count(storage_address(storage)) > 2 or sys.getrefcount(storage) > _OWN_REFERENCES
    if others or (storage.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    with disable_current_modes(), torch.inference_mode():
        size = storage.nbytes() // dtype.itemsize
        memory: Any = torch.empty(0, dtype=dtype, device=storage.device)  # torch's stubs only know typed storages
        poison(memory.set_(storage, 0, (size,)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _names_in(size: Size) -> set[str]:
    tree = ast.parse(str(size))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - _OF_SIZES.keys()


def _resolve(name: str) -> Any:
    kind, _, text = name.rpartition(" ")
    return float(text) if kind == "float" else pkgutil.resolve_name(name)


def _name_of(value: Any) -> str | None:
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, float):
        return f"float {value}"
    return None if value is None else qualified_name(value)
