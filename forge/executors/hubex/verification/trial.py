"""One trial of a kernel: it runs as it would run in a program, and is compared with its reference in eager."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from forge import clang
from forge.compiler.claim import choose, claim
from forge.executors.calls import Case, Passes, format_arguments
from forge.executors.executor import Executor
from forge.executors.hubex.assumed import Assumption, reference_of
from forge.executors.hubex.derived import Derived, derived
from forge.executors.hubex.executor import HubExecutor
from forge.executors.hubex.kernels import ALLOCATE, Kernel, compares_values
from forge.executors.registry import resolve_executors
from forge.ir import Symbol, TensorProxy, Trace, recording
from forge.ir.pytree import tensors
from forge.torch_internals.pytree import torch_pytree
from forge.torch_internals.tensors import get_tolerances

GUARD = 256  # bytes before and behind what is given to a kernel
POISON = 0xFF  # not a number in every float dtype
DIMS = 3


class Rejected(Exception):
    """A sample that says nothing: the kernel does not take it, or the reference does not."""


class Failed(Exception):
    """What is wrong with a kernel, in words."""


class Guarded:
    """Memory of tensors that lie between guards; nothing but the tensors that are to be written may change."""

    def __init__(self) -> None:
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outputs: list[tuple[torch.Tensor, int, int]] = []

    def place(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """The tensor's values, in its layout, `offset` elements behind an aligned address."""
        size = tensor.element_size()
        length = _extent(tensor) * size
        memory = _poisoned(2 * GUARD + offset * size + length, tensor.device)
        laid = memory[GUARD + offset * size :][:length].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        _fill(laid, tensor)
        self.held.append((memory, memory.clone()))
        return laid

    def place_all(self, tensors: Sequence[torch.Tensor], offset: int) -> list[torch.Tensor]:
        """Each as `place`; what is one tensor stays one."""
        placed = {id(each): each for each in tensors}
        placed = {key: self.place(each, offset) for key, each in placed.items()}
        return [placed[id(each)] for each in tensors]

    def allocate(self, shape: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a result, as torch.empty gives."""
        length = torch.Size(shape).numel() * dtype.itemsize
        memory = _poisoned(2 * GUARD + length, device)
        self.outputs.append((memory, GUARD, GUARD + length))
        return memory[GUARD : GUARD + length].view(dtype).view(shape)

    def check(self) -> None:
        """Raises Failed when an argument or a guard was written to."""
        for memory, before in self.held:
            if not torch.equal(memory, before):
                raise Failed("an input, or memory beside it, was changed")
        for memory, start, stop in self.outputs:
            if bool((memory[:start] != POISON).any()) or bool((memory[stop:] != POISON).any()):
                raise Failed("memory beside its output was written to")

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether a result lies in an argument's memory."""
        address = tensor.untyped_storage().data_ptr()
        return tensor.numel() > 0 and any(memory.data_ptr() == address for memory, _ in self.held)


def _extent(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _poisoned(length: int, device: torch.device) -> torch.Tensor:
    return torch.full((-(-length // 16) * 16,), POISON, dtype=torch.uint8, device=device)


def _fill(laid: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the values where the tensor is not expanded, once."""
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in laid.stride())
    laid[index] = values[index]


@dataclass
class Trial:
    """Trials of one kernel. `report` is told each sample before the kernel runs on it. gradients: whether they are
    compared. first: the first sample that it took, of those with dims that can be laid out in several ways."""

    kernel: Kernel
    report: Callable[[str], None] = lambda text: None
    gradients: bool = True
    accepted: int = 0
    first: Case | None = None
    failed: str | None = None
    rejected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        executor = HubExecutor("verified", faster=False)
        executor.add([self.kernel])
        self.others = resolve_executors(["torch"])
        self.executors: list[Executor] = [executor, *self.others]

    def run(self, cases: Iterable[Case]) -> str | None:
        """What is wrong, with the sample on which it shows; None when nothing is."""
        for case in cases:
            text = _described(case, self.kernel)
            try:
                self.compare(case, text)
                self.accepted += 1
                if self.first is None or _dims(self.first) < _dims(case) <= DIMS:
                    self.first = case
            except Rejected as reason:
                self.rejected.append(f"{text}: {reason}")
            except Failed as reason:
                self.failed = f"failed verification on {text}: {reason}"
                return self.failed
        return None

    def compare(self, case: Case, text: str) -> None:
        """Raises Rejected where the kernel does not take a case, and Failed where it is wrong."""
        program = _Program(self.kernel, case)
        forward = program.claimed(program.trace, self.executors)
        self._check_assumption(case)
        self.report(text)  # the reference takes its time too
        expected = (_Expected if compares_values(self.kernel) else _OwnResult)(self, program, case)
        self.report(text)
        guarded = Guarded()
        placed = guarded.place_all(program.tensors, case.offset)
        outputs = program.outputs(_attempt(lambda: program.call(forward, guarded, placed)))
        self._check_outputs(outputs, expected, guarded)
        if not self.accepted:  # whether it keeps what it returned, for the next call
            _attempt(lambda: program.call(forward, Guarded(), placed))
        if self.gradients and self.kernel.entry.grad.kind != "none" and case.gradients:
            self._compare_gradients(program, expected, case)

    def _check_assumption(self, case: Case) -> None:
        """Raises Rejected where what the kernel assumes does not hold, so that something else would run."""
        if self.kernel.assumes is None:
            return
        assumption = Assumption(self.kernel.assumes)
        if not assumption.holds(self.kernel.bind(case.args, case.kwargs)):
            known = "" if self.kernel.samples else "; name a function in samples that makes values for which it does"
            raise Rejected(f"{assumption.name}, which it assumes, does not hold{known}")

    def _check_outputs(self, outputs: list[torch.Tensor], expected: "_Expected", guarded: Guarded) -> None:
        guarded.check()
        if len(outputs) != len(expected.outputs):
            raise Failed(f"it returns {len(outputs)} tensors, and {len(expected.outputs)} is wanted")
        for i, (actual, wanted) in enumerate(zip(outputs, expected.outputs, strict=True)):
            which = f"result {i}: " if len(outputs) > 1 else ""
            if guarded.shares(actual):
                raise Failed(f"{which}it lies in an input's memory")
            exact = partial(expected.exact_output, i)
            _compare(which, actual, wanted, exact, self.tolerance(wanted.dtype), expected.passes)

    def _compare_gradients(self, program: "_Program", expected: "_Expected", case: Case) -> None:
        names = self._differentiated(program)
        joint = derived(program.trace, names, self.executors) if names else None
        if joint is None:
            return
        for layout, change in _INCOMING.items():
            gradients = [change(_incoming(output)) for output in expected.outputs]
            wanted = expected.gradients(names, gradients)
            guarded = Guarded()
            placed = guarded.place_all(program.tensors, case.offset)
            incoming = [guarded.place(gradient, 0) for gradient in gradients]
            found = _attempt(partial(_run_derived, joint, guarded, placed, incoming))
            _check_gradients(guarded, incoming)
            for name, actual in zip(names, found, strict=True):
                which = f"the gradient of {name}{layout}: "
                if actual is None:
                    raise Failed(f"{which}there is none")
                exact = partial(expected.exact_gradient, name, gradients)
                _compare(which, actual, wanted[name], exact, self.tolerance(actual.dtype))

    def _differentiated(self, program: "_Program") -> list[str]:
        """The inputs whose gradients are compared: those that the kernel gives, or all."""
        grad = self.kernel.entry.grad
        floats = [proxy.name for proxy in program.trace.inputs if proxy.dtype.is_floating_point]
        if grad.kind != "kernel":
            return floats
        values = self.kernel.bind(program.args, program.kwargs)
        given = {proxy.name for name in grad.returns for proxy in tensors(values.get(name))}
        return [name for name in floats if name in given]

    def tolerance(self, dtype: torch.dtype) -> tuple[float, float]:
        """(rtol, atol): the manifest's, or torch.testing's own for a dtype."""
        default = get_tolerances(dtype, rtol=None, atol=None)
        return self.kernel.entry.tolerance.get(dtype, default)


def _described(case: Case, kernel: Kernel) -> str:
    """'x: float32[3, 7] (unaligned), eps=1e-06'."""
    named = zip(kernel.target.signature.by_name, case.args, strict=False)
    return format_arguments({**dict(named), **case.kwargs}, case.note)


def _dims(case: Case) -> int:
    return max((tensor.ndim for tensor in _leaves((case.args, case.kwargs))), default=0)


def _check_gradients(guarded: Guarded, incoming: Sequence[torch.Tensor]) -> None:
    count = len(guarded.held) - len(incoming)
    for memory, before in guarded.held[count:]:
        if not torch.equal(memory, before):
            raise Failed("the incoming gradient was overwritten")
    guarded.check()


def _incoming(output: torch.Tensor) -> torch.Tensor:
    return torch.randn(output.shape, device=output.device).to(output.dtype)


def _expanded(gradient: torch.Tensor) -> torch.Tensor:
    return torch.randn((), device=gradient.device).to(gradient.dtype).expand(gradient.shape)


def _transposed(gradient: torch.Tensor) -> torch.Tensor:
    dims = tuple(reversed(range(gradient.ndim)))
    return gradient.permute(dims).contiguous().permute(dims)


_TIMES = 4  # as far from what is exact as eager's worst value
_INCOMING = {"": lambda gradient: gradient, " from an expanded one": _expanded, " from a transposed one": _transposed}


def _attempt(run: Callable[[], Any]) -> Any:
    try:
        with torch.no_grad():
            result = run()
        if torch.cuda.is_initialized():  # what goes wrong there is known only then
            torch.cuda.synchronize()
        return result
    except Exception as error:
        if _is_out_of_memory(error):  # of the machine's doing, now
            raise
        text = str(error).strip().splitlines()
        raise Failed(f"raises {type(error).__name__}{': ' + text[0] if text else ''}") from error


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory was wanting: as Python, as a device and as torch's allocator on the CPU say it."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch_pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Program:
    """A program that is one call of the kernel's symbol."""

    def __init__(self, kernel: Kernel, case: Case) -> None:
        self.kernel = kernel
        leaves, spec = torch_pytree.tree_flatten((case.args, case.kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.trace = Trace("verified")
        names = iter(_names(kernel, case))
        with recording(self.trace, clang.language):
            stand_ins = [
                self._input(leaf, next(names), case) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
            ]
            self.args, self.kwargs = torch_pytree.tree_unflatten(stand_ins, spec)
            try:
                self.trace.output = kernel.target.symbol(*self.args, **self.kwargs)
            except Exception as error:
                raise Rejected(f"the operation does not take it: {error}") from error
        if [bound.symbol for bound in self.trace.bound_symbols] != [kernel.target.symbol]:
            raise Rejected("the operation has nothing to do there")

    def _input(self, leaf: torch.Tensor, name: str, case: Case) -> TensorProxy:
        strides = tuple(leaf.stride()) if case.strides_known else None
        return self.trace.add_input(self.trace.tensor(leaf.shape, leaf.dtype, leaf.device, name=name, strides=strides))

    def claimed(self, trace: Trace, executors: Sequence[Executor]) -> Trace:
        """The trace with the kernel in it. Raises Rejected with the checker's reason."""
        reasons: list[tuple[str, str]] = []
        bound = trace.bound_symbols[0]
        chosen = choose(bound, executors[:1], reasons)
        if chosen is None:
            raise Rejected("; ".join(reason for _, reason in reasons))
        return claim(trace, executors)[0]

    def outputs(self, result: Any) -> list[torch.Tensor]:
        """The tensors of a result. Raises Failed where something else stands in the place of one."""
        spec = torch_pytree.tree_structure(self.trace.output)
        found = spec.flatten_up_to(result)
        wanted = torch_pytree.tree_leaves(self.trace.output)
        for value, proxy in zip(found, wanted, strict=True):
            if isinstance(proxy, TensorProxy) and not isinstance(value, torch.Tensor):
                advice = "; result: result[i] in the manifest says which of several it is" if _leaves(value) else ""
                raise Failed(f"it returns a {type(value).__name__}, but must return a tensor{advice}")
        return _leaves(result)

    def call(self, claimed: Trace, guarded: Guarded, placed: list[torch.Tensor]) -> Any:
        return _guarded(claimed, guarded).python_callable()(*placed)


def _run_derived(derived: Derived, guarded: Guarded, inputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> Any:
    """The gradients of the inputs."""
    _, saved, numbers = _guarded(derived.forward, guarded).python_callable()(*inputs)
    given = [gradient for gradient, active in zip(gradients, derived.active, strict=True) if active]
    return _guarded(derived.backward, guarded).python_callable()(*saved, *numbers, *given)


def _guarded(trace: Trace, guarded: Guarded) -> Trace:
    """The trace with the memory that it allocates for kernels between guards."""
    allocate = Symbol(ALLOCATE.name, ALLOCATE.id, meta=guarded.allocate, op=guarded.allocate)
    calls = [b.replace(symbol=allocate) if b.symbol is ALLOCATE else b for b in trace.bound_symbols]
    return trace.derive(trace.stage, calls)


def _names(kernel: Kernel, case: Case) -> list[str]:
    named = [*zip(kernel.target.signature.by_name, case.args, strict=False), *case.kwargs.items()]
    names = []
    for name, value in named:
        found = _leaves(value)
        names += [name] if len(found) == 1 else [f"{name}_{i}" for i in range(len(found))]
    return names


class _Expected:
    """What the reference gives in eager. Raises Rejected where it does not take the case."""

    def __init__(self, trial: Trial, program: _Program, case: Case) -> None:
        self.program = program
        self.function = _reference(trial, program)
        self.passes = case.passes
        if any(tensor.is_cuda and not tensor.is_floating_point() for tensor in program.tensors):
            self._run(torch.Tensor.cpu)  # an index out of range is an error there, and the end of the process on a GPU
        self.leaves, self.result = self._run(lambda tensor: tensor)
        self.outputs = [output.detach() for output in _leaves(self.result)]

    def _run(self, convert: Callable) -> tuple[list[torch.Tensor], Any]:
        inputs = [convert(tensor.detach()) for tensor in self.program.tensors]
        inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
        try:
            with torch.enable_grad():
                return inputs, self.function(inputs)
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            raise Rejected(f"the reference raises {type(error).__name__}: {error}") from error

    @cached_property
    def exact(self) -> tuple[list[torch.Tensor], Any] | None:
        """The same in float64, where the reference takes that."""
        try:
            return self._run(_in_float64)
        except Rejected:
            return None

    def exact_output(self, i: int) -> torch.Tensor | None:
        return None if self.exact is None else _leaves(self.exact[1])[i].detach()

    def gradients(self, names: list[str], incoming: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What autograd gives, by name of an input."""
        return self._gradients(self.leaves, self.result, names, incoming)

    def exact_gradient(self, name: str, incoming: list[torch.Tensor]) -> torch.Tensor | None:
        return None if self.exact is None else self._gradients(*self.exact, [name], incoming)[name]

    def _gradients(
        self, leaves: list[torch.Tensor], result: Any, names: list[str], incoming: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        inputs = dict(zip(self.program.trace.input_names, leaves, strict=True))
        pairs = [(o, g.to(o.dtype)) for o, g in zip(_leaves(result), incoming, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            [inputs[name] for name in names],
            [gradient for _, gradient in pairs],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(names, found, strict=True))


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class _OwnResult(_Expected):
    """What a kernel without a reference gives itself, on contiguous copies: it must not depend on their layout, and
    must be what the operator's fake implementation says."""

    def __init__(self, trial: Trial, program: _Program, case: Case) -> None:
        self.program, self.trial, self.passes = program, trial, case.passes
        forward = program.claimed(program.trace, trial.executors)
        self.outputs = _leaves(_attempt(lambda: program.call(forward, Guarded(), self._copies())))
        for actual, declared in zip(self.outputs, tensors(program.trace.output), strict=True):
            for what in ("shape", "dtype", "device"):
                found, wanted = getattr(actual, what), getattr(declared, what)
                if found != wanted:
                    raise Failed(f"{what} is {found}, but the fake implementation says {wanted}")

    def _copies(self) -> list[torch.Tensor]:
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in self.program.tensors]

    def exact_output(self, i: int) -> None:
        """There is none."""

    def gradients(self, names: list[str], incoming: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the kernel's own backward gives."""
        joint = derived(self.program.trace, names, self.trial.executors)
        run = partial(_run_derived, joint, Guarded(), self._copies(), [each.contiguous() for each in incoming])
        return dict(zip(names, _attempt(run), strict=True))

    def exact_gradient(self, name: str, incoming: list[torch.Tensor]) -> None:
        """There is none."""


def _reference(trial: Trial, program: _Program) -> Callable[[list[torch.Tensor]], Any]:
    """What the kernel is compared with: torch's function, the reference, the operator itself where it is somebody
    else's, or torch's calls for a prim."""
    function = reference_of(trial.kernel.target, trial.kernel.pattern)
    if function is None:
        return lambda inputs: claim(program.trace, trial.others)[0].python_callable()(*inputs)

    def run(inputs: list[torch.Tensor]) -> Any:
        by_name = dict(zip(program.trace.input_names, inputs, strict=True))
        args, kwargs = torch_pytree.tree_map(
            lambda leaf: by_name[leaf.name] if isinstance(leaf, TensorProxy) else leaf, (program.args, program.kwargs)
        )
        return function(*args, **kwargs)

    return run


def _compare(
    which: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    exact: Callable[[], torch.Tensor | None],
    tolerance: tuple[float, float],
    passes: Passes = None,
) -> None:
    """Raises Failed. A value that rounds less than eager's is not wrong: it may be near the one in float64 instead."""
    for what in ("shape", "dtype", "device"):
        if getattr(actual, what) != getattr(expected, what):
            raise Failed(f"{which}{what} is {getattr(actual, what)}, but must be {getattr(expected, what)}")
    differs = _difference(actual, expected, tolerance, exact, passes)
    if differs is not None:
        raise Failed(f"{which}{differs}")


def _difference(
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: tuple[float, float],
    exact: Callable[[], torch.Tensor | None] = lambda: None,
    passes: Passes = None,
) -> str | None:
    """In words, where values are out of tolerance, both of those in eager and of those that are exact."""
    if not actual.numel():
        return None
    close = _close(actual, expected, tolerance)
    if passes is not None:
        close |= passes(actual, expected)
    if not close.all() and expected.is_floating_point() and (best := exact()) is not None:
        close |= _close(actual, best.to(expected.dtype), tolerance) | _as_near(actual, expected, best)
    return None if close.all() else _said(_wide(actual), _wide(expected), ~close, tolerance[1])


def _close(actual: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float]) -> torch.Tensor:
    """Where values are within tolerance. What is lost by adding in another order goes with the largest value, not with
    the one that is left when terms cancel. NaN is equal to NaN alone, an infinity to itself."""
    rtol, atol = tolerance
    a, b = _wide(actual), _wide(expected)
    finite = b.abs()[b.isfinite()]
    largest = max(1.0, finite.max().item()) if finite.numel() else 1.0
    return torch.isclose(a, b, rtol=rtol, atol=atol * largest, equal_nan=True)


def _as_near(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Where values are about as far from the exact ones as eager's are anywhere in the tensor: where terms cancel, what
    is left is the rounding of numbers that are much larger."""
    off = (_wide(expected) - _wide(exact)).abs()
    finite = off[off.isfinite()]
    worst = finite.max() if finite.numel() else 0.0
    return (_wide(actual) - _wide(exact)).abs() <= _TIMES * worst


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _said(a: torch.Tensor, b: torch.Tensor, off: torch.Tensor, atol: float) -> str:
    """How values differ where they are `off`."""
    finite = off & a.isfinite() & b.isfinite()
    special = off & ~finite
    by = "values differ"
    if finite.any():
        by = f"{by} by up to {(a - b).abs()[finite].max().item():.2g}, tolerance {atol:.2g}"
    if not special.any():
        return by
    place = tuple(special.nonzero()[0].tolist())
    where = f" at [{', '.join(map(str, place))}]" if place else ""
    many = int(special.sum())
    others = f" ({many} of {a.numel()} values)" if many > 1 else ""
    value, wanted = (f"{each[place].item():.4g}" for each in (a, b))
    return f"{by}: {value}{where}, but must be {wanted}{others}"
