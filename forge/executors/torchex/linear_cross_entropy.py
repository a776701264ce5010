"""The torch executor's fused head and loss of a language model, in chunks of rows, so that the logits are never
materialized as a whole.

If gradients are needed, the forward computes them, too, chunk by chunk: no product is recomputed, and the gradient of a
scalar loss only scales them. The weight's gradient accumulates in its products.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from forge import clang
from forge.executors.executor import Checker, OperatorExecutor
from forge.executors.torchex.core import torchex
from forge.executors.torchex.memory import ROW_BYTES
from forge.ir import Tag, TensorProxy, get_grad, needs_grad, put_grad
from forge.prims.core import like
from forge.torch_internals.autograd import get_current_graph_task_keep_graph as graph_is_kept
from forge.torchlang import linear_cross_entropy
from forge.torchlang.nn.fused_linear_cross_entropy import Step

aten = torch.ops.aten

CHUNK_BYTES = 2**30  # of logits: few products, which are as fast as one, and few sums in half precision
CPU_CHUNK_BYTES = 32 * 2**20
SOFTMAX_BYTES = 2**28  # of the softmax in its wider dtype at a time: rows enough for all multiprocessors of a GPU
FEW = 4  # this many sums in half precision round no worse than their operands

_HALVES = (torch.bfloat16, torch.float16)
_NONE, _SUM = 0, 2
_as_on_a_gpu: ContextVar[bool] = ContextVar("forge_chunks_as_on_a_gpu", default=False)

Optional = torch.Tensor | None


class Rows(NamedTuple):
    """The arguments of one call, as matrices of rows.

    Attributes:
        weight: (width, H). width is the number of classes, or padded with zeros to a multiple of 8, for which products
            are fast. Logits and their gradients have the same width; gradients of the padding are 0.
        bias: (width,).
        classes: The number of classes.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: Optional
    classes: int
    logits: Callable[[slice], torch.Tensor] | None
    target: torch.Tensor
    class_weight: Optional
    steps: tuple[Step, ...]
    first: int
    ignore_index: int
    reduction: str
    label_smoothing: float
    dtype: torch.dtype  # the scores' dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the softmax."""
        return _wide(self.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else dtype


def _dtype(steps: tuple[Step, ...], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that the steps convert a dtype to."""
    return next((step[1] for step in reversed(steps) if step[0] == "to"), dtype)


def _rows(*call: Any) -> Rows:
    """Return the arguments of a call of linear_cross_entropy as Rows."""
    hidden, weight, bias, logits, target, class_weight, steps, first, ignored, reduction, label_smoothing = call
    dtype = _dtype(steps, hidden.dtype)
    start = 0 if logits is None else first
    if len(steps) > start and steps[-1] == ("to", _wide(dtype)):  # the softmax casts as it reads
        steps = steps[:-1]
    rows = hidden.reshape(-1, hidden.shape[-1])
    pick = None if logits is None else _picker(logits)
    weights = None if class_weight is None else class_weight.to(_wide(dtype))
    options = (steps, first, ignored, reduction, label_smoothing, dtype)
    classes = weight.shape[0]
    wide = None if bias is None else _padded(bias)
    return Rows(rows, _padded(weight), wide, classes, pick, target.reshape(-1), weights, *options)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Return a weight or bias, padded with zeros after the last class where products of that size are slow: cuBLAS
    loads one element at a time if the bytes of a row are not a multiple of 16."""
    if x.device.type != "cuda" or not isinstance(x.shape[0], int):
        return x
    missing = -x.shape[0] % (ROW_BYTES // x.element_size())
    if not missing:
        return x
    padded = x.new_empty((x.shape[0] + missing, *x.shape[1:]))
    padded[: x.shape[0]] = x
    padded[x.shape[0] :] = 0
    return padded


def _picker(x: torch.Tensor) -> Callable[[slice], torch.Tensor]:
    """Return a function that selects rows of (..., V) without a copy of all of them."""
    with contextlib.suppress(RuntimeError):  # the strides do not allow to flatten the leading dims
        return x.view(-1, x.shape[-1]).__getitem__

    def pick(rows: slice) -> torch.Tensor:
        flat_indices, places = torch.arange(rows.start, rows.stop, device=x.device), []
        for size in reversed(x.shape[:-1]):  # torch.unravel_index copies the shape to the device and synchronizes
            places.append(flat_indices % size)
            flat_indices = flat_indices // size
        return x[tuple(reversed(places))]

    return pick


def _chunks(inputs: Rows) -> list[slice]:
    """Return as few slices of the rows as CHUNK_BYTES of logits allow, of about equal size."""
    count = inputs.hidden.shape[0]
    if not isinstance(count, int) or not isinstance(inputs.weight.shape[0], int):  # while strides are inferred
        return [slice(0, count)]
    row = inputs.weight.shape[0] * max(inputs.hidden.element_size(), inputs.dtype.itemsize)
    is_for_cpu = inputs.hidden.device.type == "cpu" and not _as_on_a_gpu.get()
    limit = CPU_CHUNK_BYTES if is_for_cpu else CHUNK_BYTES
    most = max(limit // max(row, 1), 1)
    pieces = max(-(-count // most), 1)
    size = max(-(-count // pieces), 1)
    size = min(-(-size // 64) * 64, most) if most >= 64 else size
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


@contextlib.contextmanager
def chunks_of_a_gpu() -> Iterator[None]:
    """Use a GPU's chunks on a CPU too, for a GPU program that is simulated on a CPU."""
    token = _as_on_a_gpu.set(True)
    try:
        yield
    finally:
        _as_on_a_gpu.reset(token)


def logits_of(inputs: Rows, rows: slice) -> torch.Tensor:
    """Return the logits of a chunk, in new memory unless the program reads them."""
    if inputs.logits is not None:
        return inputs.logits(rows)
    hidden, matrix = inputs.hidden[rows], inputs.weight.t()
    return hidden @ matrix if inputs.bias is None else torch.addmm(inputs.bias, hidden, matrix)


def _as_wide(g: torch.Tensor, width: int) -> torch.Tensor:
    """Return the gradient of logits, padded with zeros after the last class."""
    return g if g.shape[1] == width else F.pad(g, (0, width - g.shape[1]))


def _scores(inputs: Rows, rows: slice) -> tuple[torch.Tensor, list[torch.Tensor | torch.dtype | None]]:
    """Return the scores of a chunk and the residual of each step: tanh's result, a cast's source dtype."""
    x = logits_of(inputs, rows)[:, : inputs.classes]
    residuals: list[torch.Tensor | torch.dtype | None] = []
    if inputs.logits is not None:
        residuals = _values_of_steps(inputs, x)
    for step in inputs.steps[len(residuals) :]:
        if step[0] == "to":
            residuals.append(x.dtype)
            x = x.to(step[1])
        elif step[0] == "tanh":
            x = torch.tanh(x)
            residuals.append(x)
        else:
            x = x * step[1] if step[0] == "mul" else x / step[1]
            residuals.append(None)
    return x, residuals


def _values_of_steps(inputs: Rows, logits: torch.Tensor) -> list[torch.Tensor | torch.dtype | None]:
    """Return the residuals of the steps before `first`; tanh's result is recomputed from its input."""
    dtypes = [inputs.hidden.dtype]
    for step in inputs.steps[: inputs.first]:
        dtypes.append(step[1] if step[0] == "to" else dtypes[-1])
    residuals: list[torch.Tensor | torch.dtype | None] = []
    x = logits
    for step, dtype in zip(reversed(inputs.steps[: inputs.first]), reversed(dtypes[:-1]), strict=True):
        residuals.append(dtype if step[0] == "to" else x.to(dtype) if step[0] == "tanh" else None)
        if step[0] == "mul":
            x = x / step[1]
        elif step[0] == "div":
            x = x * step[1]
        elif step[0] == "tanh":  # tanh's backward reads its result, not its input
            x = logits
    return residuals[::-1]


def _back(g: torch.Tensor, inputs: Rows, residuals: list[torch.Tensor | torch.dtype | None]) -> torch.Tensor:
    """Return the gradient of the linear layer's result from the gradient of the scores, which may be overwritten."""
    for step, value in zip(reversed(inputs.steps), reversed(residuals), strict=True):
        if step[0] == "to":
            g = g.to(value)
        elif step[0] == "tanh":
            g = aten.tanh_backward(g, value)
        else:
            g = g.mul_(step[1]) if step[0] == "mul" else g.div_(step[1])
    return g


class Weights(NamedTuple):
    """The factor of each row in the loss and in the gradients, and the divisor of the loss."""

    of_loss: torch.Tensor
    of_gradient: torch.Tensor
    total: torch.Tensor


def _weights(inputs: Rows) -> Weights:
    used = inputs.target != inputs.ignore_index
    if inputs.class_weight is None:
        each = used.to(inputs.wide)
    else:
        classes = torch.where(used, inputs.target, 0).to(torch.int64)
        each = torch.where(used, inputs.class_weight[classes], 0)
    if inputs.reduction != "mean":
        return Weights(each, each, each.new_ones(()))
    total = each.sum()
    return Weights(each, torch.where(used, each / total, 0), total)


def _log_softmax(scores: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return torch.log_softmax(scores, -1, dtype=None if wide == scores.dtype else wide)


def _losses(inputs: Rows, rows: slice, logs: torch.Tensor, reduction: int) -> torch.Tensor:
    """Return the loss of each row of a chunk, or their sum, without class weights in the term of label smoothing, and
    before the division by `Weights.total`."""
    target = inputs.target[rows]
    loss, _ = aten.nll_loss_forward(logs, target, inputs.class_weight, reduction, inputs.ignore_index)
    if not inputs.label_smoothing:
        return loss
    even = torch.where(target != inputs.ignore_index, -logs.sum(-1), 0)
    even = even if reduction == _NONE else even.sum()
    return loss * (1 - inputs.label_smoothing) + even * (inputs.label_smoothing / logs.shape[-1])


# Returns the losses of a chunk of rows, or their sum before the division by `Weights.total`.
ChunkLoss = Callable[[Rows, slice, Weights, bool], torch.Tensor]


def loss_of(losses_of: ChunkLoss, *call: Any) -> torch.Tensor:
    """Return the loss of a call of linear_cross_entropy."""
    inputs, target = _rows(*call), call[4]
    weights, is_reduced = _weights(inputs), inputs.reduction != "none"
    parts = [losses_of(inputs, rows, weights, is_reduced) for rows in _chunks(inputs)]
    if not is_reduced:
        return torch.cat(parts).view(target.shape).to(inputs.dtype)
    return (functools.reduce(torch.add, parts) / weights.total).to(inputs.dtype)


def _chunk_loss(inputs: Rows, rows: slice, weights: Weights, is_reduced: bool) -> torch.Tensor:
    logs = _log_softmax(_scores(inputs, rows)[0], inputs.wide)
    return _losses(inputs, rows, logs, _SUM if is_reduced else _NONE)


class _Gradients:
    """The gradients of hidden, weight and bias, accumulated over chunks."""

    def __init__(self, inputs: Rows, output_mask: tuple[bool, bool, bool], chunks: int) -> None:
        hidden, weight = inputs.hidden, inputs.weight
        self.inputs = inputs
        self.half = weight.dtype in _HALVES
        self.sums = torch.float32 if self.half and chunks > FEW else weight.dtype
        self.hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if output_mask[0] else None
        self.weight = torch.empty(weight.shape, dtype=self.sums, device=weight.device) if output_mask[1] else None
        bias = inputs.bias if output_mask[2] else None
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=_wide(weight.dtype))
        self.classes = slice(inputs.classes)

    def add(self, rows: slice, g: torch.Tensor, counts: torch.Tensor | None) -> None:
        """Add a chunk's gradients. g: the gradient of its logits, whose rows are still to be multiplied by `counts`."""
        hidden, weight = self.inputs.hidden[rows], self.inputs.weight
        g = _as_wide(g, weight.shape[0])
        if self.hidden is not None:
            part = torch.mm(g, weight, out=self.hidden[rows])
            if counts is not None:
                part.mul_(counts.unsqueeze(1))
        if self.weight is not None:
            factors = hidden if counts is None else (hidden * counts.unsqueeze(1)).to(hidden.dtype)
            self.add_product(self.weight, g.t(), factors, first=rows.start == 0)
        if self.bias is not None:
            self.bias += g.sum(0, dtype=self.bias.dtype) if counts is None else torch.mv(g.t(), counts.to(g.dtype))

    def add_product(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, first: bool) -> None:
        if self.sums == a.dtype:
            torch.mm(a, b, out=total) if first else total.addmm_(a, b)
        elif _sums_wide(a.device):
            torch.mm(a, b, torch.float32, out=total) if first else torch.addmm(total, a, b, torch.float32, out=total)
        else:
            total.copy_(a @ b) if first else total.add_(a @ b)

    def result(self, hidden: torch.Tensor, dtype: torch.dtype) -> Iterator[Optional]:
        yield None if self.hidden is None else self.hidden.view(hidden.shape)
        yield None if self.weight is None else self.weight[self.classes].to(dtype)
        yield None if self.bias is None else self.bias[self.classes].to(dtype)


@functools.cache
def _sums_wide(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 with float32 accumulation."""
    if device.type != "cuda":
        return False
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, a, a.t(), torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


# Returns, for a chunk of rows, the loss before the division, the gradient of its logits, and the factors by which the
# gradient's rows are still to be multiplied, or None.
DifferentiatedChunk = Callable[[Rows, slice, Weights], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def loss_and_gradients_of(
    differentiate: DifferentiatedChunk, hidden: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[Optional, ...]:
    """Return (loss, gradients of hidden, weight and bias), None where the last argument, output_mask, is False."""
    *others, output_mask = rest
    inputs = _rows(hidden, weight, *others)
    weights = _weights(inputs)
    chunks = _chunks(inputs)
    gradients = _Gradients(inputs, output_mask, len(chunks))
    loss = weights.total.new_zeros(())
    for rows in chunks:
        part, g, counts = differentiate(inputs, rows, weights)
        loss = loss + part
        gradients.add(rows, g, counts)
        del g
    return ((loss / weights.total).to(inputs.dtype), *gradients.result(hidden, weight.dtype))


def _differentiate_chunk(
    inputs: Rows, rows: slice, weights: Weights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate a chunk by torch's functions.

    The softmax is computed for some rows at a time, so that its wider dtype is never materialized for all. The gradient
    reuses the scores' memory if they are dead.
    """
    scores, residuals = _scores(inputs, rows)
    own = inputs.logits is None and all(each is not scores for each in residuals)
    g = scores if own else torch.empty_like(scores, memory_format=torch.contiguous_format)
    losses = []
    for some in _softmax_rows(scores, inputs.wide):
        logs = _log_softmax(scores[some], inputs.wide)
        losses.append(_losses(inputs, _within(rows, some), logs, _SUM))
        _of_scores(inputs, _within(rows, some), logs, out=g[some])
        del logs
    return functools.reduce(torch.add, losses), _back(g, inputs, residuals), weights.of_gradient[rows]


def _softmax_rows(scores: torch.Tensor, wide: torch.dtype) -> list[slice]:
    """Return as few slices of the rows as SOFTMAX_BYTES of their softmax allow."""
    count, classes = scores.shape
    if not isinstance(count, int) or not isinstance(classes, int):
        return [slice(0, count)]
    size = max(SOFTMAX_BYTES // max(classes * wide.itemsize, 1), 1)
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def _within(rows: slice, some: slice) -> slice:
    """Return the slice `some` of `rows`, as a slice of all rows."""
    return slice(rows.start + some.start, rows.start + some.stop)


def _of_scores(inputs: Rows, rows: slice, logs: torch.Tensor, out: torch.Tensor) -> None:
    """Write the gradient of each row's loss with respect to its scores, from their log softmax: probabilities minus
    the target."""
    target, even = inputs.target[rows], inputs.label_smoothing / logs.shape[-1]
    classes = torch.where(target != inputs.ignore_index, target, 0).to(torch.int64).unsqueeze(1)
    of_target = logs.gather(1, classes).exp_() - (1 - inputs.label_smoothing + even)
    if even:
        out.copy_(logs.exp_().sub_(even))
    else:
        torch.exp(logs, out=out)
    out.scatter_(1, classes, of_target.to(out.dtype))


def _scale(gradient: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return gradient * g, in place unless the graph is kept."""
    return gradient * g if graph_is_kept() else gradient.mul_(g)


def _meta(hidden: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, *rest: Any) -> tuple:
    """Return the metadata of (loss, gradients of hidden, weight and bias)."""
    *_, steps, _, _, _, _, output_mask = rest
    loss = like(hidden, shape=(), dtype=_dtype(steps, hidden.dtype))
    pairs = zip((hidden, weight, bias), output_mask, strict=True)
    return (loss, *[like(x) if requires_grad and x is not None else None for x, requires_grad in pairs])


def register(
    executor: OperatorExecutor,
    loss: Callable,
    loss_and_gradients: Callable,
    scale: Callable,
    checker: Checker | None = None,
) -> None:
    """Register the head with an executor.

    Args:
        executor: The executor.
        loss: `loss_of`, bound to the executor's function for a chunk.
        loss_and_gradients: `loss_and_gradients_of`, bound to the executor's function for a chunk.
        scale: A function that returns the product of a gradient and the loss's gradient, in the memory of the first
            if it is dead afterwards.
        checker: The checker of a call.
    """
    tags = [Tag.UNINITIALIZED, Tag.DONATES]
    scaled = executor.register_operator("scaled_gradient", meta=lambda gradient, g: like(gradient), fn=scale, tags=tags)
    with_gradients = executor.register_operator(
        "linear_cross_entropy_with_gradients", meta=_meta, fn=loss_and_gradients
    )

    def gradient_rule(hidden: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, *rest: Any) -> TensorProxy:
        logits, _, class_weight, _, _, _, reduction, _ = rest
        output_mask = (needs_grad(hidden), needs_grad(weight), needs_grad(bias))
        if reduction == "none" or needs_grad(class_weight) or not any(output_mask):
            return NotImplemented
        out, of_hidden, of_weight, of_bias = with_gradients(hidden, weight, bias, *rest, output_mask)
        g = get_grad(out)
        if output_mask[0]:
            put_grad(hidden, clang.mul(of_hidden, g))
        if output_mask[1]:
            put_grad(weight, scaled(of_weight, g))
        if output_mask[2]:
            put_grad(bias, clang.mul(of_bias, g))
        put_grad(logits, None)  # their gradient is in the others, of which they are the product
        return out

    executor.register_implementation(linear_cross_entropy, loss, checker=checker, grad_transform=gradient_rule)


def _loss(*call: Any) -> torch.Tensor:
    return loss_of(_chunk_loss, *call)


def _loss_and_gradients(*call: Any) -> tuple[Optional, ...]:
    return loss_and_gradients_of(_differentiate_chunk, *call)


register(torchex, _loss, _loss_and_gradients, _scale)
