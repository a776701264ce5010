"""How fast the kernels of examples/kernels/ are, against eager and torch.compile.

    python -m bench.example_kernels [--device cpu|cuda] [--only NAME] [--no-compile] [--large]

Every case runs forward, and forward with backward. The candidates take turns, and the shortest time of each counts, so
that a busy machine slows all of them alike. A ratio is kernel / other: below 1 the kernel is faster.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

KERNELS = Path(__file__).parents[1] / "examples" / "kernels"
REPOSITORIES = {"cpu": ["norms-cpu"], "cuda": ["norms-cuda", "norms-triton"]}
EPS = 1e-5
ROUNDS = 50
ROUND_SECONDS = 0.003  # short, so that on a busy machine some rounds run undisturbed

# (rows, hidden) of norms and gated units; (batch, heads, length, dim) of rotary; (rows, classes) of the loss
SHAPES = {
    "cpu": [(4, 64), (128, 2048), (512, 4096)],
    "cuda": [(16, 4096), (4096, 4096), (8192, 8192)],
}
ROTARY = [(1, 32, 128, 128), (4, 32, 2048, 128)]
LOSS = [(512, 32000), (4096, 128256)]


@dataclass(frozen=True)
class Case:
    """One operation on one shape: in plain torch and by a kernel; `args` are its inputs, which get gradients."""

    op: str
    reference: Callable
    kernel: Callable
    args: tuple[torch.Tensor, ...]
    trains: bool = True

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.args[0].shape))


def load(name: str) -> ModuleType:
    """The module of an example, built if that is needed. Raises CalledProcessError when its build fails."""
    folder = KERNELS / name
    if (folder / "build.py").exists():
        told = subprocess.run([sys.executable, folder / "build.py"], stdout=subprocess.PIPE, text=True, check=True)
        variant = Path(told.stdout.strip())
    else:
        variant = folder / "build" / "torch-universal"
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def cases(kernels: ModuleType, device: str, dtype: torch.dtype, large: bool) -> Iterator[Case]:
    """What a repository has, on the shapes of a device."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    for rows, hidden in SHAPES[device][: None if large else 2]:
        x, weight, up = randn(rows, hidden), randn(hidden), randn(rows, hidden)
        yield Case(
            "rms_norm",
            lambda x, w: F.rms_norm(x, w.shape, w, EPS),
            lambda x, w: kernels.rms_norm(x, w, EPS),
            (x, weight),
        )
        yield Case("swiglu", lambda g, u: F.silu(g) * u, kernels.swiglu, (x, up))
        if hasattr(kernels, "silu_and_mul"):
            yield Case(
                "silu_and_mul",
                silu_and_mul,
                lambda x: kernels.silu_and_mul(x.new_empty(x.shape[0], x.shape[1] // 2), x),
                (randn(rows, 2 * hidden),),
                trains=False,
            )
    if hasattr(kernels, "rotary"):
        for shape in ROTARY[: None if large else 1]:
            cos, sin = randn(2, 1, 1, shape[2], shape[3])
            yield Case(
                "rotary",
                lambda x, cos=cos, sin=sin: rotary(x, cos, sin),
                lambda x, cos=cos, sin=sin: kernels.rotary(x, cos, sin),
                (randn(*shape),),
            )
    if hasattr(kernels, "cross_entropy"):
        for rows, classes in LOSS[: None if large else 1]:
            target = torch.randint(classes, (rows,), device=device)
            yield Case(
                "cross_entropy",
                lambda x, target=target: F.cross_entropy(x, target),
                lambda x, target=target: kernels.cross_entropy(x, target),
                (randn(rows, classes),),
            )


def training(function: Callable, args: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Forward and backward, as one call."""
    leaves = [each.detach().requires_grad_() for each in args]
    grad = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def best_times(candidates: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Seconds of a call of each, the shortest of several rounds in turns."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(call: Callable[[], object], count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        return (time.perf_counter() - start) / count

    counts = {}
    for name, call in candidates.items():
        seconds(call, 3)
        counts[name] = max(1, int(ROUND_SECONDS / seconds(call, 3)))
    rounds = [{name: seconds(call, counts[name]) for name, call in candidates.items()} for _ in range(ROUNDS)]
    return {name: min(each[name] for each in rounds) for name in candidates}


def run(case: Case, device: str, compiled: bool) -> Iterator[str]:
    """The lines of a case."""
    functions = {"eager": case.reference, "kernel": case.kernel}
    if compiled:
        torch._dynamo.reset()
        functions["compile"] = torch.compile(case.reference, dynamic=False)
    passes = {"forward": {name: lambda f=f: f(*case.args) for name, f in functions.items()}}
    if case.trains:
        passes["forward + backward"] = {name: training(f, case.args) for name, f in functions.items()}
    for which, candidates in passes.items():
        with torch.set_grad_enabled(which != "forward"):
            times = best_times(candidates, device)
        columns = [f"{times['eager'] * 1e6:10.1f}"]
        columns.append(f"{times['compile'] * 1e6:10.1f}" if compiled else f"{'-':>10}")
        columns.append(f"{times['kernel'] * 1e6:10.1f}")
        columns.append(f"{times['kernel'] / times['eager']:8.2f}")
        columns.append(f"{times['kernel'] / times['compile']:8.2f}" if compiled else f"{'-':>8}")
        dtype = str(case.args[0].dtype).removeprefix("torch.")
        yield f"{case.op:14}{dtype:10}{case.shape:16}{which:20}{''.join(columns)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=REPOSITORIES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", help="one operation, such as rms_norm")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--large", action="store_true", help="the largest shapes too")
    asked = parser.parse_args()
    for name in REPOSITORIES[asked.device]:
        try:
            kernels = load(name)
        except (ImportError, subprocess.CalledProcessError) as error:
            print(f"\n{name} is left out: {error}")
            continue
        where = f"{asked.device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        print(f"\n{name} on {where}; µs, the best of {ROUNDS}")
        print(f"{'':60}{'eager':>10}{'compile':>10}{'kernel':>10}{'/ eager':>8}{'/ comp.':>8}")
        for dtype in (torch.float32, torch.bfloat16):
            for case in cases(kernels, asked.device, dtype, asked.large):
                if asked.only in (None, case.op):
                    for line in run(case, asked.device, not asked.no_compile):
                        print(line, flush=True)


if __name__ == "__main__":
    main()
