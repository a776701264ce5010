"""The cache entry of one captured graph: reads its compiled program from disk, or writes it there."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from forge.cache import store
from forge.cache.graphs import GraphKey, Uncacheable
from forge.cache.guards import equal_lengths, guards_since, hold
from forge.cache.keys import key_of
from forge.cache.programs import dump, generated_functions, load
from forge.cache.store import Entry
from forge.capture import dynamo, fake_values
from forge.compiler import pipeline
from forge.compiler.config import Config
from forge.compiler.executable import Executable
from forge.compiler.report import CompileReport, LayerUse
from forge.executors.contracts import when_broken
from forge.executors.executor import Executor
from forge.ir.interpreter import paused_gc
from forge.runtime.plan import CallBoundary, CompiledPlan
from forge.runtime.torch_state import modes, preserve_torch_state, set_modes
from forge.support.owner_only_store import is_on


class CacheEntry:
    """`key` is None if the cache is off, or if the graph cannot be written to disk: then `reason` says why."""

    def __init__(self, graph: torch.fx.GraphModule, config: Config, parameters: Sequence[str]) -> None:
        self.key: str | None = None
        self.reason: str | None = None
        self._seconds = 0.0
        if not config.cache or not is_on() or fake_values.CHECK_META:
            return
        self._graph = graph
        self._config = config
        self._parameter_names = parameters
        start = time.perf_counter()
        try:
            self._described = GraphKey(graph)
            self.key = key_of(self._described, config, parameters)
        except Uncacheable as reason:
            self.reason = str(reason)
        except Exception as error:  # a graph with unforeseen contents
            self.reason = f"{type(error).__name__}: {error}"
        self._seconds = time.perf_counter() - start

    @property
    def equal_lengths(self) -> dict[Any, Any]:
        """Return the sizes that are guarded to be equal by now; nothing if no program is written."""
        return {} if self.key is None else equal_lengths(self._described.symbols)

    def load(self, boundary: CallBoundary, layers: Sequence[LayerUse]) -> tuple[Executable, CompileReport] | None:
        """Return the program on disk, None if there is none that can run here."""
        if self.key is None:
            return None
        start = time.perf_counter()
        entry = store.read(self.key)
        if entry is None:
            return None
        try:
            if not hold(entry.data["guards"], self._described.symbols):
                return None
            executable, report = load(entry, self._config, self._described, self._compiler(), boundary, layers)
        except Exception as error:  # an entry refers to third-party code, which may raise anything
            store.notice(f"a program cannot be used, and is compiled again: {type(error).__name__}: {error}")
            return None
        report.seconds["load"] = self._seconds + time.perf_counter() - start
        self._write_second_tier_of(executable, report, entry.data["mutated"], entry.data["graph_constants"])
        return executable, report

    def write(
        self, executable: Executable, report: CompileReport, mutated: list[int], graph_constants: list[torch.Tensor]
    ) -> None:
        """Write a compiled program to disk; if that fails, its report says why."""
        report.uncached = self._reason_not_to_write(executable, report, mutated, graph_constants)

    def _reason_not_to_write(
        self, executable: Executable, report: CompileReport, mutated: list[int], graph_constants: list[torch.Tensor]
    ) -> str | None:
        """Write a compiled program, and return None; if that fails, return the reason."""
        if self.key is None:
            return self.reason
        start = time.perf_counter()
        try:
            if key_of(self._described, self._config, self._parameter_names) != self.key:  # an executor lost something
                raise Uncacheable("what decides how it is compiled has changed meanwhile")
            numbers = list(map(self._described.constant_number, graph_constants))
            entry = dump(
                executable.plan,
                report,
                mutated,
                numbers,
                self._config.executors,
                self._described,
                second_tier=executable.second_tier,
            )
            entry.data["guards"] = guards_since(self._described.symbols, self._described.guards)
        except Uncacheable as reason:
            return str(reason)
        except Exception as error:  # of torch's guards, or of an executor's
            return f"{type(error).__name__}: {error}"
        self._write(entry, executable.plan)
        report.seconds["keep"] = self._seconds + time.perf_counter() - start
        self._write_second_tier_of(executable, report, mutated, numbers)
        return None

    def _write_second_tier_of(
        self, executable: Executable, report: CompileReport, mutated: list[int], numbers: list[int]
    ) -> None:
        if executable.second_tier is not None:
            executable.second_tier.on_promote = partial(self._write_second_tier, report, mutated, numbers)

    def _write_second_tier(
        self,
        report: CompileReport,
        mutated: list[int],
        numbers: list[int],
        plan: CompiledPlan,
        executors: Sequence[Executor],
    ) -> None:
        """Replace a program's first tier on disk by its second; if that cannot be written, the first stays."""
        try:
            entry = dump(plan, report, mutated, numbers, executors, self._described, second_tier=None)
            entry.data["guards"] = guards_since(self._described.symbols, self._described.guards)
        except Uncacheable:
            return
        self._write(entry, plan)

    def _write(self, entry: Entry, plan: CompiledPlan) -> None:
        """Write an entry; it is removed if a user's executor breaks its contract when the program first runs, since a
        process that reads it does not check."""
        if self.key is None:
            return
        store.write(self.key, entry)
        for generated in generated_functions(plan):
            if generated is not None:
                when_broken(generated.function, partial(store.remove, self.key))

    def _compiler(self) -> Callable[[], tuple[Executable, CompileReport]]:
        """Return a function that compiles the graph under the current torch modes."""
        graph, config, parameters, now = self._graph, self._config, self._parameter_names, modes()

        def compile() -> tuple[Executable, CompileReport]:
            with paused_gc(), preserve_torch_state(), set_modes(now):
                return pipeline.compile(dynamo.record(graph, parameters).program, config)

        return compile
