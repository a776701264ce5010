"""The benchmark of single memory-bound operations on a GPU, against the bandwidth of a copy.

    python -m bench.alone [--only rms_norm …] [--dtype bfloat16]

The systems are eager, torch.compile, forge with its own choice, forge's own Triton kernel called directly, and Liger if
installed. The figures are the device's µs per call (replayed in a CUDA graph), and the minimal traffic in bytes over
that time, relative to the bandwidth of a copy. For a step of AdamW, eager is torch's fused one.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

import forge
from bench.kernel_examples import load, rotary, training
from bench.timing import device_seconds, show_table
from forge.benchmark.model_bench import entry

EPS = 1e-5
ROWS = [(8192, 2048), (8192, 8192)]
HEADS = [(4, 32, 8, 2048, 128), (1, 32, 8, 128, 128)]  # batch, heads of queries, of keys, length, dim
PARAMETERS = [(100, 2**20), (1000, 2**12)]  # number of tensors, elements of each
LOGITS = [(4096, 32000), (8192, 128256)]


@dataclass(frozen=True)
class Case:
    """An operation on one shape. moved: the minimal traffic in units of the first argument's bytes, forward and
    backward; kernel: forge's own kernel of the function; liger: the name of Liger's, if it has one. Norms also get
    eps."""

    name: str
    traffic: tuple[float, float]
    args: tuple[torch.Tensor, ...]
    reference: Callable
    kernel: Callable
    liger: str = ""


def _liger() -> ModuleType | None:
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return None
    return functional


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, F.rms_norm(total, weight.shape, weight, eps)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _rotary_pair(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary(q, cos, sin), rotary(k, cos, sin)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    ours = load("forge-triton")

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    for rows, hidden in ROWS:
        x, other, weight, bias = randn(rows, hidden), randn(rows, hidden), randn(hidden), randn(hidden)
        yield Case("rms_norm", (2, 3), (x, weight), _rms_norm, ours.rms_norm, "liger_rms_norm")
        yield Case(
            "add_rms_norm", (4, 4), (x, other, weight), _add_rms_norm, ours.add_rms_norm, "liger_fused_add_rms_norm"
        )
        yield Case("layer_norm", (2, 3), (x, weight, bias), _layer_norm, ours.layer_norm, "liger_layer_norm")
        yield Case("softmax", (2, 3), (x,), partial(F.softmax, dim=-1), ours.softmax, "liger_softmax")
        yield Case("swiglu", (3, 5), (x, other), _swiglu, ours.swiglu, "liger_swiglu")
        yield Case("geglu", (3, 5), (x, other), _geglu, ours.geglu, "liger_geglu")
    for batch, queries, keys, length, dim in HEADS:
        tables = dict(zip(("cos", "sin"), randn(2, batch, 1, length, dim), strict=True))
        both = randn(batch, queries, length, dim), randn(batch, keys, length, dim)
        yield Case("rotary", (2, 2), both[:1], partial(rotary, **tables), partial(ours.rotary, **tables))
        traffic = 2 * (1 + keys / queries)
        of_both, of_kernel = partial(_rotary_pair, **tables), partial(ours.rotary_pair, **tables)
        yield Case("rotary_pair", (traffic, traffic), both, of_both, of_kernel)
    for rows, classes in LOGITS:  # Liger writes the gradient over its input, in the forward: nothing to compare
        target = torch.randint(classes, (rows,), device="cuda")
        of = partial(F.cross_entropy, target=target)
        yield Case("cross_entropy", (1, 2), (randn(rows, classes),), of, partial(ours.cross_entropy, target=target))


def adamw_steps(dtype: torch.dtype, bandwidth: float) -> Iterator[tuple[str, ...]]:
    """Yield the row of a step of AdamW for each number of parameters. Parameters and both moments are read and written,
    gradients are read."""
    for number, elements in PARAMETERS:
        params = [torch.randn(elements, device="cuda").to(dtype) for _ in range(number)]
        for param in params:
            param.grad = torch.randn_like(param)
        at_least = 7 * number * params[0].nbytes / bandwidth
        row = ["adamw", f"{number}×{elements}", "step"]
        for kind in (partial(torch.optim.AdamW, fused=True, capturable=True), None, None, forge.optim.AdamW, None):
            if kind is None:
                row.append("-")
                continue
            seconds = device_seconds(kind(params).step)
            row.append(f"{1e6 * seconds:.0f} ({at_least / seconds:.2f})")
        yield tuple(row)


def measured(case: Case, bandwidth: float) -> Iterator[tuple[str, ...]]:
    """Yield a row for each pass; bandwidth: that of a copy, in bytes per second."""
    torch._dynamo.reset()
    eps = (EPS,) if case.name.endswith("norm") else ()
    functions = [
        case.reference,
        torch.compile(entry(case.reference), dynamic=False),
        forge.jit(case.reference, cache=False),
        lambda *args: case.kernel(*args, *eps),
        None,
    ]
    by_liger = getattr(_liger(), case.liger, None)
    if by_liger is not None:
        functions[-1] = lambda *args: by_liger(*args, *eps)
    passes = {"forward": case.traffic[0], "forward + backward": sum(case.traffic)}
    for name, traffic in passes.items():
        row = [case.name, "×".join(map(str, case.args[0].shape)), name]
        for function in functions:
            row.append(
                "-" if function is None else _one(function, case, name, traffic * case.args[0].nbytes / bandwidth)
            )
        yield tuple(row)


def _one(function: Callable, case: Case, which: str, at_least: float) -> str:
    with torch.set_grad_enabled(which != "forward"):
        forward: Callable[[], Any] = lambda: function(*case.args)
        call = forward if which == "forward" else training(function, case.args)
        seconds = device_seconds(call)
    return f"{1e6 * seconds:.0f} ({at_least / seconds:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="operations by name")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.alone measures on a GPU, and there is none here")
        return
    warnings.simplefilter("ignore")
    source = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / device_seconds(lambda: target.copy_(source))
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {options.dtype}")
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s")
    print("µs on the device (part of a copy's bandwidth)\n")
    rows = [("operation", "shape", "", "eager", "torch.compile", "forge", "kernel", "Liger")]
    for case in cases(getattr(torch, options.dtype)):
        if not options.only or case.name in options.only:
            rows += measured(case, bandwidth)
    if not options.only or "adamw" in options.only:
        rows += adamw_steps(getattr(torch, options.dtype), bandwidth)
    show_table(rows)


if __name__ == "__main__":
    main()
