"""The collectives: prims in which all processes of a group take part.

Each has an effect on the other processes: no pass drops, merges or reorders them, so that all processes that compile
the same program communicate in the same order. A collective's result may be read only after `wait_tensor`. `group` is
the process group's name in torch.
"""

from collections.abc import Sequence

import torch

from forge.ir import Dim, Tag, TensorProxy, check, current_trace, get_grad, put_grad, register_grad
from forge.prims.core import like, primitive, register_vjp, torch_check
from forge.prims.elementwise import convert_element_type, device_put
from forge.prims.shape import pad, slice

COLLECTIVE = (Tag.EFFECT,)
LINEAR = ("sum", "avg")  # reductions with a gradient


def _check_reduction(op: str, reduce_op: str) -> None:
    check(
        reduce_op in LINEAR,
        lambda: f"{op}: reduce_op is {reduce_op!r}, but must be one of {', '.join(LINEAR)}",
        NotImplementedError,
    )


def _check_group(op: str, x: TensorProxy, group_size: int) -> None:
    torch_check(group_size > 0, lambda: f"{op}: group_size is {group_size}, but must be positive")
    torch_check(x.ndim > 0, lambda: f"{op}: x is {x}, but must have a dim to gather or to scatter along")


@primitive(tags=COLLECTIVE)
def all_reduce(x: TensorProxy, reduce_op: str, group: str) -> TensorProxy:
    """Return the reduction of the processes' tensors, in every process. Shapes and dtypes: x's, the same in every
    process."""
    _check_reduction("prims.all_reduce", reduce_op)
    return like(x)


@primitive(tags=COLLECTIVE)
def all_gather_into_tensor(x: TensorProxy, group_size: int, group: str) -> TensorProxy:
    """Return the concatenation of the processes' tensors along dim 0, in every process. Shapes: x (n, ...), out
    (group_size * n, ...)."""
    _check_group("prims.all_gather_into_tensor", x, group_size)
    return current_trace().tensor((x.shape[0] * group_size, *x.shape[1:]), x.dtype, x.device)


@primitive(tags=COLLECTIVE)
def reduce_scatter_tensor(x: TensorProxy, reduce_op: str, group_size: int, group: str) -> TensorProxy:
    """Reduce the processes' tensors, and return this process's part along dim 0. Shapes: x (group_size * n, ...), out
    (n, ...). Raises: RuntimeError if dim 0 is not a multiple of group_size."""
    _check_group("prims.reduce_scatter_tensor", x, group_size)
    _check_reduction("prims.reduce_scatter_tensor", reduce_op)
    torch_check(
        x.shape[0] % group_size == 0,
        lambda: f"prims.reduce_scatter_tensor: dim 0 of x, {x}, must be a multiple of group_size, {group_size}",
    )
    return current_trace().tensor((x.shape[0] // group_size, *x.shape[1:]), x.dtype, x.device)


@primitive(tags=COLLECTIVE)
def all_to_all_single(
    x: TensorProxy, output_split_sizes: Sequence[Dim], input_split_sizes: Sequence[Dim], group: str
) -> TensorProxy:
    """Send a part of x along dim 0 from each process to each process, and return the received parts.

    Shapes: x (sum of input_split_sizes, ...), out (sum of output_split_sizes, ...).
    """
    torch_check(
        len(output_split_sizes) == len(input_split_sizes) > 0,
        lambda: (
            f"prims.all_to_all_single: output_split_sizes {tuple(output_split_sizes)} and input_split_sizes "
            f"{tuple(input_split_sizes)} must have a length for each process"
        ),
    )
    size = output_split_sizes[0]
    for more in output_split_sizes[1:]:
        size = size + more
    return current_trace().tensor((size, *x.shape[1:]), x.dtype, x.device)


@primitive(tags=(*COLLECTIVE, Tag.MAY_BE_VIEW))
def wait_tensor(x: TensorProxy) -> TensorProxy:
    """Wait for x, the result of a collective, and return it. Shapes and dtypes: x's."""
    return like(x)


STARTS = frozenset({all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single})
MESSAGE_TAGS = frozenset({Tag.SENDS, Tag.AWAITS})  # of the two calls of a message, which compute nothing


# parameters whose rows are divided among the processes

ShardGroup = tuple[int, str, str | None]  # the number of processes, and the names of their group and the replicas'


def chunk_rows(length: Dim, group_size: int) -> Dim:
    """Return the number of rows of a part, as in torch.chunk: the last parts may have fewer, or none."""
    return -(-length // group_size)


@primitive(tags=(Tag.NO_FUSE,))
def unshard(
    x: TensorProxy,
    length: int | None,
    dtype: torch.dtype,
    device: torch.device,
    reduce_dtype: torch.dtype | None,
    group: ShardGroup,
    reshard: bool | None,
) -> TensorProxy:
    """Return the full parameter, given each process's part along dim 0, which is converted before it is sent.

    It has no effect tag: whether it runs, how often and in which order depends only on state that all processes share
    (forge/transforms/collective_schedule.py).

    Args:
        x: This process's part, of `chunk_rows` rows, fewer or none.
        length: The rows of the whole; None if every process has the whole, and nothing is sent.
        dtype: The dtype of the whole.
        device: The device of the whole, on which it is sent; x may be in host memory.
        reduce_dtype: The dtype in which gradients are reduced; None for that of the gradient.
        group: The number of processes, the name of their group, and that of the group of processes that have the same
            part, over which gradients are averaged, too; None if there is none.
        reshard: Whether the backward gathers it again; None to let rematerialization decide.

    Shapes: x (rows, ...), out (length, ...).
    """
    size, *_ = group
    check(size > 0, lambda: f"prims.unshard: group has {size} processes, but must have one at least")
    if length is None:
        return like(x, dtype=dtype, device=device)
    check(
        x.ndim > 0 and x.shape[0] <= chunk_rows(length, size),
        lambda: f"prims.unshard: x is {x}, but must be a part of {length} rows for {size} processes",
    )
    return like(x, shape=(length, *x.shape[1:]), dtype=dtype, device=device)


@primitive(tags=(Tag.NO_FUSE,))
def reduce_to_shard(
    x: TensorProxy,
    length: int | None,
    dtype: torch.dtype,
    device: torch.device,
    reduce_dtype: torch.dtype | None,
    group: ShardGroup,
) -> TensorProxy:
    """Return this process's part of a parameter's gradient averaged over the processes. The whole has `length` rows;
    None returns the whole. `dtype`, `device`: those of the result. The other arguments are those of `unshard`."""
    if length is None:
        return like(x, dtype=dtype, device=device)
    return like(x, shape=(length, *x.shape[1:]), dtype=dtype, device=device)


# gradients


register_vjp(all_reduce, x=lambda g, reduce_op, group: wait_tensor(all_reduce(g, reduce_op, group)))
register_vjp(
    all_gather_into_tensor,
    x=lambda g, group_size, group: wait_tensor(reduce_scatter_tensor(g, "sum", group_size, group)),
)


@register_grad(reduce_scatter_tensor)
def _reduce_scatter_tensor_grad(x: TensorProxy, reduce_op: str, group_size: int, group: str) -> TensorProxy:
    out = reduce_scatter_tensor(x, reduce_op, group_size, group)
    gathered = wait_tensor(all_gather_into_tensor(get_grad(out), group_size, group))
    put_grad(x, gathered if reduce_op == "sum" else gathered / group_size)
    return out


register_vjp(
    all_to_all_single,
    x=lambda g, output_split_sizes, input_split_sizes, group: wait_tensor(
        all_to_all_single(g, input_split_sizes, output_split_sizes, group)
    ),
)
register_vjp(wait_tensor, x=lambda g: g)


@register_grad(unshard)
def _unshard_grad(
    x: TensorProxy,
    length: int | None,
    dtype: torch.dtype,
    device: torch.device,
    reduce_dtype: torch.dtype | None,
    group: ShardGroup,
    reshard: bool | None,
) -> TensorProxy:
    out = unshard(x, length, dtype, device, reduce_dtype, group, reshard)
    rows = None if length is None else x.shape[0]
    put_grad(x, reduce_to_shard(get_grad(out), rows, x.dtype, x.device, reduce_dtype, group))
    return out


@register_grad(reduce_to_shard)
def _reduce_to_shard_grad(
    x: TensorProxy,
    length: int | None,
    dtype: torch.dtype,
    device: torch.device,
    reduce_dtype: torch.dtype | None,
    group: ShardGroup,
) -> TensorProxy:
    out = reduce_to_shard(x, length, dtype, device, reduce_dtype, group)
    size, _, replicas = group
    g = get_grad(out)
    if length is None:  # each process has the average
        put_grad(x, reduce_to_shard(g, None, x.dtype, x.device, reduce_dtype, group))
        return out
    if replicas is not None:
        g = wait_tensor(all_reduce(g, "avg", replicas))
    put_grad(x, _gathered(g, x, group) / size)
    return out


def _gathered(part: TensorProxy, whole: TensorProxy, group: ShardGroup) -> TensorProxy:
    """Return the gathered parts of a value like `whole`. Unlike unshard's, its gradient is the sum over the processes:
    the result is linear in the parts, so that derivatives of any order are exact."""
    size, name, _ = group
    part = convert_element_type(device_put(part, whole.device), whole.dtype)
    length = whole.shape[0]
    rows = chunk_rows(length, size)
    padded = pad(part, ((0, rows - part.shape[0]), *[(0, 0)] * (part.ndim - 1)), 0)
    return slice(wait_tensor(all_gather_into_tensor(padded, size, name)), 0, 0, length)
