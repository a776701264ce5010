"""The benchmark of matrix products with the calls that follow: Inductor's templates against torch's kernels and
regions.

    python -m bench.products [--dtype bfloat16] [--backward] [--rounds 15]

torch.compile, its mode max-autotune without CUDA graphs, forge and forge with select="measured", are compiled first and
then timed in turn: milliseconds per call, and the ratio to torch.compile. Below each table are forge's measurements.
Sizes are those of a large model on a GPU, and small on a CPU, where Inductor's C++ has a template for batches only.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import forge
from bench.timing import show_table
from forge.support.timing import in_turn, ratio

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}  # relative to the largest element


class Sizes(NamedTuple):
    """The sizes of a case. rows: tokens. hidden, inner: the widths of a feed-forward block. experts: products of one
    batch."""

    rows: int
    hidden: int
    inner: int
    experts: int


SIZES = {"cuda": Sizes(8192, 4096, 14336, 8), "cpu": Sizes(64, 64, 256, 4)}


def mlp(x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias), approximate="tanh"), down)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias))


def linear_residual(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias) * 0.5 + residual


def experts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.silu(torch.bmm(x, weight))


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]:
    """Yield functions and their inputs; the summands have variance 1."""
    rows, hidden, inner, count = SIZES[device]

    def randn(*shape: int, over: int = 1) -> torch.Tensor:
        return (torch.randn(shape, device=device) / over**0.5).to(dtype)

    x, wide, bias = randn(rows, hidden), randn(inner, hidden, over=hidden), randn(inner)
    down = randn(hidden, inner, over=inner)
    yield mlp, [x, wide, bias, down]
    yield swiglu, [x, wide, randn(inner, hidden, over=hidden), down]
    yield linear_gelu, [x, wide, bias]
    square = randn(hidden, hidden, over=hidden)
    yield linear_residual, [x, square, randn(hidden), randn(rows, hidden)]
    yield experts, [randn(count, rows // count, hidden), randn(count, hidden, hidden, over=hidden)]


def systems(function: Callable) -> dict[str, Callable]:
    """Return the systems by name; the first is the reference."""
    options: dict[str, Any] = {"cuda_graphs": False, "cache": False}
    return {
        "torch.compile": torch.compile(function),
        "max-autotune": torch.compile(function, mode="max-autotune-no-cudagraphs"),
        "forge": forge.jit(function, **options),
        "forge, measured": forge.jit(function, select="measured", **options),
    }


def _step(function: Callable, inputs: list[torch.Tensor], gradient: torch.Tensor | None) -> Callable[[], Any]:
    if gradient is None:
        return lambda: function(*inputs)
    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)


def _check(name: str, actual: Any, expected: Any, tolerance: float) -> None:
    pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
    for ours, theirs in pairs:
        off = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        if not off <= tolerance:
            raise SystemExit(f"{name} differs from eager by {off:.1e} of the largest element")


def compare(function: Callable, inputs: list[torch.Tensor], dtype: torch.dtype, *, backward: bool, rounds: int) -> None:
    """Print the times of the systems."""
    gradient = None
    if backward:
        inputs = [each.requires_grad_() for each in inputs]
        gradient = torch.randn_like(function(*inputs))
    expected = _step(function, inputs, gradient)()
    torch.compiler.reset()
    built = systems(function)
    runs: dict[str, Callable[[], Any]] = {}
    compiled: dict[str, float] = {}
    for name, system in built.items():
        run, start = _step(system, inputs, gradient), time.perf_counter()
        try:
            actual = run()
        except Exception as error:
            print(f"{name} fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        compiled[name] = time.perf_counter() - start
        runs[name] = run
        _check(name, actual, expected, TOLERANCE[dtype])
    times = in_turn(runs, rounds=rounds)
    first = next(iter(times.values()))
    rows = [(function.__name__, "ms", f"over {next(iter(times))}", "compiled in s")]
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows.append((name, f"{1e3 * median:.3f}", f"{ratio(seconds, first):.3f}", f"{compiled[name]:.1f}"))
    show_table(rows)
    for each in forge.explain(built["forge, measured"]).measured:
        print(f"  {each}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--dtype", default="bfloat16" if device == "cuda" else "float32")
    parser.add_argument("--backward", action="store_true", help="with gradients of all inputs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", help="names of functions")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}, {options.dtype}\n")
    for function, inputs in cases(device, dtype):
        if options.only and function.__name__ not in options.only:
            continue
        with torch.set_grad_enabled(options.backward):
            compare(function, inputs, dtype, backward=options.backward, rounds=options.rounds)


if __name__ == "__main__":
    main()
