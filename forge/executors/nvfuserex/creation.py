"""The rules of tensors created from scratch, in nvFuser's operators."""

from collections.abc import Sequence
from typing import Any

import torch

from forge import prims
from forge.executors.executor import Decision, decline
from forge.executors.nvfuserex.definition import Ref
from forge.executors.nvfuserex.elementwise import number_of
from forge.executors.nvfuserex.rules import rule
from forge.executors.nvfuserex.writer import Writer
from forge.ir import Dim


@rule(prims.full)
def _full(writer: Writer, shape: Sequence[Dim], value: Any, dtype: torch.dtype, device: torch.device) -> Ref:
    return writer.op("full", tuple(shape), number_of(value, dtype), dtype)


def _of_integers(length: Dim, start: Any, step: Any, dtype: torch.dtype, device: torch.device) -> Decision:
    whole = all(isinstance(each, (int, torch.SymInt)) for each in (start, step)) and not dtype.is_floating_point
    return whole or decline("torch rounds a sequence of floats in its own way")


@rule(prims.iota, _of_integers)
def _iota(writer: Writer, length: Dim, start: Any, step: Any, dtype: torch.dtype, device: torch.device) -> Ref:
    return writer.op("iota", length, start, step, dtype)
