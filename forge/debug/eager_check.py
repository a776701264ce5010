"""forge.jit(check="eager"): compare each value of a program with the result of torch's own functions.

The recorded program runs first, call by call and by torch only; then the compiled one, in which the result of every
call is compared with the reference value of the same name. A transform, pass, executor or kernel that changes a value
is thus found at the first call whose result differs, fused or not. Arguments are compared with their values before the
call, which finds implementations that overwrite them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from forge.compiler.claim import Claim
from forge.compiler.standalone import claim
from forge.debug.instrument import Note, instrument
from forge.executors.contracts import parameter_of
from forge.executors.errors import CheckError
from forge.executors.torchex.core import torchex
from forge.ir import BoundSymbol, Tag, TensorProxy, Trace
from forge.ir.printing import in_words
from forge.ir.pytree import tensors
from forge.torch_internals.dispatch import OpOverload
from forge.transforms.dce import dce

# The tolerance of values by the program's dtype, relative to the largest value of the tensor: the order of additions
# differs, and errors accumulate from call to call.
_WITHIN = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-3, torch.complex64: 1e-3, torch.float16: 1e-2}
_COARSEST = 5e-2
_CANCELLED = 1e-2
_WRITES = frozenset({Tag.EFFECT, Tag.DONATES})


class CheckedTrace:
    """A claimed trace that is compared with a reference as it runs."""

    def __init__(self, claimed: Trace, claims: Sequence[Claim], reference: Trace, phase: str) -> None:
        """Set the reference: a trace of the same inputs, which computes the expected values under the same names."""
        self._claims = _by_output(claims)
        self._phase = phase
        self._within = tolerance_of(reference)
        self._expected: dict[str, torch.Tensor] = {}
        self._operands: list[torch.Tensor | None] = []  # copies of the current call's operands
        by_torch, claims = claim(dce(reference), [torchex])
        self._claims_by_torch = _by_output(claims)
        self._reference = _with_observer(by_torch, self._keep, self._before_opaque).python_callable()
        self._boxed = by_torch.boxed
        self._to_write_to = {
            name for bound in claimed.bound_symbols if Tag.UNINITIALIZED in bound.all_tags for name in bound.outputs
        }
        self.trace = _with_observer(claimed, self._compare, self._before)

    def wrap(self, function: Callable) -> Callable:
        """Wrap `function`, which runs `trace`, to run the reference first."""

        def run(*inputs: Any) -> Any:
            with same_random_numbers(), torch.no_grad():
                self._reference(*([list(inputs[0])] if self._boxed else inputs))
            try:
                return function(*inputs)
            finally:
                self._expected.clear()
                self._operands.clear()

        return run

    def _before_opaque(self, bound: BoundSymbol) -> Note | None:
        """Keep copies of the operands of an opaque call of the reference, which it may mutate.

        Later consumers of a mutated operand would be compared with values that differ from eager's.
        """
        return self._before(bound) if Tag.OPAQUE in bound.all_tags else None

    def _keep(self, bound: BoundSymbol, outputs: int, *values: torch.Tensor) -> None:
        if self._operands:
            self._check_operands(bound, values[outputs:], self._claims_by_torch)
        for proxy, value in zip(_tensors(bound.output), values[:outputs], strict=True):
            if value is not None:
                self._expected[proxy.name] = value.detach()

    def _before(self, bound: BoundSymbol) -> Note | None:
        """Keep copies of a call's operands."""
        if not _WRITES.isdisjoint(bound.all_tags):
            return None

        def keep(*values: torch.Tensor | None) -> None:
            self._operands[:] = [None if value is None else value.detach().clone() for value in values]

        return keep, _tensors((bound.args, bound.kwargs))

    def _check_operands(
        self, bound: BoundSymbol, values: Sequence[torch.Tensor | None], claims: Mapping[str, Claim]
    ) -> None:
        """Raise CheckError if a call has overwritten its operands."""
        operands, self._operands = self._operands, []
        for proxy, value, before in zip(_tensors((bound.args, bound.kwargs)), values, operands, strict=False):
            if value is None or before is None or proxy.name in self._to_write_to:
                continue
            reason = differs(value, before, within=0, around=0)
            if reason is not None:
                owner = next((claims[name] for name in bound.outputs if name in claims), None)
                raise self._report_overwrite(
                    _CallDescription(bound, owner), bound, proxy, reason, operands, value, before
                )

    def _report_overwrite(
        self,
        call: "_CallDescription",
        bound: BoundSymbol,
        proxy: TensorProxy,
        reason: str,
        operands: Sequence[torch.Tensor | None],
        actual: torch.Tensor,
        before: torch.Tensor,
    ) -> CheckError:
        return CheckError(
            f"{self._phase}: {call} overwrites its argument {parameter_of(bound, proxy.name)}, {proxy.name}: {reason}; "
            f"an implementation may not change what it is given: {_advice(bound)}",
            operation=call.operation,
            executor=call.executor,
            inputs=_by_name(bound, operands),
            actual=actual,
            expected=before,
        )

    def _compare(self, bound: BoundSymbol, outputs: int, *values: torch.Tensor) -> None:
        self._check_operands(bound, values[outputs:], self._claims)
        for proxy, value in zip(_tensors(bound.output), values[:outputs], strict=True):
            if value is None:  # a residual of attention that this kernel does not compute
                continue
            expected = self._expected.get(proxy.name)
            reason = _metadata_differs(proxy, value)
            if reason is None and expected is not None and Tag.UNINITIALIZED in bound.all_tags:
                value.copy_(expected)  # overwrite any garbage: the remaining values are compared later
            elif reason is None and expected is not None:
                reason = differs(value, expected, self._within, largest(values[outputs:]))
            if reason is not None:
                raise self._error(bound, proxy, reason, values[outputs:], value, expected)

    def _error(
        self,
        bound: BoundSymbol,
        proxy: TensorProxy,
        reason: str,
        operands: Sequence[torch.Tensor],
        actual: torch.Tensor,
        expected: torch.Tensor | None,
    ) -> CheckError:
        call, inputs = _CallDescription(bound, self._claims.get(proxy.name)), _by_name(bound, operands)
        arguments = ", ".join(f"{name}: {in_words_of(tensor)}" for name, tensor in inputs.items())
        return CheckError(
            f"{self._phase}: {proxy.name} = {call} is not what eager gives: {reason}; "
            f"it was given {arguments or 'no tensor'}",
            operation=call.operation,
            executor=call.executor,
            inputs=inputs,
            actual=actual,
            expected=expected,
        )


class _CallDescription:
    """The description of a call: its operation, its executor, and its source."""

    def __init__(self, bound: BoundSymbol, owner: Claim | None) -> None:
        self.executor = owner.executor if owner else bound.symbol.id.partition(".")[0]
        self.operation = owner.operation if owner else bound.symbol.id
        self._region = f", in {bound.symbol.id}" if owner and owner.region else ""
        self._place = f" ({owner.source})" if owner and owner.source and str(owner.source) else ""

    def __str__(self) -> str:
        return f"{self.operation} by {self.executor}{self._region}{self._place}"


def _by_output(claims: Iterable[Claim]) -> dict[str, Claim]:
    return {name: each for each in claims for name in each.outputs}


def _by_name(bound: BoundSymbol, operands: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Return the tensors of a call's arguments, by their names in the program."""
    proxies = _tensors((bound.args, bound.kwargs))
    return {proxy.name: tensor for proxy, tensor in zip(proxies, operands, strict=True) if tensor is not None}


def _advice(bound: BoundSymbol) -> str:
    if isinstance(bound.symbol.op, OpOverload):
        return "declare it in the operator's mutates_args (or schema), or let it copy that first"
    return "let it copy that first"


def _with_observer(trace: Trace, see: Callable, before: Callable[[BoundSymbol], Note | None] | None = None) -> Trace:
    """Return the trace with a call of `see` after each call that returns tensors, with the arguments call, number of
    results, results, and operands. before: returns the note that runs before such a call."""

    def first(number: int, bound: BoundSymbol) -> Note | None:
        return before(bound) if before is not None and _tensors(bound.output) else None

    def note(number: int, bound: BoundSymbol) -> Note | None:
        results = _tensors(bound.output)
        return (
            (partial(see, bound, len(results)), [*results, *_tensors((bound.args, bound.kwargs))]) if results else None
        )

    return instrument(trace, "checked", note, first)


def _tensors(tree: Any) -> list[TensorProxy]:
    return list({proxy.name: proxy for proxy in tensors(tree)}.values())


def in_words_of(tensor: torch.Tensor) -> str:
    """Return a tensor's metadata in the notation of proxies."""
    return in_words(TensorProxy("t", tuple(tensor.shape), tensor.dtype, tensor.device))


def _metadata_differs(proxy: TensorProxy, value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"it gave a {type(value).__name__}, its meta function says {in_words(proxy)}"
    sizes = zip(proxy.shape, value.shape, strict=False)
    fits = len(proxy.shape) == value.dim() and all(not isinstance(one, int) or one == other for one, other in sizes)
    if fits and proxy.dtype == value.dtype:
        return None
    return f"it gave {in_words_of(value)}, its meta function says {in_words(proxy)}"


def largest(values: Iterable[torch.Tensor | None]) -> float:
    """Return the largest finite magnitude in these tensors."""
    result = 0.0
    for tensor in values:
        if tensor is not None and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            finite = tensor.detach().abs()[tensor.isfinite()]
            result = max(result, finite.max().item() if finite.numel() else 0.0)
    return result


def tolerance_of(trace: Trace) -> float:
    """Return the tolerance of a program's values, which follows from the coarsest dtype of its computations."""
    results = [proxy for bound in trace.bound_symbols for proxy in _tensors(bound.output)]
    return tolerance(proxy.dtype for proxy in (*results, *_tensors(trace.inputs)))


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """Return the tolerance of the coarsest of these dtypes."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max([_WITHIN.get(dtype, _COARSEST) for dtype in floats], default=0.0)


def differs(actual: torch.Tensor, expected: torch.Tensor, within: float, around: float) -> str | None:
    """Describe a value's difference from eager's; return None within the tolerance, relative to the largest value. NaN
    equals NaN. around: the magnitude of the operands, since a result that cancels to zero keeps their rounding
    error."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{in_words_of(actual)} where eager gives {in_words_of(expected)}"
    if actual.numel() == 0:
        return None
    if not (actual.dtype.is_floating_point or actual.dtype.is_complex):
        return None if torch.equal(actual, expected) else "values differ"
    wide = torch.complex128 if actual.dtype.is_complex else torch.float64
    one, other = actual.detach().to(wide), expected.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    far = torch.where(same, 0.0, (one - other).abs())
    most = far.nan_to_num(nan=torch.inf).max().item()
    if most <= within * max(largest([other]), around * _CANCELLED):
        return None
    place = tuple(int(each) for each in torch.unravel_index(far.nan_to_num(nan=torch.inf).argmax(), far.shape))
    return f"{one[place].item():.6g} where eager gives {other[place].item():.6g}, at {list(place)}"


def copy_as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to a new leaf of the same layout, or to a dense one if its elements share memory."""
    shares = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if shares:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the state of torch's generators at exit."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        yield
