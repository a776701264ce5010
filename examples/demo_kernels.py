"""An unmodified Llama uses a kernel repository: built, verified, claimed, trained; and a wrong kernel is found out.

make demo-kernels
"""

import copy
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forge

REPOSITORY = Path(__file__).parent / "kernels" / "norms-cpu"

WRONG = """
forge_kernels: 1
library: {name: wrong}
ops:
- pattern: swiglu
  kernels:
  - name: swiglu_without_silu
    kernel_name: "python:wrong_kernels:swiglu"
    grad: composite
"""


def llama() -> tuple[LlamaForCausalLM, torch.Tensor]:
    """A tiny Llama of 4 layers, and tokens for it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config), torch.randint(0, 128, (2, 16))


def step(run: torch.nn.Module, owner: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The loss and every gradient of one training step."""
    owner.zero_grad()
    loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *[parameter.grad.clone() for parameter in owner.parameters()]]


def compare(title: str, kernels: list[str | Path], wanted: set[str]) -> bool:
    """Trains one step with `kernels` and in eager; prints what became of norms and gated units."""
    model, ids = llama()
    eager = copy.deepcopy(model)
    expected = step(eager, eager, ids)
    jitted = forge.jit(model, kernels=kernels)
    actual = step(jitted, model, ids)
    worst = max((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))
    told = forge.explain(jitted)
    rows = [row for row in told.rows if row.operation.startswith("pattern.") or row.executor in wanted]
    print(f"\n== {title}: loss and gradients differ from eager's by at most {worst:.1e}")
    for row in rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in row.declined)
        print(f"  {row.phase:8}  {row.operation:40}  {row.executor:24}  {reasons}")
    declined = {reason for row in told.rows for reason in row.declined}
    for name, reason in sorted(declined):
        print(f"  declined: {name}: {reason}")
    return worst < 1e-4


def main() -> int:
    """Builds the example's kernels, uses them, then a wrong one. Returns the exit status."""
    subprocess.run([sys.executable, str(REPOSITORY / "build.py")], check=True)
    right = compare("norms-cpu", [REPOSITORY], {"norms-cpu.rms_norm_cpu", "norms-cpu.swiglu_cpu"})
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("always")
        (Path(folder) / "wrong_kernels.py").write_text("def swiglu(gate, up):\n    return gate * up\n")
        manifest = Path(folder) / "wrong.yaml"
        manifest.write_text(WRONG)
        sys.path.insert(0, folder)
        right = compare("a kernel made wrong on purpose", [manifest], set()) and right
    print("\nall as eager" if right else "\nNOT as eager")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
