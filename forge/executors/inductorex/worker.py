"""The process that compiles graphs for another one: `python -m forge.executors.inductorex.worker`.

Each line of its standard input is a folder. It reads FOLDER/job, pickled (PlainGraph, Settings), and writes
FOLDER/artifact or, if it fails, FOLDER/error: the first line of the reason. Each file is written atomically. It yields
to other processes, and exits when its input ends or after some idle time.
"""

import os
import pickle
import select
import traceback
from pathlib import Path

import torch

from forge.executors.executor import Declined
from forge.executors.inductorex.artifacts import dump_artifact
from forge.executors.inductorex.graphs import rebuild
from forge.executors.inductorex.lower import compile_graph
from forge.ir.checks import in_one_line

NICE = 10
IDLE = 30  # seconds without a job after which it exits


def main() -> None:
    """Compile jobs from standard input."""
    os.nice(NICE)
    jobs = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # compilers do not read jobs
    waiting = b""
    while select.select([jobs], [], [], IDLE)[0]:
        read = os.read(jobs, 4096)
        if not read:
            return
        *folders, waiting = (waiting + read).split(b"\n")
        for folder in folders:
            run(Path(os.fsdecode(folder)))


def run(folder: Path) -> None:
    """Run the job in a folder."""
    try:
        graph, settings = pickle.loads((folder / "job").read_bytes())
        settings.apply()
        with torch.no_grad():
            data = dump_artifact(compile_graph(*rebuild(graph), whole_program=True))
        if isinstance(data, Declined):
            raise NotImplementedError(data.reason)
        write(folder / "artifact", data)
    except Exception as error:
        traceback.print_exc()
        write(folder / "error", in_one_line(error).encode())


def write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(data)
    unfinished.rename(path)


if __name__ == "__main__":
    main()
