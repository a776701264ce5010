"""Comparison of a kernel with its reference: the kernel runs as in a program, the reference in eager. This module runs
the kernel, so it belongs in a separate process where possible."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain, combinations
from typing import Any

import torch

from forge.compiler.claim import choose
from forge.compiler.standalone import claim
from forge.executors.calls import Case, NotReproducible, Passes, call_of, format_arguments, with_strides
from forge.executors.executor import Executor
from forge.executors.hubex.assumptions import Assumption, reference_of
from forge.executors.hubex.derived import CallWithBackward, record_call, with_backward
from forge.executors.hubex.executor import HubExecutor
from forge.executors.hubex.kernels import Kernel, compares_values
from forge.executors.hubex.verification.messages import Answer, Question
from forge.executors.hubex.verification.process import verifying
from forge.executors.hubex.verification.runs import TrainingRun, attempt, is_out_of_memory, run
from forge.executors.hubex.verification.samples import call_cases, general_cases, opinfos_of, symbolic_cases, variations
from forge.executors.hubex.verification.sandbox import RemoteFunction
from forge.executors.hubex.verification.tensors import GuardedMemory, KernelFailure, difference
from forge.executors.hubex.verification.watched import changed_states, random_states, share_elements, watched
from forge.executors.registry import resolve_executors
from forge.ir import TensorProxy, Trace
from forge.ir.pytree import tensors
from forge.torch_internals.dispatch import disable_current_modes
from forge.torch_internals.pytree import tensor_leaves, torch_pytree
from forge.torch_internals.tensors import get_tolerances

DIMS = 3

Report = Callable[[str], None]


def verify(kernel: Kernel, question: Question, report: Report) -> Answer:
    """Verify a kernel and return the answer; call `report` with each sample before the kernel runs on it."""
    comparison = Comparison(kernel, report, question.gradients)
    before, verifying.active = verifying.active, True
    try:
        with (
            warnings.catch_warnings(),
            disable_current_modes(),
            torch.inference_mode(False),
            torch.random.fork_rng(devices=_cuda_devices(question.device)),
        ):
            warnings.simplefilter("ignore")  # a warning is of a sample, not of the program
            torch.manual_seed(0)
            reason = comparison.run(_cases(kernel, question))
            if reason is not None and question.call is None:
                reason = comparison.failed = f"{reason}{_advice(kernel)}"
            if reason is None and question.call is None and comparison.first is not None:
                reason = comparison.run(_cases_like(kernel, comparison.first))
    except Exception as error:  # a fault of forge, or of a device that a kernel left unusable
        text = str(error).strip().partition("\n")[0]
        unknown = f"cannot be verified: {type(error).__name__}: {text}"
        return Answer(comparison.failed or unknown, comparison.accepted, lasting=comparison.failed is not None)
    finally:
        verifying.active = before
    return Answer(reason, comparison.accepted, comparison.rejected[0] if comparison.rejected else "")


def _advice(kernel: Kernel) -> str:
    """Return what to declare if a kernel does not take samples that were made without an example of a call."""
    names = kernel.target.signature.tensors if kernel.pattern is None else kernel.pattern.tensors
    free = [name for name in names if kernel.target.names.get(name, name) not in kernel.entry.shape]
    if opinfos_of(kernel) or kernel.samples is not None or len(free) < 2:
        return ""
    return f"; if it takes {' and '.join(free)} of certain shapes only, shape says so"


def _cuda_devices(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _cases(kernel: Kernel, question: Question) -> Iterator[Case]:
    if question.call is not None:
        cases = call_cases(kernel, question.call)
        return cases if question.symbolic is None else chain(cases, symbolic_cases(kernel, question.symbolic))
    return general_cases(kernel, question.device, question.dtype)


def _cases_like(kernel: Kernel, case: Case) -> Iterator[Case]:
    """Return variations of an OpInfo sample that the kernel took."""
    try:
        return variations(kernel, call_of(case.args, case.kwargs))
    except NotReproducible:
        return iter(())


class InconclusiveSample(Exception):
    """An inconclusive sample: the kernel or the reference does not take it."""


class Comparison:
    """Comparisons of one kernel with its reference. report: called with each sample before the kernel runs on it.
    gradients: whether gradients are compared; differentiated: whether one was. first: the first accepted sample whose
    dims can be laid out in several ways."""

    def __init__(self, kernel: Kernel, report: Report = lambda text: None, gradients: bool = True) -> None:
        self.compares_values = compares_values(kernel)
        self.kernel = kernel = kernel if isinstance(kernel.function, RemoteFunction) else watched(kernel)
        self.report = report
        self.gradients = gradients
        self.differentiated = False
        self.accepted = 0
        self.first: Case | None = None
        self.failed: str | None = None
        self.rejected: list[str] = []
        executor = HubExecutor("verified", faster=False)
        executor.add([kernel])
        self.others = resolve_executors(["torch"])
        self.executors: list[Executor] = [executor, *self.others]

    def run(self, cases: Iterable[Case]) -> str | None:
        """Return the first problem and its sample, or None if there is none."""
        for case in cases:
            by_name = dict(zip(self.kernel.target.signature.by_name, case.args, strict=False))
            text = format_arguments({**by_name, **case.kwargs}, case.note)
            try:
                self.compare(case, text)
                self.accepted += 1
                if self.first is None or _dims(self.first) < _dims(case) <= DIMS:
                    self.first = case
            except InconclusiveSample as reason:
                self.rejected.append(f"{text}: {reason}")
            except KernelFailure as reason:
                self.failed = f"failed verification on {text}: {reason}"
                return self.failed
        return None

    def compare(self, case: Case, text: str) -> None:
        """Raise InconclusiveSample if the kernel does not take a case, KernelFailure if it is wrong."""
        program = _Program(self.kernel, case)
        forward = program.claim(self.executors)
        self._check_assumption(case)
        self.report(text)  # before the reference, which takes time too
        expected = (_Reference if self.compares_values else _KernelItself)(self, program, case)
        self.report(text)
        memory = GuardedMemory()
        copies = memory.copy_all_to_guarded(program.tensors, case.offset)
        outputs = program.outputs(self._attempt(lambda: run(self.kernel, forward, memory, copies), expected))
        self._check_outputs(outputs, expected, memory)
        if not self.accepted:  # call it twice: the kernel may return memory that it keeps, or depend on the grad mode
            attempt(lambda: run(self.kernel, forward, GuardedMemory(), copies), grad=True)
        if self.gradients and self.kernel.entry.grad.kind != "none":
            self._compare_training(program, expected, case)

    def _attempt(self, function: Callable[[], Any], expected: "_Reference") -> Any:
        """Return the result of a run of the kernel. Raises KernelFailure if it draws random numbers, and the reference
        does not: the program's own would be others."""
        before = random_states()
        result = attempt(function)
        if changed_states(before) and not expected.draws:
            raise KernelFailure("it changes the state of torch's random numbers, which the operation does not")
        return result

    def _check_assumption(self, case: Case) -> None:
        """Raise InconclusiveSample if the kernel's assumption does not hold, so that the reference would run."""
        if self.kernel.assumes is None:
            return
        assumption = Assumption(self.kernel.assumes)
        if not assumption.holds(self.kernel.bind(case.args, case.kwargs)):
            hint = "" if self.kernel.samples else "; name a function in samples that makes values for which it does"
            raise InconclusiveSample(f"{assumption.name}, which it assumes, does not hold{hint}")

    def _check_outputs(
        self, outputs: list[torch.Tensor], expected: "_Reference", memory: GuardedMemory, where: str = ""
    ) -> None:
        memory.check()
        if len(outputs) != len(expected.outputs):
            raise KernelFailure(f"the kernel returns {len(outputs)} tensors, and {len(expected.outputs)} is wanted")
        for i, j in combinations(range(len(outputs)), 2):
            if share_elements(outputs[i], outputs[j]) and not share_elements(expected.outputs[i], expected.outputs[j]):
                raise KernelFailure(f"results {i} and {j} lie in the same memory")
        for i, (actual, reference) in enumerate(zip(outputs, expected.outputs, strict=True)):
            which = f"result {i}{where}: " if len(outputs) > 1 else f"the result{where}: " if where else ""
            if memory.shares(actual):
                raise KernelFailure(f"{which}it lies in an input's memory")
            self._check(which, actual, reference, partial(expected.exact_output, i), expected.passes)

    def _compare_training(self, program: "_Program", expected: "_Reference", case: Case) -> None:
        """Compare the results of a forward for training, and gradients."""
        names = self._differentiated_inputs(program)
        trains_alike = self.kernel.entry.grad.kind == "composite"
        joint = with_backward(program.trace, names, self.executors) if names else None
        if joint is None or (trains_alike and not case.gradients):
            return
        memory = GuardedMemory()
        copies = memory.copy_all_to_guarded(program.tensors, case.offset)
        training = self._attempt(lambda: TrainingRun(self.kernel, joint, memory, copies), expected)
        self._check_outputs(tensor_leaves(training.outputs), expected, memory, " of the forward for training")
        if not case.gradients:
            return
        if not self.differentiated:
            self.differentiated = True
            self._run_between(joint, program, case)
            training.check_saved("another call of the forward overwrites {}")
        for layout, change in _INCOMING.items() if case.layouts else [("", _INCOMING[""])]:
            gradients = [change(_random_like(output)) for output in expected.outputs]
            references = expected.gradients(names, gradients)
            incoming = GuardedMemory()
            placed_gradients = [incoming.copy_to_guarded(gradient, 0) for gradient in gradients]
            actual = self._attempt(lambda: training.gradients(placed_gradients), expected)  # noqa: B023  runs here
            if any(not torch.equal(now, before) for now, before in incoming.inputs):
                raise KernelFailure("the incoming gradient was overwritten")
            memory.check()
            for name, gradient in zip(names, actual, strict=True):
                which = f"the gradient of {name}{layout}: "
                if gradient is None:
                    raise KernelFailure(f"{which}there is none")
                exact = partial(expected.exact_gradient, name, gradients)
                self._check(which, gradient, references[name], exact)

    def _run_between(self, joint: CallWithBackward, program: "_Program", case: Case) -> None:
        """Run the forward on other values before the backward, as a program does that calls the kernel twice."""
        if self.kernel.samples is not None or self.kernel.assumes is not None:  # these define the valid values
            return
        others = [
            with_strides(torch.roll(each, 1), each.stride()) if each.is_floating_point() else each
            for each in program.tensors
        ]
        memory = GuardedMemory()
        with suppress(KernelFailure):  # the operation need not take these values
            attempt(lambda: run(self.kernel, joint.forward, memory, memory.copy_all_to_guarded(others, case.offset)))

    def _differentiated_inputs(self, program: "_Program") -> list[str]:
        """Return the inputs whose gradients are compared: those that the kernel computes, or all."""
        grad = self.kernel.entry.grad
        floats = [proxy.name for proxy in tensors(program.trace.inputs) if proxy.dtype.is_floating_point]
        if grad.kind != "kernel":
            return floats
        values = self.kernel.bind(program.args, program.kwargs)
        returned = {proxy.name for name in grad.returns for proxy in tensors(values.get(name))}
        return [name for name in floats if name in returned]

    def _check(
        self,
        which: str,
        actual: torch.Tensor,
        expected: torch.Tensor,
        exact: Callable[[], torch.Tensor | None],
        passes: Passes = None,
    ) -> None:
        """Raise KernelFailure if a tensor differs from the expected one by more than the manifest's or torch.testing's
        tolerance."""
        for what in ("shape", "dtype", "device"):
            if getattr(actual, what) != getattr(expected, what):
                raise KernelFailure(f"{which}{what} is {getattr(actual, what)}, but must be {getattr(expected, what)}")
        tolerance = self.kernel.entry.tolerance.get(actual.dtype, get_tolerances(actual.dtype, rtol=None, atol=None))
        problem = difference(actual, expected, tolerance, exact, passes)
        if problem is not None:
            raise KernelFailure(f"{which}{problem}")


def _dims(case: Case) -> int:
    return max((tensor.ndim for tensor in tensor_leaves((case.args, case.kwargs))), default=0)


def _random_like(output: torch.Tensor) -> torch.Tensor:
    return torch.randn(output.shape, device=output.device).to(output.dtype)


def _expand(gradient: torch.Tensor) -> torch.Tensor:
    return torch.randn((), device=gradient.device).to(gradient.dtype).expand(gradient.shape)


def _transpose(gradient: torch.Tensor) -> torch.Tensor:
    dims = tuple(reversed(range(gradient.ndim)))
    return gradient.permute(dims).contiguous().permute(dims)


_INCOMING = {
    "": lambda gradient: gradient,
    " of a second backward": lambda gradient: gradient,
    " from an expanded one": _expand,
    " from a transposed one": _transpose,
}


class _Program:
    """A program of one call of the kernel's symbol."""

    def __init__(self, kernel: Kernel, case: Case) -> None:
        self.kernel = kernel
        self.tensors = tensor_leaves((case.args, case.kwargs))
        symbol = kernel.target.symbol
        try:
            self.trace, self.args, self.kwargs = record_call(
                symbol, case.args, case.kwargs, _names(kernel, case), strides_known=case.strides_known
            )
        except Exception as error:
            raise InconclusiveSample(f"the operation does not take it: {error}") from error
        if [bound.symbol for bound in self.trace.bound_symbols] != [symbol]:
            raise InconclusiveSample("the operation has nothing to do there")

    def claim(self, executors: Sequence[Executor]) -> Trace:
        """Return the trace with the kernel's call. Raises InconclusiveSample with the checker's reason."""
        reasons: list[tuple[str, str]] = []
        if choose(self.trace.bound_symbols[0], executors[:1], reasons) is None:
            raise InconclusiveSample("; ".join(reason for _, reason in reasons))
        return claim(self.trace, executors)[0]

    def outputs(self, result: Any) -> list[torch.Tensor]:
        """Return the tensors of a result. Raises KernelFailure if one of them is not a tensor."""
        spec = torch_pytree.tree_structure(self.trace.output)
        proxies = torch_pytree.tree_leaves(self.trace.output)
        for value, proxy in zip(spec.flatten_up_to(result), proxies, strict=True):
            if isinstance(proxy, TensorProxy) and not isinstance(value, torch.Tensor):
                advice = (
                    "; result: result[i] in the manifest says which of several it is" if tensor_leaves(value) else ""
                )
                raise KernelFailure(f"it returns a {type(value).__name__}, but must return a tensor{advice}")
        return tensor_leaves(result)


def _names(kernel: Kernel, case: Case) -> Iterator[str]:
    for name, value in (*zip(kernel.target.signature.by_name, case.args, strict=False), *case.kwargs.items()):
        count = len(tensor_leaves(value))
        yield from [name] if count == 1 else [f"{name}_{i}" for i in range(count)]


class _Reference:
    """The results of the reference in eager. Raises InconclusiveSample if the reference does not take the case."""

    def __init__(self, comparison: Comparison, program: _Program, case: Case) -> None:
        self.program = program
        self.function = _reference(comparison, program)
        self.passes = case.passes
        if any(tensor.is_cuda and not tensor.is_floating_point() for tensor in program.tensors):
            self._run(torch.Tensor.cpu)  # an index out of range raises on the CPU, and kills the process on a GPU
        before = random_states()
        self.leaves, self.result = self._run(lambda tensor: tensor)
        self.draws = bool(changed_states(before))
        self.outputs = [output.detach() for output in tensor_leaves(self.result)]

    def _run(self, convert: Callable) -> tuple[list[torch.Tensor], Any]:
        inputs = [convert(tensor.detach()) for tensor in self.program.tensors]
        inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
        try:
            with torch.enable_grad():
                return inputs, self.function(inputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise InconclusiveSample(f"the reference raises {type(error).__name__}: {error}") from error

    @cached_property
    def exact(self) -> tuple[list[torch.Tensor], Any] | None:
        """The results in float64, or None if the reference does not take it."""
        try:
            return self._run(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        except InconclusiveSample:
            return None

    def exact_output(self, i: int) -> torch.Tensor | None:
        return None if self.exact is None else tensor_leaves(self.exact[1])[i].detach()

    def gradients(self, names: list[str], incoming: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return autograd's gradients, by the inputs' names."""
        return self._gradients(self.leaves, self.result, names, incoming)

    def exact_gradient(self, name: str, incoming: list[torch.Tensor]) -> torch.Tensor | None:
        return None if self.exact is None else self._gradients(*self.exact, [name], incoming)[name]

    def _gradients(
        self, leaves: list[torch.Tensor], result: Any, names: list[str], incoming: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        inputs = dict(zip(self.program.trace.input_names, leaves, strict=True))
        pairs = [(o, g.to(o.dtype)) for o, g in zip(tensor_leaves(result), incoming, strict=True) if o.requires_grad]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            [inputs[name] for name in names],
            [gradient for _, gradient in pairs],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(names, gradients, strict=True))


class _KernelItself(_Reference):
    """The results of a kernel without a reference, on contiguous copies: they must not depend on the layout, and must
    match the operator's fake implementation."""

    exact = None

    def __init__(self, comparison: Comparison, program: _Program, case: Case) -> None:
        self.kernel, self.executors, self.draws = comparison.kernel, comparison.executors, True
        self.program, self.passes = program, case.passes
        forward = program.claim(self.executors)
        self.outputs = tensor_leaves(attempt(lambda: run(self.kernel, forward, GuardedMemory(), self._copies())))
        for actual, declared in zip(self.outputs, tensors(program.trace.output), strict=True):
            for what in ("shape", "dtype", "device"):
                value, expected = getattr(actual, what), getattr(declared, what)
                if value != expected:
                    raise KernelFailure(f"{what} is {value}, but the fake implementation says {expected}")

    def _copies(self) -> list[torch.Tensor]:
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in self.program.tensors]

    def gradients(self, names: list[str], incoming: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradients of the kernel's own backward."""
        joint = with_backward(self.program.trace, names, self.executors)
        assert joint is not None, "the same names reached the kernel's outputs before"
        contiguous = [each.contiguous() for each in incoming]
        call = lambda: TrainingRun(self.kernel, joint, GuardedMemory(), self._copies()).gradients(contiguous)
        return dict(zip(names, attempt(call), strict=True))


def _reference(comparison: Comparison, program: _Program) -> Callable[[list[torch.Tensor]], Any]:
    """Return the kernel's reference: torch's function, the declared reference, the operator itself if a third party
    defines it, or torch's calls for a prim."""
    function = reference_of(comparison.kernel.target, comparison.kernel.pattern)
    if function is None:
        return lambda inputs: claim(program.trace, comparison.others)[0].python_callable()(*inputs)

    def run(inputs: list[torch.Tensor]) -> Any:
        by_name = dict(zip(program.trace.input_names, inputs, strict=True))
        args, kwargs = torch_pytree.tree_map(
            lambda leaf: by_name[leaf.name] if isinstance(leaf, TensorProxy) else leaf, (program.args, program.kwargs)
        )
        return function(*args, **kwargs)

    return run
