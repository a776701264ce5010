"""The benchmark of the kernels of examples/kernels/ against eager and torch.compile.

Every case runs forward, and forward with backward. The candidates take turns, and the shortest time of each counts, so
that a busy machine affects all of them alike. A ratio is kernel / other: below 1 the kernel is faster.

On a GPU, the device's time per call is measured, too (replayed in a CUDA graph, where launches cost next to nothing),
and GB/s is the minimal traffic over that time.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

from bench.timing import device_seconds
from forge.support.timing import in_turn

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "norms-cpu": ROOT / "examples" / "kernels" / "norms-cpu",
    "norms-cuda": ROOT / "examples" / "kernels" / "norms-cuda",
    "forge-triton": ROOT / "forge" / "_builtin_kernels" / "forge-triton",
}
REPOSITORIES = {"cpu": ["norms-cpu"], "cuda": ["norms-cuda", "forge-triton"]}
OPERATIONS = ("rms_norm", "swiglu", "silu_and_mul", "rotary", "cross_entropy")
CANDIDATES = ("eager", "compile", "kernel")
EPS = 1e-5
ROUNDS = 50
ROUND_SECONDS = 0.003  # short, so that on a busy machine some rounds run undisturbed

# (rows, hidden) of norms and gated units; (batch, heads, length, dim) of rotary; (rows, classes) of the loss
SHAPES = {
    "cpu": [(4, 64), (128, 2048), (512, 4096)],
    "cuda": [(16, 4096), (4096, 4096), (131072, 128), (8192, 8192), (16384, 16384)],
}
ROTARY = [(1, 32, 128, 128), (4, 32, 2048, 128), (8, 32, 8192, 128)]
LOSS = [(512, 32000), (4096, 32000), (8192, 128256)]


@dataclass(frozen=True)
class Case:
    """An operation on one shape, in plain torch and by a kernel; `args` are its inputs, which get gradients.

    traffic: the minimal traffic in units of the first input's bytes, forward and backward.
    """

    op: str
    reference: Callable
    kernel: Callable
    args: tuple[torch.Tensor, ...]
    traffic: tuple[float, float]

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.args[0].shape))


def build(folder: Path) -> Path:
    """Return the variant of an example, built if necessary. Raises CalledProcessError if its build fails."""
    if not (folder / "build.py").exists():
        return folder / "build" / "torch-universal"
    process = subprocess.run([sys.executable, folder / "build.py"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(process.stdout.strip())


def load(name: str) -> ModuleType:
    """Return the module of an example, loaded without forge."""
    variant = build(FOLDERS[name])
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
    """Yield the cases of a repository's kernels, with the shapes of a device."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    for rows, hidden in SHAPES[device][: None if large else 2]:
        x, weight, up = randn(rows, hidden), randn(hidden), randn(rows, hidden)
        yield Case(
            "rms_norm",
            lambda x, w: F.rms_norm(x, w.shape, w, EPS),
            lambda x, w: kernels.rms_norm(x, w, EPS),
            (x, weight),
            (2, 3),
        )
        yield Case("swiglu", lambda g, u: F.silu(g) * u, kernels.swiglu, (x, up), (3, 5))
        if hasattr(kernels, "silu_and_mul"):
            yield Case(
                "silu_and_mul",
                silu_and_mul,
                lambda x: kernels.silu_and_mul(x.new_empty(x.shape[0], x.shape[1] // 2), x),
                (randn(rows, 2 * hidden),),
                (1.5, 0),
            )
    if hasattr(kernels, "rotary"):
        for shape in ROTARY[: None if large else 1]:
            cos, sin = randn(2, 1, 1, shape[2], shape[3])
            yield Case(
                "rotary",
                lambda x, cos=cos, sin=sin: rotary(x, cos, sin),
                lambda x, cos=cos, sin=sin: kernels.rotary(x, cos, sin),
                (randn(*shape),),
                (2, 2),
            )
    if hasattr(kernels, "cross_entropy"):
        for rows, classes in LOSS[: None if large else 1]:
            target = torch.randint(classes, (rows,), device=device)
            yield Case(
                "cross_entropy",
                lambda x, target=target: F.cross_entropy(x, target),
                lambda x, target=target: kernels.cross_entropy(x, target),
                (randn(rows, classes),),
                (1, 2),
            )


def training(function: Callable, args: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """Return forward and backward, as one call."""
    leaves = [each.detach().clone().requires_grad_() for each in args]

    def outputs() -> tuple[torch.Tensor, ...]:
        result = function(*leaves)
        return result if isinstance(result, tuple) else (result,)

    gradients = [torch.randn_like(each) for each in outputs()]
    return lambda: torch.autograd.grad(outputs(), leaves, gradients)


def run(case: Case, compiled: bool) -> Iterator[str]:
    """Yield the lines of a case."""
    functions = {"eager": case.reference, "kernel": case.kernel}
    if compiled:
        torch._dynamo.reset()
        functions["compile"] = torch.compile(case.reference, dynamic=False)
    forward, backward = case.traffic
    passes = {"forward": (forward, {name: lambda f=f: f(*case.args) for name, f in functions.items()})}
    if backward:
        trained = {name: training(f, case.args) for name, f in functions.items()}
        passes["forward + backward"] = forward + backward, trained
    for which, (traffic, candidates) in passes.items():
        with torch.set_grad_enabled(which != "forward"):
            timings = in_turn(candidates, rounds=ROUNDS, batch_seconds=ROUND_SECONDS)
            columns = _columns({name: min(seconds) for name, seconds in timings.items()})
            if case.args[0].is_cuda:
                times = {name: device_seconds(call) for name, call in candidates.items()}
                columns += f"  |{_columns(times)}{traffic * case.args[0].nbytes / times['kernel'] / 1e9:8.0f}"
        dtype = str(case.args[0].dtype).removeprefix("torch.")
        yield f"{case.op:14}{dtype:10}{case.shape:16}{which:20}{columns}"


def _columns(times: dict[str, float]) -> str:
    """Return the microseconds of each candidate, and the ratios."""
    cells = [f"{times[name] * 1e6:10.1f}" if name in times else f"{'-':>10}" for name in CANDIDATES]
    for name in CANDIDATES[:2]:
        cells.append(f"{times['kernel'] / times[name]:8.2f}" if name in times else f"{'-':>8}")
    return "".join(cells)


def _title(device: str) -> str:
    columns = f"{'eager':>10}{'compile':>10}{'kernel':>10}{'/ eager':>8}{'/ comp.':>8}"
    return f"{'':60}{columns}{f'  |{columns}    GB/s' if device == 'cuda' else ''}"


def bench_examples(
    repositories: Sequence[str], device: str, *, operations: Sequence[str] | None, compiled: bool, large: bool
) -> None:
    """Print each operation of each repository. operations: only these. Raises SystemExit if no repository has them."""
    modules = dict(_loaded(repositories))
    available = [op for op in OPERATIONS if any(hasattr(module, op) for module in modules.values())]
    if operations is not None and not set(operations) & set(available):
        raise SystemExit(f"{', '.join(modules)} have no {', '.join(operations)}, but {', '.join(available)}")
    for name, module in modules.items():
        threads = f"{torch.get_num_threads()} threads"
        where = torch.cuda.get_device_name() if device == "cuda" else f"{device}, {threads}"
        on_device = ", and on the device alone" if device == "cuda" else ""
        print(f"{name} on {where}, torch {torch.__version__}; µs, the best of {ROUNDS}{on_device}")
        print(_title(device))
        for dtype in (torch.float32, torch.bfloat16):
            for case in cases(module, device, dtype, large):
                if operations is None or case.op in operations:
                    for line in run(case, compiled):
                        print(line, flush=True)


def _loaded(repositories: Sequence[str]) -> Iterator[tuple[str, ModuleType]]:
    for name in repositories:
        try:
            yield name, load(name)
        except (ImportError, subprocess.CalledProcessError) as error:
            print(f"{name} is left out: {error}")
