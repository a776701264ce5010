"""Models of tests/models, exported with a static and a dynamic batch, loaded in a process without transformers."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import forge
from forge import ExportError
from tests.markers import slow_except
from tests.models.test_models import build, difference, outputs
from tests.models.zoo import MODELS

pytest.importorskip("transformers")

QUICK = ["llama"]
NAMES = slow_except(MODELS, *QUICK)
LABELS = ("labels", "return_loss")

# Models that torch.export refuses, by the first words of its reason.
NOT_EXPORTED = {
    "led": "GuardOnDataDependentSymNode",
    "normalizing_flow": "GuardOnDataDependentSymNode",
    "prophetnet": "GuardOnDataDependentSymNode",
    "time_series_transformer": "GuardOnDataDependentSymNode",
    "informer": "ValueError: Attention mask",
    "speecht5": "RuntimeError: Found",
}
# Models whose first dim is not a batch: nodes and edges of a graph; or one that is compared with a number.
STATIC = {"graph_convolution", "graph_attention", "message_passing", "vq_vae", "xlnet"}
# Models that call operators of the transformers library, which a process has to import.
LIBRARY = {"qwen3_moe", "phimoe", "mixtral", "olmoe", "granitemoe", "gpt_oss", "deepseek_v3"}

SERVER = """
import sys
if sys.argv[1] == "without":
    sys.modules["transformers"] = None
else:
    import transformers.integrations.moe
import torch
import forge
from torch.utils import _pytree
for line in sys.stdin:
    path = line.strip()
    try:
        given, seed = torch.load(f"{path}.inputs")
        loaded = forge.load(path)
        torch.manual_seed(seed)
        results = [leaf for leaf in _pytree.tree_leaves(loaded(**given)) if isinstance(leaf, torch.Tensor)]
        torch.save(results, f"{path}.results")
        print("done", flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\\n", " "), flush=True)
"""


class Server:
    """A process that loads files, and runs each with the inputs beside it."""

    def __init__(self, libraries: str) -> None:
        command = [sys.executable, "-c", SERVER, libraries]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, path: Path, given: dict[str, Any], seed: int) -> list[torch.Tensor]:
        torch.save((given, seed), f"{path}.inputs")
        assert self.process.stdin is not None and self.process.stdout is not None
        print(path, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().strip()
        assert answer == "done", answer
        return torch.load(f"{path}.results")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    started: dict[str, Server] = {}
    yield started
    for each in started.values():
        each.process.kill()
        each.process.wait()


def arguments(name: str, *, labels: bool) -> tuple[torch.nn.Module, dict[str, Any]]:
    model, given = build(name, training=False)
    return model, {key: value for key, value in given.items() if labels or key not in LABELS}


def export(name: str, *, dynamic: bool) -> tuple[forge.Exported, torch.nn.Module, dict[str, Any]]:
    """Return the export, and the model without labels if it can be called without them."""
    for labels in (False, True):
        model, given = arguments(name, labels=labels)
        batch = Dim("batch", min=2, max=64)
        shapes = {key: {0: batch} if isinstance(value, torch.Tensor) else None for key, value in given.items()}
        try:
            exported = forge.export(copy.deepcopy(model), (), given, dynamic_shapes=shapes if dynamic else None)
        except ExportError:
            if labels:
                raise
            continue
        return exported, model, given
    raise AssertionError


@pytest.mark.parametrize(
    "dynamic", [pytest.param(False, marks=pytest.mark.slow, id="static"), pytest.param(True, id="dynamic")]
)
@pytest.mark.parametrize("name", NAMES)
def test_exported_model_equals_eager_in_another_process(name, dynamic, servers, tmp_path):
    if name in NOT_EXPORTED:
        with pytest.raises(ExportError, match=f"torch.export cannot take the model: {NOT_EXPORTED[name]}"):
            export(name, dynamic=dynamic)
        return
    dynamic = dynamic and name not in STATIC
    exported, model, given = export(name, dynamic=dynamic)
    path = tmp_path / "model.pt2"
    exported.save(path)
    if dynamic:
        given = {key: _longer(value) for key, value in given.items()}
    libraries = "with" if name in LIBRARY else "without"
    if libraries not in servers:
        servers[libraries] = Server(libraries)
    results = servers[libraries].run(path, given, seed=3)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = outputs(model(**given))
    for ours, eager in zip(results, expected, strict=True):
        assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
        assert difference(ours, eager) < 1e-5


def _longer(value: Any) -> Any:
    """Return a batch with one more row."""
    return torch.cat([value, value[:1]]) if isinstance(value, torch.Tensor) else value
