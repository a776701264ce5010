"""The benchmark of the overhead of a claimed kernel's call, and of its checker during compilation.

Chains of 1 and of 101 calls run under forge.jit and directly, in turn in one process. The slope between the two is the
cost of a call; the fixed cost of a function (Dynamo's guards, entering the compiled function) is in the chain of 1.
"""

import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

import forge
from bench.kernel_examples import training
from bench.timing import show_table
from forge.executors.hubex import Kernel, gather, kernel_executor
from forge.executors.hubex.operators import make_checker
from forge.ir import TensorProxy
from forge.support.timing import in_turn

WANTED = 2e-6
CHAINS = (1, 101)
SHAPE = (4, 64)

Step = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Chain:
    """A chain of calls of one kernel, each on the result of the previous one. step: the model's own code; direct: a
    direct call of the kernel; others: the arguments besides the first."""

    name: str
    step: Step
    direct: Step
    kernels: list[Kernel]
    others: tuple[torch.Tensor, ...] = ()
    trains: bool = True


def negative(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(x)


def negative_into(out: torch.Tensor, x: torch.Tensor) -> None:
    torch.neg(x, out=out)


def negative_directly(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    negative_into(out, x)
    return out


def least() -> list[Chain]:
    """Return chains of Python kernels that do next to nothing, so that only forge's own cost remains."""
    plain = forge.kernel(torch.neg, negative, grad="composite")
    writes = forge.kernel(torch.neg, negative_into, args={"x": "input"}, out="out")
    return [
        Chain("Python function", torch.neg, negative, [plain]),
        Chain("Python function, out first", torch.neg, negative_directly, [writes], trains=False),
    ]


def native(module: ModuleType, kernels: list[Kernel]) -> list[Chain]:
    """Return chains of an example repository's kernels; inputs of zeros stay zeros, which are as fast as other
    numbers."""
    other, weight = torch.zeros(SHAPE), torch.ones(SHAPE[-1])

    def silu_and_mul_directly(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        module.silu_and_mul(out, x)
        return torch.cat((out, out), -1)

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        out = F.silu(gate) * up
        return torch.cat((out, out), -1)

    return [
        Chain(
            "rms_norm",
            lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
            lambda x, w: module.rms_norm(x, w, 1e-5),
            kernels,
            (weight,),
        ),
        Chain("swiglu", lambda g, u: F.silu(g) * u, lambda g, u: module.swiglu(g, u), kernels, (other,)),
        Chain("silu_and_mul, out first", silu_and_mul, silu_and_mul_directly, kernels, trains=False),
    ]


def chained(step: Step, length: int) -> Step:
    def chain(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = step(x, *others)
        return x

    return chain


def jitted(chain: Chain, length: int) -> Step:
    executor = kernel_executor(chain.kernels, verify=False)
    return forge.jit(chained(chain.step, length), executors=[executor, "torch"])


def forward(function: Step, args: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return function(*args)

    return run


def check_claimed(function: Step, length: int, names: set[str]) -> None:
    """Raise RuntimeError unless the kernels run each call of a chain."""
    rows = [row for row in forge.explain(function).rows if row.executor in names and row.phase == "forward"]
    if len(rows) < length:
        raise RuntimeError(f"kernels run {len(rows)} of {length} calls:\n{forge.explain(function)}")


def measured(chain: Chain, runs: Callable[[Step, tuple], Callable[[], object]], rounds: int) -> tuple[str, ...]:
    """Return the µs of a direct call and of one under forge, the overhead per call, and the fixed cost of a
    function."""
    args = (torch.zeros(SHAPE), *chain.others)
    functions = {("forge", length): jitted(chain, length) for length in CHAINS}
    calls = {("direct", length): runs(chained(chain.direct, length), args) for length in CHAINS}
    calls |= {key: runs(function, args) for key, function in functions.items()}
    best = {key: min(seconds) for key, seconds in in_turn(calls, rounds=rounds).items()}
    for (_, length), function in functions.items():
        check_claimed(function, length, {kernel.name for kernel in chain.kernels})
    short, long = CHAINS
    slope = {who: (best[who, long] - best[who, short]) / (long - short) for who in ("direct", "forge")}
    added = slope["forge"] - slope["direct"]
    once = best["forge", short] - best["direct", short] - added
    columns = [f"{1e6 * each:.2f}" for each in (slope["direct"], slope["forge"])]
    return *columns, f"{1e6 * added:+.2f}", "yes" if added <= WANTED else "no", f"{1e6 * once:+.1f}"


def bench_calls(chains: list[Chain], rounds: int) -> None:
    limit = f"≤ {1e6 * WANTED:.0f}"
    rows = [(f"µs, {SHAPE[0]} × {SHAPE[1]}", "", "direct", "forge", "added a call", limit, "once a function")]
    for chain in chains:
        rows.append((chain.name, "inference", *measured(chain, forward, rounds)))
        if chain.trains:
            rows.append(("", "training", *measured(chain, training, rounds)))
    show_table(rows)


# checkers


def proxy(*shape: int, dtype: torch.dtype, device: str) -> TensorProxy:
    return TensorProxy("x", shape, dtype, torch.device(device))


def arguments(name: str, dtype: torch.dtype, device: str, short: int) -> tuple:
    """Return the arguments of an example's operation; `short` is subtracted from a length that must match another."""

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> TensorProxy:
        return proxy(*shape, dtype=dtype, device=device)

    return {
        "torch.nn.functional.rms_norm": lambda: (tensor(4, 64), (64 - short,), tensor(64), 1e-5),
        "rms_norm": lambda: (tensor(4, 64), tensor(64 - short), 1e-5),
        "swiglu": lambda: (tensor(4, 64), tensor(4, 64 - short)),
        "silu_and_mul": lambda: (tensor(4, 128 - short),),
        "rotary": lambda: (tensor(1, 8, 16, 64), tensor(1, 1, 16, 64 - short), tensor(1, 1, 16, 64)),
        "torch.nn.functional.cross_entropy": lambda: (tensor(16, 100), tensor(16 - short, dtype=torch.int64)),
    }[name]()


def bench_checkers(sources: list[Path], device: str) -> None:
    """Benchmark the decision on proxies, as in compilation."""
    rows = [("µs of a decision", "operation", "taken", "other dtype", "other length", "why not")]
    for kernel in gather(sources):
        check = make_checker(kernel.entry, kernel.signature, kernel.target)
        name = kernel.pattern.name if kernel.pattern is not None else kernel.entry.op
        calls = [arguments(name, *each) for each in _variations(device)]
        times = [f"{1e6 * _seconds(check, call):.1f}" for call in calls]
        decisions = [check(*call) for call in calls]
        if [bool(each) for each in decisions] != [True, False, False]:
            raise RuntimeError(f"{kernel.name} decided {decisions} on {calls}")
        rows.append((kernel.name, name, *times, decisions[-1].reason))
    show_table(rows)


def _seconds(check: Callable, call: tuple) -> float:
    return min(timeit.repeat(lambda: check(*call), number=1000, repeat=25)) / 1000


def _variations(device: str) -> list[tuple[torch.dtype, str, int]]:
    return [(torch.float32, device, 0), (torch.float64, device, 0), (torch.float32, device, 1)]
