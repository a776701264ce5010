"""forge kernels bench: what kernels take, against what they stand for, over shapes.

Each runs as a program of one call: the kernel's, its reference's (the calls that it is made of, by torch), the fuser's
(as one region); eager is torch's own function, or the reference called as it is written.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from forge import clang
from forge.api.functional import Direct
from forge.compiler.autotune import ForcedFusion, microseconds
from forge.executors.calls import Call, Meta, call_of
from forge.executors.executor import Executor
from forge.executors.hubex import HubExecutor, Kernel, Verifier
from forge.executors.hubex.assumptions import reference_of
from forge.executors.hubex.verification.messages import Question
from forge.executors.hubex.verification.verification_cache import zero_accepted
from forge.executors.inductorex import inductorex
from forge.ir import check, set_language
from forge.ir.checks import in_one_line
from forge.ir.printing import quantity, table
from forge.support import timing
from forge.support.dtypes import dtype_name
from forge.support.machine import device_name, processor
from forge.torch_internals.pytree import torch_pytree

EAGER, REFERENCE, FUSER = "eager", "reference", "inductor"
SLOWER = 1.1  # times the best candidate's time: less is noise
HEADER = ("kernel", "arguments", "who", "time", "of eager", "bandwidth")
SIZES = (1 << 16, 1 << 20, 1 << 22)  # elements of the first tensor, where no shapes are given
WIDEST = 1024  # of the last dim, where the constraints do not ask for more

Shapes = Sequence[tuple[int, ...]]  # of a call's tensors, in order


@dataclass(frozen=True)
class Bench:
    """The times of one call, by candidate.

    kernel: its name. operation: what it implements. arguments: the tensors in words. bytes: what must be read and
    written. seconds: of one call. reasons: why a candidate was not timed; of the kernel, why nothing was.
    """

    kernel: str
    operation: str
    dtype: str
    device: str
    arguments: str = ""
    backward: bool = False
    elements: int = 0
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def ratio(self, who: str) -> float | None:
        """Return the time as a multiple of eager's."""
        if EAGER not in self.seconds or who not in self.seconds:
            return None
        return self.seconds[who] / self.seconds[EAGER]

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        candidates = [
            {
                "name": who,
                "seconds": self.seconds.get(who),
                "of_eager": self.ratio(who),
                "bytes_per_second": self.bytes / self.seconds[who] if who in self.seconds else None,
                "reason": self.reasons.get(who),
            }
            for who in dict.fromkeys((*self.seconds, *self.reasons))
        ]
        facts = ("kernel", "operation", "dtype", "device", "arguments", "backward", "elements", "bytes")
        return {**{name: getattr(self, name) for name in facts}, "candidates": candidates}

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a row of cells for each candidate, as HEADER names them."""
        arguments = self.arguments or f"{self.dtype} on {self.device}"
        for who, seconds in self.seconds.items():
            ratio, rate = self.ratio(who), f"{1e-9 * self.bytes / seconds:.1f} GB/s"
            of_eager = "-" if ratio is None else f"{ratio:.2f}"
            yield self.kernel, arguments, who, microseconds(seconds), of_eager, rate
        for who, reason in self.reasons.items():
            yield self.kernel, arguments, who, "-", "-", reason


def bench(
    kernels: Sequence[Kernel],
    *,
    op: str | None = None,
    shapes: Sequence[Shapes] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    backward: bool = False,
    verifier: Verifier | None = None,
) -> Iterator[Bench]:
    """Yield the timings of each kernel's calls, one after the other.

    op: kernels of this operation alone, as `forge kernels verify` prints it. shapes: of the tensors of each call; by
    default some that the kernel's constraints allow. dtype, device: these alone. backward: forward and backward
    together. verifier: kernels that it finds wrong are not timed; None asks for nothing.
    Raises ValueError for an operation, dtype, device or shapes that no kernel is for.
    """
    operations = sorted({kernel.operation for kernel in kernels})
    selection = [
        kernel for kernel in kernels if op in (None, kernel.operation, kernel.operation.removeprefix("pattern:"))
    ]
    check(bool(selection), lambda: f"op is {op!r}, but the kernels are of {', '.join(operations) or 'nothing'}")
    where = [
        (kernel, at, each)
        for kernel in selection
        for at in kernel.devices
        if device is None or device.type == at.type
        for each in kernel.dtypes
        if dtype in (None, each)
    ]
    check(bool(where), lambda: _nowhere(selection, dtype, device))
    for kernel, at, each in where:
        yield from _of_kernel(kernel, device or at, each, shapes, backward, verifier)


def slower_kernels(results: Sequence[Bench]) -> list[str]:
    """Return a line for each kernel that another candidate is faster than, with the remedy: by default forge runs a
    kernel wherever it can."""
    lines = []
    for name in dict.fromkeys(each.kernel for each in results):
        timed = [each for each in results if each.kernel == name and name in each.seconds]
        slower = [each for each in timed if each.seconds[name] > SLOWER * min(each.seconds.values())]
        if slower:
            best = Counter(min(each.seconds, key=each.seconds.__getitem__) for each in slower).most_common(1)[0][0]
            remedy = "say in faster where it is the faster one, or give forge.jit select='measured'"
            lines.append(f"{name} is slower than {best} in {len(slower)} of {quantity(len(timed), 'call')}: {remedy}")
    return lines


def _nowhere(kernels: Sequence[Kernel], dtype: torch.dtype | None, device: torch.device | None) -> str:
    dtypes = dict.fromkeys(dtype_name(each) for kernel in kernels for each in kernel.dtypes)
    devices = dict.fromkeys(str(each) for kernel in kernels for each in kernel.devices)
    request = [*([] if dtype is None else [dtype_name(dtype)]), *([] if device is None else [f"on {device}"])]
    return (
        f"{' '.join(request) or 'nothing'} was asked for, but the kernels are for {', '.join(dtypes)} "
        f"on {', '.join(devices) or 'no device that is here'}"
    )


def _of_kernel(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[Shapes],
    backward: bool,
    verifier: Verifier | None,
) -> Iterator[Bench]:
    untimed = Bench(kernel.name, kernel.operation, dtype_name(dtype), str(device), backward=backward)
    answer = verifier.answer(kernel, Question(device, dtype)) if verifier is not None else None
    reason = None if answer is None else answer.reason or zero_accepted(answer)
    if backward and kernel.entry.grad.kind == "none":
        reason = reason or "it has no gradient"
    if reason is not None:
        yield replace(untimed, reasons={kernel.name: reason})
        return
    samples = _Samples(kernel, device, dtype)
    for call in [samples.of(each) for each in shapes] or samples.calls_of_sizes():
        yield _time_candidates(untimed, kernel, samples.values(call), device)


def _time_candidates(untimed: Bench, kernel: Kernel, call: Call, device: torch.device) -> Bench:
    """Return the candidates of one call, timed in turn."""
    program = _Program(kernel, call, untimed.backward)
    runs: dict[str, Callable[[], Any]] = {}
    reasons: dict[str, str] = {}
    size = 0
    for who, prepare in program.candidates().items():
        try:
            run = prepare()
            size = size or program.bytes(run())
            runs[who] = run
        except Exception as error:  # of the candidate's own code: the others are timed all the same
            reasons[who] = str(error) if isinstance(error, _DeclineError) else in_one_line(error)
    tensors = program.tensors
    return replace(
        untimed,
        arguments=", ".join(f"{dtype_name(each.dtype)}{list(each.shape)}" for each in tensors),
        elements=tensors[0].numel(),
        bytes=size,
        seconds=timing.time_candidates(runs, device) if runs else {},
        reasons=reasons,
    )


class _DeclineError(Exception):
    """The requested executor declined the call; carries the reason."""


class _Program:
    """A call on real tensors, as each candidate runs it."""

    def __init__(self, kernel: Kernel, call: Call, backward: bool) -> None:
        self.kernel, self.call, self.backward = kernel, call, backward
        if backward:
            self.call = call.map(lambda leaf: leaf.requires_grad_() if _is_float(leaf) else leaf)
        leaves = torch_pytree.tree_leaves((self.call.args, self.call.kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def candidates(self) -> dict[str, Callable[[], Callable[[], Any]]]:
        """Return the candidates by name: for each, a factory of the function without arguments that is timed."""
        own = HubExecutor("kernels", None, faster=False)
        own.add([self.kernel])
        candidates: dict[str, Callable[[], Callable[[], Any]]] = {
            self.kernel.name: partial(self._compile, [own, "torch"], self.kernel.name)
        }
        eager = reference_of(self.kernel.target, self.kernel.pattern)
        if eager is not None:
            candidates[EAGER] = lambda: partial(self._run, partial(eager, *self.call.args, **self.call.kwargs))
        if self.kernel.pattern is not None:
            candidates[REFERENCE] = partial(self._compile, ["torch"])
        candidates[FUSER] = partial(self._compile, [ForcedFusion(inductorex), "torch"], FUSER)
        return candidates

    def _compile(self, executors: Sequence[Executor | str], taken_by: str | None = None) -> Callable[[], Any]:
        """Return a function that runs the call. Raises _DeclineError where the executor `taken_by` does not run
        it."""
        with torch.set_grad_enabled(self.backward):
            executable, report = Direct(self._symbol_call, executors).compile(self.call.args, self.call.kwargs)
        if taken_by is not None and all(claim.executor != taken_by for claim in report.claims):
            reasons = [reason for claim in report.claims for who, reason in claim.declined if who == taken_by]
            raise _DeclineError(reasons[0] if reasons else "it does not take the call")
        return partial(self._run, partial(executable.call, *self.tensors))

    def _symbol_call(self, *args: Any, **kwargs: Any) -> Any:
        with set_language(clang.language):
            return self.kernel.target.symbol(*args, **kwargs)

    def _run(self, forward: Callable[[], Any]) -> Any:
        """Return the outputs; with the gradients of the float inputs where the backward is part of it."""
        if not self.backward:
            with torch.no_grad():
                return forward()
        outputs = [leaf for leaf in torch_pytree.tree_leaves(forward()) if _is_float(leaf) and leaf.requires_grad]
        targets = [each for each in self.tensors if each.requires_grad]
        gradients = torch.autograd.grad(
            outputs, targets, [torch.ones_like(each) for each in outputs], allow_unused=True
        )
        return outputs, gradients

    def bytes(self, result: Any) -> int:
        """Return the number of bytes that must be read and written: inputs and outputs; with a backward the inputs and
        the incoming gradients once more, and the gradients."""
        leaves = [leaf for leaf in torch_pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not self.backward:
            return _bytes(self.tensors) + _bytes(leaves)
        outputs, gradients = result
        writes = [each for each in gradients if each is not None]
        return 2 * _bytes(self.tensors) + 2 * _bytes(outputs) + _bytes(writes)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


class _Samples:
    """Calls of a kernel, made from one that its constraints allow. Raises ValueError where none is found."""

    def __init__(self, kernel: Kernel, device: torch.device, dtype: torch.dtype) -> None:
        # verification's samples bring the OpInfos, which a program needs nowhere else
        from forge.executors.hubex.verification import generic, samples
        from forge.executors.hubex.verification.search import Constraints

        self._samples, self.kernel = samples, kernel
        self._constraints = Constraints(kernel)
        cases = (each for each in samples.general_cases(kernel, device, dtype) if not each.note)
        usual = (call_of(case.args, case.kwargs).map(_dense) for case in cases)
        calls = [*self._valid_calls(generic.generic_calls(kernel, device, dtype))] or [*self._valid_calls(usual)]
        check(
            bool(calls), lambda: f"{kernel.name}: no {dtype_name(dtype)} arguments on {device} were found that it takes"
        )
        self.start = max(calls, key=lambda call: (len(call.metas[0].shape), _elements(call)))

    def _valid_calls(self, calls: Iterable[Call]) -> Iterator[Call]:
        return (call for call in calls if call.metas and _elements(call) and not self._constraints.violations(call))

    def calls_of_sizes(self) -> list[Call]:
        """Return the call with lengths as large as the constraints allow, for each of SIZES."""
        calls = {repr(call): call for call in map(self._enlarge, SIZES)}
        return list(calls.values())

    def _enlarge(self, elements: int) -> Call:
        call = self.start
        for index in range(1, len(call.metas[0].shape) + 1):
            old = call.metas[0].shape[-index]
            factor = 1
            while old > 1 and (index > 1 or old * factor < WIDEST) and factor < elements:
                factor *= 2
            while factor > 1:
                candidate = self._samples.with_lengths(call, {old: old * factor})
                if _elements(candidate) <= elements and not self._constraints.violations(candidate):
                    call = candidate
                    break
                factor //= 2
        return call

    def of(self, shapes: Shapes) -> Call:
        """Return a call on tensors of these shapes. Raises ValueError with the first constraint that fails."""
        metas = self.start.metas
        names = ", ".join(self.kernel.target.signature.tensors)
        check(
            len(shapes) == len(metas),
            lambda: (
                f"{self.kernel.name}: {quantity(len(shapes), 'shape')} given, but it is called with "
                f"{quantity(len(metas), 'tensor')} ({names}), such as {_format_shapes(each.shape for each in metas)}"
            ),
        )
        iterator = iter(shapes)
        pairs = [(old, new) for meta, shape in zip(metas, shapes, strict=True) for old, new in _zip_sizes(meta, shape)]
        call = self._samples.with_lengths(self.start, dict(pairs))
        call = call.map(lambda leaf: replace(leaf, shape=tuple(next(iterator))) if isinstance(leaf, Meta) else leaf)
        failing = sorted(str(getattr(each, "text", each)) for each in self._constraints.violations(call))
        check(
            not failing,
            lambda: (
                f"{self.kernel.name}: does not take {_format_shapes(each.shape for each in call.metas)}: {failing[0]}"
            ),
        )
        return call

    def values(self, call: Call) -> Call:
        """Return the call on real tensors: the repository's own samples where it makes some."""
        case = next(self._samples.call_cases(self.kernel, call))
        return Call(case.args, case.kwargs)


def _elements(call: Call) -> int:
    return prod(call.metas[0].shape)


def _dense(leaf: Any) -> Any:
    return replace(leaf, strides=None) if isinstance(leaf, Meta) else leaf


def _zip_sizes(meta: Meta, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (current size, new size) of each dim, from the last one on."""
    return zip(reversed(meta.shape), reversed(tuple(shape)), strict=False)


def _format_shapes(shapes: Any) -> str:
    """Return shapes as text, such as '2x512,512'."""
    return ",".join("x".join(map(str, shape)) for shape in shapes)


def parse_shapes(text: str) -> Shapes:
    """Return the shapes of '2x512,512'. Raises ValueError for what is none."""
    try:
        shapes = [tuple(int(length) for length in each.split("x")) for each in text.split(",")]
        check(all(length >= 0 for shape in shapes for length in shape), lambda: "a length is negative")
    except ValueError as error:
        raise ValueError(
            f"--shapes is {text!r}, but must be the shape of each tensor, such as 2x512,512: {error}"
        ) from error
    return shapes


def parse_dtype(text: str) -> torch.dtype:
    """Return torch's dtype of a name. Raises ValueError for what is none."""
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype is {text!r}, but must be a dtype of torch, such as float32")
    return dtype


def parse_device(text: str) -> torch.device:
    """Return a device. Raises ValueError for what is none."""
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"--device is {text!r}, but must be a device of torch, such as cuda:0") from error


def as_json(results: Sequence[Bench]) -> dict[str, Any]:
    """Return plain data, with what it was measured on."""
    devices = dict.fromkeys(torch.device(each.device) for each in results)
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "devices": [device_name(each) for each in devices],
        "results": [each.as_json() for each in results],
    }


def rich_table(results: Sequence[Bench]) -> Table:
    """Return a table for a terminal, with the fastest of each call in green."""
    colored = Table(*HEADER, box=None, header_style="bold")
    for each in results:
        best = min(each.seconds, key=each.seconds.__getitem__, default=None)
        for row in each.rows():
            style = "red" if row[2] in each.reasons else "green" if row[2] == best else None
            colored.add_row(*map(Text, row), style=style)
        colored.add_section()
    return colored


def plotter(path: Path) -> Callable[[Sequence[Bench]], None]:
    """Draw time against the first tensor's elements to a file, one picture a kernel and dtype.

    Raises ValueError, before anything is timed, where matplotlib is not installed.
    """
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
    return partial(_draw, pyplot, path)


def _draw(pyplot: Any, path: Path, results: Sequence[Bench]) -> None:
    groups: dict[str, list[Bench]] = {}
    for each in results:
        if each.seconds:
            groups.setdefault(f"{each.kernel}, {each.dtype} on {each.device}", []).append(each)
    check(bool(groups), lambda: "--plot: there is nothing to draw, as nothing was timed")
    figure, axes = pyplot.subplots(len(groups), squeeze=False, figsize=(7, 4 * len(groups)), layout="constrained")
    for (title, group), (axis,) in zip(groups.items(), axes, strict=True):
        for who in dict.fromkeys(name for each in group for name in each.seconds):
            points = sorted((each.elements, 1e6 * each.seconds[who]) for each in group if who in each.seconds)
            axis.plot(*zip(*points, strict=True), marker="o", label=who)
        axis.set(title=title, xlabel="elements", ylabel="µs", xscale="log", yscale="log")
        axis.legend()
    figure.savefig(path)
    pyplot.close(figure)


def show(results: Sequence[Bench]) -> str:
    """Return a table of text."""
    return "\n".join(table([HEADER, *[row for each in results for row in each.rows()]]))
