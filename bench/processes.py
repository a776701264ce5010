"""The benchmark of the first training step of a Llama in a process with empty caches, and in one with warm caches.

    python -m bench.processes [--layers 2] [--repetitions 3]

Each first step runs in a separate process, forge and torch.compile in turn. The cold ones have an empty cache on disk
(forge's and Inductor's), the warm ones the caches of their system's cold one. The imports of torch, transformers and
forge, and the making of the model, are not counted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers.utils import logging

import forge
from bench.common import llama, token_ids
from bench.timing import show_table
from forge.benchmark.model_bench import entry, training_step

SYSTEMS = {"forge": forge.jit, "torch.compile": lambda model: torch.compile(entry(model))}


def first_step(system: str, layers: int) -> float:
    """Return the seconds of a first step in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    model = llama(layers).train()
    step = training_step(SYSTEMS[system](model), model.parameters(), token_ids())
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def in_a_process(system: str, layers: int, caches: Path) -> float:
    """Return the seconds of a first step in a new process with these caches."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "FORGE_CACHE_DIR": str(caches / "forge")}
    environment = {**os.environ, "FORGE_CACHE": "1", **places}
    command = [sys.executable, "-m", "bench.processes", "--first-step", system, "--layers", str(layers)]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(process.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3, help="of the warm ones")
    parser.add_argument("--first-step", choices=SYSTEMS, help="nothing but this step, in this process")
    options = parser.parse_args()
    if options.first_step:
        print(first_step(options.first_step, options.layers))
        return
    cold: dict[str, float] = {}
    warm: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder:
        caches = {system: Path(folder) / system for system in SYSTEMS}
        for system in SYSTEMS:
            cold[system] = in_a_process(system, options.layers, caches[system])
        for _ in range(options.repetitions):
            for system in SYSTEMS:
                warm[system].append(in_a_process(system, options.layers, caches[system]))
    times = {"cold": cold, "warm": {system: statistics.median(seconds) for system, seconds in warm.items()}}
    rows = [(f"first training step, Llama, {options.layers} layers, s", *SYSTEMS, "ratio", "wanted")]
    for name, limit in (("cold", 0.6), ("warm", 0.8)):
        over = times[name]["forge"] / times[name]["torch.compile"]
        verdict = f"≤ {limit}: {'yes' if over <= limit else 'no'}"
        rows.append((f"{name} process", *[f"{times[name][system]:.2f}" for system in SYSTEMS], f"{over:.2f}", verdict))
    show_table(rows)


if __name__ == "__main__":
    main()
