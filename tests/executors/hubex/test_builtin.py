"""The kernels that come with forge: when they are found, trusted and selected."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.hubex import HubExecutor, Kernel, Verifier, builtin
from forge.hub.manifest import ManifestError
from forge.transforms import linear_cross_entropy
from tests.hub.kernels import process_restored
from tests.hub.repositories import GELU, Repository

CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with process_restored():
        yield


def silu(input: torch.Tensor) -> torch.Tensor:
    return input / (1 + torch.exp(-input))


def threshold(**options: object) -> Kernel:
    """Return a kernel that is faster for 100 elements or more."""
    return forge.kernel(
        F.silu, silu, name="large", dtypes=[torch.float32], grad="composite", faster="input.numel >= 100", **options
    )


def chosen(jitted: object, rows: int) -> tuple[str, tuple]:
    """Return the executor of the call for that many elements, and the reasons of those that declined it."""
    jitted(torch.randn(rows))
    (row,) = [row for row in forge.explain(jitted).rows if "silu" in row.operation]
    return row.executor, row.declined


@pytest.mark.parametrize("folder", builtin.FOLDERS, ids=lambda folder: folder.name)
def test_the_kernels_are_those_that_were_verified_on_a_gpu(folder: Path) -> None:
    known, now = builtin.released_digests(folder), builtin.digests(folder)
    changed = {name for name, digest in now.items() if known.get(name) != digest}
    assert now and not changed, "verify them again: make release-kernels, on a machine with a GPU"


def test_where_a_kernel_is_faster_may_change_without_verification_and_what_it_does_may_not(tmp_path: Path) -> None:
    made = Repository(tmp_path, "gelu", "def f(x): return F.gelu(x)", faster="input.numel >= 100", **GELU)
    shutil.move(made.folder / "forge_kernels.yaml", made.folder / "build" / "torch-universal")
    (before,) = builtin.digests(made.folder).values()
    manifest = made.folder / "build" / "torch-universal" / "forge_kernels.yaml"
    manifest.write_text(manifest.read_text().replace("100", "200"))
    assert list(builtin.digests(made.folder).values()) == [before]
    manifest.write_text(manifest.read_text().replace("approximate == 'none'", "True"))
    (changed,) = builtin.digests(made.folder).values()
    made.write("def f(x): return F.gelu(x) + 1")
    assert len({before, changed, *builtin.digests(made.folder).values()}) == 3


def test_a_change_concerns_the_kernels_that_import_it_alone(tmp_path: Path) -> None:
    """one.f calls a helper of shared.py, two.g nothing; a third file and the package's exports affect neither."""
    made = Repository(tmp_path, "one", "", kernel_name="f", **GELU)
    variant = made.folder / "build" / "torch-universal"
    manifest = made.folder / "forge_kernels.yaml"
    text = manifest.read_text()
    manifest.write_text(
        text
        + text[text.index("- op") :].replace("name: one", "name: two").replace(": f", ": g").replace("gelu", "silu")
    )
    files = {
        "__init__.py": "from .one import f\nfrom .two import g\n\n__all__ = ['f', 'g']\n",
        "one.py": "def f(x):\n    from .shared import helper\n    return helper(x)\n",
        "two.py": "def g(x): return x\n",
        "shared.py": "from . import deeper\ndef helper(x): return deeper.same(x)\n",
        "deeper.py": "def same(x): return x\n",
        "third.py": "",
    }
    for name, content in files.items():
        (variant / name).write_text(content)

    def changed_by(name: str, old: str, new: str) -> list[str]:
        before = builtin.digests(made.folder)
        path = manifest if name == manifest.name else variant / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))
        return [each.split()[0] for each, now in builtin.digests(made.folder).items() if now != before[each]]

    assert changed_by("one.py", "helper(x)", "helper(x) + 1") == ["one"]
    assert changed_by("two.py", "return x", "return x + 1") == ["two"]
    assert changed_by("shared.py", "same(x)", "same(x) + 1") == ["one"]
    assert changed_by("deeper.py", "return x", "return x + 1") == ["one"]
    (variant / "third.py").write_text("from .one import f as h\n")
    assert changed_by("__init__.py", "from .two", "from .third import h\nfrom .two") == []
    assert changed_by("__init__.py", "__all__", "print('imported')\n__all__") == ["one", "two"]
    assert changed_by("metadata.json", "}", " }") == ["one", "two"]
    assert changed_by(manifest.name, "kernel_name: f", "kernel_name: g") == ["one"]


def test_a_kernel_is_chosen_where_it_was_measured_to_be_faster() -> None:
    assert chosen(forge.jit(lambda x: F.silu(x), kernels=[threshold()]), 100)[0] == "large"
    executor, declined = chosen(forge.jit(lambda x: F.silu(x), kernels=[threshold()]), 99)
    assert executor != "large"
    assert declined[0] == ("large", "the kernel is not known to be faster: input.numel = 99 is less than 100")


def test_what_it_is_faster_at_decides_neither_a_direct_call_nor_a_verification() -> None:
    x = torch.randn(5)
    torch.testing.assert_close(forge.load_kernel(F.silu, kernels=[threshold()])(x), F.silu(x))
    found = list(builtin.verify_all(threshold(device="cpu"), Verifier()))
    assert [row[-1] for row in found] == ["ok"] and int(found[0][-2]) > 0  # of samples, which are small


def test_where_it_is_faster_is_read_as_other_conditions_are() -> None:
    with pytest.raises(ManifestError, match=r"faster: .width. in .* is neither an argument"):
        forge.kernel(F.silu, silu, faster="width >= 100")
    with pytest.raises(ManifestError, match=r"faster: .len\(input\). is not an allowed expression"):
        forge.kernel(F.silu, silu, faster="len(input)")
    assert "faster where input.numel >= 100" in forge.kernels([threshold()])[0].constraints


def test_kernels_are_looked_for_when_somebody_asks() -> None:
    asked = []

    def later() -> list[Kernel]:
        asked.append(True)
        return [threshold()]

    executor = HubExecutor("late", builtin_kernels=later)
    assert not asked
    assert [kernel.name for kernel in executor.kernels] == ["large"]
    executor.add([forge.kernel(F.silu, silu, name="another")])
    assert [kernel.name for kernel in executor.kernels] == ["large", "another"] and len(asked) == 1


@pytest.mark.skipif(CUDA, reason="there is a GPU")
def test_without_a_gpu_there_are_none() -> None:
    assert builtin.builtin_kernels(lambda kernels: None) == []


@pytest.mark.parametrize("changed", [False, True])
def test_files_that_were_verified_before_release_are_trusted_and_others_are_not(
    changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Repository(tmp_path, "gelu", "def f(x): return F.gelu(x)", **GELU)
    known = {name: "another" if changed else digest for name, digest in builtin.digests(made.folder).items()}
    (made.folder / builtin.VERIFIED).write_text(json.dumps({"kernels": known}))
    monkeypatch.setattr(builtin, "FOLDERS", (made.folder,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found_by = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: name == "triton" or found_by(name, *of))
    trusted: list[Kernel] = []
    found = builtin.builtin_kernels(trusted.extend)
    assert found and trusted == ([] if changed else found)


def test_a_kernel_that_nobody_asked_for_gives_way_to_a_head_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "BYTE_LIMIT", 0)

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, weight), target)

    def own(input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -input.log_softmax(-1).gather(1, target[:, None]).mean()

    options = {"args": {"input": "input", "target": "target"}, "device": "cpu", "grad": "composite"}
    kernel = forge.kernel(F.cross_entropy, own, where=["input.ndim == 2", "target.ndim == 1"], **options)
    arguments = torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))
    for asked_for in (True, False):
        executor = HubExecutor("kernels")
        executor.add([replace(kernel, builtin=not asked_for)])
        jitted = forge.jit(loss, executors=[executor, "torch"])
        torch.testing.assert_close(jitted(*arguments), loss(*arguments))
        operations = [row.operation for row in forge.explain(jitted).rows]
        assert any("linear_cross_entropy" in each for each in operations) is not asked_for


@pytest.mark.skipif(not CUDA, reason="no GPU here")
def test_large_norms_on_a_gpu_are_forges_own_and_need_no_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "_ask", lambda *args: pytest.fail("it was verified"))
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    jitted = forge.jit(lambda x, w: F.rms_norm(x, w.shape, w, 1e-5))
    found = torch.autograd.grad(jitted(x, weight).sum(), (x, weight))
    expected = torch.autograd.grad(F.rms_norm(x, weight.shape, weight, 1e-5).sum(), (x, weight))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * 8192**0.5)
    assert "forge-triton.rms_norm" in str(forge.explain(jitted))
