"""Collectives: prims in which all processes of a group take part.

Each has an effect, on the other processes: no pass drops one, makes one of two, or changes their order, so that every
process that compiles the same program communicates in the same order. A collective's result may be read only after
`wait_tensor`. `group` is the name under which torch knows the process group.
"""

from collections.abc import Sequence

from forge.ir import Dim, Tag, TensorProxy, check, current_trace, get_grad, put_grad, register_grad
from forge.prims.core import like, primitive, register_vjp, torch_check

COLLECTIVE = (Tag.EFFECT,)
LINEAR = ("sum", "avg")  # reductions whose gradient is one


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
    """Return the processes' tensors reduced, in every process. Shapes and dtypes: x's, the same in every process."""
    _check_reduction("prims.all_reduce", reduce_op)
    return like(x)


@primitive(tags=COLLECTIVE)
def all_gather_into_tensor(x: TensorProxy, group_size: int, group: str) -> TensorProxy:
    """Return the processes' tensors one after the other along dim 0, in every process. Shapes: x (n, ...), out
    (group_size * n, ...)."""
    _check_group("prims.all_gather_into_tensor", x, group_size)
    return current_trace().tensor((x.shape[0] * group_size, *x.shape[1:]), x.dtype, x.device)


@primitive(tags=COLLECTIVE)
def reduce_scatter_tensor(x: TensorProxy, reduce_op: str, group_size: int, group: str) -> TensorProxy:
    """Return the processes' tensors reduced, of which each process gets its part along dim 0. Shapes: x (group_size *
    n, ...), out (n, ...). Raises: RuntimeError where dim 0 is no multiple of group_size."""
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
    """Send a part of x along dim 0 from each process to each process.

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


@primitive(tags=COLLECTIVE)
def wait_tensor(x: TensorProxy) -> TensorProxy:
    """x, which a collective returned, once it is there. Shapes and dtypes: x's."""
    return like(x)


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
