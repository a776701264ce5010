"""The programs of tests/frontend/programs with tensors on the device, in three default dtypes.

All but the values of floating point tensors is as in eager: structure, strides, shared memory, errors.
"""

import warnings
from functools import partial
from typing import Any

import torch
from frontend.programs import (  # noqa: F401  each fills the table
    effects,
    errors,
    functions,
    grad_modes,
    modules,
    reshaping,
    surroundings,
    views,
)
from frontend.programs.table import PROGRAMS, Jit, Program, no_jit, observed
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from tests.gpu.cases import DTYPES, Case
from tests.gpu.measure import judge

EVERY = {"float32": 1, "bfloat16": 3, "float16": 3}


def cases() -> dict[str, Case]:
    """Every case by name: all programs in float32, a third in each half precision."""
    return {
        f"program/{name}/{dtype}": Case(partial(_run, program, DTYPES[dtype]))
        for turn, dtype in enumerate(DTYPES)
        for place, (name, program) in enumerate(PROGRAMS.items())
        if place % EVERY[dtype] == turn % EVERY[dtype]
    }


def _run(program: Program, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        structure, eager = _parted(observed(program.run, no_jit))
        jit = Jit()
        ours_structure, ours = _parted(observed(program.run, jit))
    if ours_structure != structure:
        return "beyond", _first_difference(ours_structure, structure)
    unexpected = [reason for reason in jit.eager if not program.eager or program.eager not in reason]
    if unexpected:
        return "beyond", f"ran in eager: {unexpected[0]}"

    def reference(draw: int | None) -> list[torch.Tensor]:
        torch.set_default_dtype(torch.float64)
        with _Drawing(dtype, draw):
            _, wide = _parted(observed(program.run, no_jit))
        same = len(wide) == len(eager) and all(one.shape == other.shape for one, other in zip(wide, eager, strict=True))
        return wide if same else [each.double() if each.is_floating_point() else each for each in eager]

    return judge(ours, eager, reference)


def _parted(seen: Any) -> tuple[Any, list[torch.Tensor]]:
    """What was observed without the tensors, and the tensors."""
    leaves, spec = _pytree.tree_flatten(seen)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    rest = [(str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return (str(spec), rest), tensors


def _first_difference(ours: Any, eager: Any) -> str:
    if ours[0] != eager[0]:
        return "what can be observed has another structure than in eager"
    return next(f"{one} where eager has {other}" for one, other in zip(ours[1], eager[1], strict=True) if one != other)


_RANDOM = {"rand", "randn", "rand_like", "randn_like", "normal_", "uniform_", "normal"}


class _Drawing(TorchFunctionMode):
    """What is drawn at random in float64 are the numbers drawn in another dtype, or numbers half an eps off."""

    def __init__(self, dtype: torch.dtype, draw: int | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.off = 0.0 if draw is None else torch.finfo(dtype).eps / 2 * (1 if draw % 2 else -1)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _RANDOM:
            return func(*args, **kwargs)
        if name.endswith("_") and args[0].dtype == torch.float64:
            drawn = func(args[0].detach().to(self.dtype), *args[1:], **kwargs)
            with torch.no_grad():
                return args[0].copy_(drawn.double() * (1 + self.off))
        wide = kwargs.get("dtype", torch.float64) == torch.float64
        if not wide or name.endswith("_"):
            return func(*args, **kwargs)
        drawn = func(*args, **{**kwargs, "dtype": self.dtype, "requires_grad": False})
        drawn = drawn.double() * (1 + self.off)
        return drawn.requires_grad_() if kwargs.get("requires_grad") else drawn
