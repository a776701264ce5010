"""The place of one captured graph in the cache: what it finds there, or leaves."""

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from forge.cache import store
from forge.cache.graphs import Described, Uncacheable
from forge.cache.guards import equal_lengths, guards_since, hold
from forge.cache.keys import key_of
from forge.cache.programs import Loaded, dump, load
from forge.capture import dynamo
from forge.compiler.config import Options
from forge.compiler.executable import Compiled
from forge.compiler.pipeline import compile_program
from forge.executors.executor import Executor
from forge.ir.interpreter import paused_gc
from forge.runtime.plan import Recipe
from forge.runtime.torch_state import modes, restored, under
from forge.support.owner_only_store import is_on


class Slot:
    """`key` is None where the cache is off, or where the graph cannot be kept: then `reason` says why."""

    def __init__(self, graph: torch.fx.GraphModule, options: Options, parameters: Sequence[str]) -> None:
        self.key: str | None = None
        self.reason: str | None = None
        self._seconds = 0.0
        if not options.cache or not is_on() or dynamo.CHECK_META:
            return
        self._graph = graph
        self._options = options
        self._parameters = parameters
        start = time.perf_counter()
        try:
            self._described = Described(graph)
            self.key = key_of(self._described, options, parameters)
        except Uncacheable as reason:
            self.reason = str(reason)
        except Exception as error:  # a graph with something in it that nobody thought of
            self.reason = f"{type(error).__name__}: {error}"
        self._seconds = time.perf_counter() - start

    @property
    def equal_lengths(self) -> dict[Any, Any]:
        """The lengths that are guarded to be equal by now; nothing where no program is kept."""
        return {} if self.key is None else equal_lengths(self._described.symbols)

    def load(self, eager: Callable) -> Loaded | None:
        """The program that was kept; None where there is none that can run here."""
        if self.key is None:
            return None
        start = time.perf_counter()
        entry = store.read(self.key)
        if entry is None:
            return None
        try:
            if not hold(entry.data["guards"], self._described.symbols):
                return None
            program = load(entry, self._options, self._described, self._compiler(), eager)
        except Exception as error:  # what an entry names is code of others
            store.notice(f"a program cannot be used, and is compiled anew: {type(error).__name__}: {error}")
            return None
        program.seconds["load"] = self._seconds + time.perf_counter() - start
        if program.grow is not None:
            program.keep = partial(self._keep_larger, weakref.ref(program), entry.data["mutated"], entry.data["held"])
        return program

    def keep(self, compiled: Compiled, mutated: list[int], held: list[torch.Tensor]) -> None:
        """Keeps a compiled program; where that cannot be, says in it why."""
        compiled.uncached = self.reason
        if self.key is None:
            return
        start = time.perf_counter()
        try:
            if key_of(self._described, self._options, self._parameters) != self.key:  # an executor lost something
                raise Uncacheable("what decides how it is compiled has changed meanwhile")
            numbers = list(map(self._described.held_number, held))
            entry = dump(compiled, compiled.recipe, mutated, numbers, self._options.executors, self._described)
            entry.data["guards"] = guards_since(self._described.symbols, self._described.guards)
        except Uncacheable as reason:
            compiled.uncached = str(reason)
            return
        except Exception as error:  # of torch's guards, or of an executor's
            compiled.uncached = f"{type(error).__name__}: {error}"
            return
        store.write(self.key, entry)
        compiled.seconds["keep"] = self._seconds + time.perf_counter() - start
        if compiled.grow is not None:
            compiled.keep = partial(self._keep_larger, weakref.ref(compiled), mutated, numbers)

    def _keep_larger(
        self,
        compiled: Callable[[], Compiled | None],
        mutated: list[int],
        numbers: list[int],
        recipe: Recipe,
        executors: Sequence[Executor],
    ) -> None:
        """Keeps the larger regions that a small program has got, in its place; what cannot be kept stays as it was."""
        try:
            entry = dump(compiled(), recipe, mutated, numbers, executors, self._described)
            entry.data["guards"] = guards_since(self._described.symbols, self._described.guards)
        except Uncacheable:
            return
        store.write(self.key, entry)

    def _compiler(self) -> Callable[[], Compiled]:
        """Compiles the graph later, under the modes of now."""
        graph, options, parameters, now = self._graph, self._options, self._parameters, modes()

        def compile() -> Compiled:
            with paused_gc(), restored(), under(now):
                capture = dynamo.record(graph, parameters)
                return compile_program(capture.program, options)

        return compile
