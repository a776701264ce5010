"""Operators registered by the program itself, which no other process has."""

from pathlib import Path

import torch
import torch.nn.functional as F

import forge

MANIFEST = """\
forge_kernels: 1
library: {name: prog}
ops:
- op: torch.nn.functional.silu
  kernels:
  - {name: right, kernel_name: "registered_here::silu", args: [input], arg_meta: {input: float32}}
- op: torch.nn.functional.gelu
  kernels:
  - name: wrong
    kernel_name: registered_here::silu
    args: [input]
    arg_meta: {input: float32}
    where: "approximate == 'none'"
"""


@torch.library.custom_op("registered_here::silu", mutates_args=())
def silu(x: torch.Tensor) -> torch.Tensor:
    """Run a kernel that the program registers itself."""
    return F.silu(x)


silu.register_fake(torch.empty_like)


def test_a_kernel_that_the_program_registers_is_verified_in_a_copy_of_it(tmp_path: Path) -> None:
    (tmp_path / "k.yaml").write_text(MANIFEST)
    jitted = forge.jit(lambda x: F.silu(x) + F.gelu(x), kernels=[tmp_path / "k.yaml"])
    x = torch.randn(4)
    torch.testing.assert_close(jitted(x), F.silu(x) + F.gelu(x))
    rows = forge.explain(jitted).rows
    assert [row.operation for row in rows if row.executor == "prog.right"] == ["torch.nn.functional.silu"]
    (reason,) = (reason for row in rows for name, reason in row.declined if name == "prog.wrong")
    assert reason.startswith("failed verification on input: float32") and "values differ" in reason
