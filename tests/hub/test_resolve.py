"""Resolution of kernels: from the Hub, from its cache, from a folder."""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from forge import hub
from forge.hub import client, compat
from forge.testing.hub_server import Hub
from tests.hub.kernels import LOCAL, kernel, metadata, write


def test_a_version_is_a_branch_of_the_hub_and_its_kernel_is_loaded(server: Hub) -> None:
    commit = server.publish("acme/rms", kernel())
    resolved = hub.resolve("acme/rms", version=1)
    assert (resolved.source, resolved.commit, resolved.variant) == ("acme/rms", commit, "torch-universal")
    assert resolved.folder.parts[-4:] == ("snapshots", commit, "build", "torch-universal")
    assert hub.load(resolved).double(21) == 42


def test_a_version_or_revision_can_stand_in_the_name(server: Hub) -> None:
    first, second = server.publish("acme/rms", kernel()), server.publish("acme/rms", kernel(), branch="fix/one")
    assert hub.resolve("acme/rms@v1").commit == first
    assert hub.resolve("acme/rms@fix/one").commit == second
    assert hub.resolve(f"acme/rms@{first}").commit == first


def test_without_a_version_the_error_names_those_there_are(server: Hub) -> None:
    server.publish("acme/rms", kernel())
    server.publish("acme/rms", kernel(), branch="v2")
    wanted = r"acme/rms: give a version, as in acme/rms@v1, or a revision; branches and tags: v1, v2$"
    with pytest.raises(hub.NotFoundError, match=wanted):
        hub.resolve("acme/rms")
    with pytest.raises(hub.NotFoundError, match=r"acme/rms@v3: there is no 'v3'; branches and tags: v1, v2"):
        hub.resolve("acme/rms", version=3)


def test_version_1_works_offline_after_it_was_resolved_once(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """hub-facts 4, first half: `kernels` never writes refs/v1."""
    commit = server.publish("acme/rms", kernel())
    hub.resolve("acme/rms", version=1)
    asked = len(server.requests)
    client.forget()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved = hub.resolve("acme/rms", version=1)
    assert resolved.commit == commit and len(server.requests) == asked
    assert hub.load(resolved).double(4) == 8


def test_kernels_itself_works_offline_by_version_after_forge_resolved_it(
    server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish("acme/rms", kernel())
    hub.resolve("acme/rms", version=1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("kernels.resolver.CACHE_DIR", str(cache))
    import kernels

    assert kernels.has_kernel("acme/rms", version=1)


def test_an_unreachable_hub_is_served_from_the_cache_at_once_with_a_notice(server: Hub) -> None:
    """hub-facts 4, second half."""
    commit = server.publish("acme/rms", kernel())
    hub.resolve("acme/rms", version=1)
    server.stop()
    client.forget()
    started = time.monotonic()
    with pytest.warns(hub.HubNotice, match=f"the cache serves commit {commit[:12]}, because .*did not|does not"):
        resolved = hub.resolve("acme/rms", version=1)
    assert time.monotonic() - started < 1.0
    assert hub.load(resolved).double(1) == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_refuses_is_served_from_the_cache(server: Hub, status: int) -> None:
    server.publish("acme/rms", kernel())
    hub.resolve("acme/rms", version=1)
    server.status = status
    client.forget()
    with pytest.warns(hub.HubNotice, match=str(status)):
        assert hub.load(hub.resolve("acme/rms", version=1)).double(1) == 2


def test_a_hub_that_does_not_answer_is_asked_once(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.stop()
    wanted = r"^acme/rms@v1: http://\S+ does not give it: .*; and the cache holds nothing of it$"
    with pytest.raises(hub.UnreachableError, match=wanted):
        hub.resolve("acme/rms", version=1)
    monkeypatch.setattr(client, "_get_refs", lambda *_: pytest.fail("asked again"))
    with pytest.raises(hub.UnreachableError, match="did not answer a moment ago"):
        hub.resolve("acme/other", version=1)


def test_the_hub_has_a_time_limit(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(client, "PROBE_SECONDS", 0.2)
        with pytest.raises(hub.UnreachableError, match="Timeout"):
            hub.resolve("acme/rms", version=1)


def test_a_cached_commit_needs_no_request(server: Hub) -> None:
    commit = server.publish("acme/rms", kernel())
    hub.resolve("acme/rms", revision=commit)
    asked = len(server.requests)
    client.forget()
    hub.load(hub.resolve("acme/rms", revision=commit))
    assert len(server.requests) == asked


def test_a_cached_version_needs_one_request_a_process(server: Hub) -> None:
    server.publish("acme/rms", kernel())
    hub.resolve("acme/rms", version=1)
    asked = len(server.requests)
    client.forget()
    for _ in range(3):
        hub.resolve("acme/rms", version=1)
    assert server.requests[asked:] == ["GET /api/kernels/acme/rms/refs"]


def test_an_interrupted_download_is_completed(server: Hub) -> None:
    server.publish("acme/rms", kernel())
    resolved = hub.resolve("acme/rms", version=1)
    (resolved.folder / "ops.py").unlink()
    assert hub.load(hub.resolve("acme/rms", version=1)).double(2) == 4


def test_an_incomplete_variant_is_not_offered_offline(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish("acme/rms", kernel())
    (hub.resolve("acme/rms", version=1).folder / "ops.py").unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    client.forget()
    with pytest.raises(hub.NotFoundError, match=r"torch-universal: is not in the cache"):
        hub.resolve("acme/rms", version=1)


def test_offline_the_best_variant_of_the_cache_is_taken(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    better = kernel(variant="torch-cpu")
    server.publish("acme/rms", kernel() | better)
    selection = hub.select("acme/rms", version=1, backend="cpu")
    hub.fetch(selection, "torch-universal")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    client.forget()
    resolved = hub.resolve("acme/rms", version=1, backend="cpu")
    assert resolved.variant == "torch-universal"
    assert dict(resolved.rejected)["torch-cpu"].startswith("is not in the cache")


def test_a_cache_that_another_tool_filled_serves(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = server.publish("acme/rms", kernel())
    import huggingface_hub

    huggingface_hub.HfApi(endpoint=server.url).snapshot_download(
        "acme/rms", repo_type="kernel", revision=commit, cache_dir=cache
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    policy = hub.Policy(repositories=("acme/rms",))
    assert hub.load(hub.resolve("acme/rms", revision=commit, policy=policy)).double(1) == 2


def test_a_cache_that_cannot_be_written_to_serves(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish("acme/rms", kernel())

    def read_only(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("forge.hub.cache.os.replace", read_only)
    assert hub.resolve("acme/rms", version=1).variant == "torch-universal"


def test_with_a_gpu_a_repository_for_the_cpu_alone_is_taken(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = compat.decide_variants

    def with_a_gpu(variants: list, backend: str) -> list:
        if backend == "cpu":
            return decide(variants, backend)
        for_gpu = {"torch-cuda", "torch-universal"}
        return [(each, None if each.variant_str in for_gpu else "it is for the CPU") for each in variants]

    monkeypatch.setattr(compat, "active_backend", lambda backend: backend or "cuda")
    monkeypatch.setattr(compat, "decide_variants", with_a_gpu)
    server.publish("acme/one", kernel(variant="torch-cpu"))
    server.publish("acme/both", kernel(variant="torch-cpu") | kernel(variant="torch-cuda"))
    resolved = hub.resolve("acme/one", version=1)
    assert (resolved.variant, resolved.backend) == ("torch-cpu", "cpu")
    resolved = hub.select("acme/both", version=1)
    assert (resolved.variant, resolved.backend) == ("torch-cuda", "cuda")
    with pytest.raises(hub.NotFoundError, match=r"no variant fits this system \(backend cuda\)"):
        hub.resolve("acme/one", version=1, backend="cuda")


def test_rejected_variants_keep_their_reasons(server: Hub) -> None:
    names = ("torch26-cxx98-cu118-x86_64-linux", "torch-cuda", "torch-universal", "nonsense")
    server.publish("acme/rms", {path: data for name in names for path, data in kernel(variant=name).items()})
    rejected = dict(hub.resolve("acme/rms", version=1, backend="cpu").rejected)
    assert set(rejected) == set(names) - {"torch-universal"}
    assert "2.6" in rejected["torch26-cxx98-cu118-x86_64-linux"]
    assert "not the name of a variant" in rejected["nonsense"]


def test_no_variant_is_an_error_with_every_reason(server: Hub) -> None:
    server.publish("acme/rms", kernel(variant="torch26-cxx98-cu118-x86_64-linux") | kernel(variant="torch-metal"))
    with pytest.raises(hub.NotFoundError) as caught:
        hub.resolve("acme/rms", version=1)
    text = str(caught.value)
    assert text.startswith("acme/rms@v1 (commit ") and "no variant fits this system (backend " in text
    assert "\n  torch26-cxx98-cu118-x86_64-linux: " in text and "\n  torch-metal: " in text


def test_an_unknown_repository_or_version_is_not_available_and_raises_nothing(server: Hub) -> None:
    """hub-facts 8: `has_kernel` raises for both."""
    server.publish("acme/rms", kernel())
    assert hub.available("acme/rms", version=1)
    assert not hub.available("acme/rms", version=7)
    assert not hub.available("acme/none", version=1)
    with pytest.raises(hub.NotFoundError, match="acme/none"):
        hub.resolve("acme/none", version=1)


@pytest.mark.slow
def test_telemetry_may_be_off(server: Hub, tmp_path: Path) -> None:
    """hub-facts 5: `kernels` then sends an illegal user agent. The test runs the whole client in a separate process."""
    server.publish("acme/rms", kernel())
    environment = os.environ | {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
    }
    environment.pop("KERNELS_CACHE")
    program = "from forge import hub; print(hub.load(hub.resolve('acme/rms', version=1)).double(3))"
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.stdout == "6\n", ran.stderr
    assert "Fetching 3 files" in ran.stderr, "huggingface_hub shows its progress"
    assert server.agents and all(agent == agent.strip() and "; ;" not in agent for agent in server.agents)
    assert not any(agent.startswith("kernels") for agent in server.agents)


def test_the_environment_variable_for_local_kernels_is_not_obeyed(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hub-facts 6: LOCAL_KERNELS skips trust, version and architecture checks."""
    write(tmp_path / "evil", kernel({"ops.py": "def double(x):\n    return x * 3\n"}))
    server.publish("acme/rms", kernel())
    monkeypatch.setenv("LOCAL_KERNELS", f"acme/rms={tmp_path / 'evil'}")
    assert hub.load(hub.resolve("acme/rms", version=1)).double(1) == 2


def test_a_folder_is_an_opt_in(tmp_path: Path) -> None:
    """hub-facts 6."""
    write(tmp_path / "rms", kernel())
    with pytest.raises(hub.RefusedError, match=r"is a folder of this machine; allow it with Policy\(local=True\)"):
        hub.resolve(tmp_path / "rms")
    assert hub.resolve(tmp_path / "rms", policy=LOCAL).commit is None


@pytest.mark.parametrize("inner", ["", "build", "build/torch-universal"])
def test_a_folder_may_be_the_repository_its_build_or_the_variant(tmp_path: Path, inner: str) -> None:
    write(tmp_path / "rms", kernel({"metadata.json": None}))
    resolved = hub.resolve(tmp_path / "rms" / inner, policy=LOCAL)
    assert (resolved.variant, resolved.metadata.name) == ("torch-universal", "rms")


def test_the_sources_beside_build_are_no_variant(tmp_path: Path) -> None:
    (tmp_path / "torch-ext" / "rms").mkdir(parents=True)
    write(tmp_path, kernel())
    assert hub.resolve(tmp_path, policy=LOCAL).rejected == ()


def test_a_folder_named_as_no_variant_may_be_one(tmp_path: Path) -> None:
    write(tmp_path, kernel(variant="mine"))
    assert hub.load(hub.resolve(tmp_path / "build" / "mine", policy=LOCAL)).double(1) == 2


def test_a_folder_of_a_variant_for_another_system_is_refused(tmp_path: Path) -> None:
    """hub-facts 6: get_local_kernel does not check the variant if the path itself is one."""
    write(tmp_path, kernel(variant="torch26-cxx98-cu118-x86_64-linux"))
    with pytest.raises(hub.NotFoundError, match="torch26-cxx98-cu118-x86_64-linux: "):
        hub.resolve(tmp_path / "build" / "torch26-cxx98-cu118-x86_64-linux", policy=LOCAL)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(hub.NotFoundError, match="nothing: there is no such folder"):
        hub.resolve(tmp_path / "nothing", policy=LOCAL)


def test_a_backend_that_torch_does_not_have_is_named(tmp_path: Path) -> None:
    write(tmp_path, kernel())
    with pytest.raises(hub.NotFoundError, match="Invalid backend 'abacus'"):
        hub.resolve(tmp_path, policy=LOCAL, backend="abacus")
    assert hub.resolve(tmp_path, policy=LOCAL, backend="cpu").backend == "cpu"


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("acme/rms", {"version": 1, "revision": "main"}, ValueError, "version=1 and revision='main'; give one"),
        ("acme/rms@v1", {"version": 2}, ValueError, "gives a revision, and version=2"),
        ("acme/rms", {"version": "1"}, TypeError, "version='1', but must be an integer"),
        ("acme/rms", {"revision": "../../x"}, ValueError, "is not a branch, tag or commit"),
        ("./rms", {"version": 1}, ValueError, "is a folder, which has no version"),
        ("", {}, TypeError, 'neither "org/name" nor a folder'),
        (3, {}, TypeError, 'neither "org/name" nor a folder'),
    ],
)
def test_what_names_no_kernel_is_an_error(source: object, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        hub.resolve(source, **options)


def test_a_kernel_may_depend_on_another(server: Hub) -> None:
    dependency = [{"repo-id": "acme/base", "version": 1}]
    server.publish("acme/base", kernel({"metadata.json": metadata("base", "_base_cd34")}))
    server.publish(
        "acme/rms",
        kernel(
            {
                "metadata.json": metadata(kernel_depends=dependency),
                "__init__.py": "from kernels import get_kernel_dep\nquadruple = "
                "lambda x: get_double(get_double(x))\nget_double = get_kernel_dep('acme/base').double\n",
            }
        ),
    )
    assert hub.load(hub.resolve("acme/rms", version=1)).quadruple(1) == 4


def test_kernels_that_depend_on_each_other_are_an_error(server: Hub) -> None:
    server.publish("acme/a", kernel({"metadata.json": metadata(kernel_depends=[{"repo-id": "acme/b", "version": 1}])}))
    server.publish("acme/b", kernel({"metadata.json": metadata(kernel_depends=[{"repo-id": "acme/a", "version": 1}])}))
    with pytest.raises(hub.MalformedError, match="acme/a: depends on itself, by way of acme/b"):
        hub.resolve("acme/a", version=1)


def test_what_the_hub_answers_is_not_believed(server: Hub) -> None:
    commit = server.publish("acme/rms", kernel())
    server.repositories["acme/rms"].branches["v1"] = "../../x"
    with pytest.raises(hub.MalformedError, match=r"the Hub says that v1 is the commit '../../x'"):
        hub.resolve("acme/rms", version=1)
    server.repositories["acme/rms"].commits[commit]["build/../../../x"] = b""
    with pytest.raises(hub.MalformedError, match=r"'build/../../../x' in its listing leaves its folder"):
        hub.resolve("acme/rms", revision=commit)


def test_a_huge_file_is_refused_before_it_is_fetched(server: Hub) -> None:
    server.publish("acme/rms", kernel())
    server.repositories["acme/rms"].listed["build/torch-universal/big.so"] = 5 << 30
    with pytest.raises(hub.MalformedError, match=r"big.so\): has 5368709120 bytes, but at most 4294967296"):
        hub.resolve("acme/rms", version=1)
    assert not any("/resolve/" in request for request in server.requests)


def test_the_record_of_the_cache_is_only_a_help(server: Hub, cache: Path) -> None:
    commit = server.publish("acme/rms", kernel())
    hub.resolve("acme/rms", version=1)
    record = cache / "kernels--acme--rms" / "forge" / f"{commit}.json"
    assert json.loads(record.read_text())["trusted"] is True
    record.write_text('{"files": 3')
    assert hub.load(hub.resolve("acme/rms", version=1)).double(1) == 2


def test_huggingface_hub_reads_its_cache_as_before(server: Hub, cache: Path) -> None:
    server.publish("acme/rms", kernel())
    hub.resolve("acme/rms", version=1)
    import huggingface_hub

    assert not huggingface_hub.scan_cache_dir(cache).warnings
