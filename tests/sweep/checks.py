"""The checks of an entry: each returns the problem in words, or None.

A check that torch itself does not support (a gradient that it refuses) raises Skipped.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

import forge
from tests.sweep.compare import difference, sharing
from tests.sweep.entries import Call, Entry

Check = Callable[[Entry], str | None]
CHECKS: dict[str, Check] = {}


class Skipped(Exception):
    """The error for a check that torch itself does not support; the message is the reason."""


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _requiring(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _run(function: Callable, call: Call, *, seed: int = 7) -> tuple[Any, Any]:
    """Return (results, arguments afterwards)."""
    given = call.fresh()
    torch.manual_seed(seed)
    return function(*given), given


def _deterministic(entry: Entry, call: Call) -> bool:
    """Return whether eager gives the same results twice."""
    first, second = (_run(entry.function, call)[0] for _ in range(2))
    return not entry.has_values or difference(first, second) is None


def _calls(entry: Entry, dtype: torch.dtype | None = None, **options: Any) -> list[Call]:
    found = [call for call in entry.calls(dtype or entry.dtype, **options) if _deterministic(entry, call)]
    if not found:
        raise Skipped("eager gives something else each time")
    return found


def _forward(entry: Entry, dtype: torch.dtype | None = None, **options: Any) -> str | None:
    for call in _calls(entry, dtype):
        theirs, their_inputs = _run(entry.function, call)
        ours, our_inputs = _run(forge.jit(entry.function, **options), call)
        found = (
            difference(ours, theirs, values=entry.has_values)
            or difference(our_inputs, their_inputs, "argument")
            or (sharing(our_inputs, ours) != sharing(their_inputs, theirs) and "memory is shared otherwise")
        )
        if found:
            return found
    return None


@check
def forward(entry: Entry) -> str | None:
    """Results, their strides and memory, and the arguments after the call."""
    return _forward(entry)


@check
def native(entry: Entry) -> str | None:
    """No opaque call, without gradients and with them."""
    names: dict[str, None] = {}
    for grad in (False, True):
        if grad and not entry.differentiable(entry.dtype):
            continue
        for call in _calls(entry):
            jitted = forge.jit(entry.function)
            given = call.fresh(grad=grad)
            jitted(*given)
            explained = forge.explain(jitted)
            names.update(dict.fromkeys(explained.opaque_calls))
            names.update(dict.fromkeys(f"in eager: {each}" for each in explained.eager))
            names.update(dict.fromkeys(f"graph break: {each}" for each in explained.graph_breaks))
    return ", ".join(names) or None


@check
def again(entry: Entry) -> str | None:
    """A second call of one jitted function, with other values."""
    for first, second in zip(_calls(entry), entry.calls(entry.dtype, seed=1), strict=False):
        jitted = forge.jit(entry.function)
        _run(jitted, first)
        if not _deterministic(entry, second):
            continue
        try:
            theirs = _run(entry.function, second)[0]
        except Exception:
            continue
        found = difference(_run(jitted, second)[0], theirs, values=entry.has_values)
        if found:
            return found
    return None


@check
def dynamic(entry: Entry) -> str | None:
    """With dynamic=True."""
    return _forward(entry, dynamic=True)


@check
def whole(entry: Entry) -> str | None:
    """One graph, under no_grad, where torch.compile makes one."""
    with torch.no_grad():
        for call in _calls(entry):
            try:
                _run(torch.compile(entry.function, backend="eager", fullgraph=True), call)
            except Exception as error:
                raise Skipped("torch.compile makes no graph of it") from error
        return _forward(entry, fullgraph=True)


def _gradients(function: Callable, call: Call, order: int) -> tuple[Any, list]:
    """Return (results, gradients of the last order), with the same cotangents every time."""
    given = call.fresh(grad=True)
    torch.manual_seed(7)
    inputs = _requiring(given)
    # an operator that writes to its argument may not write to a leaf
    arguments = _pytree.tree_map(lambda x: x * 1 if isinstance(x, torch.Tensor) and x.requires_grad else x, given)
    result = function(*arguments)
    outputs = _differentiable(result)
    if not outputs or not inputs:
        raise Skipped("no result has a gradient")
    torch.manual_seed(8)
    for number in range(order):
        weights = [torch.randn(each.shape, dtype=each.dtype) for each in outputs]
        last = number == order - 1
        found = torch.autograd.grad(outputs, inputs, weights, create_graph=not last, allow_unused=True)
        gradients = list(found)
        outputs = [each for each in found if each is not None and each.requires_grad]
        if not last and not outputs:
            raise Skipped("the gradient has no gradient")
    return result, gradients


def _backward(entry: Entry, dtype: torch.dtype, order: int) -> str | None:
    if not entry.differentiable(dtype):
        raise Skipped("torch does not differentiate it")
    compared = 0
    for call in _calls(entry, dtype, grad=True):
        try:
            _, theirs = _gradients(entry.function, call, order)
        except (Skipped, RuntimeError, NotImplementedError):
            continue
        _, ours = _gradients(forge.jit(entry.function), call, order)
        compared += 1
        found = difference(ours, theirs, "gradient", strides=False)
        if found:
            return found
    if not compared:
        raise Skipped("no sample has a gradient in eager")
    return None


@check
def backward(entry: Entry) -> str | None:
    """The gradients of all arguments that require one."""
    return _backward(entry, _precise(entry), 1)


def _precise(entry: Entry) -> torch.dtype:
    """Return float64 if the entry supports it: gradients are summed in another order than torch's."""
    return torch.float64 if torch.float64 in entry.info.dtypes else entry.dtype


@check
def double_backward(entry: Entry) -> str | None:
    """The gradients of the gradients, where torch has them."""
    if not entry.info.supports_gradgrad:
        raise Skipped("torch does not differentiate it twice")
    return _backward(entry, _precise(entry), 2)


@check
def refused(entry: Entry) -> str | None:
    """Calls that torch refuses raise what torch raises."""
    count = 0
    for call, kind, _ in entry.refused():
        try:
            entry.function(*call.fresh())
        except Exception as error:
            theirs = error
        else:
            continue
        count += 1
        try:
            forge.jit(entry.function)(*call.fresh())
        except Exception as error:
            if not isinstance(error, kind if isinstance(kind, tuple) else (kind, type(theirs))):
                return f"{type(error).__name__}: {str(error)[:100]}, not {type(theirs).__name__}: {str(theirs)[:100]}"
        else:
            return f"accepted, but torch says {type(theirs).__name__}: {str(theirs)[:100]}"
    if not count:
        raise Skipped("the database has no call that torch refuses")
    return None


@check
def dtypes(entry: Entry) -> str | None:
    """complex64, bfloat16, float16, int64 and bool, where torch has them: forward, and gradients of complex numbers."""
    for dtype in entry.dtypes():
        try:
            found = _forward(entry, dtype)
            if found is None and dtype == torch.complex64 and entry.differentiable(dtype):
                found = _backward(entry, dtype, 1)
        except Skipped:
            continue
        if found:
            return f"{dtype}: {found}"
    return None


Transform = Callable[[Callable], Callable]


def _transformed(entry: Entry, transform_of: Callable[[Call], tuple[Transform, list[torch.Tensor]]]) -> str | None:
    """A transform of the jitted function, and the jitted transform of the function: recorded, without an opaque call.
    `transform_of` gives, for a call, the transform, which makes a function of tensors, and these."""
    compared = 0
    for call in _calls(entry, most=1):
        transform, tensors = transform_of(call)

        def run(function: Callable, tensors: Sequence[torch.Tensor] = tensors) -> Any:
            torch.manual_seed(7)
            return function(*[each.clone() for each in tensors])

        try:
            theirs = run(transform(entry.function))
        except Exception:
            continue
        compared += 1
        inside = forge.jit(transform(entry.function))
        for jitted in (transform(forge.jit(entry.function)), inside):
            found = difference(run(jitted), theirs, strides=False, values=entry.has_values)
            if found:
                return found if jitted is not inside else f"inside: {found}"
        told = forge.explain(inside)
        if told.opaque_calls and not told.graph_breaks:
            return f"inside: {', '.join(told.opaque_calls)}"
    if not compared:
        raise Skipped("torch refuses it")
    return None


def _tensors_of(call: Call) -> tuple[list[torch.Tensor], Callable]:
    """Return the floating point tensors of a call, and a function that makes the call with others in their places."""
    leaves, spec = _pytree.tree_flatten((call.input, call.args, call.kwargs))
    places = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.dtype.is_floating_point
    ]
    if not places:
        raise Skipped("no argument is a tensor of floating point numbers")

    def unpack(tensors: Sequence[torch.Tensor]) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return _pytree.tree_unflatten(given, spec)

    return [leaves[i].detach() for i in places], unpack


@check
def vmap(entry: Entry) -> str | None:
    """torch.func.vmap of the jitted function, and inside of it (recorded, no opaque call)."""

    def transform_of(call: Call) -> tuple[Transform, list[torch.Tensor]]:
        tensors, unpack = _tensors_of(call)
        batch = [torch.stack([each, each]) for each in tensors]
        return lambda function: torch.func.vmap(lambda *rows: function(*unpack(rows))), batch

    return _transformed(entry, transform_of)


@check
def func_grad(entry: Entry) -> str | None:
    """torch.func.grad of the jitted function, and inside of it (recorded, no opaque call)."""
    if not entry.differentiable(entry.dtype) or entry.dtype.is_complex:
        raise Skipped("torch does not differentiate it")

    def transform_of(call: Call) -> tuple[Transform, list[torch.Tensor]]:
        tensors, unpack = _tensors_of(call)

        def gradient(function: Callable) -> Callable:
            def total(*given: torch.Tensor) -> torch.Tensor:
                outputs = [leaf for leaf in _pytree.tree_leaves(function(*unpack(given))) if _is_floating(leaf)]
                return sum(each.sum() for each in outputs)

            return torch.func.grad(total, argnums=tuple(range(len(tensors))))

        return gradient, tensors

    return _transformed(entry, transform_of)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point


def run_check(name: str, entry: Entry) -> tuple[str, str]:
    """Return ('ok' | 'skipped' | 'failed', reason)."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = CHECKS[name](entry)
        except Skipped as skipped:
            return "skipped", str(skipped)
        except Exception as error:
            return "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ("failed", found) if found else ("ok", "")
