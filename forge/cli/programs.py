"""forge trace, explain and bench: what becomes of a program that the command line names."""

import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.syntax import Syntax

import forge
from forge import model_bench
from forge.cli import inputs, targets
from forge.cli.app import TargetError, command
from forge.cli.help import THE_PROGRAM
from forge.compile import KEEP_STAGES
from forge.executors.executor import known_executors, resolve_executors
from forge.executors.machine import device_name
from forge.ir import Trace
from forge.ir.printing import table
from forge.model_bench import Case
from forge.records import Record, record_of

_PANEL = "See into a program"


def _complete_executors(incomplete: str) -> list[str]:
    """Names behind the last comma."""
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in known_executors() if name not in before.split(",")]


@dataclass(frozen=True)
class Program:
    """A program as the command line names it, with its inputs."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A function, a module, or a function that makes one, as package.module:NAME or file.py:NAME; or a "
            "model of transformers, made small: a model type (llama), or the class of a config or a model.",
        ),
    ]
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="INPUT",
            help="An argument of the call, as x=float32[4,8], ids=int64[2,16]<1000 (below 1000) or dim=-1; "
            "positional without NAME=. May be repeated. By default what the factory returns, as (program, inputs), or "
            "forge_inputs() of its module; of a model by name, random tokens or images.",
            rich_help_panel=THE_PROGRAM,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A field of the config, or an argument of the class or factory. May be repeated.",
            rich_help_panel=THE_PROGRAM,
        ),
    ] = None
    train: Annotated[
        bool,
        typer.Option("--train", help="A training step: forward and backward.", rich_help_panel=THE_PROGRAM),
    ] = False
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Of parameters and of inputs by default, such as bfloat16.",
            autocompletion=inputs.dtypes,
            rich_help_panel=THE_PROGRAM,
        ),
    ] = None
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Such as cuda or cuda:1.", rich_help_panel=THE_PROGRAM)
    ] = "cpu"
    seed: Annotated[int, typer.Option(metavar="N", help="Of weights and inputs.", rich_help_panel=THE_PROGRAM)] = 0
    executors: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Who is asked to run each operation, in this order, such as inductor,torch; by default those of "
            "forge.jit.",
            autocompletion=_complete_executors,
        ),
    ] = None

    def executor_names(self) -> list[str] | None:
        """Raises typer.BadParameter for an unknown one, or one that is not here."""
        if self.executors is None:
            return None
        names = [name.strip() for name in self.executors.split(",") if name.strip()]
        try:
            resolve_executors(names)
        except ValueError as error:
            text = str(error).removeprefix("forge.jit: ")
            raise typer.BadParameter(text, param_hint="--executors") from error
        return names

    def load(self, *, training: bool) -> Case:
        """Raises typer.BadParameter for what cannot be read, TargetError for what cannot be loaded."""
        dtype = None if self.dtype is None else inputs.parse_dtype(self.dtype)
        device = inputs.parse_device(self.device)
        settings = inputs.parse_settings(self.settings or ())
        torch.manual_seed(self.seed)
        given = None if self.given is None else inputs.parse_inputs(self.given, device)
        return targets.load(self.target, settings, given, training=training, dtype=dtype, device=device)

    def compiled(self, *, training: bool) -> Any:
        """The program after a call of it, jitted; every stage of it is kept, and nothing on disk."""
        names = self.executor_names()
        case = self.load(training=training)
        with _environment(KEEP_STAGES, "1"), targets.blamed(self.target):
            jitted = forge.jit(case.target, executors=names, cache=False)
            case.run(jitted)()
        return jitted


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@command(
    "trace",
    "forge trace llama --executors torch",
    "forge trace torch.nn.functional:gelu --input 'float32[4,8]' --train",
    "forge trace torch.nn:Linear --set in_features=8 --set out_features=4 \\\n      --input 'float32[2,8]' --stage all",
    "forge trace gpt2 --set n_layer=1 --stage 0 --levels 3",
    panel=_PANEL,
)
def trace(
    program: Program,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="Which stage: its number, a part of its name, all, or list for their names; the last one by default, "
            "which is what runs.",
        ),
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="The backward alone, of a training step.")] = False,
    levels: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many levels of what each call consists of; 1 is the call.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of the traces.")] = False,
) -> int:
    """Print the program that forge generates, or a stage on the way to it.

    What is printed is Python: the last stage runs as it stands.
    """
    jitted = program.compiled(training=program.train or backward)  # its graphs live as long as it does
    chosen = list(_chosen(record_of(jitted), program.target, stage, only_backward=backward))
    if as_json:
        found = [
            {"graph": graph, "phase": phase, "number": number, "stage": trace.stage, "text": trace.show(levels)}
            for graph, phase, number, trace in chosen
        ]
        print(json.dumps(found, indent=2))
    elif stage == "list":
        rows = [(str(graph), phase, str(number), trace.stage) for graph, phase, number, trace in chosen]
        print("\n".join(table([("graph", "phase", "number", "stage"), *rows])))
    else:
        _print_python("\n".join(each.show(levels) for *_, each in chosen).rstrip())
    return 0


def _chosen(
    record: Record, target: str, stage: str | None, *, only_backward: bool
) -> Iterator[tuple[int, str, int, Trace]]:
    """(number of the graph, phase, number of the stage, its trace) of those that were asked for."""
    for reason in record.eager:
        print(f"forge: a graph runs in eager: {reason}", file=sys.stderr)
    if not record.compiled:
        raise TargetError(f"{target}: nothing was compiled; forge explain says why")
    phases = [
        (graph, phase, traces)
        for graph, compiled in enumerate(record.compiled)
        for phase, traces in (("forward", compiled.traces), ("backward", compiled.backward_traces))
        if traces and (phase == "backward" or not only_backward)
    ]
    found = [(graph, phase, *each) for graph, phase, traces in phases for each in _stages(traces, stage)]
    if not found:
        known = dict.fromkeys(trace.stage for _, _, traces in phases for trace in traces)
        names = ", ".join(f"{number} {name}" for number, name in enumerate(known))
        raise typer.BadParameter(f"{stage!r} is none of {names or 'no stages'}", param_hint="--stage")
    yield from found


def _stages(traces: Sequence[Trace], wanted: str | None) -> list[tuple[int, Trace]]:
    numbered = list(enumerate(traces))
    if wanted is None:
        return numbered[-1:]
    if wanted in ("all", "list"):
        return numbered
    if wanted.removeprefix("-").isdecimal():
        return [each for each in numbered if each[0] == int(wanted) % len(traces)][: abs(int(wanted)) <= len(traces)]
    return [each for each in numbered if wanted in each[1].stage]


def _print_python(text: str) -> None:
    """In colours on a terminal; lines are never broken."""
    if sys.stdout.isatty():
        Console().print(Syntax("", "python", theme="ansi_dark").highlight(text), soft_wrap=True)
    else:
        print(text)


@command(
    "explain",
    "forge explain llama --train",
    "forge explain gpt2 --profile",
    "forge explain bert --html report.html",
    "forge explain torch.nn.functional:softmax --input 'float32[4,8]' \\\n      --input dim=-1 --json",
    panel=_PANEL,
)
def explain(
    program: Program,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one page to search and filter, too.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run the program again, and say what each call takes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Say who runs each operation, who declined it and why.

    And what is fused, what is saved for the backward, graph breaks, what runs in eager, and the time to compile; with
    --profile the time and memory of each call.
    """
    if html is not None and not html.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {html.parent}", param_hint="--html")
    jitted = program.compiled(training=program.train)  # the page has the traces of graphs that are still there
    found = forge.explain(jitted, profile=profile)
    if html is not None:
        found.to_html(html)
        print(f"forge: the report is in {html}", file=sys.stderr)
    if as_json:
        print(found.to_json())
    elif sys.stdout.isatty():
        Console().print(found)
    else:
        print(found)
    return 0


def _complete_systems(incomplete: str) -> list[str]:
    """Names behind the last comma."""
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in model_bench.systems() if name not in before.split(",")]


@command(
    "bench",
    "forge bench llama --only eager,forge",
    "forge bench gpt2 --train --only eager,forge --rounds 15 --json",
    "forge bench torch.nn:Linear --set in_features=512 --set out_features=512 \\\n      --input 'float32[64,512]'",
    panel=_PANEL,
)
def bench(
    program: Program,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="How often each is timed, in turn.")] = 9,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="These alone, of eager, torch.compile and forge.",
            autocompletion=_complete_systems,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Time eager, torch.compile and forge, in turn in one process.

    The ratios are medians over rounds: below 1.00 is faster. The exit status is 1 where one of them failed.
    """
    known = model_bench.systems(program.executor_names())
    chosen = list(known) if only is None else [name.strip() for name in only.split(",")]
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--only")
    case = program.load(training=program.train)
    with targets.blamed(program.target):  # what the program itself raises
        own = case.copy()
        own.run(own.target)()
        timed = model_bench.compare(case, [known[name] for name in chosen], rounds)
    if as_json:
        print(json.dumps(_with_circumstances(program, timed), indent=2))
    else:
        print(_headline(program))
        print(model_bench.show(timed))
    return 1 if any(each.reason is not None for each in timed) else 0


def _headline(program: Program) -> str:
    step = "training step" if program.train else "forward"
    return f"{program.target}, a {step} on {device_name(torch.device(program.device))}, torch {torch.__version__}\n"


def _with_circumstances(program: Program, timed: Sequence[model_bench.Timed]) -> dict[str, Any]:
    return {
        "target": program.target,
        "training": program.train,
        "device": device_name(torch.device(program.device)),
        "threads": torch.get_num_threads(),
        "versions": {"forge": forge.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "systems": model_bench.as_json(timed),
    }
