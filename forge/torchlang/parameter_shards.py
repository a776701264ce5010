"""Parameters that are sharded over processes: each is gathered where the program reads it, and its gradient is averaged
and scattered (FSDP). What is sent, and how, is here for eager and for executors alike.

Source: Y. Zhao et al., PyTorch FSDP (2023); R. Zhang et al., SimpleFSDP (2024), for gathering in the program.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from forge import prims
from forge.ir import TensorProxy
from forge.prims.distributed import chunk_rows
from forge.torchlang.core import torchsymbol

Tensors = Sequence[torch.Tensor]


def start_unshard(
    shards: Tensors, lengths: Sequence[int | None], dtypes: Sequence[torch.dtype], group_size: int, group: str
) -> list[torch.Tensor]:
    """Start to gather parameters by one message; return what `finish_unshard` waits for."""
    sent = []
    for shard, length, dtype in zip(shards, lengths, dtypes, strict=True):
        rows = _message(shard, dtype)
        sent.append(rows if length is None else _pad(rows, chunk_rows(length, group_size)))
    places = [i for i, length in enumerate(lengths) if length is not None]
    if places:
        gathered = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(
            [sent[i] for i in places], group_size, group
        )
        for i, each in zip(places, gathered, strict=True):
            sent[i] = each
    return sent


def finish_unshard(started: Tensors, lengths: Sequence[int | None]) -> list[torch.Tensor]:
    """Return the parameters, once they are there."""
    return [
        each if length is None else _cut(torch.ops._c10d_functional.wait_tensor(each), length)
        for each, length in zip(started, lengths, strict=True)
    ]


def start_reduce(
    gradients: Tensors,
    lengths: Sequence[int | None],
    reduce_dtypes: Sequence[torch.dtype | None],
    group_size: int,
    group: str,
) -> list[torch.Tensor]:
    """Start to average gradients by one message; return what `finish_reduce` waits for."""
    sent = []
    for g, length, dtype in zip(gradients, lengths, reduce_dtypes, strict=True):
        rows = _message(g.expand(group_size, *g.shape) if length is None else g, dtype or g.dtype)
        sent.append(_pad(rows, chunk_rows(rows.shape[0], group_size) * group_size))
    return torch.ops._c10d_functional.reduce_scatter_tensor_coalesced(sent, "avg", group_size, group)


def finish_reduce(
    started: Tensors, lengths: Sequence[int | None], dtypes: Sequence[torch.dtype], read: Tensors = ()
) -> list[torch.Tensor]:
    """Return this process's parts of the gradients, once they are there. read: gradients that are sent until then, so
    that nothing writes to their memory."""
    received = []
    for each, length, dtype in zip(started, lengths, dtypes, strict=True):
        rows = torch.ops._c10d_functional.wait_tensor(each)
        received.append((rows[0] if length is None else _cut(rows, length)).to(dtype))
    return received


def _message(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).contiguous()


def _cut(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x if x.shape[0] == rows else x[:rows]


def _pad(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x if x.shape[0] == rows else torch.cat([x, x.new_zeros((rows - x.shape[0], *x.shape[1:]))])


def gather_alone(
    x: torch.Tensor,
    length: int | None,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    group_size: int,
    group: str,
    reshard: bool | None,
) -> torch.Tensor:
    """Return a parameter, gathered by a message of its own: prims.unshard."""
    if length is None:
        return x.to(dtype, copy=True)
    return finish_unshard(start_unshard([x], [length], [dtype], group_size, group), [length])[0]


def reduce_alone(
    x: torch.Tensor,
    length: int | None,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    group_size: int,
    group: str,
) -> torch.Tensor:
    """Return a part of a gradient, averaged by a message of its own: prims.reduce_to_shard."""
    return finish_reduce(start_reduce([x], [length], [reduce_dtype], group_size, group), [length], [dtype])[0]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = x.shape[:1], x.dtype, *how
        return gather_alone(x, *how)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        rows, dtype, length, _, reduce_dtype, *group, _ = ctx.how
        part = reduce_alone(g, None if length is None else rows[0], dtype, reduce_dtype, *group)
        return part, *[None] * 6


def unshard(
    x: torch.Tensor,
    length: int | None,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    group_size: int,
    group: str,
    reshard: bool | None,
    bucket: int,
    prefetch: int,
) -> torch.Tensor:
    """Return the whole of a parameter of which x is this process's part; its gradient is averaged over the processes.

    bucket: the bytes that are gathered together, at most; prefetch: those that are gathered ahead of their use. The
    others are the arguments of prims.unshard.
    """
    if has_torch_function_unary(x):  # while a program is traced directly
        return handle_torch_function(
            unshard, (x,), x, length, dtype, reduce_dtype, group_size, group, reshard, bucket, prefetch
        )
    return _Unshard.apply(x, length, dtype, reduce_dtype, group_size, group, reshard)


@torchsymbol(unshard, id="forge.unshard")
def unsharded(
    x: TensorProxy,
    length: int | None,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    group_size: int,
    group: str,
    reshard: bool | None,
    bucket: int,
    prefetch: int,
) -> TensorProxy:
    """Return the whole of a parameter of which each process has a part along dim 0."""
    return prims.unshard(x, length, dtype, reduce_dtype, group_size, group, reshard)
