"""The rules of reductions, in nvFuser's operators. Half precision is summed in float32, as in torch."""

from collections.abc import Callable
from typing import Any

import torch

from forge import prims
from forge.executors.executor import Decision
from forge.executors.nvfuserex.definition import Ref
from forge.executors.nvfuserex.elementwise import no_bools
from forge.executors.nvfuserex.rules import add_rule, rule
from forge.executors.nvfuserex.writer import Writer
from forge.ir import Symbol, TensorProxy

_HALVES = (torch.float16, torch.bfloat16)


def _reduce(writer: Writer, name: str, x: Any, dims: tuple[int, ...]) -> Ref:
    return writer.op(name, x, dims, False)


def _wide(writer: Writer, x: TensorProxy) -> Any:
    return writer.cast(x, torch.float32) if x.dtype in _HALVES else x


def _reduction(prim: Symbol, name: str, checker: Callable[..., Decision] | None) -> None:
    def write(writer: Writer, x: TensorProxy, dims: tuple[int, ...]) -> Ref:
        if not x.ndim or not dims:  # nvFuser takes no dims for all of them
            return writer.op("set", x)
        return _reduce(writer, name, _wide(writer, x), dims)

    add_rule(prim, write, checker)


_reduction(prims.sum, "sum", no_bools)
_reduction(prims.prod, "prod", no_bools)
_reduction(prims.amax, "max", no_bools)
_reduction(prims.amin, "min", no_bools)


def _truths(writer: Writer, x: TensorProxy) -> Ref:
    """Return 1 where x is not 0, else 0, as numbers."""
    nonzero = x if x.dtype == torch.bool else writer.op("ne", x, 0)
    return writer.cast(nonzero, torch.float32)


def _whether(prim: Symbol, name: str) -> None:
    @rule(prim)
    def write(writer: Writer, x: TensorProxy, dims: tuple[int, ...]) -> Ref:
        truths = _truths(writer, x)
        reduced = _reduce(writer, name, truths, dims) if x.ndim and dims else truths
        return writer.op("gt", reduced, 0.5)


_whether(prims.any, "max")
_whether(prims.all, "min")
