"""Bundles by forge.bundle: a program's kernels in a separate folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import hub
from forge.aot.kernels import _prune_manifest
from forge.executors.hubex import gather, operators
from forge.hub.bundle import NAME
from forge.hub.manifest import read_manifest
from tests.hub.kernels import forget, metadata

MANIFEST = """\
forge_kernels: 1
library: {name: acme, priority: 3}
ops:
- op: torch.nn.functional.silu
  kernels:
  - {name: silu, kernel_name: silu, arg_meta: {input: float32}, args: {x: input}, grad: composite}
  - {name: silu64, kernel_name: silu, arg_meta: {input: float64}, args: {x: input}}
- op: torch.nn.functional.gelu
  kernels:
  - {name: gelu, kernel_name: gelu, args: {x: input}, where: "approximate == 'none'"}
"""
CODE = "import torch.nn.functional as F\n\ndef silu(x): return F.silu(x)\n\ndef gelu(x): return F.gelu(x)\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    variant = tmp_path / "acme" / "build" / "torch-universal"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(CODE)
    (variant / "metadata.json").write_text(metadata("acme", "_acme_ab12"))
    (variant / "forge_kernels.yaml").write_text(MANIFEST)
    return variant.parent.parent


def program(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x)


def bundled(repository: Path) -> Path:
    """Return a bundle of a program that ran only silu, and remove its repository."""
    jitted = forge.jit(program, kernels=[repository])
    jitted(torch.randn(2, 3))
    folder = forge.bundle(jitted, repository.parent / "bundle")
    shutil.rmtree(repository)
    forget()
    return folder


def test_a_bundle_holds_what_ran_and_nothing_else(repository: Path) -> None:
    folder = bundled(repository)
    kernels = gather([folder])
    assert [(kernel.operation, kernel.name) for kernel in kernels] == [("torch.nn.functional.silu", "acme.silu")]
    assert kernels[0].entry.priority == 3 and kernels[0].entry.grad.kind == "composite"
    jitted = forge.jit(lambda x: program(x) + F.gelu(x), kernels=[folder])
    x = torch.randn(2, 3, requires_grad=True)
    torch.testing.assert_close(jitted(x), F.silu(x) + F.gelu(x))
    told = {row.operation: row.executor for row in forge.explain(jitted).rows}
    assert told["torch.nn.functional.silu"] == "acme.silu" != told["torch.nn.functional.gelu"]


def test_a_bundle_of_a_bundle(repository: Path) -> None:
    jitted = forge.jit(program, kernels=[bundled(repository)])
    jitted(torch.randn(2, 3))
    again = forge.bundle(jitted, repository.parent / "again")
    assert [kernel.name for kernel in gather([again])] == ["acme.silu"]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            {"acme/build/torch-universal/__init__.py": "raise SystemExit('imported')"},
            r"__init__.py is sha256:.*, wanted",
        ),
        ({"acme/forge_kernels.yaml": None}, "acme/forge_kernels.yaml is missing"),
        ({"acme/build/torch-universal/more.py": "pass"}, "more.py is not among them"),
    ],
)
def test_a_changed_bundle_is_not_imported(repository: Path, change: dict[str, str | None], wanted: str) -> None:
    folder = bundled(repository)
    for path, text in change.items():
        (folder / path).unlink() if text is None else (folder / path).write_text(text)
    with pytest.raises(hub.IntegrityError, match=wanted):
        gather([folder])


def rewritten(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps({**values, **changes}))


def test_a_kernel_that_cannot_be_used_is_named(repository: Path) -> None:
    folder = bundled(repository)
    variants = folder / "acme" / "build"
    (variants / "torch-universal").rename(variants / "torch-cann")
    files = json.loads((folder / NAME).read_text())["files"]
    rewritten(folder, files={path.replace("torch-universal", "torch-cann"): sha for path, sha in files.items()})
    with pytest.raises(
        hub.NotFoundError, match=r"needs acme.silu of torch.nn.functional.silu, which cannot be used here: "
    ):
        gather([folder])


def test_a_needed_kernel_that_is_not_there_is_named(repository: Path) -> None:
    folder = bundled(repository)
    parts = json.loads((folder / NAME).read_text())["parts"]
    rewritten(folder, parts=[{**parts[0], "kernels": [*parts[0]["kernels"], ["torch.relu", "acme.relu"]]}])
    with pytest.raises(hub.NotFoundError, match=r"has no kernel acme.relu of torch.relu"):
        gather([folder])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "is not JSON"),
        ("[]", "has no forge_bundle: 1"),
        ('{"forge_bundle": 1}', "needs the keys parts and files"),
        ('{"forge_bundle": 1, "parts": [], "files": {"../x": "0"}}', "leaves its folder"),
        ('{"forge_bundle": 1, "parts": [1], "files": {}}', "1 is no part"),
    ],
)
def test_a_malformed_bundle_has_one_clear_error(tmp_path: Path, text: str, wanted: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(hub.MalformedError, match=wanted):
        gather([tmp_path])


def test_what_cannot_be_bundled_says_why(repository: Path, tmp_path: Path) -> None:
    jitted = forge.jit(program, kernels=[repository])
    with pytest.raises(ValueError, match="no kernel runs; call the jitted function first"):
        forge.bundle(jitted, tmp_path / "bundle")
    jitted(torch.randn(2, 3))
    with pytest.raises(ValueError, match="is not empty"):
        forge.bundle(jitted, repository)
    declared = forge.kernel(F.silu, lambda input: F.silu(input), name="declared")
    jitted = forge.jit(program, kernels=[declared])
    jitted(torch.randn(2, 3))
    with pytest.raises(
        ValueError, match=r"kernel declared of torch.nn.functional.silu was declared in Python at .*test_bundle.py"
    ):
        forge.bundle(jitted, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_manifest_alone_is_pruned(tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    path.write_text(MANIFEST.replace("kernel_name: ", "kernel_name: python:torch.nn.functional:").replace("x: ", ""))
    path.write_text(path.read_text().replace("args: {input}", "args: [input]"))
    jitted = forge.jit(program, kernels=[path])
    jitted(torch.randn(2, 3))
    folder = forge.bundle(jitted, tmp_path / "bundle")
    assert [kernel.name for kernel in gather([folder])] == ["acme.silu"]
    assert (folder / "acme" / "alone.yaml").is_file()


def test_a_functions_yaml_is_pruned_by_dispatch_key(tmp_path: Path) -> None:
    path = tmp_path / "functions.yaml"
    path.write_text("- op: relu.out\n  dispatch:\n    CPU: acme::relu\n    CUDA: acme::relu_cuda\n- op: abs.out\n")
    chosen = [kernel for kernel in read_manifest(path, operators()).kernels if kernel.device.types == ("cpu",)]

    class Used:
        entry = chosen[0]

    path.write_bytes(_prune_manifest(path, [Used()], None))
    assert [kernel.kernel_name for kernel in read_manifest(path, operators()).kernels] == ["acme::relu"]
