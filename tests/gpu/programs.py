"""The cases of the programs of tests/capture/programs with tensors on the device, in three default dtypes.

Everything but the values of floating point tensors equals eager: structure, strides, shared memory, errors. A program
with a failing assertion runs in separate processes, because the device cannot be used afterwards.

`python -m tests.gpu.programs NAME DTYPE DEVICE eager|forge` runs such a program and prints the name of its error.
"""

import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import torch
from capture.programs.all_programs import PROGRAMS
from capture.programs.table import Jit, Program, no_jit, observed
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from tests.gpu.cases import DTYPES, Case, Skipped
from tests.gpu.measure import judge

EVERY = {"float32": 1, "bfloat16": 3, "float16": 3}


def cases() -> dict[str, Case]:
    """Return every case by name: all programs in float32, a third in each half precision."""
    return {
        f"program/{name}/{dtype}": Case(
            partial(_run_apart, name, dtype) if _fails_on_the_device(name) else partial(_run, program, DTYPES[dtype])
        )
        for turn, dtype in enumerate(DTYPES)
        for place, (name, program) in enumerate(PROGRAMS.items())
        if place % EVERY[dtype] == turn % EVERY[dtype]
    }


def _run(program: Program, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = observed(program.run, no_jit)
        structure, eager = _parted(seen)
        if seen["error"] is not None and dtype != torch.float32 and _runs_in_float32(program, dtype):
            raise Skipped(f"eager raises {seen['error']} in {dtype}")
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
            exact = observed(program.run, no_jit)
        assert exact["error"] == seen["error"], f"in float64, eager raises {exact['error']}"
        _, wide = _parted(exact)
        same = len(wide) == len(eager) and all(one.shape == other.shape for one, other in zip(wide, eager, strict=True))
        return wide if same else [each.double() if each.is_floating_point() else each for each in eager]

    return judge(ours, eager, reference)


def _runs_in_float32(program: Program, dtype: torch.dtype) -> bool:
    torch.set_default_dtype(torch.float32)
    error = observed(program.run, no_jit)["error"]
    torch.set_default_dtype(dtype)
    return error is None


def _fails_on_the_device(name: str) -> bool:
    return "assertion" in name and name.endswith("fails")


def _run_apart(name: str, dtype: str, device: torch.device) -> tuple[str, str]:
    raised = []
    for kind in ("eager", "forge"):
        command = [sys.executable, "-m", "tests.gpu.programs", name, dtype, device.type, kind]
        done = subprocess.run(command, capture_output=True, text=True)
        raised.append(done.stdout.strip() or f"no answer, and status {done.returncode}")
    eager, forge = raised
    return ("within", "") if forge == eager else ("beyond", f"forge: {forge}; eager: {eager}")


def _error(name: str, dtype: str, device: str, kind: str) -> str:
    """Return the name of the error that a program raises until the device has finished its work."""
    torch.set_default_device(device)
    torch.set_default_dtype(DTYPES[dtype])
    try:
        result = PROGRAMS[name].run(Jit() if kind == "forge" else no_jit)
        _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, result)
    except Exception as error:
        return type(error).__name__
    return "none"


def _parted(seen: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the observation without its tensors, and the tensors."""
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
    """A mode in which float64 draws have the numbers of another dtype, or numbers perturbed by half an eps."""

    def __init__(self, dtype: torch.dtype, draw: int | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.off = 0.0 if draw is None else torch.finfo(dtype).eps / 2 * (1 if draw % 2 else -1)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _RANDOM:
            return func(*args, **kwargs)
        if name.endswith("_"):
            changed = args[0] if args else kwargs.pop("tensor")  # of torch.nn.init, by keyword
            if changed.dtype != torch.float64:
                return func(changed, *args[1:], **kwargs)
            drawn = func(changed.detach().to(self.dtype), *args[1:], **kwargs)
            with torch.no_grad():
                return changed.copy_(drawn.double() * (1 + self.off))
        wide = kwargs.get("dtype", torch.float64) == torch.float64
        if not wide:
            return func(*args, **kwargs)
        drawn = func(*args, **{**kwargs, "dtype": self.dtype, "requires_grad": False})
        drawn = drawn.double() * (1 + self.off)
        return drawn.requires_grad_() if kwargs.get("requires_grad") else drawn


if __name__ == "__main__":
    print(_error(*sys.argv[1:]))
