"""Versions, locks and policies of kernels in models, and their verification without a Hub."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import forge
from forge import hub
from forge.executors.hubex import kernel_executor
from forge.hub import HubNotice, client
from forge.hub.manifest import ManifestError
from forge.testing.hub_server import Hub
from tests.hub.kernels import metadata, native_module, write
from tests.hub.repositories import gelu

HEADER = "import torch\nimport torch.nn.functional as F\n"
MANIFEST = """\
forge_kernels: 1
library: {name: acme}
ops:
- op: torch.nn.functional.gelu
  type_alias: {T: [float32]}
  kernels:
  - name: gelu
    kernel_name: f
    arg_meta: {input: T}
    args: {x: input}
    where: ["approximate == 'none'"]
    grad: composite
    tolerance: {float32: [0.3, 0.3]}
"""


def gelu_files(shift: float, build: str = "ab12", **others: str | bytes) -> dict[str, str | bytes]:
    """Return the files of a repository whose gelu is off by `shift`, within its declared tolerance."""
    files = {
        "__init__.py": f"{HEADER}\ndef f(x):\n    return F.gelu(x) + {shift}\n",
        "forge_kernels.yaml": MANIFEST,
        "metadata.json": metadata("gelu", f"_gelu_{build}"),
    }
    return {f"torch-universal/{path}": text for path, text in (files | others).items()}


def shift_of(jitted: Callable) -> float:
    """Return the shift of the kernel that ran."""
    x = torch.randn(6)
    return round((jitted(x) - gelu(x)).mean().item(), 4)


def test_two_versions_serve_two_models_in_one_process(server: Hub, asked: list) -> None:
    server.publish("acme/gelu", gelu_files(0.1), branch="v1")
    server.publish("acme/gelu", gelu_files(0.2), branch="v2")
    first, second = (forge.jit(gelu, kernels=[f"acme/gelu@v{version}"]) for version in (1, 2))
    assert [shift_of(first), shift_of(second), shift_of(first)] == [0.1, 0.2, 0.1]
    assert len(asked) == 4  # each in general, and for its call
    assert all(row.executor == "acme.gelu" for jitted in (first, second) for row in forge.explain(jitted).rows[:1])


def test_versions_in_folders_serve_two_models_in_one_process(tmp_path: Path, asked: list) -> None:
    for version in (1, 2):
        write(tmp_path / f"v{version}", gelu_files(version / 10, build=f"v{version}"))
    first, second = (forge.jit(gelu, kernels=[tmp_path / f"v{version}"]) for version in (1, 2))
    assert [shift_of(first), shift_of(second), shift_of(first)] == [0.1, 0.2, 0.1]
    assert len(asked) == 4


def test_a_commit_is_used_and_verified_with_no_hub_at_all(
    server: Hub, asked: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = server.publish("acme/gelu", gelu_files(0.1))
    hub.resolve("acme/gelu", version=1)
    server.stop()
    client.forget()
    monkeypatch.delenv("HF_ENDPOINT")
    assert shift_of(forge.jit(gelu, kernels=[f"acme/gelu@{commit}"])) == 0.1
    assert len(asked) == 2


def test_a_version_is_used_offline_after_it_was_used_online(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish("acme/gelu", gelu_files(0.1))
    assert shift_of(forge.jit(gelu, kernels=["acme/gelu@v1"])) == 0.1
    before = len(server.requests)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    client.forget()
    assert shift_of(forge.jit(gelu, kernels=["acme/gelu@v1"])) == 0.1
    assert len(server.requests) == before


def test_a_hub_that_is_gone_is_served_from_the_cache_with_a_notice(server: Hub) -> None:
    server.publish("acme/gelu", gelu_files(0.1))
    hub.resolve("acme/gelu", version=1)
    server.stop()
    client.forget()
    with pytest.warns(HubNotice, match=r"acme/gelu@v1: the cache serves commit"):
        jitted = forge.jit(gelu, kernels=["acme/gelu@v1"])
    assert shift_of(jitted) == 0.1


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler")
def test_two_builds_of_one_native_module_serve_two_models_in_one_process(server: Hub, tmp_path: Path) -> None:
    for version in (1, 2):
        name = f"_gelu_v{version}"  # as the Hub's builder names it: unique to the build
        code = f"{HEADER}from . import {name}\n\ndef f(x):\n    return F.gelu(x) + {name}.value() / 10\n"
        native = {f"{name}.abi3.so": native_module(tmp_path, name, version)}
        server.publish("acme/gelu", gelu_files(0, **{"__init__.py": code}, **native), branch=f"v{version}")
    first, second = (forge.jit(gelu, kernels=[f"acme/gelu@v{version}"]) for version in (1, 2))
    assert [shift_of(first), shift_of(second), shift_of(first)] == [0.1, 0.2, 0.1]
    assert all(row.executor == "acme.gelu" for jitted in (first, second) for row in forge.explain(jitted).rows[:1])


def locked(server: Hub, folder: Path) -> Path:
    """Return a lock of acme/gelu@v1, after the Hub's branch has moved on."""
    server.publish("acme/gelu", gelu_files(0.1))
    lock = folder / "forge-kernels.lock"
    hub.lock_kernels(["acme/gelu@v1"], lock, policy=hub.Policy(trust="any"))
    server.publish("acme/gelu", gelu_files(0.2))
    client.forget()
    return lock


def test_a_locked_kernel_is_used_and_verified_with_the_hub_gone(
    server: Hub, asked: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locked(server, tmp_path)
    server.stop()
    monkeypatch.delenv("HF_ENDPOINT")
    policy = hub.Policy(trust="locked")
    by = kernel_executor(["acme/gelu"], lock=lock, policy=policy)
    assert shift_of(forge.jit(gelu, executors=[by, "torch"])) == 0.1
    assert len(asked) == 2
    with pytest.raises(hub.RefusedError, match='trust="locked" takes what a lock file holds'):
        kernel_executor(["acme/gelu@v1"], policy=policy)


def test_what_the_policy_allows_is_allowed_where_it_is_verified_too(server: Hub, asked: list) -> None:
    code = f"{HEADER}\nimport yaml\n\ndef f(x):\n    return F.gelu(x) + 0.1\n"
    server.publish("other/gelu", gelu_files(0, **{"__init__.py": code}))
    policy = hub.Policy(trust="any", imports=("yaml",))
    by = kernel_executor(["other/gelu@v1"], policy=policy)
    assert shift_of(forge.jit(gelu, executors=[by, "torch"])) == 0.1
    assert len(asked) == 2


def test_a_kernel_named_by_a_manifest_on_this_machine_needs_the_policys_word(
    server: Hub, tmp_path: Path, asked: list
) -> None:
    lock = locked(server, tmp_path)
    manifest = tmp_path / "theirs.yaml"
    manifest.write_text(MANIFEST.replace("kernel_name: f", "kernel_name: hub:acme/gelu@v1:f"))
    with pytest.raises(ManifestError, match='trust="locked" takes what a lock file holds, and no lock was given'):
        kernel_executor([manifest], policy=hub.Policy(trust="locked"))
    by = kernel_executor([manifest], lock=lock, policy=hub.Policy(trust="locked"))
    assert shift_of(forge.jit(gelu, executors=[by, "torch"])) == 0.1
    assert len(asked) == 2
    server.stop()
    by = kernel_executor([manifest], lock=lock, policy=hub.Policy(trust="locked"))
    assert shift_of(forge.jit(lambda x: gelu(x.view(2, 3)).view(6), executors=[by, "torch"])) == 0.1
