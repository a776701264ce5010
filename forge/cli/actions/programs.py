"""Actions of forge trace, explain and bench; forge/cli/programs.py declares them."""

import contextlib
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.syntax import Syntax

import forge
from forge.benchmark import model_bench, parallel_bench
from forge.benchmark.model_bench import Case
from forge.capture.handles import JitHandle, handle_of
from forge.cli import inputs, targets
from forge.cli.app import TargetError
from forge.cli.programs import Program
from forge.compiler.report import ALL_STAGES
from forge.executors.registry import resolve_executors
from forge.ir import Trace
from forge.ir.printing import table
from forge.support.machine import device_name


def executor_names(program: Program) -> list[str] | None:
    """Return the names of a command line's executors. Raises typer.BadParameter for one that is not here."""
    if program.executors is None:
        return None
    names = [name.strip() for name in program.executors.split(",") if name.strip()]
    try:
        resolve_executors(names)
    except ValueError as error:
        text = str(error).removeprefix("forge.jit: ")
        raise typer.BadParameter(text, param_hint="--executors") from error
    return names


def load(program: Program, *, training: bool) -> Case:
    """Return the program of a command line with its inputs.

    Raises typer.BadParameter for what cannot be read, TargetError for what cannot be loaded.
    """
    dtype = None if program.dtype is None else inputs.parse_dtype(program.dtype)
    device = inputs.parse_device(program.device)
    settings = inputs.parse_settings(program.settings or ())
    torch.manual_seed(program.seed)
    arguments = None if program.input_texts is None else inputs.parse_inputs(program.input_texts, device)
    return targets.load(program.target, settings, arguments, training=training, dtype=dtype, device=device)


def _compile(program: Program, *, training: bool) -> Any:
    """Return the program after a call of it, jitted, with every stage in memory and nothing on disk."""
    names = executor_names(program)
    case = load(program, training=training)
    with _environment(ALL_STAGES, "1"), targets.attribute_errors(program.target):
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


def trace(program: Program, stage: str | None, backward: bool, levels: int, as_json: bool) -> int:
    jitted = _compile(program, training=program.train or backward)  # its graphs live as long as it does
    stages = list(_select_stages(handle_of(jitted), program.target, stage, only_backward=backward))
    if as_json:
        records = [
            {"graph": graph, "phase": phase, "number": number, "stage": trace.stage, "text": trace.show(levels)}
            for graph, phase, number, trace in stages
        ]
        print(json.dumps(records, indent=2))
    elif stage == "list":
        rows = [(str(graph), phase, str(number), trace.stage) for graph, phase, number, trace in stages]
        print("\n".join(table([("graph", "phase", "number", "stage"), *rows])))
    else:
        _print_python("\n".join(each.show(levels) for *_, each in stages).rstrip())
    return 0


def _select_stages(
    handle: JitHandle, target: str, stage: str | None, *, only_backward: bool
) -> Iterator[tuple[int, str, int, Trace]]:
    """Yield (number of the graph, phase, number of the stage, its trace) of the requested stages."""
    for reason in handle.eager:
        print(f"forge: a graph runs in eager: {reason}", file=sys.stderr)
    if not handle.reports:
        raise TargetError(f"{target}: nothing was compiled; forge explain says why")
    phases = [
        (graph, phase, traces)
        for graph, report in enumerate(handle.reports)
        for phase, traces in (("forward", report.traces), ("backward", report.backward_traces))
        if traces and (phase == "backward" or not only_backward)
    ]
    selection = [(graph, phase, *each) for graph, phase, traces in phases for each in _stages(traces, stage)]
    if not selection:
        stages = dict.fromkeys(trace.stage for _, _, traces in phases for trace in traces)
        names = ", ".join(f"{number} {name}" for number, name in enumerate(stages))
        raise typer.BadParameter(f"{stage!r} is none of {names or 'no stages'}", param_hint="--stage")
    yield from selection


def _stages(traces: Sequence[Trace], stage: str | None) -> list[tuple[int, Trace]]:
    pairs = list(enumerate(traces))
    if stage is None:
        return pairs[-1:]
    if stage in ("all", "list"):
        return pairs
    if stage.removeprefix("-").isdecimal():
        return [each for each in pairs if each[0] == int(stage) % len(traces)][: abs(int(stage)) <= len(traces)]
    return [each for each in pairs if stage in each[1].stage]


def _print_python(text: str) -> None:
    """Print Python, in colours on a terminal; lines are never broken."""
    if sys.stdout.isatty():
        Console().print(Syntax("", "python", theme="ansi_dark").highlight(text), soft_wrap=True)
    else:
        print(text)


def explain(program: Program, html: Path | None, profile: bool, as_json: bool) -> int:
    if html is not None and not html.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {html.parent}", param_hint="--html")
    jitted = _compile(program, training=program.train)  # the page has the traces of graphs that are still there
    explanation = forge.explain(jitted, profile=profile)
    if html is not None:
        explanation.to_html(html)
        print(f"forge: the report is in {html}", file=sys.stderr)
    if as_json:
        print(explanation.to_json())
    elif sys.stdout.isatty():
        Console().print(explanation)
    else:
        print(explanation)
    return 0


def bench(program: Program, rounds: int, only: str | None, nproc: int | None, plan: str, as_json: bool) -> int:
    systems = model_bench.systems(executor_names(program))
    names = list(systems) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in systems:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(systems)}", param_hint="--only")
    if parallel_bench.is_launched():
        parallel_systems = parallel_bench.systems(systems, plan)
        return _bench_in_processes(program, [parallel_systems[name] for name in names], rounds, plan, as_json=as_json)
    case = load(program, training=program.train)
    if nproc is None:
        timings = _compare(program, case, partial(model_bench.compare, case, [systems[name] for name in names], rounds))
        result = _as_json(program, timings)
    else:
        _check_shared(case)
        report = parallel_bench.launch(_arguments(program, rounds, only, plan), nproc)
        if report is None:
            return 1
        result = report
    _show(result, as_json=as_json)
    return 1 if any(each["reason"] is not None for each in result["systems"]) else 0


def _bench_in_processes(
    program: Program, compared: Sequence[model_bench.System], rounds: int, plan: str, *, as_json: bool
) -> int:
    """Run in one of the processes that torchrun started: the first one prints."""
    with parallel_bench.process_group(inputs.parse_device(program.device)) as device:
        program = dataclasses.replace(program, device=str(device))
        case = load(program, training=program.train)
        _check_shared(case)
        timings = _compare(program, case, partial(parallel_bench.compare_in_processes, case, compared, rounds))
        if torch.distributed.get_rank() == 0:
            _show(_as_json(program, timings, torch.distributed.get_world_size(), plan), as_json=as_json)
    return 0


def _check_shared(case: Case) -> None:
    if not isinstance(case.target, torch.nn.Module) or not any(each.requires_grad for each in case.target.parameters()):
        raise TargetError(f"{case.name}: is no module with parameters, whose work several processes could share")


def _compare(
    program: Program, case: Case, compare: Callable[[], list[model_bench.SystemTiming]]
) -> list[model_bench.SystemTiming]:
    with targets.attribute_errors(program.target):  # errors of the program itself
        own = case.copy()
        own.run(own.target)()
        return compare()


def _arguments(program: Program, rounds: int, only: str | None, plan: str) -> list[str]:
    """Return the arguments of the command line that runs in each of several processes."""
    options = [("--input", each) for each in program.input_texts or ()]
    options += [("--set", each) for each in program.settings or ()]
    options += [("--device", program.device), ("--seed", str(program.seed))]
    options += [("--rounds", str(rounds)), ("--plan", plan)]
    optional = (("--dtype", program.dtype), ("--executors", program.executors), ("--only", only))
    options += [(name, value) for name, value in optional if value is not None]
    return [program.target, *(["--train"] if program.train else []), *[part for each in options for part in each]]


def _as_json(
    program: Program, timings: Sequence[model_bench.SystemTiming], processes: int = 1, plan: str | None = None
) -> dict[str, Any]:
    return {
        "target": program.target,
        "training": program.train,
        "device": device_name(torch.device(program.device)),
        "processes": processes,
        "plan": plan,
        "threads": torch.get_num_threads(),
        "versions": {"forge": forge.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "systems": model_bench.as_json(timings),
    }


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    step = "training step" if result["training"] else "forward"
    suffix = "" if result["plan"] is None else f" in {result['processes']} processes by {result['plan']}"
    print(f"{result['target']}, a {step} on {result['device']}{suffix}, torch {result['versions']['torch']}\n")
    print(model_bench.show(model_bench.from_json(result["systems"])))
