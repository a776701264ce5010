"""Mutated manifests of a real repository: all their kernels are registered, or nothing is."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import forge
from forge import clang, hub, prims, torchlang
from forge.executors.hubex import hubex
from forge.executors.registry import known_executors
from forge.hub.manifest import ManifestError
from forge.ir import grad_rules
from tests.hub.kernels import forget, metadata, process_restored, write
from tests.hub.test_malformed import broken_link, directory, folder_link, garbage, huge, links, pipe
from tests.hub.test_manifest_fuzz import mutate, written

CODE = """\
import torch
import torch.nn.functional as F


def rms(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_backward(grad_output, x, weight, eps):
    return grad_output, weight


def gelu(x):
    return F.gelu(x)


def scale(x, factor=1.0):
    return x * factor


def fast_scale(x, factor=1.0):
    return x * factor


def twice(x):
    return F.relu(x) * 2


def swiglu(gate, up):
    return F.silu(gate) * up
"""
MANIFEST = """\
forge_kernels: 1
library: {name: acme.fuzzed, priority: 10}
requires: {torch: ">=2.0"}
ops:
- op: torch.nn.functional.rms_norm
  type_alias: {T: [float32]}
  kernels:
  - name: rms
    kernel_name: rms
    arg_meta: {input: T, weight: T, __ret_0: T}
    shape: {input: "[..., H]", weight: "[H]"}
    where: ["normalized_shape == (H,)", "eps is not None"]
    args: {x: input, weight: weight, eps: eps}
    layout: contiguous
    grad:
      kernel_name: rms_backward
      args: {grad_output: grad_output, x: input, weight: weight, eps: eps}
      returns: [input, weight]
- op: torch.nn.functional.gelu
  kernels:
  - {name: gelu, kernel_name: gelu, args: {x: input}, where: "approximate == 'none'", grad: composite}
  - {name: half, kernel_name: gelu, args: {x: input}, arg_meta: {input: float16}, where: "approximate == 'none'"}
- func: "forge_fuzzed::scale(Tensor x, float factor=1.0) -> Tensor"
  reference: python:.:scale
  kernels:
  - {name: scale, kernel_name: fast_scale, grad: composite}
- pattern: swiglu
  kernels:
  - {name: swiglu, kernel_name: swiglu, grad: autograd}
- pattern: python:.:twice
  kernels:
  - {name: twice, kernel_name: twice}
"""
TREE = yaml.safe_load(MANIFEST)


def registered() -> list[Any]:
    """Return everything that a manifest could change in this process."""
    tables = (torchlang.all_symbols(), prims.all_prims(), clang.all_symbols(), grad_rules._rules, known_executors())
    return [
        list(hubex.kernels),
        {name: list(map(id, found)) for name, found in hubex._by_symbol.items()},
        hubex.patterns,
        sorted(torch._C._dispatch_get_all_op_names()),
        *map(sorted, tables),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    with process_restored():
        yield


def use(folder: Path, manifest: str) -> bool:
    """Register a repository with this manifest, and return whether that succeeded; if not, check that nothing
    changed."""
    files = {"__init__.py": CODE, "forge_kernels.yaml": manifest, "metadata.json": metadata("fuzzed", "_fuzzed_ab12")}
    write(folder, {f"torch-universal/{path}": text for path, text in files.items()})
    before = registered()
    try:
        forge.use_kernels([folder])
    except (hub.HubError, ManifestError, NotImplementedError) as error:
        assert str(error) and "Traceback" not in str(error)
        assert registered() == before
        return False
    finally:
        forget()
    new = hubex.kernels[len(before[0]) :]
    assert {kernel.entry.library for kernel in new} <= {yaml.safe_load(manifest)["library"]["name"]}
    defined = set(torch._C._dispatch_get_all_op_names()) - set(before[3])
    assert all(name.partition("::")[0].startswith("forge") for name in defined)
    hubex._kernels = before[0]
    hubex.add([])
    return True


def test_the_valid_manifest_is_registered_whole(folder: Path) -> None:
    assert use(folder, MANIFEST)


def test_a_mistake_in_another_source_can_be_put_right(folder: Path, tmp_path: Path) -> None:
    """Definitions in torch.library by the earlier sources persist, and the next registration uses them."""
    broken = tmp_path / "broken.yaml"
    broken.write_text("forge_kernels: 1\nlibrary: {name: broken}\nops:\n- op: nosuch\n  kernels: []\n")
    assert use(folder, MANIFEST)
    before = list(hubex.kernels)
    with pytest.raises(ManifestError, match="unknown operator 'nosuch'"):
        forge.use_kernels([folder, broken])
    assert hubex.kernels == before
    forge.use_kernels([folder])
    assert len(hubex.kernels) == len(before) + MANIFEST.count("- name:") + MANIFEST.count("- {name:")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
@example(0, 1)
def test_a_mutated_manifest_is_registered_whole_or_not_at_all(folder: Path, seed: int, count: int) -> None:
    pick = random.Random(seed)
    tree = copy.deepcopy(TREE)
    for _ in range(count):
        if tree:
            mutate(tree, pick)
    use(folder, written(tree))


def test_a_manifest_names_no_module_that_its_code_may_not_import(folder: Path) -> None:
    files = {"__init__.py": CODE, "metadata.json": metadata("fuzzed", "_fuzzed_ab12")}
    files["forge_kernels.yaml"] = MANIFEST.replace("kernel_name: twice", "kernel_name: python:antigravity_:fly")
    write(folder, {f"torch-universal/{path}": text for path, text in files.items()})
    with pytest.raises(ManifestError, match="antigravity_ is neither the standard library nor torch, and no part of"):
        forge.use_kernels([folder])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kernel_name: twice", "kernel_name: thrice"),
        ("python:.:twice", "python:.:nosuch"),
        ("python:.:twice", "python:nosuch:f"),
        ("kernel_name: twice", "kernel_name: python:yaml:safe_load"),
        ("{name: half, kernel_name: gelu", "{name: half, kernel_name: rms"),
        ("forge_kernels: 1\n", "forge_kernels: 1\nop: x\n"),
        ('torch: ">=2.0"', 'torch: ">=99"'),
        ("- pattern: python:.:twice", "- op: aten::nonzero"),
    ],
)
def test_a_mistake_in_the_last_entry_registers_none_before_it(folder: Path, old: str, new: str) -> None:
    assert old in MANIFEST
    assert not use(folder, MANIFEST.replace(old, new))


@pytest.mark.parametrize("inner", ["build/torch-universal", "."])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (links, "is a link to /etc/hostname, which is outside of the repository"),
        (huge, "has more than 1048576 bytes, too many for a manifest"),
        (pipe, "has no forge_kernels.yaml"),
        (directory, "has no forge_kernels.yaml"),
        (broken_link, "has no forge_kernels.yaml"),
        (folder_link, r"has no forge_kernels.yaml|is a link to .*, which is outside of the repository"),
        (garbage, "not UTF-8"),
    ],
)
def test_a_manifest_that_is_no_file_of_the_repository_is_one_clear_error(
    tmp_path: Path, inner: str, fault: Any, message: str
) -> None:
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w').close()\n{CODE}"
    files = {"__init__.py": code, "metadata.json": metadata("fuzzed", "_fuzzed_ab12")}
    root = write(tmp_path / "fuzzed", {f"torch-universal/{path}": text for path, text in files.items()})
    fault(root / inner, "forge_kernels.yaml")
    before = registered()
    with pytest.raises((hub.HubError, ManifestError), match=message) as caught:
        forge.use_kernels([root])
    assert str(root) in str(caught.value) and registered() == before and not mark.exists()


def test_a_name_that_is_taken_registers_none_of_the_others(folder: Path, repository: Any) -> None:
    made = repository("gelu", "def f(x):\n    return F.gelu(x)", op="torch.nn.functional.gelu", args="{x: input}")
    forge.use_kernels([made.folder])
    before = registered()
    other = repository("other", "def f(x):\n    return F.relu(x)", op="torch.nn.functional.relu", args="{x: input}")
    with pytest.raises(ValueError, match=r"kernel acme\.gelu of torch\.nn\.functional\.gelu is there already"):
        forge.use_kernels([other.folder, made.folder])
    assert registered() == before
    jitted = forge.jit(lambda x: F.relu(x))
    jitted(torch.randn(3))
    assert [row.executor for row in forge.explain(jitted).rows] == ["torch"]
