"""The benchmark of a compiler's cost per call and compilation: forge, eager, bare Dynamo, torch.compile and Thunder.

    python -m bench.overhead [--rounds 15] [--layers 2 8 32] [--no-inductor] [--only calls|compilation]

All systems run in one process and one thread, in turn; each has a deep copy of the model. Sizes are small, so that
everything but the kernels is measured. "Wanted" is forge's target with the torch executor.
"""

import argparse
import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

import forge
from bench.common import MLP, finish_compiling, llama, systems, token_ids
from bench.timing import show_table
from forge.benchmark.model_bench import System, inference, training_step
from forge.ir.printing import in_seconds
from forge.support.timing import in_turn, ratio

Runs = dict[str, Callable[[], Any]]


def add(compared: list[System]) -> Runs:
    """Return the runs of a + b on 4 elements."""
    a, b = torch.randn(4), torch.randn(4)
    return {system.name: functools.partial(system.prepare(lambda a, b: a + b), a, b) for system in compared}


def forwards(compared: list[System], model: nn.Module, inputs: dict[str, Any]) -> Runs:
    model.eval()
    return {system.name: inference(system.prepare(copy.deepcopy(model)), inputs) for system in compared}


def steps(compared: list[System], model: nn.Module, inputs: dict[str, Any]) -> Runs:
    copies = {system.name: copy.deepcopy(model).train() for system in compared}
    return {
        system.name: training_step(system.prepare(copies[system.name]), copies[system.name].parameters(), inputs)
        for system in compared
    }


def bench_calls(compared: list[System], rounds: int) -> None:
    """Print the seconds per warm call."""
    mlp_inputs = {"x": torch.randn(2, 8)}
    mlp_training = {**mlp_inputs, "target": torch.randn(2, 8)}
    cases: dict[str, tuple[Callable[[], Runs], tuple[float, str] | None]] = {
        "a + b, 4 elements": (lambda: add(compared), None),
        "MLP, 20 layers of 8: inference": (lambda: forwards(compared, MLP(), mlp_inputs), (0.77, "eager")),
        "MLP, 20 layers of 8: training step": (lambda: steps(compared, MLP(), mlp_training), (0.80, "eager")),
        "Llama, 4 tiny layers: inference": (lambda: forwards(compared, llama(4), token_ids()), (0.75, "torch.compile")),
        "Llama, 4 tiny layers: training step": (
            lambda: steps(compared, llama(4), token_ids()),
            (0.75, "torch.compile"),
        ),
    }
    rows = [("ratio to eager", "eager", *[system.name for system in compared[1:]], "wanted")]
    for name, (prepare, limit) in cases.items():
        runs = prepare()
        for run in runs.values():
            run()
        finish_compiling()
        times = in_turn(runs, rounds=rounds)
        rows.append((name, *_cells(times), _verdict(times, limit)))
    print()
    show_table(rows)


def _cells(times: dict[str, list[float]]) -> list[str]:
    names = list(times)
    ratios = [f"{ratio(times[name], times['eager']):.2f} ({_median_text(times[name])})" for name in names[1:]]
    return [_median_text(times["eager"]), *ratios]


def _median_text(seconds: list[float]) -> str:
    return in_seconds(statistics.median(seconds))


def _verdict(times: dict[str, list[float]], limit: tuple[float, str] | None) -> str:
    if limit is not None:
        most, other = limit
        if other not in times:
            return f"≤ {most:.2f} × {other}, which is left out"
        actual = ratio(times["forge"], times[other])
        return f"≤ {most:.2f} × {other}: {'yes' if actual <= most else 'no'} ({actual:.2f})"
    extra = statistics.median(times["forge"]) - statistics.median(times["bare Dynamo"])
    return f"≤ bare Dynamo + 0.5 µs: {'yes' if extra <= 0.5e-6 else 'no'} ({extra * 1e6:+.1f} µs)"


def first_step(system: System, layers: int) -> tuple[float, Callable]:
    """Return the seconds of the first training step of a new Llama, and the called function."""
    model = llama(layers).train()
    prepared = system.prepare(model)
    step = training_step(prepared, model.parameters(), token_ids())
    gc.collect()
    gc.freeze()  # leftovers of earlier models in Dynamo's caches are not traversed while this one compiles
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    gc.unfreeze()
    return seconds, prepared


def bench_compilation(compared: list[System], layers: list[int], repetitions: int) -> None:
    """Print the seconds of a first training step, by depth; torch.compile runs once, because it takes long."""
    for system in compared:
        first_step(system, 1)  # warm up: imports and builds that happen once
    rows = [("first training step, s", *[system.name for system in compared], "wanted")]
    for depth in layers:
        times: dict[str, list[float]] = {system.name: [] for system in compared}
        for repetition in range(repetitions):
            for system in compared:
                if repetition == 0 or system.name != "torch.compile":
                    times[system.name].append(first_step(system, depth)[0])
        best = {name: statistics.median(seconds) for name, seconds in times.items()}
        over = best["forge"] / best["bare Dynamo"]
        verdict = f"≤ 1.25 × bare Dynamo: {'yes' if over <= 1.25 else 'no'} ({over:.2f})"
        rows.append((f"Llama, {depth} layers", *[f"{seconds:.2f}" for seconds in best.values()], verdict))
    print()
    show_table(rows)


def bench_stages(depths: list[int]) -> None:
    """Print the stages of forge's part of a first training step; per layer it should stay constant."""
    forge_system = System("forge", forge.jit)
    first_steps = {depth: first_step(forge_system, depth) for depth in depths}
    explained = {depth: forge.explain(prepared).seconds for depth, (_, prepared) in first_steps.items()}
    stages = list(dict.fromkeys(stage for seconds in explained.values() for stage in seconds))
    rows = [("seconds by stage", *[f"{depth} layers" for depth in depths], "ms per layer")]
    for stage in stages:
        rows.append(_stage_row(stage, {depth: explained[depth].get(stage, 0.0) for depth in depths}))
    rows.append(_stage_row("forge, all", {depth: sum(explained[depth].values()) for depth in depths}))
    rest = {depth: first_steps[depth][0] - sum(explained[depth].values()) for depth in depths}
    rows.append(_stage_row("Dynamo and the step itself", rest))
    print()
    show_table(rows)


def _stage_row(stage: str, seconds: dict[int, float]) -> tuple[str, ...]:
    per_layer = " / ".join(f"{value / depth * 1e3:.1f}" for depth, value in seconds.items())
    return (stage, *[f"{value:.3f}" for value in seconds.values()], per_layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repetitions", type=int, default=3, help="of each first call")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--stage-layers", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile's default backend out")
    parser.add_argument("--only", choices=["calls", "compilation"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._inductor.config.fx_graph_cache = False  # the first call simulates a machine that has not seen the model
    torch._functorch.config.enable_autograd_cache = False
    logging.set_verbosity_error()
    compared = systems(inductor=not options.no_inductor)
    if options.only != "compilation":
        bench_calls(compared, options.rounds)
    if options.only != "calls":
        bench_compilation(compared, options.layers, options.repetitions)
        bench_stages(options.stage_layers)


if __name__ == "__main__":
    main()
