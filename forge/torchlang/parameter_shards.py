"""The parameters that are sharded over processes (FSDP): each is gathered where the program reads it, and its gradient
is averaged and scattered. Eager and executors share the communication in this module.

Source: Y. Zhao et al., PyTorch FSDP (2023); R. Zhang et al., SimpleFSDP (2024), for gathering in the program.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from forge import prims
from forge.ir import Dim, TensorProxy
from forge.prims.distributed import ShardGroup, chunk_rows
from forge.torch_internals.distributed import group_size, start_all_gather, start_reduce_scatter
from forge.torch_internals.fake_tensors import FakeTensor
from forge.torchlang.collective_watch import collective_error
from forge.torchlang.core import torchsymbol
from forge.torchlang.host_copies import HostCopies

Tensors = Sequence[torch.Tensor]


def start_unshard(
    shards: Tensors,
    lengths: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    group: ShardGroup,
) -> list[torch.Tensor]:
    """Start to gather parameters in one message on a device; return the tensors that `finish_unshard` waits for."""
    size, name, _ = group
    started, payload = [], []
    for shard, length, dtype in zip(shards, lengths, dtypes, strict=True):
        if length is None:
            started.append(shard.to(device, dtype, copy=True))
            continue
        rows = chunk_rows(length, size)
        started.append(torch.empty((size * rows, *shard.shape[1:]), dtype=dtype, device=device))
        payload.append((shard, rows, started[-1]))
    if payload:
        copies = HostCopies()
        there = copies.upload([shard for shard, _, _ in payload], device)
        with copies.sending():
            parts = [_as_sent(x, whole.dtype, rows) for x, (_, rows, whole) in zip(there, payload, strict=True)]
            wholes = [whole for *_, whole in payload]
            _send(start_all_gather, parts, wholes, name).until_awaited(wholes, copies)
    return started


def finish_unshard(started: Tensors, lengths: Sequence[int | None]) -> list[torch.Tensor]:
    """Wait for the parameters, and return them."""
    _await(started)
    return [each if length is None else _cut(each, length) for each, length in zip(started, lengths, strict=True)]


def start_reduce(
    gradients: Tensors,
    lengths: Sequence[int | None],
    reduce_dtypes: Sequence[torch.dtype | None],
    device: torch.device,
    group: ShardGroup,
) -> list[torch.Tensor]:
    """Start to average gradients in one message, and their parts over the replicas in another; return the tensors that
    `finish_reduce` waits for, on a device."""
    size, name, replicas = group
    wholes = []
    for g, length, dtype in zip(gradients, lengths, reduce_dtypes, strict=True):
        rows = g.expand(size, *g.shape) if length is None else g
        wholes.append(_as_sent(rows, dtype or g.dtype, chunk_rows(rows.shape[0], size) * size))
    parts = [each.new_empty((each.shape[0] // size, *each.shape[1:])) for each in wholes]
    message = _send(start_reduce_scatter, wholes, parts, name, replicas)
    copies = HostCopies()
    started = parts if parts[0].device == device else copies.download(parts, device, message.wait)
    message.until_awaited(started, copies)
    return started


def finish_reduce(
    started: Tensors, lengths: Sequence[int | None], dtypes: Sequence[torch.dtype], read: Tensors = ()
) -> list[torch.Tensor]:
    """Wait for this process's parts of the gradients, and return them. read: the gradients that are being sent, kept so
    that nothing writes to their memory."""
    _await(started)
    return [
        (each[0] if length is None else _cut(each, length)).to(dtype)
        for each, length, dtype in zip(started, lengths, dtypes, strict=True)
    ]


class _Message(NamedTuple):
    """A pending message, and the tensors that it reads. work: torch's Work; None for fake tensors, which are not
    sent."""

    work: Any
    payload: Tensors

    def wait(self) -> None:
        """Make the current stream, or the process, wait for the message. Raises: CollectiveError."""
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                raise collective_error(error) from error

    def until_awaited(self, started: Tensors, copies: HostCopies) -> None:
        """Attach the message, and its copies to or from the host, to the first of these tensors until it is awaited."""
        started[0]._forge_pending = self, copies  # type: ignore[attr-defined]


def _send(start: Callable, payload: Tensors, received: Tensors, *groups: str | None) -> _Message:
    """Start a message."""
    work = None if isinstance(received[0], FakeTensor) else start(payload, received, *groups)
    return _Message(work, payload)


def _await(started: Tensors) -> None:
    for each in started:
        message, copies = vars(each).pop("_forge_pending", (None, None))
        if message is not None:
            message.wait()
            copies.wait(message.wait)


def _as_sent(x: torch.Tensor, dtype: torch.dtype, rows: Dim) -> torch.Tensor:
    """Return a tensor in the form in which it is sent: in a dtype, contiguous, padded with zero rows. It is copied at
    most once."""
    length = x.shape[0]
    if length == rows:
        return x.to(dtype).contiguous()
    padded = x.new_empty((rows, *x.shape[1:]), dtype=dtype)
    padded[:length] = x
    padded[length:] = 0
    return padded


def _cut(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x if x.shape[0] == rows else x[:rows]


def gather_alone(
    x: torch.Tensor,
    length: int | None,
    dtype: torch.dtype,
    device: torch.device,
    reduce_dtype: torch.dtype | None,
    group: ShardGroup,
    reshard: bool | None,
) -> torch.Tensor:
    """Return a parameter, gathered in a separate message: prims.unshard."""
    return finish_unshard(start_unshard([x], [length], [dtype], device, group), [length])[0]


def reduce_alone(
    x: torch.Tensor,
    length: int | None,
    dtype: torch.dtype,
    device: torch.device,
    reduce_dtype: torch.dtype | None,
    group: ShardGroup,
) -> torch.Tensor:
    """Return a part of a gradient, averaged in a separate message: prims.reduce_to_shard."""
    return finish_reduce(start_reduce([x], [length], [reduce_dtype], device, group), [length], [dtype])[0]


class _Unshard(torch.autograd.Function):
    """The autograd function of prims.unshard, differentiable to any order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = x.shape[:1], x.dtype, x.device, *how
        return gather_alone(x, *how)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        rows, dtype, device, length, _, _, reduce_dtype, group, _ = ctx.how
        part = _Reduce.apply(g, None if length is None else rows[0], dtype, device, reduce_dtype, group)
        return part, *[None] * 6


class _Reduce(torch.autograd.Function):
    """The autograd function of prims.reduce_to_shard, differentiable to any order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = x.shape[:1], x.dtype, x.device, *how
        return reduce_alone(x, *how)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        rows, dtype, device, length, _, _, reduce_dtype, group = ctx.how
        *_, replicas = group
        if length is None:  # each process has the average
            return _Reduce.apply(g, None, dtype, device, reduce_dtype, group), *[None] * 5
        if replicas is not None:
            among = group_size(replicas), replicas, None
            g = _Reduce.apply(g, None, g.dtype, g.device, reduce_dtype, among)
        return _Gather.apply(g, rows[0], dtype, device, reduce_dtype, group), *[None] * 5


class _Gather(torch.autograd.Function):
    """The gathering of parts, divided by the number of processes: the transpose of `_Reduce`, which is its transpose.
    Unlike `_Unshard`, its gradient is not that of an average over the processes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        reduce_dtype: torch.dtype | None,
        group: ShardGroup,
    ) -> torch.Tensor:
        ctx.how = x.shape[0], x.dtype, x.device, reduce_dtype, group
        return gather_alone(x, length, dtype, device, reduce_dtype, group, None) / group[0]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        return _Reduce.apply(g, *ctx.how), *[None] * 5


def unshard(
    x: torch.Tensor,
    length: int | None,
    dtype: torch.dtype,
    device: torch.device,
    reduce_dtype: torch.dtype | None,
    group: ShardGroup,
    reshard: bool | None,
    bucket: int,
    prefetch: int,
) -> torch.Tensor:
    """Return the full parameter, given this process's part x; its gradient is averaged over the processes.

    bucket: the maximum number of bytes per message; prefetch: the number of bytes gathered ahead of their use. The
    other arguments are those of prims.unshard.
    """
    if has_torch_function_unary(x):  # while a program is traced directly
        return handle_torch_function(
            unshard, (x,), x, length, dtype, device, reduce_dtype, group, reshard, bucket, prefetch
        )
    return _Unshard.apply(x, length, dtype, device, reduce_dtype, group, reshard)


@torchsymbol(unshard, id="forge.unshard")
def unsharded(
    x: TensorProxy,
    length: int | None,
    dtype: torch.dtype,
    device: torch.device,
    reduce_dtype: torch.dtype | None,
    group: ShardGroup,
    reshard: bool | None,
    bucket: int,
    prefetch: int,
) -> TensorProxy:
    """Return the full parameter, given each process's part along dim 0."""
    return prims.unshard(x, length, dtype, device, reduce_dtype, group, reshard)
