"""The place of one captured graph in the cache: what it finds there, or leaves."""

import time
from collections.abc import Callable, Sequence

import torch

from forge.cache import store
from forge.cache.graphs import Described, Uncacheable
from forge.cache.guards import guards_of, hold
from forge.cache.keys import is_on, key_of
from forge.cache.programs import Loaded, dump, load
from forge.compile import Compiled, Options, compile_program
from forge.frontend import dynamo
from forge.frontend.ambient import modes, restored, under
from forge.ir.collection import paused_gc


class Slot:
    """`key` is None where the cache is off, or where the graph cannot be kept: then `reason` says why."""

    def __init__(self, graph: torch.fx.GraphModule, options: Options, parameters: Sequence[str]) -> None:
        self.key: str | None = None
        self.reason: str | None = None
        if not options.cache or not is_on() or dynamo.CHECK_META:
            return
        self._graph = graph
        self._options = options
        self._parameters = parameters
        try:
            self._described = Described(graph)
            self.key = key_of(self._described, options, parameters)
        except Uncacheable as reason:
            self.reason = str(reason)
        except Exception as error:  # a graph with something in it that nobody thought of
            self.reason = f"{type(error).__name__}: {error}"

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
        program.seconds["load"] = time.perf_counter() - start
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
            entry = dump(compiled, mutated, numbers, self._options, self._described)
            entry.data["guards"] = guards_of(self._described.symbols)
        except Uncacheable as reason:
            compiled.uncached = str(reason)
            return
        except Exception as error:  # of torch's guards, or of an executor's
            compiled.uncached = f"{type(error).__name__}: {error}"
            return
        store.write(self.key, entry)
        compiled.seconds["keep"] = time.perf_counter() - start

    def _compiler(self) -> Callable[[], Compiled]:
        """Compiles the graph later, under the modes of now."""
        graph, options, parameters, now = self._graph, self._options, self._parameters, modes()

        def compile() -> Compiled:
            with paused_gc(), restored(), under(now):
                capture = dynamo.record(graph, parameters)
                return compile_program(capture.program, options)

        return compile
