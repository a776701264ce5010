"""A compiled program as an entry, and an entry as a program again.

What is kept is what runs: the text of the generated functions, with a table of what it names, the plain data of the
recipe, and who claimed what, for forge.explain. The passes have not run where a program was read: what only they give
(the backward of other outputs, a backward of a backward, the stages) is compiled from the captured graph when it is
asked for.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from forge.cache.graphs import Described
from forge.cache.objects import Reader, Writer
from forge.cache.store import Entry
from forge.compiler.autotune import Measured
from forge.compiler.claim import Claim
from forge.compiler.config import Options
from forge.compiler.executable import Compiled
from forge.compiler.fallback import Fallback
from forge.executors.executor import Executor, FusionExecutor
from forge.ir import Trace
from forge.ir.bounded import Bounded
from forge.ir.locks import new_lock
from forge.ir.printing import compile_function
from forge.ir.pytree import names
from forge.ir.source import Source
from forge.runtime.autograd import Again, Sources
from forge.runtime.plan import Generated, Recipe, Training, assemble, finished
from forge.runtime.tiering import Replacement
from forge.transforms.split import Saved

_PARTS = ("forward", "backward", "epilogue")
_loaded: Bounded = Bounded(4096)  # what executors made of dumped regions, by executor and hash


def dump(
    compiled: Compiled,
    recipe: Recipe,
    mutated: list[int],
    held: list[int],
    executors: Sequence[Executor],
    graph: Described,
) -> Entry:
    """What is kept of a program: the recipe, with the executors that it was made with. held: numbers of tensors that
    the graph holds, which the program takes last.

    Raises Uncacheable for one that another process could not run.
    """
    entry = Entry({})
    functions = dict(zip(_PARTS, _generated(recipe), strict=True))
    entry.data = {
        "functions": {
            part: _text_and_table(entry, each.trace, executors, graph)
            for part, each in functions.items()
            if each is not None
        },
        "grad": recipe.grad,
        "sets_mode": recipe.sets_mode,
        "attends": recipe.attends,
        "grows": recipe is compiled.recipe and compiled.grow is not None,
        "training": _training_data(recipe.training),
        "mutated": mutated,
        "held": held,
        "opaque_calls": compiled.opaque_calls,
        "measured": [asdict(each) for each in compiled.measured],
        "saved": [[*each[:-1], graph.lines.get(each.source)] for each in compiled.saved],
        "claims": [
            entry.add(json.dumps([_claim_data(claim, graph) for claim in claims]).encode())
            for claims in (compiled.claims, compiled.backward_claims)
        ],
    }
    return entry


def _generated(recipe: Recipe) -> tuple[Generated | None, ...]:
    training = recipe.training
    return (recipe.forward, training and training.backward, training and training.epilogue)


def _text_and_table(entry: Entry, trace: Trace, executors: Sequence[Executor], graph: Described) -> dict[str, Any]:
    regions = {
        id(bound.symbol.op): bound.symbol.executor
        for bound in trace.bound_symbols
        if isinstance(bound.symbol.executor, FusionExecutor)
    }
    writer = Writer(entry, executors, regions, graph.lines)
    return {"name": trace.name, **writer.code(trace.python_source())}


def _training_data(training: Training | None) -> dict[str, Any] | None:
    if training is None:
        return None
    sources = training.sources
    return {
        "usual": list(training.usual),
        "constants": training.constants,
        "sources": [list(sources.saved.items()), *sources[1:]],
        "split": _hash(training.split),
        "read": training.backward.read,
        "parts": training.parts,
    }


def _hash(split: Trace) -> str:
    """What a forward saves, and of what: the layout of what its backwards are given."""
    saved = [names(part) for part in split.output]
    return hashlib.sha256(repr((split.input_names, split.bound_symbols, saved)).encode()).hexdigest()


def _claim_data(claim: Claim, graph: Described) -> list:
    line = graph.lines.get(claim.source)
    told = claim.operation, claim.outputs, claim.results, line
    return [*told, claim.executor, claim.declined, claim.level, claim.region]


def load(
    entry: Entry, options: Options, graph: Described, compile: Callable[[], Compiled], eager: Callable
) -> "Loaded":
    """The program of an entry. compile: compiles it from the captured graph. An error, of whatever kind, where what it
    names is not here."""
    data = entry.data
    program = Loaded(entry, graph, compile)
    errors: list[Exception] = []

    def region(executor: FusionExecutor, data: bytes) -> Callable | None:
        try:
            return _load_region(executor, data)
        except Exception as error:  # the others are tried as well: each executor finds all that it cannot use
            errors.append(error)
            return None

    reader = Reader(entry, options.executors, region, program.lines)
    made = {part: _function(reader, **each) for part, each in data["functions"].items()}
    if errors:
        raise errors[0]
    program.fallbacks = [_fallbacks(made.get(part)) for part in ("forward", "backward")]
    recipe = Recipe(made["forward"], data["grad"], data["sets_mode"], attends=data["attends"])
    if data["training"] is not None:
        training = _training(made, program, **data["training"])
        recipe = recipe._replace(training=training)
    program.grow = program.grow_whole if data["grows"] else None
    call = finished(program.grown(assemble(recipe, program.call_whole)), data["mutated"], eager)
    tensors = list(graph.held.values())
    held = [tensors[number] for number in data["held"]]
    program.call = (lambda *inputs: call(*inputs, *held)) if held else call
    program.opaque_calls = data["opaque_calls"]
    program.saved = [Saved(*each, program.lines.get(line)) for *each, line in data["saved"]]
    program.measured = [Measured(**each) for each in data["measured"]]
    return program


def _function(reader: Reader, name: str, **code: Any) -> Generated:
    return Generated(compile_function(name, reader.code(**code)))


def _fallbacks(generated: Generated | None) -> dict[str, Fallback]:
    """Those of a function's regions, by the region's name."""
    scope = {} if generated is None else generated.function.__globals__
    found = [each for each in scope.values() if isinstance(each, Fallback)]
    return {region: each for each in found for region in each.regions}


def _training(
    made: dict[str, Generated],
    program: "Loaded",
    usual: list[bool],
    constants: list[int],
    sources: list,
    split: str,
    read: list[int] | None,
    parts: list[list[int]],
) -> Training:
    saved, *rest = sources

    def compiled() -> Training:
        training = program.whole.recipe.training
        if training is None or _hash(training.split) != split:
            raise AssertionError(
                "a program from forge's cache saves for its backward what this process does not find in it; "
                "please report it, and run with FORGE_CACHE=0"
            )
        return training

    def backward_for(present: tuple[bool, ...], *, batched: bool = False) -> Generated:
        return compiled().backward_for(present, batched=batched)

    def again_for(key: tuple) -> Again:
        return compiled().again_for(key)

    def numbers() -> Sequence[Any]:
        return compiled().numbers()

    places = Sources({int(position): place for position, place in saved}, *rest)
    epilogue = made.get("epilogue")
    backward = made["backward"]._replace(read=read)
    return Training(
        backward, tuple(usual), epilogue, constants, places, backward_for, again_for, numbers=numbers, parts=parts
    )


def _load_region(executor: FusionExecutor, data: bytes) -> Callable:
    """What the executor makes of a region; once in a process."""
    key = (executor, hashlib.sha256(data).digest())
    function = _loaded.get(key)
    if function is None:
        function = _loaded[key] = executor.load(data)
    return function


class Loaded(Compiled):
    """A program that was read from the disk. `whole` is the same one compiled here, once something is asked for that
    was not kept."""

    cached = True
    edited = ()  # such programs are not kept

    def __init__(self, entry: Entry, graph: Described, compile: Callable[[], Compiled]) -> None:
        self.fallbacks: list[dict[str, Fallback]] = [{}, {}]  # forward, backward
        self._told = [entry.blobs[number] for number in entry.data["claims"]]
        self.lines = {number: line for line, number in graph.lines.items()}
        self._compile = compile
        self._whole: Compiled | None = None
        self._compiling = new_lock()
        super().__init__()

    @property
    def whole(self) -> Compiled:
        with self._compiling:
            if self._whole is None:
                self._whole = self._compile()
            return self._whole

    def call_whole(self, *inputs: Any) -> Any:
        """The same program, compiled here."""
        return self.whole.call(*inputs)

    def grow_whole(self, call: Callable) -> Replacement:
        """Larger regions, made of the same program compiled here."""
        self.whole.keep = self.keep
        return self.whole.grow(call)

    def _claims(self, number: int) -> list[Claim]:
        fallbacks = self.fallbacks[number]
        return [_claim(self.lines, fallbacks, *each) for each in json.loads(self._told[number])]


def _claim(
    lines: dict[int, Source],
    fallbacks: dict[str, Fallback],
    operation: str,
    outputs: list[str],
    results: list[str],
    line: int | None,
    *made: Any,
) -> Claim:
    executor, declined, level, region = made
    how = lines.get(line), executor, map(tuple, declined), level, region, fallbacks.get(region)
    return Claim(operation, outputs, results, *how)


def _of_whole(name: str, otherwise: Callable[[Loaded], Any]) -> property:
    """What a program has: `otherwise` of one that is not compiled here. What is assigned is the empty start of it."""

    def get(program: Loaded) -> Any:
        if program._whole is None:
            return otherwise(program)
        return getattr(program._whole, name)

    return property(get, lambda program, value: None)


Loaded.traces = _of_whole("traces", lambda program: program.whole.traces)
Loaded.backward_traces = _of_whole("backward_traces", lambda program: program.whole.backward_traces)
Loaded.claims = _of_whole("claims", lambda program: program._claims(0))
Loaded.backward_claims = _of_whole("backward_claims", lambda program: program._claims(1))
Loaded.again = _of_whole("again", lambda program: [])
