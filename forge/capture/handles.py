"""JitHandle: the record of each jitted function or module, and how it is found from a user's object."""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from forge.capture.history import History
from forge.compiler.executable import Executable
from forge.compiler.report import CompileReport
from forge.ir import check
from forge.runtime.frozen import FoldedWeights
from forge.runtime.tiering import TieredProgram
from forge.torch_internals.dynamo import (
    InstructionTranslator,
    WrapBackendDebug,
    compiled_call,
    inner_backend,
    innermost_backend,
    lookup_backend,
    original_function,
    original_module,
)

_handles: "weakref.WeakSet[JitHandle]" = weakref.WeakSet()  # of this process
_numbers = itertools.count()


class _Graph(NamedTuple):
    """One compiled graph: its report, and weak references to the parts of its call, which only its caller owns."""

    report: CompileReport
    folded_weights: "weakref.ref[FoldedWeights] | None"
    tiered_program: "weakref.ref[TieredProgram] | None"


class JitHandle:
    """The handle of one jitted function: the report of each graph, in order; what runs in eager, and why.

    A graph is here while Dynamo keeps it: after a failed guard, the deletion of a module or torch._dynamo.reset()
    it is gone, but for `latest`.

    Attributes:
        name: The user's name for the function.
        parameters: The names of its positional arguments.
        by_torch: Whether it belongs to torch.compile(backend="forge"), of which forge sees only the graphs.
        latest: The report of the last graph that was compiled.
        on_graph: Called with the report of each graph that was compiled, before it runs.
    """

    def __init__(self, name: str, parameters: Sequence[str] = (), *, by_torch: bool = False) -> None:
        self.name = name
        self.by_torch = by_torch
        self.number = next(_numbers)
        self.parameters = parameters
        self.latest: CompileReport | None = None
        self.on_graph: Callable[[CompileReport], None] | None = None
        self.history = History(name, parameters)
        self.numerics = "fast"
        self.again: functools.partial | None = None  # forge.jit with its arguments, the target among them
        self.warned = False  # that gradients prevent freezing it
        self._graphs: weakref.WeakKeyDictionary[Callable, _Graph | str] = weakref.WeakKeyDictionary()
        _handles.add(self)

    def add(self, executable: Executable, report: CompileReport) -> None:
        """Add a graph that was compiled; Dynamo calls `executable.call`."""
        folded, tiered = executable.folded_weights, executable.tiered_program
        self._graphs[executable.call] = _Graph(
            report,
            None if folded is None else weakref.ref(folded),
            None if tiered is None else weakref.ref(tiered),
        )
        self.history.graphs += 1
        self.latest = report
        if self.on_graph is not None:
            self.on_graph(report)

    def add_eager(self, call: Callable, reason: str) -> None:
        """Add a graph that runs in eager when Dynamo calls `call`, and the reason."""
        self._graphs[call] = reason
        self.history.graphs += 1

    @property
    def _compiled_graphs(self) -> list[_Graph]:
        return [graph for graph in self._graphs.values() if isinstance(graph, _Graph)]

    @property
    def reports(self) -> list[CompileReport]:
        """The reports of the graphs that were compiled, in order."""
        return [graph.report for graph in self._compiled_graphs]

    @property
    def eager(self) -> list[str]:
        """The reasons why graphs run in eager."""
        return [graph for graph in self._graphs.values() if isinstance(graph, str)]

    def folded_weights(self) -> list[FoldedWeights]:
        """Return the values that the graphs compute from frozen weights."""
        results = [graph.folded_weights() for graph in self._compiled_graphs if graph.folded_weights is not None]
        return [each for each in results if each is not None]

    def tiered_programs(self) -> list[TieredProgram]:
        """Return the programs with a pending or finished second tier."""
        programs = [graph.tiered_program() for graph in self._compiled_graphs if graph.tiered_program is not None]
        return [each for each in programs if each is not None]


def name_of(target: Callable) -> str:
    """Return the user's name of a function or module: its own name, or its class's."""
    return getattr(target, "__name__", type(target).__name__)


_by_backend: "weakref.WeakKeyDictionary[Any, JitHandle]" = weakref.WeakKeyDictionary()


def handle_of_torch_compile() -> JitHandle:
    """Return the handle of the torch.compile(backend="forge") result whose frame Dynamo is compiling: each has its own
    backend object."""
    frame = InstructionTranslator.current_tx()
    handle = _by_backend.get(frame.output.compiler_fn)
    if handle is None:
        name = name_of(frame.f_locals["self"]) if "self" in frame.f_locals else frame.f_code.co_name
        handle = _by_backend[frame.output.compiler_fn] = JitHandle(name, by_torch=True)
    return handle


def handle_of(jitted: Any, caller: str = "forge") -> JitHandle:
    """Return the handle of a jitted function or module, with all its compiled graphs. Raises TypeError, in the name
    of `caller`, for anything else."""
    handle = _own_handle(jitted)
    if handle is None:
        raise TypeError(f"{caller}: {_brief_repr(jitted)} was not made by forge.jit")
    return handle


def _own_handle(jitted: Any) -> JitHandle | None:
    return getattr(getattr(jitted, "_forge_compiled", jitted), "_forge_handle", None)


def _brief_repr(value: Any) -> str:
    """Return a short repr of a value: a module's repr takes pages."""
    return f"a {type(value).__name__}" if isinstance(value, torch.nn.Module) else repr(value)


def handles_of(target: Any) -> tuple[str, list[JitHandle]]:
    """Return a name for `target`, and the handles of all jitted functions in it: a result of forge.jit, a module that
    contains such modules, a result of torch.compile(backend="forge"), or, for None, this process.

    Raises TypeError for anything else."""
    if target is None:
        return "this process", sorted(_handles, key=lambda handle: handle.number)
    own = _own_handle(target) or _compiled_by_torch(target)
    if own is not None:
        module = original_module(target)
        return name_of(target if module is None else module), [own]
    modules = target.modules() if isinstance(target, torch.nn.Module) else ()
    candidates = [_own_handle(module) or _compiled_by_torch(module) for module in modules]
    handles = [handle for handle in dict.fromkeys(candidates) if handle is not None]
    check(
        bool(handles),
        lambda: f"forge.explain: {_brief_repr(target)} was not made by forge.jit, and holds nothing that was",
        TypeError,
    )
    return name_of(target), handles


def eager_modules(target: Any) -> list[str]:
    """Return the modules that run in eager around the jitted modules of a module: its other modules without a jitted
    one inside, and the forward of those with some, unless it is torch's (a wrapper's)."""
    if not isinstance(target, torch.nn.Module) or _is_jitted(target):
        return []
    paths: list[str] = []
    _look_outside(target, "", paths)
    return paths


def _look_outside(module: torch.nn.Module, path: str, paths: list[str]) -> None:
    forward = type(module).forward
    if not forward.__module__.startswith("torch."):
        paths.append(f"{f'{path}.' if path else ''}forward ({forward.__qualname__})")
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        if any(map(_is_jitted, child.modules())):
            if not _is_jitted(child):
                _look_outside(child, place, paths)
        else:
            paths.append(f"{place} ({type(child).__name__})")


def _is_jitted(target: Any) -> bool:
    return _own_handle(target) is not None or _compiled_by_torch(target) is not None


def _compiled_by_torch(target: Any) -> JitHandle | None:
    """Return the handle of a torch.compile(backend="forge") result; an empty one if Dynamo passed no graph to
    forge."""
    original = original_module(target) or original_function(target) or target
    if isinstance(target, torch.nn.Module):  # module.compile() leaves the function that it calls
        target = getattr(target, "dynamo_ctx", None) or compiled_call(target)
    config = getattr(target, "get_compiler_config", None)  # the only attribute that refers to its context
    contexts = [target, *(cell.cell_contents for cell in getattr(config, "__closure__", None) or ())]
    chain = next((callback for each in contexts if (callback := getattr(each, "callback", None)) is not None), None)
    while chain is not None and not isinstance(chain, WrapBackendDebug):
        chain = inner_backend(chain)
    if chain is None:
        return None
    own = _by_backend.get(chain)
    if own is not None and own.history.graphs:
        return own
    like = innermost_backend(chain)  # of several compiled with equal options, Dynamo calls one
    names = name_of(original), name_of(getattr(original, "__self__", original))
    others = [each for backend, each in _by_backend.items() if innermost_backend(backend) == like]
    handle = next((each for each in others if each.name in names and each.history.graphs), own)
    if handle is None and getattr(like, "compiler_fn", None) is lookup_backend("forge"):
        handle = _by_backend[chain] = JitHandle(names[0], by_torch=True)
    return handle
