"""The redistribution of a sharded tensor: the collectives that convert each process's part to another placement, as for
the local tensors of a DTensor, and their gradients.

A placement is an int, the dim along which each process has a part; "replicate": each process has the whole; or
"partial": the whole is the sum of the processes' tensors. A gradient has the placement of its value, except that the
gradient of a partial value is replicated, as in torch (DTensor.from_local and to_local).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from forge import clang, prims
from forge.ir import TensorProxy, check, get_grad, put_grad, register_grad
from forge.torchlang.core import View, torchsymbol

Place = int | Literal["replicate", "partial"]


def of_gradient(place: Place) -> Place:
    """Return the placement of the gradient of a value with this placement."""
    return "replicate" if place == "partial" else place


class _Calls(NamedTuple):
    """The functions that redistribution uses: those of tensors, or those of proxies."""

    collectives: Any
    narrow: Callable[..., Any]
    cat: Callable[..., Any]
    clone: Callable[..., Any]


def _redistribute(calls: _Calls, x: Any, source: Place, target: Place, size: int, rank: int, group: str) -> Any:
    """Redistribute like `redistribute`, with the given functions."""
    collectives = calls.collectives

    def parts(x: Any, dim: Place) -> list[Any]:
        length = x.shape[dim] // size
        return [calls.narrow(x, dim, i * length, length) for i in range(size)]

    if source == target:
        return calls.clone(x)
    if (source, target) == ("replicate", "partial"):
        return x / size
    if source == "replicate":
        return calls.clone(parts(x, target)[rank])
    if (source, target) == ("partial", "replicate"):
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", group))
    if target == "replicate":
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(x, size, group))
        return gathered if source == 0 else calls.cat(parts(gathered, 0), source)
    payload = calls.cat(parts(x, target), 0) if target != 0 else x
    if source == "partial":
        return collectives.wait_tensor(collectives.reduce_scatter_tensor(payload, "sum", size, group))
    sizes = [payload.shape[0] // size] * size
    received = collectives.wait_tensor(collectives.all_to_all_single(payload, sizes, sizes, group))
    return received if source == 0 else calls.cat(parts(received, 0), source)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        calls = _Calls(torch.ops._c10d_functional, torch.narrow, torch.cat, torch.clone)
        return _redistribute(calls, x.contiguous(), *how)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        source, target, *group = ctx.how
        return redistribute(g, of_gradient(target), of_gradient(source), *group), *[None] * 5


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        return redistribute(g, "partial", "replicate", *ctx.group), None, None, None


def redistribute(x: torch.Tensor, source: Place, target: Place, size: int, rank: int, group: str) -> torch.Tensor:
    """Return this process's part of a tensor after its placement changes from `source` to `target`.

    size, rank: of the group, and this process's in it. group: its name in torch.
    """
    if has_torch_function_unary(x):  # while a program is traced directly
        return handle_torch_function(redistribute, (x,), x, source, target, size, rank, group)
    return _Redistribute.apply(x, source, target, size, rank, group)


def spread(x: torch.Tensor, size: int, rank: int, group: str) -> torch.Tensor:
    """Return x, which every process has and uses for its own part of a result; the gradients are summed."""
    if has_torch_function_unary(x):
        return handle_torch_function(spread, (x,), x, size, rank, group)
    return _Spread.apply(x, size, rank, group)


def _check_group(op: str, x: Any, size: int, rank: int) -> None:
    check(0 <= rank < size, lambda: f"{op}: rank is {rank}, but must be one of a group of {size}")


if torch.distributed.is_available():

    @torchsymbol(redistribute, id="forge.redistribute")
    def redistributed(x: TensorProxy, source: Place, target: Place, size: int, rank: int, group: str) -> TensorProxy:
        """Return this process's part of a tensor in another placement.

        Shapes: a sharded dim is `size` times as long if not sharded; the length must be a multiple.
        Raises: ValueError for an invalid placement or rank.
        """
        _check_group("redistribute", x, size, rank)
        for name, place in (("source", source), ("target", target)):
            check(
                place in ("replicate", "partial") or (isinstance(place, int) and 0 <= place < x.ndim),
                lambda name=name, place=place: (
                    f"redistribute: {name} is {place!r}, but must be a dim of {x}, 'replicate' or 'partial'"
                ),
            )
        calls = _Calls(prims, clang.narrow_in_dim, clang.cat, prims.clone)
        return _redistribute(calls, x, source, target, size, rank, group)

    @register_grad(redistributed)
    def _redistributed_grad(
        x: TensorProxy, source: Place, target: Place, size: int, rank: int, group: str
    ) -> TensorProxy:
        out = redistributed(x, source, target, size, rank, group)
        before, after = of_gradient(target), of_gradient(source)
        g = get_grad(out)
        put_grad(x, g if before == after else redistributed(g, before, after, size, rank, group))
        return out

    @torchsymbol(spread, id="forge.spread", view=View.ALWAYS, invert=lambda x, new, *group: new)
    def spreading(x: TensorProxy, size: int, rank: int, group: str) -> TensorProxy:
        """Return x. The gradient is the sum of the processes' gradients. Raises: ValueError for an invalid rank."""
        _check_group("spread", x, size, rank)
        return prims.alias(x)

    @register_grad(spreading)
    def _spreading_grad(x: TensorProxy, size: int, rank: int, group: str) -> TensorProxy:
        out = spreading(x, size, rank, group)
        put_grad(x, redistributed(get_grad(out), "partial", "replicate", size, rank, group))
        return out
