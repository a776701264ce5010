"""An unmodified Llama trains with kernels of a repository: from a folder, from a Hub on the loopback, and offline.

make demo-kernels
"""

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forge
from forge import cli
from forge.debug.report import Explanation
from forge.hub import HubNotice
from forge.ir.printing import table
from forge.testing.hub_server import Hub

NORMS_CPU = Path(__file__).parent / "kernels" / "norms-cpu"
LAYERS = 4
SITES = {"rms_norm": 2 * LAYERS + 1, "swiglu": LAYERS}
TOLERANCE = 1e-5

WRONG_KERNEL = "def swiglu(gate, up):\n    return gate * up\n"
WRONG_MANIFEST = """\
forge_kernels: 1
library: {name: wrong, priority: 100}
ops:
- pattern: swiglu
  kernels:
  - {name: swiglu_without_silu, kernel_name: "python:wrong_kernels:swiglu", grad: composite}
"""


def llama() -> tuple[LlamaForCausalLM, torch.Tensor]:
    """A tiny Llama as the transformers library has it, and tokens for it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config), torch.randint(0, 128, (2, 16))


def step(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The loss and every gradient of one training step."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *[parameter.grad for parameter in model.parameters()]]


def train(kernels: list[str | Path]) -> tuple[Explanation, float]:
    """Return the explanation of a training step with `kernels`, and its largest difference from eager."""
    model, ids = llama()
    expected = step(copy.deepcopy(model), ids)
    jitted = forge.jit(model, kernels=kernels)
    actual = step(jitted, ids)
    worst = max((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))
    return forge.explain(jitted), worst


def show_table(told: Explanation) -> None:
    """Print the rows of forge.explain whose calls kernels of norms-cpu took."""
    rows = [("phase", "result", "operation", "executor", "source")]
    for row in told.rows:
        if row.executor.startswith("norms-cpu."):
            operation = row.operation.removeprefix("hub.norms-cpu.")
            source = (row.source or "").partition("  ")[0]
            rows.append((row.phase, ", ".join(row.outputs), operation, row.executor, source))
    print(*table(rows), sep="\n")


def report(told: Explanation, worst: float) -> bool:
    """Prints how many calls norms-cpu took and how far the step is from eager's; whether that is as it should be."""
    right = worst < TOLERANCE
    for name, sites in SITES.items():
        kernel = f"norms-cpu.{name}_cpu"
        taken = Counter(row.phase for row in told.rows if row.executor == kernel)
        right = right and taken == {"forward": sites, "backward": sites}
        print(f"{kernel:22}  {taken['forward']} of {sites} forward, {taken['backward']} of {sites} backward")
    print(f"loss and gradients differ from eager's by at most {worst:.1e}{'' if right else '  NOT RIGHT'}", flush=True)
    return right


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def build() -> int:
    """Compiles norms-cpu, unless it is there. Returns the exit status."""
    start = time.perf_counter()
    command = [sys.executable, NORMS_CPU / "build.py"]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode == 0:
        print(f"{os.path.relpath(built.stdout.strip())}, in {time.perf_counter() - start:.1f} s")
    return built.returncode


def use(source: str | Path) -> bool:
    """One step with a repository, wherever it is."""
    return report(*train([source]))


def from_folder() -> bool:
    """One step with the repository's folder: every call, then the counts."""
    told, worst = train([NORMS_CPU])
    show_table(told)
    print()
    return report(told, worst)


def with_a_wrong_kernel(folder: Path) -> bool:
    """A kernel that is asked first and is wrong: found by verification, declined by name; the next one is used."""
    (folder / "wrong_kernels.py").write_text(WRONG_KERNEL)
    (folder / "wrong.yaml").write_text(WRONG_MANIFEST)
    sys.path.insert(0, str(folder))
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always", HubNotice)
        told, worst = train([folder / "wrong.yaml", NORMS_CPU])
    print(WRONG_KERNEL)
    for notice in notices:
        print(notice.message)
    declined = {name for row in told.rows if row.operation == "pattern.swiglu" for name, _ in row.declined}
    return report(told, worst) and declined == {"wrong.swiglu_without_silu"}


def from_a_hub(folder: Path) -> bool:
    """Two processes of their own: one fetches norms-cpu from a Hub on the loopback, one has the cache alone."""
    with Hub(trusted={"acme"}) as hub:
        commit = hub.publish_folder("acme/norms-cpu", NORMS_CPU)
        title(f'From a Hub, {hub.url}: kernels=["acme/norms-cpu@v1"]')
        fetched = in_a_process("acme/norms-cpu@v1", hub.url, folder)
        client = next((agent for agent in hub.agents if "hf_hub" in agent), "no client")
        print(f"{len(hub.requests)} requests of {client}")
    title(f'Offline, the Hub is gone: kernels=["acme/norms-cpu@{commit[:12]}…"]')
    served = len(hub.requests)
    held = in_a_process(f"acme/norms-cpu@{commit}", hub.url, folder, HF_HUB_OFFLINE="1")
    return fetched and held and served == len(hub.requests)


def in_a_process(source: str, hub: str, folder: Path, **environment: str) -> bool:
    """One step with a kernel of this Hub, kept in a cache below `folder`; the user's tokens and caches are not seen."""
    theirs = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KERNELS_"))}
    ours = {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "hub"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, __file__, "--kernels", source]
    return subprocess.run(command, env={**theirs, **ours, **environment}, check=False).returncode == 0


def demo(folder: Path) -> bool:
    """Run the steps in order and return whether all succeed. forge's caches are kept below `folder`."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    title("Build: python examples/kernels/norms-cpu/build.py")
    if build():
        return False
    title("Verify: forge kernels verify examples/kernels/norms-cpu")
    right = cli.main(["kernels", "verify", str(NORMS_CPU)]) == 0
    title(f'Train a Llama of {LAYERS} layers one step: forge.jit(model, kernels=["examples/kernels/norms-cpu"])')
    right = from_folder() and right
    title('The same with a wrong kernel, asked first: kernels=["wrong.yaml", "examples/kernels/norms-cpu"]')
    right = with_a_wrong_kernel(folder) and right
    right = from_a_hub(folder) and right
    print("\nAll is as it should be." if right else "\nSomething is NOT as it should be.")
    return right


def main() -> int:
    """The demo, or one step with the kernels that are named. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", metavar="SOURCE", help="only train one step, with these: a folder or org/name@v1")
    source = parser.parse_args().kernels
    if source is not None:
        return 0 if use(source) else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if demo(Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
