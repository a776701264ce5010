"""The process that compiles a graph for another one: `python -m forge.executors.inductorex.worker FOLDER`.

It reads FOLDER/job, pickled (Described, Settings), and writes FOLDER/artifact or, where it fails, FOLDER/error: the
first line of why. Each file appears whole. It steps aside for other processes.
"""

import os
import pickle
import sys
import traceback
from pathlib import Path

import torch

from forge.executors.executor import Declined
from forge.executors.inductorex.artifacts import dump_artifact
from forge.executors.inductorex.graphs import rebuild
from forge.executors.inductorex.lower import compile_graph
from forge.ir.checks import in_one_line

NICE = 10


def main(folder: Path) -> int:
    """Run the job in a folder, and return the exit status."""
    os.nice(NICE)
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
        return 1
    return 0


def write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(data)
    unfinished.rename(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
