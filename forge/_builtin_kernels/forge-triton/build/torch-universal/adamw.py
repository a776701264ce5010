"""A step of AdamW for many tensors: one launch for all of one device and dtype, whatever their sizes.

A table on the device has their addresses, and where each program's chunk begins: it is kept between steps, and made
again when an address changes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_

import torch
import triton
import triton.language as tl

from .launch import DTYPES, INTERPRETED, check, launch

BLOCK = 2048  # elements that a program works on at once
BLOCKS = 8  # of a chunk, which is one program's
WARPS = 8
COLUMNS = 7  # of the table: the addresses of parameter, gradient, the moments, the largest second and step; elements
COUNTED = 256  # steps that a program counts

_IN_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Tensor = torch.Tensor


@triton.jit
def _is_skipped(found_inf):
    """Whether a gradient was found that is not finite: 0 or 1."""
    skipped = 0.0
    if found_inf is not None:
        skipped = tl.load(found_inf).to(tl.float32)
    return skipped


@triton.jit(do_not_specialize=["tensors"])
def _count(table, found_inf, tensors, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Each tensor's step is one more."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tensors
    step = tl.load(table + row.to(tl.int64) * COLUMNS + 5, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    if _is_skipped(found_inf) == 0.0:
        tl.store(step, tl.load(step, mask=inside, other=0.0) + 1.0, mask=inside)


@triton.jit
def _at(address, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The places of a tensor's elements, by its address."""
    pointers = address.to(tl.pointer_type(DTYPE)) + offset
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def _block(
    param,
    grad,
    first,
    second,
    largest,
    offset,
    inside,
    inverse_scale,
    lr,
    weight_decay,
    weight_1,
    weight_2,
    correction_1,
    root_correction_2,
    eps,
    SCALED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The update of BLOCK elements; inside: which there are, None for all."""
    param_at = _at(param, offset, PARAM, ALIGNED)
    grad_at = _at(grad, offset, GRAD, ALIGNED)
    first_at = _at(first, offset, MOMENT, ALIGNED)
    second_at = _at(second, offset, MOMENT, ALIGNED)
    value = tl.load(param_at, mask=inside).to(tl.float32)
    g = tl.load(grad_at, mask=inside).to(tl.float32)
    m = tl.load(first_at, mask=inside).to(tl.float32)
    v = tl.load(second_at, mask=inside).to(tl.float32)
    if SCALED:  # as torch does: the gradient is left without its scale
        g = g * inverse_scale
        tl.store(grad_at, g.to(GRAD), mask=inside)
    if MAXIMIZE:
        g = -g
    value = value - lr * weight_decay * value
    m = m * (1 - weight_1) + g * weight_1  # not m + (g - m) * weight_1, which for a small beta leaves m's rounding
    v = v * (1 - weight_2) + g * g * weight_2
    tl.store(first_at, m.to(MOMENT), mask=inside)
    tl.store(second_at, v.to(MOMENT), mask=inside)
    if AMSGRAD:
        largest_at = _at(largest, offset, MOMENT, ALIGNED)
        v = tl.maximum(tl.load(largest_at, mask=inside).to(tl.float32), v)
        tl.store(largest_at, v.to(MOMENT), mask=inside)
    value = value - lr / correction_1 * m / (tl.sqrt(v) / root_correction_2 + eps)
    tl.store(param_at, value.to(PARAM), mask=inside)


@triton.jit
def _update(
    table,
    chunks,
    lr_at,
    grad_scale,
    found_inf,
    lr,
    weight_decay,
    weight_1,
    weight_2,
    log_beta_1,
    log_beta_2,
    eps,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One chunk of one tensor. weight_1 and weight_2: 1 - beta; log_beta: its logarithm to the base 2."""
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(chunks + 2 * program) * COLUMNS
    start = tl.load(chunks + 2 * program + 1)
    param = tl.load(row)
    grad = tl.load(row + 1)
    first = tl.load(row + 2)
    second = tl.load(row + 3)
    largest = tl.load(row + 4)
    step = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32)))
    elements = tl.load(row + 6)
    if lr_at is not None:
        lr = tl.load(lr_at).to(tl.float32)
    inverse_scale = 1.0
    if grad_scale is not None:
        inverse_scale = 1.0 / tl.load(grad_scale).to(tl.float32)
    # 1 - beta ** step; in float64, since beta ** step is nearly 1
    correction_1 = (1.0 - tl.exp2(step.to(tl.float64) * log_beta_1)).to(tl.float32)
    root_correction_2 = tl.sqrt((1.0 - tl.exp2(step.to(tl.float64) * log_beta_2)).to(tl.float32))
    if _is_skipped(found_inf) == 0.0:
        for number in range(BLOCKS):
            begin = start + number * BLOCK
            offset = begin + tl.arange(0, BLOCK)
            if begin + BLOCK <= elements:  # without a mask loads are wide
                _block(
                    param, grad, first, second, largest, offset, None, inverse_scale, lr, weight_decay, weight_1,
                    weight_2, correction_1, root_correction_2, eps, grad_scale is not None, AMSGRAD, MAXIMIZE, PARAM,
                    GRAD, MOMENT, ALIGNED,
                )  # fmt: skip
            elif begin < elements:
                _block(
                    param, grad, first, second, largest, offset, offset < elements, inverse_scale, lr, weight_decay,
                    weight_1, weight_2, correction_1, root_correction_2, eps, grad_scale is not None, AMSGRAD, MAXIMIZE,
                    PARAM, GRAD, MOMENT, ALIGNED,
                )  # fmt: skip


@dataclass(frozen=True)
class _Launch:
    """The tensors of one device and of one dtype of parameters, gradients and moments, in a launch.

    rows, chunks: the table of their addresses and of where each program begins; sources: the
    memory of the host that the device's was copied from, which a CUDA graph that has captured the copy reads again;
    aligned: whether 16 divides all addresses.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    rows: Tensor
    chunks: Tensor
    sources: tuple[Tensor, ...]
    aligned: bool


def _launch_of(kind: tuple, rows: Tensor) -> _Launch:
    device, *dtypes = kind
    of_each = (rows[:, -1] + BLOCK * BLOCKS - 1) // (BLOCK * BLOCKS)
    owner = torch.repeat_interleave(torch.arange(len(rows)), of_each)
    place = torch.arange(len(owner)) - (of_each.cumsum(0) - of_each)[owner]
    chunks = torch.stack((owner, place * BLOCK * BLOCKS), 1)
    aligned = not (rows[:, :5] % 16).any()
    sources = tuple(each.pin_memory() if device.type == "cuda" else each for each in (rows, chunks))
    return _Launch(
        device, tuple(dtypes), *(each.to(device, non_blocking=True) for each in sources), sources, bool(aligned)
    )


class AdamWStep:
    """Steps of AdamW, each of any tensors: `AdamWStep()(params, grads, ...)`.

    It keeps what it found of the tensors that it was called with last, their addresses among it, and for as long as it
    lives the tables that a CUDA graph has captured.
    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2019; torch.optim.AdamW, whose results it gives.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []  # parameters, moments and steps of the last call
        self._layouts: tuple = ((), ())  # their addresses, and of parameters and gradients strides and dtypes
        self._places_of_grads: list[int] = []
        self._groups: dict[tuple, list[int]] = {}  # parameters by number
        self._launches: list[_Launch] = []
        self._captured: list[_Launch] = []

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        max_exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool = False,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Changes parameters, moments and steps in place.

        max_exp_avg_sqs: the largest second moments, for AMSGrad; empty without it. steps: one number each, which
        becomes one more. lr: a number, or one element on the parameters' device, which is read there. grad_scale: what
        the gradients are divided by, in place; found_inf: 1 where nothing is to be changed: both of one element.
        Shapes: a tensor's gradient and moments have its shape. Memory: a parameter's elements lie side by side; a
        gradient of other strides is copied, moments have the parameter's.
        Dtypes: parameters and gradients float32, bfloat16 or float16; moments float32 or the parameter's; steps
        float32.
        Raises: RuntimeError when a tensor does not fit; NotImplementedError when betas are tensors.
        """
        check(
            all(isinstance(beta, (int, float)) for beta in betas),
            lambda: "adamw: betas must be numbers; for betas that are tensors use torch.optim.AdamW",
            NotImplementedError,
        )
        check(
            all(len(each) == len(params) for each in (grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or params, steps)),
            lambda: "adamw: there must be as many gradients, moments and steps as parameters",
        )
        if not params:
            return
        strides = [param.stride() for param in params]
        copies = {}
        laid_out = grads
        if [grad.stride() for grad in grads] != strides:
            laid_out = list(grads)
            for i, (grad, stride) in enumerate(zip(grads, strides, strict=True)):
                if grad.stride() != stride and grad.shape == params[i].shape:
                    copies[i] = laid_out[i] = torch.empty_like(params[i], dtype=grad.dtype).copy_(grad)
        moments = [each for each in (exp_avgs, exp_avg_sqs, max_exp_avg_sqs) if each]
        self._look_at(params, laid_out, moments, steps, strides)
        for each in self._launches:
            _run(each, bool(max_exp_avg_sqs), lr, betas, eps, weight_decay, maximize, grad_scale, found_inf)
        if grad_scale is not None:
            for i, copy in copies.items():
                grads[i].copy_(copy)

    def _look_at(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        moments: list[Sequence[Tensor]],
        steps: Sequence[Tensor],
        strides: list[tuple[int, ...]],
    ) -> None:
        """Sets the launches of these tensors. They are checked unless they are the last call's, in the same memory;
        of gradients elsewhere, the shape and the device are.

        Of a thousand tensors this takes as long as the launch, so that it asks no more of them than it has to.
        """
        tensors = [*params, *chain.from_iterable(moments), *steps]
        places = [each.data_ptr() for each in tensors]
        kinds = strides, [param.dtype for param in params], [grad.dtype for grad in grads]
        places_of_grads = [grad.data_ptr() for grad in grads]
        is_same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        is_known = is_same and (places, kinds) == self._layouts
        if not is_known:
            self._groups = {}
            for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
                _check(param, grad, [each[i] for each in moments], steps[i])
                kind = param.device, param.dtype, grad.dtype, moments[0][i].dtype
                self._groups.setdefault(kind, []).append(i)
        elif places_of_grads != self._places_of_grads:
            for param, grad in zip(params, grads, strict=True):
                _check_grad(param, grad)
        if not is_known or places_of_grads != self._places_of_grads:
            count = len(params)
            rows = torch.zeros((count, COLUMNS), dtype=torch.int64)
            addresses = torch.tensor(places, dtype=torch.int64).view(-1, count).t()
            rows[:, 0], rows[:, 1] = addresses[:, 0], torch.tensor(places_of_grads, dtype=torch.int64)
            rows[:, 2 : addresses.shape[1]] = addresses[:, 1:-1]
            rows[:, 5], rows[:, 6] = addresses[:, -1], torch.tensor([param.numel() for param in params])
            self._launches = [_launch_of(kind, rows[members]) for kind, members in self._groups.items()]
            self._tensors, self._layouts, self._places_of_grads = tensors, (places, kinds), places_of_grads
        if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured += (each for each in self._launches if not any(each is other for other in self._captured))


def _run(
    launched: _Launch,
    amsgrad: bool,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    lr_at, grad_scale, found_inf = (
        each.to(launched.device) if isinstance(each, Tensor) else None for each in (lr, grad_scale, found_inf)
    )
    launch(
        _count,
        triton.cdiv(len(launched.rows), COUNTED),
        launched.rows,
        found_inf,
        len(launched.rows),
        COLUMNS=COLUMNS,
        BLOCK=COUNTED,
        warps=1,
    )
    if not len(launched.chunks):  # of parameters without elements alone
        return
    launch(
        _update,
        len(launched.chunks),
        launched.rows,
        launched.chunks,
        lr_at,
        grad_scale,
        found_inf,
        0.0 if lr_at is not None else float(lr),
        float(weight_decay),
        *(1.0 - beta for beta in betas),
        *(math.log2(beta) if beta else -math.inf for beta in betas),
        float(eps),
        AMSGRAD=amsgrad,
        MAXIMIZE=maximize,
        **{name: _IN_TRITON[dtype] for name, dtype in zip(("PARAM", "GRAD", "MOMENT"), launched.dtypes, strict=True)},
        ALIGNED=launched.aligned,
        COLUMNS=COLUMNS,
        BLOCK=BLOCK,
        BLOCKS=BLOCKS,
        warps=WARPS,
    )


def adamw_unsupported(param: Tensor) -> str | None:
    """Why AdamWStep does not take a parameter; None where it does."""
    if type(param) not in (Tensor, torch.nn.Parameter):
        return f"a parameter is a {type(param).__name__}"
    if not (param.is_cuda or (INTERPRETED and param.device.type == "cpu")):
        return f"a parameter is on {param.device}, where Triton does not run"
    if param.dtype not in DTYPES:
        return f"a parameter is {param.dtype}"
    if param.is_sparse or not torch.ops.aten.is_non_overlapping_and_dense(param):
        return "a parameter's elements do not lie side by side in memory"
    return None


def _check(param: Tensor, grad: Tensor, moments: list[Tensor], step: Tensor) -> None:
    reason = adamw_unsupported(param)
    check(reason is None, lambda: f"adamw: {reason}")
    check(
        grad.dtype in DTYPES,
        lambda: f"adamw: a gradient is {grad.dtype}, but must be {' or '.join(map(str, DTYPES))}",
    )
    _check_grad(param, grad)
    for moment in moments:
        check(
            moment.dtype in (torch.float32, param.dtype) and moment.dtype == moments[0].dtype,
            lambda moment=moment: (
                f"adamw: a moment of a {param.dtype} parameter is {moment.dtype}, but must be "
                f"{torch.float32} or the parameter's dtype, as its other moments"
            ),
        )
        check(
            moment.shape == param.shape and moment.stride() == param.stride() and moment.device == param.device,
            lambda: "adamw: a moment must have the shape, the strides and the device of its parameter",
        )
    check(
        step.dtype == torch.float32 and step.numel() == 1 and step.device == param.device,
        lambda: f"adamw: a step is {step.dtype} on {step.device}, but must be one float32 on the parameter's device",
    )


def _check_grad(param: Tensor, grad: Tensor) -> None:
    check(
        grad.shape == param.shape and grad.device == param.device,
        lambda: (
            f"adamw: a gradient is {list(grad.shape)} on {grad.device}, its parameter {list(param.shape)} on "
            f"{param.device}"
        ),
    )
