"""The comparison of a program under `forge.jit` with eager: values, dtypes, strides, aliases, writes to inputs,
gradients and errors.

The bound of a tensor's error is twice eager's error against a run in float64, plus a few units of the dtype. If forge
exceeds it, the float64 run is repeated with each value perturbed by a rounding of the coarsest dtype. A result that
moves as far as forge's is ill-conditioned, and its difference is not an error of forge. Eager's error is one draw of a
random number, and a lucky one if terms cancel inside an operator: its errors for inputs perturbed by a rounding count,
too.
"""

import itertools
import linecache
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import forge
from tests.fuzz.programs import Line, Program

UNITS = 16  # in the dtype's eps times the largest value: the error of a sum in another order
NUDGES = 8
GATHERS = (".gather(", "take_along_dim(")
FILE = "<fuzz "
FORWARD, AFTER = "forward", "after"


class Difference(AssertionError):
    """The error for a difference between forge and eager."""


@dataclass
class Outcome:
    """The outcome of a call: results, the inputs after it, the gradients; or the error and the progress of the call."""

    results: list[torch.Tensor]
    inputs: list[torch.Tensor]
    error: Exception | None = None
    phase: str = ""
    aliases: frozenset = frozenset()
    requires_grad: tuple[bool, ...] = ()
    strides: tuple = ()

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        return {
            **{f"result {i}": each for i, each in enumerate(self.results)},
            **{f"input {i} after the call": each for i, each in enumerate(self.inputs)},
            **{f"gradient of input {i}": each.grad for i, each in enumerate(self.inputs)},
        }


_files = itertools.count()


def defined(source: str, name: str, scope: dict[str, Any] | None = None) -> Callable:
    """Return the function of this name defined by the source, whose lines tracebacks can show."""
    scope = {"torch": torch, "__name__": "__main__", **(scope or {})}
    file = f"{FILE}{next(_files)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)
    return scope[name]


def check(program: Program) -> str:
    """Run the program with all its lengths. Return the last stage that eager reached. Raises Difference."""
    torch._dynamo.reset()
    make = defined(program.maker(), "make")
    eager, jitted = defined(program.source(), "f"), forge.jit(defined(program.source(), "f"))
    verdict = "agrees"
    for sizes in program.sizes:
        expected = _called(program, eager, make(*sizes))
        actual = _called(program, jitted, make(*sizes))
        try:
            if (said := _compare(program, sizes, expected, actual)) != "agrees":
                verdict = said
        except Difference as difference:
            if _reads_what_it_writes(program, eager, make(*sizes)):
                return "undefined"
            raise Difference(f"lengths {sizes}: {difference}") from actual.error
    return verdict


def _called(program: Program, f: Callable, inputs: list[torch.Tensor]) -> Outcome:
    outcome = Outcome([], inputs, phase=FORWARD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outcome.results = out = f(*inputs)
            outcome.phase = AFTER
            outcome.aliases = _aliases([*out, *inputs])
            outcome.requires_grad = tuple(each.requires_grad for each in out)
            outcome.strides = tuple(_strides(each) for each in out)
            scope = {
                "out": out,
                "torch": torch,
                **{each.name: x for each, x in zip(program.inputs, inputs, strict=True)},
            }
            for each in program.after:
                exec(each, scope)
            used = [out[i] for i in program.used if out[i].requires_grad]
            if used:
                weighted = (v * torch.cos(torch.arange(v.numel()).view(v.shape)) for v in used)
                sum(v.sum() for v in weighted).backward()
            outcome.phase = ""
        except Exception as error:
            outcome.error = error
    return outcome


def _aliases(tensors: list[torch.Tensor]) -> frozenset:
    """Return the overlaps of tensors in memory, with their places, and the identical objects."""
    found = set()
    for (i, x), (j, y) in itertools.combinations(enumerate(tensors), 2):
        if x is y:
            found.add((i, j, "same object"))
        elif x.numel() and y.numel() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
            found.add((i, j, x.storage_offset() - y.storage_offset()))
    return frozenset(found)


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    if x.numel() == 0:
        return ()
    return tuple(stride for length, stride in zip(x.shape, x.stride(), strict=True) if length > 1)


def _compare(program: Program, sizes: tuple[int, int], expected: Outcome, actual: Outcome) -> str:
    if expected.error is not None and expected.phase == FORWARD:
        if actual.error is None and _is_in_dead_code(program, expected.error):
            return "raises in dead code"
        if actual.error is None and str(expected.error).startswith("setStorage"):
            return "undefined"  # as_strided beyond the end of memory
        if actual.error is None and "refer to a single memory location" in str(expected.error):
            return "raises in eager alone"  # of views that overlap, or may overlap: forge does not write to views
        if actual.error is None:
            raise Difference(f"eager raises {expected.error!r}, forge nothing")
        return "raises"
    if _reads_outside(program, actual.error):
        return "undefined"
    if actual.error is not None and (expected.error is None or actual.phase == FORWARD):
        raise Difference(f"forge raises {type(actual.error).__name__}: {str(actual.error)[:2000]}")
    for what in ("aliases", "requires_grad", "strides"):
        if getattr(actual, what) != getattr(expected, what):
            _report = {"eager": getattr(expected, what), "forge": getattr(actual, what)}
            raise Difference(f"{what}: {_report}")
    if expected.error is not None:
        return "raises in the backward"
    outside = {}
    for name, wanted in expected.tensors.items():
        found = actual.tensors[name]
        if (found is None) != (wanted is None):
            raise Difference(f"{name}: forge has {found}, eager {wanted}")
        if wanted is None or _is_of_another_shape(expected, name):
            continue
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            raise Difference(f"{name}: {found.dtype}{list(found.shape)}, eager {wanted.dtype}{list(wanted.shape)}")
        if not torch.equal(found.detach(), wanted.detach()):
            outside[name] = found.detach(), wanted.detach()
    if outside:
        _judge(program, sizes, outside)
    return "agrees"


def _is_of_another_shape(expected: Outcome, name: str) -> bool:
    """Return whether eager's gradient has another shape than the leaf, whose shape an in-place call changed: its shape
    depends on the computations on the leaf, even in dead code."""
    kind, _, place = name.rpartition(" ")
    return kind == "gradient of input" and expected.tensors[name].shape != expected.inputs[int(place)].shape


def _is_in_dead_code(program: Program, error: Exception) -> bool:
    """Return whether the error is raised by a line with an unused result: forge does not make such calls, and checks no
    values there."""
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(FILE)]
    ends = itertools.accumulate(len(line.source.split("\n")) for line in program.lines)
    place = next((place for place, end in enumerate(ends) if lines and lines[0] - 1 <= end), None)
    return place is not None and program.is_dead(place)


def _reads_outside(program: Program, error: Exception | None) -> bool:
    """Return whether an index is out of range for a gather, which eager does not detect for an expanded index."""
    return "is out of bounds for dimension" in str(error) and any(name in program.source() for name in GATHERS)


class _Overlaps(TorchDispatchMode):
    """A mode that detects operators that write to memory which they read through another view: eager's result depends
    on the order of its loop."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        formal = func._schema.arguments
        named = {**dict(zip((each.name for each in formal), args, strict=False)), **kwargs}
        written = [named.get(each.name) for each in formal if each.alias_info is not None and each.alias_info.is_write]
        read = [x for x in tree_leaves([args, kwargs]) if isinstance(x, torch.Tensor)]
        self.seen |= any(_overlap(x, y) for x in written if isinstance(x, torch.Tensor) for y in read)
        return func(*args, **kwargs)


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether the tensors are different views of the same memory."""
    if not x.numel() or not y.numel() or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    return (x.storage_offset(), x.shape, _strides(x)) != (y.storage_offset(), y.shape, _strides(y))


def _reads_what_it_writes(program: Program, eager: Callable, inputs: list[torch.Tensor]) -> bool:
    with _Overlaps() as overlaps:
        _called(program, eager, inputs)
    return overlaps.seen


def _judge(program: Program, sizes: tuple[int, int], outside: dict) -> None:
    """Raise Difference for a tensor whose error against float64 exceeds the bound by eager and its conditioning."""
    reference = _in_double(program, _inputs(program, sizes, 0.0), 0.0)
    nudged: list | None = None
    for name, (found, wanted) in outside.items():
        exact = reference.tensors.get(name)
        if reference.error is not None or exact is None or exact.shape != found.shape:
            return  # e.g. a view that float64 cannot have
        eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
        found, wanted, exact = found.double(), wanted.double(), exact.detach().double()
        usable = wanted.isfinite() & exact.isfinite() & (exact.abs() < 3e4)
        far, bound = _distances(found, wanted, exact, usable, eps)
        if bool((far <= bound).all()):
            continue
        if nudged is None:
            coarsest = _coarsest(program)
            nudged = [_in_double(program, _inputs(program, sizes, coarsest, seed), coarsest) for seed in range(NUDGES)]
        moved = [each.tensors[name].detach().double() for each in nudged if each.error is None]
        if len(moved) < NUDGES:
            return
        spread = torch.stack([(each - exact).abs() for each in moved]).nan_to_num(torch.inf).amax(0)
        bound = bound + 4 * spread.max() if eps else bound + torch.inf * (spread != 0).nan_to_num()
        if eps and not bool((far <= bound.nan_to_num(torch.inf)).all()):
            bound = bound.maximum(2 * max(_eagers_distance(program, sizes, name, eps, seed) for seed in range(NUDGES)))
        if not bool((far <= bound.nan_to_num(torch.inf)).all()):
            worst = (far - bound).argmax()
            raise Difference(
                f"{name}: forge {found.flatten()[worst]:.6g}, eager {wanted.flatten()[worst]:.6g}, float64 "
                f"{exact.flatten()[worst]:.6g}; off by {far.max():.3g}, allowed {bound.flatten()[worst]:.3g}"
            )


def _distances(found: Any, wanted: Any, exact: Any, usable: Any, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    far = torch.where(usable, (found - exact).abs().nan_to_num(torch.inf), 0.0)
    theirs = torch.where(usable, (wanted - exact).abs(), 0.0)
    scale = torch.where(usable, exact.abs(), 0.0).max()
    return far, (2 * theirs.max() + UNITS * eps * scale).expand_as(far) if eps else theirs


def _eagers_distance(
    program: Program, sizes: tuple[int, int], name: str, eps: float, seed: int
) -> torch.Tensor | float:
    """Return the largest error of a tensor in eager against float64, for inputs perturbed by a rounding."""
    inputs = _inputs(program, sizes, eps, seed)
    exact = _in_double(program, inputs, 0.0).tensors.get(name)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    wanted = _called(program, defined(program.source(), "f"), leaves).tensors.get(name)
    if wanted is None or exact is None:
        return 0.0
    return (wanted.detach().double() - exact.detach()).abs().nan_to_num(0.0, 0.0, 0.0).max()


def _coarsest(program: Program) -> float:
    text = program.source() + program.maker()
    halves = [torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16) if str(dtype) in text]
    return max([torch.finfo(torch.float32).eps, *halves])


class _Nudge(torch.autograd.Function):
    """A function that perturbs the value, and its gradient, by a rounding."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.eps = eps
        return _off(x, eps)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _off(g, ctx.eps), None


def _off(x: torch.Tensor, eps: float) -> torch.Tensor:
    if not x.numel():
        return x.clone()
    return x * (1 + eps * _signs(x)) + eps * x.abs().max() * _signs(x)


def _signs(x: torch.Tensor) -> torch.Tensor:
    return torch.randint_like(x, 0, 2) * 2 - 1


def _inputs(program: Program, sizes: tuple[int, int], eps: float, seed: int = 0) -> list[torch.Tensor]:
    """Return the program's inputs, each float perturbed by a rounding `eps`."""
    inputs = defined(program.maker(), "make")(*sizes)
    torch.manual_seed(seed + 1)
    if not eps:
        return inputs
    return [_off(x.detach(), eps).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]


def _in_double(program: Program, inputs: list[torch.Tensor], eps: float) -> Outcome:
    """Return eager's outcome for the inputs with each float in float64, each value perturbed by a rounding `eps`."""
    inputs = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]

    def nudge(x: Any) -> Any:
        if not eps or not x.is_floating_point() or x._is_view():
            return x
        if any(x.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in inputs):
            return x
        return _Nudge.apply(x, eps)

    def nudge_(x: torch.Tensor) -> None:
        if not eps or not x.is_floating_point():
            return
        x.data.copy_(_off(x.data, eps))
        if x.grad_fn is not None:
            x.register_hook(lambda g: _off(g, eps))

    source = program.function([line for each in program.lines for line in _nudging(each)])
    for dtype in ("float32", "bfloat16", "float16"):
        source = source.replace(f"torch.{dtype}", "torch.float64")
    source = source.replace(".float()", ".double()")
    torch.set_default_dtype(torch.float64)
    try:
        return _called(program, defined(source, "f", {"nudge": nudge, "nudge_": nudge_}), inputs)
    finally:
        torch.set_default_dtype(torch.float32)


def _nudging(line: Line) -> list[str]:
    if line.target:
        return [line.source, f"{line.target} = nudge({line.target})"]
    return [line.source, f"nudge_({line.writes})"]
