"""Conversion between compiled programs and cache entries.

An entry has what runs: the text of the generated functions, with a table of the objects that it names, the plain data
of the plan, and the claims, for forge.explain. The passes do not run for a program from disk: results that only they
provide (the backward of other outputs, a double backward, the stages) are compiled from the captured graph on
demand.
"""

import hashlib
import json
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from forge.cache.graphs import GraphKey
from forge.cache.objects import Reader, Writer
from forge.cache.store import Entry
from forge.compiler.autotune import Measurement
from forge.compiler.claim import Claim
from forge.compiler.collectives import Collective
from forge.compiler.config import Config
from forge.compiler.executable import Executable, SecondTier
from forge.compiler.fallback import Fallback
from forge.compiler.report import CompileReport, LayerUse
from forge.executors.executor import Executor, FusionExecutor
from forge.ir import Trace
from forge.ir.bounded import BoundedDict
from forge.ir.locks import new_lock
from forge.ir.printing import compile_function
from forge.ir.pytree import names
from forge.ir.source import Source
from forge.runtime.autograd import DifferentiableBackward, Sources
from forge.runtime.plan import Backwards, CallBoundary, CompiledPlan, GeneratedFunction, ProgramCall, TrainingPlan
from forge.runtime.tiering import TierResult
from forge.support.background import is_background_enabled
from forge.transforms.split import SavedValue

_PARTS = ("forward", "backward", "epilogue")
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # in the repr of a function: of this process alone
_loaded: BoundedDict = BoundedDict(4096)  # functions that executors loaded from dumped regions, by executor and hash


def dump(
    plan: CompiledPlan,
    report: CompileReport,
    mutated: list[int],
    graph_constants: list[int],
    executors: Sequence[Executor],
    graph: GraphKey,
    *,
    second_tier: SecondTier | None,
) -> Entry:
    """Return a program as an entry: its plan, with its executors. graph_constants: numbers of tensors in the graph,
    which the program takes last.

    Raises Uncacheable for a program that another process could not run.
    """
    entry = Entry({})
    functions = dict(zip(_PARTS, generated_functions(plan), strict=True))
    entry.data = {
        "functions": {
            part: _text_and_table(entry, each.trace, executors, graph)
            for part, each in functions.items()
            if each is not None and each.trace is not None
        },
        "grad": plan.grad,
        "sets_mode": plan.sets_mode,
        "attends": plan.attends,
        "second_tier": None if second_tier is None else [second_tier.hidden_seconds, second_tier.calls],
        "training": _training_data(plan.training),
        "mutated": mutated,
        "graph_constants": graph_constants,
        "opaque_calls": report.opaque_calls,
        "measured": [asdict(each) for each in report.measured],
        "saved": [[*each[:-1], graph.line_of(each.source)] for each in report.saved],
        "collectives": [
            [[*each[:-1], graph.line_of(each.source)] for each in collectives] for collectives in report.collectives()
        ],
        "claims": [
            entry.add(json.dumps([_claim_data(claim, graph) for claim in claims]).encode())
            for claims in (report.claims, report.backward_claims)
        ],
    }
    return entry


def generated_functions(plan: CompiledPlan) -> tuple[GeneratedFunction | None, ...]:
    """Return the forward, and the backward and epilogue if there are any, of a plan."""
    training = plan.training
    return (plan.forward, training and training.backward, training and training.epilogue)


def _text_and_table(entry: Entry, trace: Trace, executors: Sequence[Executor], graph: GraphKey) -> dict[str, Any]:
    regions = {
        id(bound.symbol.op): bound.symbol.executor
        for bound in trace.bound_symbols
        if isinstance(bound.symbol.executor, FusionExecutor)
    }
    writer = Writer(entry, executors, regions, graph.lines)
    return {"name": trace.name, **writer.code(trace.python_source())}


def _training_data(training: TrainingPlan | None) -> dict[str, Any] | None:
    if training is None:
        return None
    sources = training.sources
    return {
        "usual": list(training.usual),
        "constants": training.constants,
        "sources": [list(sources.saved.items()), *sources[1:]],
        "split": _hash(training),
        "read": training.backward.read,
        "buckets": training.buckets,
    }


def _hash(training: TrainingPlan) -> str:
    """Return the hash of a forward and its residuals: the layout of its backwards' inputs."""
    split = training.split
    assert split is not None, "a plan from disk is not written again"
    saved = [names(part) for part in split.output]
    printed = _ADDRESS.sub("", repr((split.input_names, split.bound_symbols, saved)))
    return hashlib.sha256(printed.encode()).hexdigest()


def _claim_data(claim: Claim, graph: GraphKey) -> list:
    line = graph.line_of(claim.source)
    facts = claim.operation, claim.outputs, claim.results, line
    return [*facts, claim.executor, claim.declined, claim.level, claim.region]


def load(
    entry: Entry,
    config: Config,
    graph: GraphKey,
    compile: Callable[[], tuple[Executable, CompileReport]],
    boundary: CallBoundary,
    layers: Sequence[LayerUse],
) -> tuple[Executable, CompileReport]:
    """Return the program of an entry. compile: compiles it from the captured graph. layers: for its report. Raises an
    error, of any kind, if an object that it names does not exist here."""
    data = entry.data
    program = _Program(compile)
    lines = {number: line for line, number in graph.lines.items()}
    errors: list[Exception] = []

    def region(executor: FusionExecutor, data: bytes) -> Callable | None:
        try:
            return _load_region(executor, data)
        except Exception as error:  # the others are tried as well, so that each executor finds all that it cannot use
            errors.append(error)
            return None

    reader = Reader(entry, config.executors, region, lines)
    functions = {part: _function(reader, **each) for part, each in data["functions"].items()}
    if errors:
        raise errors[0]
    fallbacks = [_fallbacks(functions.get(part)) for part in ("forward", "backward")]
    plan = CompiledPlan(functions["forward"], data["grad"], data["sets_mode"], attends=data["attends"])
    if data["training"] is not None:
        plan = plan._replace(training=_training_plan(functions, program, **data["training"]))
    fields = data["second_tier"]
    second_tier = None if fields is None else SecondTier(program.second_tier, *fields)
    tiered = second_tier.tiered_program() if second_tier is not None and is_background_enabled() else None
    tensors = list(graph.graph_constants.values())
    boundary = boundary._replace(graph_constants=[tensors[number] for number in data["graph_constants"]])
    parts = ProgramCall(plan, program.call, tiered, data["mutated"], boundary=boundary)
    call, wrappers = parts.assemble()
    report = LoadedReport(entry, program, lines, fallbacks, wrappers=wrappers, layers=layers)
    return Executable(call, plan, second_tier, tiered), report


def _function(reader: Reader, name: str, **code: Any) -> GeneratedFunction:
    return GeneratedFunction(compile_function(name, reader.code(**code)))


def _fallbacks(generated: GeneratedFunction | None) -> dict[str, Fallback]:
    """Return the fallbacks of a function's regions, by the region's name."""
    scope = {} if generated is None else generated.function.__globals__
    fallbacks = [each for each in scope.values() if isinstance(each, Fallback)]
    return {region: each for each in fallbacks for region in each.regions}


def _training_plan(  # noqa: PLR0913  the fields of a record
    functions: dict[str, GeneratedFunction],
    program: "_Program",
    usual: list[bool],
    constants: list[int],
    sources: list,
    split: str,
    read: list[int] | None,
    buckets: list[list[int]],
) -> TrainingPlan:
    saved, *rest = sources
    return TrainingPlan(
        functions["backward"]._replace(read=read),
        tuple(usual),
        functions.get("epilogue"),
        constants,
        Sources({int(position): place for position, place in saved}, *rest),
        _LoadedBackwards(program, split),
        buckets=buckets,
    )


class _LoadedBackwards:
    """The backwards of a program from disk that are not stored (forge.runtime.plan.Backwards). split: the hash of the
    forward with its residuals."""

    def __init__(self, program: "_Program", split: str) -> None:
        self._program = program
        self._split = split

    @property
    def _backwards(self) -> Backwards:
        training = self._program.whole.plan.training
        if training is None or _hash(training) != self._split:
            raise AssertionError(
                "a program from forge's cache saves for its backward what this process does not find in it; "
                "please report it, and run with FORGE_CACHE=0"
            )
        return training.backwards

    def compile(self, present: tuple, *, batched: bool = False) -> GeneratedFunction:
        return self._backwards.compile(present, batched=batched)

    def compile_differentiable(self, key: tuple) -> DifferentiableBackward:
        return self._backwards.compile_differentiable(key)

    def numbers(self) -> Sequence[Any]:
        return self._backwards.numbers()


def _load_region(executor: FusionExecutor, data: bytes) -> Callable:
    """Return the executor's function for a serialized region, loaded once per process."""
    key = (executor, hashlib.sha256(data).digest())
    function = _loaded.get(key)
    if function is None:
        function = _loaded[key] = executor.load(data)
    return function


class _Program:
    """A program from disk. `whole` is the same program compiled here, once something that is not on disk is needed."""

    def __init__(self, compile: Callable[[], tuple[Executable, CompileReport]]) -> None:
        self.report_of: weakref.ref[LoadedReport] | None = None
        self.compile = compile
        self._compiled: Executable | None = None
        self._compiling = new_lock()

    @property
    def whole(self) -> Executable:
        with self._compiling:
            if self._compiled is None:
                self._compiled, own = self.compile()
                report = None if self.report_of is None else self.report_of()
                if report is not None:
                    report.whole = own
            return self._compiled

    def call(self, *inputs: Any) -> Any:
        """Run the program that was compiled here."""
        return self.whole.call(*inputs)

    def second_tier(self, tier: SecondTier, call: Callable) -> TierResult:
        """Return the second tier of the program that was compiled here, for the first one's function from disk."""
        own = self.whole.second_tier
        assert own is not None
        own.on_promote = tier.on_promote
        return own.compile(call)


class LoadedReport(CompileReport):
    """The report of a program from disk: its stages, if they are read, are those of the program compiled here."""

    cached = True

    def __init__(
        self,
        entry: Entry,
        program: _Program,
        lines: dict[int, Source],
        fallbacks: list[dict[str, Fallback]],  # of the forward, of the backward
        *,
        wrappers: list[str],
        layers: Sequence[LayerUse],
    ) -> None:
        self.lines = lines
        self.fallbacks = fallbacks
        self._collectives_on_disk = entry.data["collectives"]
        self._claims_on_disk = [entry.blobs[number] for number in entry.data["claims"]]
        self.whole: CompileReport | None = None  # of the same program compiled here
        self._compile = program.compile
        self._program_of = weakref.ref(program)
        program.report_of = weakref.ref(self)
        super().__init__(
            opaque_calls=entry.data["opaque_calls"],
            saved=[SavedValue._make([*each, self.line(line)]) for *each, line in entry.data["saved"]],
            measured=[Measurement(**each) for each in entry.data["measured"]],
            wrappers=wrappers,
            layers=layers,
        )

    def compile(self) -> CompileReport:
        """Return the report of the same program compiled here."""
        program = self._program_of()
        if self.whole is None and program is not None:
            _ = program.whole
        if self.whole is None:  # the program is gone
            _, self.whole = self._compile()
        return self.whole

    def collectives(self) -> tuple[list[Collective], list[Collective]]:
        """Return the collectives of the program compiled here, or else those on disk."""
        if self.whole is not None:
            return self.whole.collectives()
        forward, backward = (
            [Collective._make([*facts, tuple(overlap), self.line(line)]) for *facts, overlap, line in rows]
            for rows in self._collectives_on_disk
        )
        return forward, backward

    @property
    def edited_files(self) -> list[str]:
        """None: programs with such files are not on disk."""
        return []

    def line(self, number: int | None) -> Source | None:
        """Return a line of the user's program by its number on disk."""
        return None if number is None else self.lines.get(number)

    def _claims(self, number: int) -> list[Claim]:
        return [self._claim(number, *each) for each in json.loads(self._claims_on_disk[number])]

    def _claim(
        self, number: int, operation: str, outputs: list[str], results: list[str], line: int | None, *rest: Any
    ) -> Claim:
        executor, declined, level, region = rest
        how = self.line(line), executor, list(map(tuple, declined)), level, region, self.fallbacks[number].get(region)
        return Claim(operation, tuple(outputs), tuple(results), *how)


def _of_whole(name: str, otherwise: Callable[[LoadedReport], Any]) -> property:
    """Return an attribute of the report of the program compiled here; `otherwise` if there is none. CompileReport's
    initial empty value is ignored."""

    def get(report: LoadedReport) -> Any:
        return otherwise(report) if report.whole is None else getattr(report.whole, name)

    return property(get, lambda report, value: None)


_OTHERWISE: dict[str, Callable[[LoadedReport], Any]] = {
    "traces": lambda report: report.compile().traces,
    "backward_traces": lambda report: report.compile().backward_traces,
    "claims": lambda report: report._claims(0),
    "backward_claims": lambda report: report._claims(1),
    "double_backwards": lambda report: [],
    "uses_cuda_graphs": lambda report: False,
    "recorded": lambda report: [],
}
for _name, _otherwise in _OTHERWISE.items():
    setattr(LoadedReport, _name, _of_whole(_name, _otherwise))
