"""A language model's head and loss become one call, which never materializes all logits.

    logits = linear(hidden, weight)                                  (..., V), the largest tensor of a training step
    scaled = cap * tanh(logits / cap)                                casts, scales, caps, shapes, slices of rows
    loss = cross_entropy(scaled[..., :-1, :].reshape(-1, V), labels)

is found by walking back from each cross_entropy (or nll_loss of log_softmax) to the linear layer, through prims, so
that it does not matter how it was written. Calls that take rows of logits take rows of `hidden` instead. Logits that
the program returns are computed as before; values derived from them are not kept.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from forge import prims, torchlang
from forge.clang import language
from forge.ir import BoundSymbol, Tag, TensorProxy, Trace
from forge.ir.proxies import hint_of
from forge.ir.pytree import tensors
from forge.torchlang import linear_cross_entropy
from forge.torchlang.nn.fused_linear_cross_entropy import Step
from forge.transforms.makers import Makers, innermost
from forge.transforms.replacement import rewrite

CROSS_ENTROPY = torchlang.cross_entropy
NLL_LOSS = torchlang.nll_loss
LOG_SOFTMAX = (torchlang.log_softmax, torchlang.functional_log_softmax)
LINEAR = torchlang.linear
PRODUCTS = frozenset({torchlang.matmul, torchlang.mm})

BYTE_LIMIT = 16 * 2**20  # fewer bytes of logits do not pay

_SAME_ROWS = frozenset({prims.contiguous, prims.clone})
_LAYOUT = frozenset({prims.reshape, prims.permute, prims.slice, prims.squeeze})
_WIDE = (torch.float32, torch.float64, torch.bfloat16)
_TARGETS = (torch.int64, torch.uint8)


class _Loss(NamedTuple):
    """A cross entropy of `scores`, after `steps`: the arguments of the loss's call. `softmax` is the call of
    log_softmax if nll_loss computes it, `after` are the calls that reshape its result, `own` the program's calls of
    these."""

    bound: BoundSymbol
    softmax: BoundSymbol | None
    after: tuple[BoundSymbol, ...]
    own: tuple[BoundSymbol, ...]
    scores: TensorProxy
    steps: tuple[Step, ...]
    target: TensorProxy
    class_weight: TensorProxy | None
    ignore_index: int
    reduction: str
    label_smoothing: float


class _Head(NamedTuple):
    """One site. `calls` lead from the linear layer's call to the scores; the first `prefix_length` stay, since the
    program reads their results (None: it does not read the logits)."""

    loss: _Loss
    base: BoundSymbol
    calls: list[BoundSymbol]
    prefix_length: int | None


def fused_linear_cross_entropy(
    trace: Trace, in_torch: Callable[[BoundSymbol], bool] = lambda bound: True, limit: int | None = None
) -> Trace:
    """Return the trace with every head and loss as one call of torchlang.linear_cross_entropy.

    `in_torch` returns whether a call runs as torch runs it: one for which the user selected another kernel
    stays. So do heads of fewer than `limit` bytes of logits (BYTE_LIMIT), and in training float16, whose gradients
    depend on the scale of the loss, and losses that are not reduced, whose gradients need another matrix product.
    """
    program = _Program(trace, in_torch, BYTE_LIMIT if limit is None else limit)
    heads = {head.loss.bound.output.name: head for head in program.heads()}
    if not heads:
        return trace

    def loss(bound: BoundSymbol) -> TensorProxy | None:
        head = heads.get(bound.outputs[0]) if bound.outputs else None
        return None if head is None else _loss_of(head)

    return rewrite(trace, "fused_linear_cross_entropy", loss, language=language)


class _Program:
    """The producer and the users of each value of a trace."""

    def __init__(self, trace: Trace, in_torch: Callable[[BoundSymbol], bool], limit: int) -> None:
        self.calls = trace.bound_symbols
        self.in_torch = in_torch
        self.limit = limit
        self.outputs = frozenset(trace.output_names)
        self.differentiable = bool(trace.differentiable_inputs)
        self.makers = Makers(trace)
        self.readers: dict[str, list[BoundSymbol]] = {}

    def heads(self) -> Iterator[_Head]:
        if all(bound.symbol not in (CROSS_ENTROPY, NLL_LOSS) for bound in self.calls):
            return
        for bound in self.calls:
            for name in bound.inputs:
                self.readers.setdefault(name, []).append(bound)
        for bound in self.calls:
            loss = self.loss(bound)
            head = None if loss is None else self.head(loss)
            if head is not None:
                yield head

    def loss(self, bound: BoundSymbol) -> _Loss | None:
        """Return the call as a cross entropy of class indices with options that can be run in chunks."""
        if bound.symbol not in (CROSS_ENTROPY, NLL_LOSS) or Tag.RECOMPUTE in bound.tags or not self.in_torch(bound):
            return None
        arguments = bound.symbol.bind(bound.args, bound.kwargs)
        scores, target, weight = arguments["input"], arguments["target"], arguments["weight"]
        smoothing, reduction = arguments.get("label_smoothing", 0.0), arguments["reduction"]
        if target.dtype not in _TARGETS or scores.ndim < 2 or target.ndim != scores.ndim - 1:
            return None
        if (weight is not None and smoothing) or (reduction == "none" and self.trains(bound)):
            return None
        loss = _Loss(
            bound, None, (), (bound,), scores, (), target, weight, arguments["ignore_index"], reduction, smoothing
        )
        return loss if bound.symbol is CROSS_ENTROPY else self.of_log_softmax(loss)

    def of_log_softmax(self, loss: _Loss) -> _Loss | None:
        """Return an nll_loss as the cross entropy of its log softmax's argument."""
        logs, reader, after, own = loss.scores, loss.bound, [], [loss.bound]
        while True:
            maker = self.makers.calls.get(logs.name)
            if maker is None or maker.tags != loss.bound.tags or self.is_read_beside(logs.name, reader):
                return None
            own.append(maker)
            if maker.symbol in LOG_SOFTMAX:
                break
            call = self.makers.prim(logs.name)
            if call is None or call.symbol not in _SAME_ROWS | _LAYOUT or tensors(maker.args) != tensors(call.args):
                return None
            after.append(call)
            logs, reader = tensors(call.args)[0], maker
        arguments = maker.symbol.bind(maker.args, maker.kwargs)
        scores = arguments["input"]
        if arguments["dim"] is None or not self.in_torch(maker):
            return None
        steps: tuple[Step, ...] = (("to", logs.dtype),) if scores.dtype != logs.dtype else ()
        return loss._replace(softmax=maker, after=tuple(after[::-1]), own=tuple(own), scores=scores, steps=steps)

    def trains(self, bound: BoundSymbol) -> bool:
        """Return whether gradients may flow through a call."""
        return self.differentiable and Tag.NO_GRAD not in bound.tags

    def is_read_beside(self, name: str, reader: BoundSymbol) -> bool:
        """Return whether a value has other users than `reader`."""
        return name in self.outputs or any(each is not reader for each in self.readers.get(name, ()))

    def head(self, loss: _Loss) -> _Head | None:
        """Return the way back from a loss to the linear layer; None if there is none."""
        calls: list[BoundSymbol] = []
        tops = list(loss.own)
        name = loss.scores.name
        while True:
            top = self.makers.calls.get(name)
            if top is not None and top.tags != loss.bound.tags:
                return None
            if top is not None and _base(top) is not None:
                break
            call = self.makers.prim(name)
            if call is None or not _is_step(call):
                return None
            tops += [top] if top is not None else []
            calls.append(call)
            name = tensors(call.args)[0].name
        head = _Head(loss, top, [*calls[::-1], *loss.after], None)
        return self.with_uses(head, tops) if self.fits(head) else None

    def fits(self, head: _Head) -> bool:
        """Return whether classes stay one dim on the way, in dtypes and of a size for which chunks pay."""
        logits = head.base.output
        values: list[TensorProxy] = [logits, *[call.output for call in head.calls]]
        allowed = _WIDE if self.trains(head.base) else (*_WIDE, torch.float16)
        if not self.in_torch(head.base) or any(value.dtype not in allowed for value in values):
            return False
        axes = [logits.ndim - 1]
        for call in head.calls:
            axis = _moved_axis(call, axes[-1])
            if axis is None:
                return False
            axes.append(axis)
        softmax, scores = head.loss.softmax, head.loss.scores
        if softmax is not None and axes[-1 - len(head.loss.after)] != _softmax_axis(softmax, scores):
            return False
        wide = max(value.dtype.itemsize for value in values)
        return axes[-1] == 1 and math.prod(map(hint_of, logits.shape)) * wide >= self.limit

    def with_uses(self, head: _Head, tops: Sequence[BoundSymbol]) -> _Head | None:
        """Return the head with the program's other uses of its values; None if these may add gradients in its middle,
        which would compute the products twice."""
        own = {id(top) for top in tops}
        values = [head.base.output, *[call.output for call in head.calls]]
        prefix_length = None
        for position, value in enumerate(values):
            others = [bound for bound in self.readers.get(value.name, ()) if id(bound) not in own]
            if self.differentiable and any(_differentiates(bound) for bound in others):
                return None
            if others or value.name in self.outputs:
                prefix_length = position
        return head._replace(prefix_length=prefix_length)


def _softmax_axis(softmax: BoundSymbol, scores: TensorProxy) -> int:
    dim: int = softmax.symbol.bind(softmax.args, softmax.kwargs)["dim"]
    return dim % scores.ndim


def _differentiates(bound: BoundSymbol) -> bool:
    if Tag.NO_GRAD in bound.tags or all(Tag.NOT_DIFFERENTIABLE in call.symbol.tags for call in innermost(bound)):
        return False
    return any(out.dtype.is_floating_point or out.dtype.is_complex for out in tensors(bound.output))


def _base(bound: BoundSymbol) -> tuple[TensorProxy, TensorProxy, TensorProxy | None, bool] | None:
    """Return (hidden, weight, bias, whether the weight is (H, V)) of a linear layer or of a product with a matrix."""
    if bound.symbol is LINEAR:
        arguments = LINEAR.bind(bound.args, bound.kwargs)
        hidden, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
        fits = hidden.ndim > 1 and weight.ndim == 2 and (bias is None or bias.ndim == 1)
        return (hidden, weight, bias, False) if fits else None
    if bound.symbol in PRODUCTS:
        hidden, weight = list(bound.symbol.bind(bound.args, bound.kwargs).values())[:2]
        return (hidden, weight, None, True) if hidden.ndim > 1 and weight.ndim == 2 else None
    return None


def _is_step(call: BoundSymbol) -> bool:
    """Return whether a prim acts on each row separately, or reshapes the rows."""
    symbol, operands = call.symbol, tensors(call.args)
    if len(operands) != 1 or not isinstance(call.output, TensorProxy):
        return False
    return symbol in _SAME_ROWS or symbol in _LAYOUT or _step(call) is not None


def _step(call: BoundSymbol) -> Step | None:
    """Return a prim as a step of the composite, None for another."""
    if call.symbol is prims.convert_element_type and call.args[0].is_floating_point():
        return "to", call.output.dtype
    if call.symbol is prims.tanh:
        return ("tanh",)
    if call.symbol is prims.mul or (call.symbol is prims.div and isinstance(call.args[0], TensorProxy)):
        number = next(arg for arg in call.args if not isinstance(arg, TensorProxy))
        if type(number) in (int, float) and math.isfinite(number) and number:
            return ("mul" if call.symbol is prims.mul else "div"), float(number)
    return None


def _moved_axis(call: BoundSymbol, axis: int) -> int | None:
    """Return the class dim after a call; None if it is cut, or joined with others."""
    x, symbol = tensors(call.args)[0], call.symbol
    if symbol is prims.permute:
        return tuple(call.args[1]).index(axis)
    if symbol is prims.slice:
        return None if call.args[1] == axis else axis
    if symbol is prims.squeeze:
        return None if axis in call.args[1] else axis - sum(dim < axis for dim in call.args[1])
    if symbol is prims.reshape:
        last = axis == x.ndim - 1 and call.output.ndim and prims.statically_true(call.output.shape[-1] == x.shape[-1])
        return call.output.ndim - 1 if last else None
    return axis


def _known_axis(call: BoundSymbol, axis: int) -> int:
    result = _moved_axis(call, axis)
    assert result is not None, f"{call} cuts the classes"
    return result


def _loss_of(head: _Head) -> TensorProxy:
    """Record the selection of the rows, and the call that computes the loss from them."""
    loss = head.loss
    base = _base(head.base)
    assert base is not None, f"{head.base} is no product"
    hidden, weight, bias, transposed = base
    steps = [_step(call) for call in head.calls]
    first = head.prefix_length or 0
    rows = _rows_of(hidden, head.calls, hidden.ndim - 1)
    logits = None
    if head.prefix_length is not None:
        value = head.calls[first - 1].output if first else head.base.output
        logits = _rows_of(value, head.calls[first:], _axis_after(head, first))
    output: TensorProxy = linear_cross_entropy(
        rows,
        prims.permute(weight, (1, 0)) if transposed else weight,
        bias,
        logits,
        loss.target,
        loss.class_weight,
        (*[step for step in steps if step], *loss.steps),
        sum(step is not None for step in steps[:first]),
        loss.ignore_index,
        loss.reduction,
        loss.label_smoothing,
    )
    return output


def _axis_after(head: _Head, calls: int) -> int:
    axis: int = head.base.output.ndim - 1
    for call in head.calls[:calls]:
        axis = _known_axis(call, axis)
    return axis


def _rows_of(x: TensorProxy, calls: Sequence[BoundSymbol], axis: int) -> TensorProxy:
    """Return the calls' result for the rows along `axis`, of any number, which is the last dim of the result.

    Trailing calls that leave the rows in order are omitted.
    """
    places: list[tuple[BoundSymbol, int]] = []
    for call in calls:
        if call.symbol in _LAYOUT:
            places.append((call, axis))
        axis = _known_axis(call, axis)
    while places and _keeps_order(*places[-1]):
        axis = places.pop()[1]
    for call, before in places:
        x = _reshape(x, call, before)
    if axis == x.ndim - 1:
        return x
    return prims.permute(x, (*[dim for dim in range(x.ndim) if dim != axis], axis))


def _keeps_order(call: BoundSymbol, axis: int) -> bool:
    if call.symbol is prims.permute:
        others = [dim for dim in call.args[1] if dim != axis]
        return others == sorted(others)
    return call.symbol is not prims.slice


def _reshape(x: TensorProxy, call: BoundSymbol, axis: int) -> TensorProxy:
    if call.symbol is prims.reshape:
        return prims.reshape(x, (*call.output.shape[:-1], x.shape[axis]))
    reshaped: TensorProxy = call.symbol(x, *call.args[1:], **call.kwargs)
    return reshaped
