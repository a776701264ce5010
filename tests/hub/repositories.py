"""Repositories with one kernel and a manifest, and the use of the kernel in a jitted function."""

import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import forge
from forge.executors.executor import Executor
from forge.executors.hubex import Verifier, kernel_executor
from forge.hub import HubNotice
from tests.hub.kernels import metadata

GELU = {
    "op": "torch.nn.functional.gelu",
    "arg_meta": "{input: T}",
    "args": "{x: input}",
    "where": "[\"approximate == 'none'\"]",
}
LAYER_NORM = {
    "op": "torch.nn.functional.layer_norm",
    "arg_meta": "{input: T, weight: T, bias: T}",
    "shape": '{input: "[..., H]", weight: "[H]", bias: "[H]"}',
    "where": '["normalized_shape == (H,)"]',
    "args": "{x: input, weight: weight, bias: bias, eps: eps}",
}
ROWS = "torch.as_strided(x, x.shape, torch.empty(x.shape).stride())"


class Repository:
    """A folder with one kernel `f`, with given code and manifest."""

    def __init__(self, folder: Path, name: str, code: str, **entry: str) -> None:
        self.folder, self.name = folder / name, name
        self.write(code)
        fields = {"kernel_name": "f", "grad": "composite", **entry}
        op = "pattern" if "pattern" in fields else "op"
        target = fields.pop(op)
        lines = "".join(f"    {key}: {value}\n" for key, value in fields.items())
        (self.folder / "forge_kernels.yaml").write_text(
            f"forge_kernels: 1\nlibrary: {{name: acme}}\nops:\n- {op}: {target}\n"
            f"  type_alias: {{T: [float32]}}\n  kernels:\n  - name: {name}\n{lines}"
        )

    def write(self, code: str) -> None:
        variant = self.folder / "build" / "torch-universal"
        variant.mkdir(parents=True, exist_ok=True)
        header = "import ctypes\nimport time\n\nimport torch\nimport torch.nn.functional as F\n\n"
        (variant / "__init__.py").write_text(header + textwrap.dedent(code))
        (variant / "metadata.json").write_text(metadata(self.name.replace("_", "-"), f"_{self.name}_ab12"))


def executor(made: Repository, seconds: float = 60) -> Executor:
    return kernel_executor([made.folder], verify=Verifier(seconds))


def run(function: Callable, *args: torch.Tensor, by: Executor) -> Any:
    """Jit a function, compare it with eager (including gradients if required), and return its explanation."""
    jitted = forge.jit(function, executors=[by, "torch"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HubNotice)
        actual = jitted(*args)
    expected = function(*args)
    torch.testing.assert_close(actual, expected)
    wanted = [each for each in args if each.requires_grad]
    if wanted:
        g = torch.ones(()).expand(expected.shape)
        for ours, theirs in zip(
            torch.autograd.grad(actual, wanted, g), torch.autograd.grad(expected, wanted, g), strict=True
        ):
            torch.testing.assert_close(ours, theirs)
    return forge.explain(jitted)


def declined(explained: Any, made: Repository) -> str:
    """Return the reason why the kernel was declined, after checking that it ran nothing."""
    assert not [row for row in explained.rows if row.executor == f"acme.{made.name}"]
    return next(reason for row in explained.rows for who, reason in row.declined if who == f"acme.{made.name}")


def claimed(explained: Any, made: Repository) -> int:
    return sum(row.executor == f"acme.{made.name}" for row in explained.rows)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) + 1


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (16,), weight, bias)


def norm_inputs() -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in ((3, 16), (16,), (16,))]
