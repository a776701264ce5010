"""The benchmark of the verification of kernels: on first use, on the next, and in a new process."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.timing import show_table

USES = """
import json, sys, time
import torch
import torch.nn.functional as F
import forge
from forge.executors.hubex import kernel_executor
from forge.executors.hubex.verification.verification_cache import worker

questions = 0
ask = worker.ask

def counted(*args):
    global questions
    questions += 1
    return ask(*args)

worker.ask = counted

def use(rows, verify=True):
    def model(x, weight):
        return F.rms_norm(x, (64,), weight, 1e-5)
    executor = kernel_executor(sys.argv[1:], verify=verify)
    before, start = questions, time.perf_counter()
    jitted = forge.jit(model, executors=[executor, "torch"])
    with torch.no_grad():
        jitted(torch.randn(rows, 64), torch.randn(64))
    seconds = time.perf_counter() - start
    claimed = [row.executor for row in forge.explain(jitted).rows] == ["norms-cpu.rms_norm_cpu"]
    return seconds, questions - before, worker.starts, claimed

use(2, verify=False)
print(json.dumps({
    "not verified": use(3, verify=False),
    "first use": use(4),
    "second use": use(4),
    "another shape": use(5),
}))
"""


def uses(source: Path, cache: str) -> dict[str, tuple]:
    """Measure compiling and running a model of one norm, in a new process with this cache of verdicts."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    process = subprocess.run([sys.executable, "-c", USES, source], stdout=subprocess.PIPE, check=True, env=environment)
    return json.loads(process.stdout)


def bench_verification(source: Path) -> None:
    rows = [(f"a model of one norm, {source.name}", "", "ms", "questions asked", "processes started", "claimed")]
    with tempfile.TemporaryDirectory() as cache:
        for process in ("first process", "new process"):
            for use, (seconds, questions, starts, claimed) in uses(source, cache).items():
                cells = (f"{1e3 * seconds:.1f}", str(questions), str(starts), "yes" if claimed else "no")
                rows.append((process, use, *cells))
    show_table(rows)
