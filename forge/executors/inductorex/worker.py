"""The process that compiles a graph for another one: `python -m forge.executors.inductorex.worker FOLDER`.

It reads FOLDER/job, pickled (Described, Settings), and writes FOLDER/artifact or, where it fails, FOLDER/error: the
first line of why. Each file appears whole. It steps aside for other processes.

`python -m forge.executors.inductorex.worker --ahead FILE` compiles a kernel for the CPU, so that Inductor's cache has
what all of them need, and makes the file.
"""

import os
import pickle
import sys
import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from forge.executors.executor import Declined
from forge.executors.inductorex.graphs import rebuild
from forge.executors.inductorex.lower import compile_graph
from forge.executors.inductorex.saved import dump_artifact
from forge.ir.checks import in_one_line

NICE = 10


def main(folder: Path) -> int:
    """Does the job in a folder; the exit status."""
    os.nice(NICE)
    try:
        graph, settings = pickle.loads((folder / "job").read_bytes())
        settings.apply()
        with torch.no_grad():
            data = dump_artifact(compile_graph(*rebuild(graph), whole=True))
        if isinstance(data, Declined):
            raise NotImplementedError(data.reason)
        write(folder / "artifact", data)
    except Exception as error:
        traceback.print_exc()
        write(folder / "error", in_one_line(error).encode())
        return 1
    return 0


def build_ahead(built: Path) -> int:
    """Has Inductor compile a kernel; the exit status. The file `built` says that it did."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    with torch.no_grad(), fake:
        given = [torch.ones(64)]
        graph = make_fx(lambda x: [x.exp() + 1])(*given)
    with torch.no_grad():
        compile_graph(graph, given, fake, whole=False)
    built.touch()
    return 0


def write(path: Path, data: bytes) -> None:
    """A file that is there whole, or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(data)
    unfinished.rename(path)


if __name__ == "__main__":
    sys.exit(build_ahead(Path(sys.argv[2])) if sys.argv[1] == "--ahead" else main(Path(sys.argv[1])))
