"""Manifests for real packages of the Hub, and the features they need: packed arguments, functions in submodules."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import hub
from forge.executors import hubex
from forge.executors.hubex import gather
from forge.hub.manifest import ManifestError, read_manifest
from forge.patterns import builtin
from forge.testing.hub_server import Hub
from tests.hub.test_versions import MANIFEST, gelu_files

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "examples/manifests").glob("*.yaml"))
CODE = "import torch.nn.functional as F\ndef f(x):\n    return F.gelu(x)\nclass G:\n    f = staticmethod(f)\n"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_for_a_real_package_names_operators_and_arguments_that_there_are(path: Path) -> None:
    manifest = read_manifest(path, hubex.operators())
    assert manifest.kernels
    named = {kernel.kernel_name.partition("@")[0] for kernel in manifest.kernels}
    assert named == {f"hub:kernels-community/{path.stem}"}


def test_the_document_of_real_kernels_lists_exactly_these_manifests() -> None:
    text = (ROOT / "examples/manifests/README.md").read_text()
    assert sorted(set(re.findall(r"\]\(([\w-]+\.yaml)\)", text))) == [path.name for path in MANIFESTS]
    packages = re.findall(r"^\| `([\w-]+)` \| v\d+, `[0-9a-f]{8}` \|", text, re.MULTILINE)
    assert len(set(packages)) == len(packages) >= 20


def theirs(folder: Path, name: str) -> Path:
    path = folder / "theirs.yaml"
    path.write_text(MANIFEST.replace("kernel_name: f", f"kernel_name: hub:acme/gelu@v1:{name}"))
    return path


@pytest.mark.parametrize("name", ["fast.f", "fast.G.f", "inner.faster.f"])
def test_a_manifest_may_name_a_function_in_a_module_that_the_package_does_not_import(
    server: Hub, tmp_path: Path, name: str
) -> None:
    server.publish("acme/gelu", gelu_files(0, **{"fast.py": CODE, "inner/faster.py": CODE}))
    (kernel,) = gather([theirs(tmp_path, name)])
    assert kernel.function.__module__.endswith(name.removesuffix(".f").removesuffix(".G"))


def test_the_imports_of_such_a_module_are_checked_before_it_is_imported(server: Hub, tmp_path: Path) -> None:
    files = {"fast.py": "from . import more\n" + CODE, "more.py": "import yaml\n"}
    server.publish("acme/gelu", gelu_files(0, **files))
    with pytest.raises(ManifestError, match=r"more.py:1: import yaml"):
        gather([theirs(tmp_path, "fast.f")])
    (kernel,) = gather([theirs(tmp_path, "fast.f")], allow_imports=["yaml"])
    assert kernel.function(torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("slow.f", "has no slow"), ("fast.g", "has no g"), ("bad.f", "bad raised while it was imported: ValueError: no")],
)
def test_a_name_that_is_not_there_is_an_error(server: Hub, tmp_path: Path, name: str, problem: str) -> None:
    server.publish("acme/gelu", gelu_files(0, **{"fast.py": CODE, "bad.py": "raise ValueError('no')\n"}))
    with pytest.raises((ManifestError, hub.HubError), match=problem):
        gather([theirs(tmp_path, name)])


@pytest.mark.parametrize(
    ("pattern", "activation"),
    [
        (builtin.silu_and_mul, F.silu),
        (builtin.gelu_and_mul, F.gelu),
        (builtin.gelu_tanh_and_mul, lambda x: F.gelu(x, approximate="tanh")),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_kernel_of_gate_and_up_in_one_tensor_takes_a_gated_unit_of_two_halves(pattern, activation) -> None:
    def packed(out, x):
        out.copy_(pattern.reference(x))

    def unit(x):
        gate, up = x.chunk(2, dim=-1)
        return up * activation(gate)

    options = {"dtypes": [torch.float32], "shape": {"x": "[..., 2*D]"}, "args": ["x"], "out": 0}
    kernel = forge.kernel(f"pattern:{pattern.name}", packed, **options)
    jitted = forge.jit(unit, kernels=[kernel])
    x = torch.randn(3, 8)
    torch.testing.assert_close(jitted(x), unit(x))
    assert [row.executor for row in forge.explain(jitted).rows] == ["packed"]
