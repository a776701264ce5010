"""Artifacts of Inductor for another process: the module that Inductor generated, and the paths of its kernels.

Inductor's own folder has the compiled kernels of a CPU region, as shared objects; they are found there by path and
hash, and the module is run without the time that Inductor takes to find them: its lowerings, which it imports for
regions that call none, and a probe of the CPU's features. If one is missing, Inductor loads the module unchanged, and
compiles. So it does for a GPU, whose kernels come from Triton's own folder. If one has another hash, it is deleted,
since Inductor would load it, and the program is recompiled.

`torch._inductor.standalone_compile` costs more: see ALTERNATIVES of forge/torch_internals/patch.py.

Source: torch._inductor.codecache, PyCodeCache.load and CppPythonBindingsCodeCache; CompiledFxGraph.post_compile.
"""

import ast
import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

from forge.executors.executor import Declined, decline
from forge.executors.inductorex import isa_probe, units
from forge.executors.inductorex.strides import NO_STRIDES, Strides
from forge.torch_internals.inductor.codecache import (
    OrderedSet,
    PyCodeCache,
    defers_alignment,
    inductor_utils,
    load_library,
    wraps_regions,
)
from forge.torch_internals.inductor.config import inductor_config

_UNUSED = frozenset({"get_args", "benchmark_compiled_module"})  # for running the module by itself
_artifacts: "weakref.WeakKeyDictionary[Callable, ArtifactRecord | _SerializedArtifact]" = weakref.WeakKeyDictionary()


class ArtifactRecord:
    """The serializable parts of an artifact. strides: those of the results if Inductor's differ."""

    def __init__(self, graph: Any, strides: Strides) -> None:
        self.source: str | None = getattr(graph, "source_code", None)
        self.scope: dict[str, Any] = getattr(graph.current_callable, "__globals__", {})
        self.reason = _find_obstacle(graph)
        self.aligned: list[int] = [] if defers_alignment(graph) else list(graph.inputs_to_check)
        self.strides = strides

    def dump(self) -> bytes | Declined:
        """Serialize the parts to bytes."""
        if self.source is None:
            return decline("the source of a region is not known")
        if self.reason is not None:
            return decline(self.reason)
        kernels = _kernels(self.scope)
        return json.dumps(
            {
                "source": self.source,
                "short": _short(self.source, kernels),
                "kernels": kernels,
                "aligned": self.aligned,
                "strides": _as_data(self.strides),
            }
        ).encode()


def _find_obstacle(graph: Any) -> str | None:
    """Return why an artifact cannot leave this process."""
    if graph.constants or getattr(graph, "torchbind_constants", None):
        return "Inductor keeps constants for a region"
    if graph.mutated_input_idxs or inductor_config.triton.cudagraphs or wraps_regions(graph):
        return "Inductor wraps a region"
    return None


def _as_data(strides: Strides) -> list:
    return [list(strides.results.items()), dict(strides.sizes)]


def keep(function: Callable, graph: Any, strides: Strides) -> None:
    """Record the artifact of a region's function: `graph` is Inductor's CompiledFxGraph."""
    _artifacts[function] = ArtifactRecord(graph, strides)


def dump(function: Callable) -> bytes | Declined:
    """Return the bytes from which `load` rebuilds the function."""
    artifact = _artifacts.get(function)
    return decline("the source of a region is not known") if artifact is None else artifact.dump()


def dump_artifact(graph: Any) -> bytes | Declined:
    """Return the bytes from which `load` rebuilds the function of Inductor's CompiledFxGraph."""
    return ArtifactRecord(graph, NO_STRIDES).dump()


def load_with_strides(data: bytes, strides: Strides) -> Callable:
    """Return the function of `load`, with results of these strides; it can be dumped again."""
    fields = json.loads(data)
    fields["strides"] = _as_data(strides)
    data = json.dumps(fields).encode()
    function = load(data)
    _artifacts[function] = _SerializedArtifact(data)
    return function


class _SerializedArtifact:
    """An artifact that was already dumped."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def dump(self) -> bytes:
        """Return the dumped bytes."""
        return self._data


def load(data: bytes) -> Callable:
    """Return the function of a region that another process dumped."""
    fields = json.loads(data)
    are_there = _are_there(fields["kernels"])
    if fields["short"] is not None and are_there:
        call = _call_with_kernels(fields["short"], fields["kernels"])
    else:
        call = _module(fields["source"]).call
    if fields["aligned"]:
        call = inductor_utils.align_inputs_from_check_idxs(call, fields["aligned"], OrderedSet())
    results, sizes = fields["strides"]
    return Strides(dict(results), sizes).wrap(call)


def files_of(data: bytes) -> dict[str, bytes]:
    """Return the contents of the shared objects of dumped bytes, by path. Raises OSError if one has changed."""
    contents = {}
    for path, digest, _ in json.loads(data)["kernels"].values():
        contents[path] = Path(path).read_bytes()
        if units.hash_of(path) != digest:
            raise OSError(f"{path}: not what was built")
    return contents


def with_files(data: bytes, paths: Mapping[str, str]) -> bytes:
    """Return dumped bytes whose shared objects are at other paths."""
    fields = json.loads(data)
    fields["kernels"] = {
        name: (paths[path], digest, function) for name, (path, digest, function) in fields["kernels"].items()
    }
    return json.dumps(fields).encode()


def _are_there(kernels: Mapping[str, tuple[str, str, str]]) -> bool:
    """Return whether no shared object is missing. Raises ImportError if some have changed, after these are
    deleted."""
    digests = {path: digest for path, digest, _ in kernels.values()}
    states = {path: units.state_of(path, digest) for path, digest in digests.items()}
    deleted = [path for path, state in states.items() if state is units.State.DELETED]
    if deleted:
        raise ImportError(f"{', '.join(deleted)}: not what was built, deleted")
    return units.State.MISSING not in states.values()


def _module(source: str) -> ModuleType:
    """Return the module as Inductor loads it: a file of its name with other contents is rewritten."""
    isa_probe.remember()  # it queries the CPU's instruction sets, before lower.py is imported
    _, path = PyCodeCache.write(source)
    if Path(path).read_bytes() != source.encode():
        Path(path).unlink()
    return PyCodeCache.load(source)


def _call_with_kernels(text: str, kernels: Mapping[str, tuple[str, str, str]]) -> Callable:
    """Return the module's call with kernels that already exist."""
    functions = {
        name: getattr(load_library(path, digest), function) for name, (path, digest, function) in kernels.items()
    }
    scope = {"__name__": "forge.inductor_region", **functions}
    exec(compile(text, "<forge region>", "exec"), scope)
    return scope["call"]


def _kernels(scope: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Return the C++ kernels of a generated module: name → shared object, its hash, and its function's name."""
    kernels = {}
    for name, value in scope.items():
        path = getattr(getattr(value, "__self__", None), "__file__", None)
        if type(value) is BuiltinFunctionType and _is_kernel(value.__name__) and path is not None:
            digest = units.hash_of(path)
            if digest is not None:
                kernels[name] = (path, digest, value.__name__)
    return kernels


def _is_kernel(name: str) -> bool:
    return name == "kernel" or name.startswith(units.PREFIX)


def _short(source: str, kernels: Mapping[str, Any]) -> str | None:
    """Return a generated module without the C++ of these kernels, and without unused imports of Inductor; None
    for one that compiles others."""
    statements = [each for each in ast.parse(source).body if not _is_aside(each, kernels)]
    compiler = [each for each in statements if _reads(each, "async_compile")]
    if len(compiler) > 3:  # more than creating it, waiting for it and deleting it
        return None
    statements = [each for each in statements if each not in compiler]
    read = {node.id for each in statements for node in ast.walk(each) if isinstance(node, ast.Name)}
    statements = [each for each in statements if not _imports_in_vain(each, read)]
    lines = source.splitlines()
    return "\n".join("\n".join(lines[each.lineno - 1 : each.end_lineno]) for each in statements) + "\n"


def _is_aside(statement: ast.stmt, kernels: Mapping[str, Any]) -> bool:
    if isinstance(statement, ast.Assign):
        (target,) = statement.targets
        return isinstance(target, ast.Name) and target.id in kernels
    if isinstance(statement, ast.FunctionDef):
        return statement.name in _UNUSED
    return isinstance(statement, ast.If) and _reads(statement, "__name__")


def _reads(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement))


def _imports_in_vain(statement: ast.stmt, read: set[str]) -> bool:
    if not isinstance(statement, ast.ImportFrom) or not (statement.module or "").startswith("torch._inductor."):
        return False
    return all((each.asname or each.name) not in read for each in statement.names)
