"""Sources for `kernels=` other than a folder: a lock file, a variant for another backend."""

from pathlib import Path

import pytest
import torch

import forge
from forge import hub
from forge.executors.hubex import gather, kernel_executor, worker
from forge.executors.hubex.verification import process
from forge.hub.manifest import ManifestError
from tests.hub.kernels import LOCAL
from tests.hub.repositories import GELU, Repository, claimed, run

CODE = "def f(x): return F.gelu(x)"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_lock_file_names_all_that_it_holds(tmp_path: Path) -> None:
    made = [Repository(tmp_path, name, CODE, **GELU) for name in ("one", "two")]
    lock = tmp_path / "forge-kernels.lock"
    hub.lock_kernels([each.folder for each in made], lock, policy=LOCAL)
    assert [kernel.name for kernel in gather([lock])] == ["acme.one", "acme.two"]
    jitted = forge.jit(torch.nn.functional.gelu, kernels=[str(lock)])
    jitted(torch.randn(4))
    assert [row.executor for row in forge.explain(jitted).rows] == ["acme.one"]
    made[1].write("raise SystemExit('imported')")
    with pytest.raises(hub.IntegrityError, match="are not those of"):
        gather([lock])


def test_a_worker_chooses_the_variant_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has CUDA here, and the user requests the CPU's variant: another process must find that one, too."""
    made = Repository(tmp_path, "chosen", CODE, **GELU)
    variants = made.folder / "build"
    (variants / "torch-universal").rename(variants / "torch-cpu")
    kernel = gather([made.folder], backend="cpu")[0]
    assert kernel.origin.backend == "cpu"
    asked = []
    monkeypatch.setattr(worker, "gather", lambda sources, **options: asked.append(options) or [])
    with pytest.raises(hub.IntegrityError):
        worker.find(process._request(kernel, None, 1.0, ""))
    assert asked[0]["backend"] == "cpu"
    assert claimed(run(torch.nn.functional.gelu, torch.randn(4), by=kernel_executor([kernel])), made) == 1


def test_who_means_a_folder_by_what_reads_as_a_repository_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, offline: None
) -> None:
    (tmp_path / "kernels" / "norms").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    start = r"^kernels/norms: \S+ is not asked: offline \(HF_HUB_OFFLINE is set\); and the cache holds nothing of it; "
    with pytest.raises(hub.UnreachableError, match=start + r"for the folder of this name, write ./kernels/norms$"):
        gather(["kernels/norms"])


def test_what_is_no_source_is_named() -> None:
    with pytest.raises(TypeError, match=r"kernels: 3 is no repository, folder, manifest, lock file or kernel"):
        gather([3])
    with pytest.raises(TypeError, match=r"kernels: <executor torch> is no .*; give an executor as executors=\["):
        gather(forge.executors.resolve_executors(["torch"]))
    with pytest.raises(
        ManifestError, match=r"'torch\.nn\..*Hardswish'; did you mean 'torch\.nn\.functional\.hardswish'"
    ):
        forge.kernel(torch.nn.Hardswish, lambda input: input)
