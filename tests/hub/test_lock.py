"""The lock file, and loading with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge import cli, hub
from forge.hub import client
from forge.testing.hub_server import Hub
from tests.hub.kernels import LOCAL, kernel, metadata, write


def published(server: Hub) -> str:
    return server.publish("acme/rms", kernel({"data/_a.so": b"native"}))


def test_a_lock_holds_the_commit_and_the_sha256_of_every_file(server: Hub, tmp_path: Path) -> None:
    commit = published(server)
    hub.lock_kernels(["acme/rms@v1"], tmp_path / "kernels.lock")
    values = json.loads((tmp_path / "kernels.lock").read_text())
    (entry,) = values["kernels"]
    assert (entry["source"], entry["version"], entry["revision"], entry["commit"]) == ("acme/rms", 1, None, commit)
    files = entry["variants"]["torch-universal"]
    assert list(files) == ["__init__.py", "data/_a.so", "metadata.json", "ops.py"]
    assert all(len(sha) == 64 for sha in files.values())


def test_a_lock_is_the_same_text_whatever_the_order(server: Hub, tmp_path: Path) -> None:
    published(server)
    server.publish("acme/other", kernel({"metadata.json": metadata("other", "_other")}))
    hub.lock_kernels(["acme/rms@v1", "acme/other@v1"], tmp_path / "a.lock")
    hub.lock_kernels(["acme/other@v1"], tmp_path / "b.lock")
    hub.lock_kernels(["acme/rms@v1"], tmp_path / "b.lock")
    assert (tmp_path / "a.lock").read_text() == (tmp_path / "b.lock").read_text()


def test_a_locked_kernel_is_loaded_without_a_request(server: Hub, tmp_path: Path) -> None:
    published(server)
    lock = hub.lock_kernels(["acme/rms@v1"], tmp_path / "kernels.lock")
    server.publish("acme/rms", kernel({"ops.py": "def double(x):\n    return 0\n"}))
    server.stop()
    client.forget()
    policy = hub.Policy(trust="locked")
    assert hub.load(hub.resolve("acme/rms", version=1, lock=lock, policy=policy)).double(1) == 2
    assert hub.load(hub.resolve("acme/rms", lock=tmp_path / "kernels.lock", policy=policy)).double(1) == 2


def test_locking_again_takes_the_newest_commit(server: Hub, tmp_path: Path) -> None:
    published(server)
    hub.lock_kernels(["acme/rms@v1"], tmp_path / "kernels.lock")
    newer = server.publish("acme/rms", kernel({"ops.py": "def double(x):\n    return 0\n"}))
    client.forget()
    (entry,) = hub.lock_kernels([], tmp_path / "kernels.lock").kernels
    assert entry.commit == newer


def test_two_versions_can_be_locked(server: Hub, tmp_path: Path) -> None:
    first, second = published(server), server.publish("acme/rms", kernel(), branch="v2")
    lock = hub.lock_kernels(["acme/rms@v1", "acme/rms@v2"], tmp_path / "kernels.lock")
    assert [hub.resolve("acme/rms", version=version, lock=lock).commit for version in (1, 2)] == [first, second]
    with pytest.raises(hub.NotFoundError, match=r"kernels.lock holds version 1, version 2; say which"):
        hub.resolve("acme/rms", lock=lock)
    assert hub.resolve(f"acme/rms@{first}", lock=lock).commit == first


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: (folder / "ops.py").unlink(), "ops.py is missing"),
        (lambda folder: (folder / "new.py").write_text(""), "new.py is not among them"),
        (lambda folder: (folder / "ops.py").write_text("x = 1"), "ops.py is sha256:"),
        (lambda folder: (folder / "metadata.json").write_text("{}"), "metadata.json is sha256:"),
        (lambda folder: (folder / "data/_a.so").write_bytes(b"evil"), "data/_a.so is sha256:"),
        (lambda folder: write_bytecode(folder), "__pycache__/ops.pyc is not among them"),
    ],
)
def test_a_missing_extra_or_changed_file_is_refused_before_any_import(
    tmp_path: Path, change: Callable[[Path], Any], problem: str
) -> None:
    """hub-facts 1: `kernels` locks the commit only."""
    mark = tmp_path / "ran"
    write(tmp_path, kernel({"data/_a.so": b"native", "__init__.py": f"open({str(mark)!r}, 'a').close()\n"}))
    lock = hub.lock_kernels([tmp_path], tmp_path / "kernels.lock", policy=LOCAL)
    change(tmp_path / "build" / "torch-universal")
    with pytest.raises(hub.IntegrityError, match=r"are not those of .*kernels\.lock:") as caught:
        hub.load(hub.resolve(tmp_path, lock=lock))
    assert f"\n  {problem}" in str(caught.value)
    assert not mark.exists()


def write_bytecode(folder: Path) -> None:
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "ops.pyc").write_bytes(b"")


def test_a_locked_kernel_is_verified_every_time(server: Hub, tmp_path: Path) -> None:
    published(server)
    lock = hub.lock_kernels(["acme/rms@v1"], tmp_path / "kernels.lock")
    resolved = hub.resolve("acme/rms", version=1, lock=lock)
    assert hub.load(resolved).double(1) == 2
    (resolved.folder / "ops.py").resolve().write_text("x = 1")
    with pytest.raises(hub.IntegrityError, match=r"(?s)acme/rms \(commit .*ops.py is sha256:"):
        hub.load(resolved)


def test_a_tampered_cache_cannot_be_locked(server: Hub, tmp_path: Path) -> None:
    published(server)
    (hub.resolve("acme/rms", version=1).folder / "ops.py").resolve().write_text(f"{' ' * 32}")
    with pytest.raises(hub.IntegrityError, match="the Hub's listing"):
        hub.lock_kernels(["acme/rms@v1"], tmp_path / "kernels.lock")
    assert not (tmp_path / "kernels.lock").exists()


def test_a_locked_folder_needs_no_other_permission(tmp_path: Path) -> None:
    write(tmp_path / "rms", kernel())
    lock = hub.lock_kernels([tmp_path / "rms"], tmp_path / "kernels.lock", policy=LOCAL)
    assert [each.source for each in lock.kernels] == ["./rms"]
    assert hub.load(hub.resolve(tmp_path / "rms", lock=lock, policy=hub.Policy(trust="locked"))).double(1) == 2


def test_what_is_not_locked_is_an_error_that_says_how(server: Hub, tmp_path: Path) -> None:
    published(server)
    lock = hub.lock_kernels(["acme/rms@v1"], tmp_path / "kernels.lock")
    with pytest.raises(hub.NotFoundError, match=r"which holds acme/rms version 1; run: forge kernels lock acme/x@v1"):
        hub.resolve("acme/x", version=1, lock=lock)
    with pytest.raises(hub.NotFoundError, match=r"run: forge kernels lock acme/rms@v2"):
        hub.resolve("acme/rms", version=2, lock=lock)


def test_only_locked_variants_are_taken(server: Hub, tmp_path: Path) -> None:
    server.publish("acme/rms", kernel() | kernel(variant="torch-cpu") | kernel(variant="torch-metal"))
    lock = hub.lock_kernels(["acme/rms@v1"], tmp_path / "a.lock", variants=["torch-universal"], backend="cpu")
    resolved = hub.resolve("acme/rms", version=1, lock=lock, backend="cpu")
    assert resolved.variant == "torch-universal"
    assert dict(resolved.rejected)["torch-cpu"].startswith("is not in ")
    everything = hub.lock_kernels(["acme/rms@v1"], tmp_path / "b.lock", all_variants=True)
    assert set(everything.kernels[0].variants) == {"torch-universal", "torch-cpu", "torch-metal"}
    with pytest.raises(hub.NotFoundError, match="has no variant torch-npu; it has "):
        hub.lock_kernels(["acme/rms@v1"], tmp_path / "c.lock", variants=["torch-npu"])


def test_what_a_kernel_depends_on_is_locked_with_it(server: Hub, tmp_path: Path) -> None:
    depends = metadata(kernel_depends=[{"repo-id": "acme/base", "version": 1}])
    server.publish("acme/base", kernel({"metadata.json": metadata("base", "_base")}))
    server.publish("acme/rms", kernel({"metadata.json": depends}))
    lock = hub.lock_kernels(["acme/rms@v1"], tmp_path / "kernels.lock")
    assert [each.source for each in lock.kernels] == ["acme/base", "acme/rms"]
    (resolved,) = hub.resolve("acme/rms", version=1, lock=lock).depends
    assert resolved.source == "acme/base" and resolved.pins.exact


GOOD: dict[str, Any] = {
    "source": "acme/rms",
    "version": 1,
    "revision": None,
    "commit": "a" * 40,
    "variants": {"torch-cpu": {"ops.py": "b" * 64}},
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a lock file"),
        ("[]", "has no forge_kernels_lock: 1"),
        ('{"forge_kernels_lock": 2, "kernels": []}', "has no forge_kernels_lock: 1"),
        ('{"forge_kernels_lock": 1}', r"needs 'kernels': \[\]"),
        (GOOD | {"extra": 1}, "each kernel needs the keys"),
        (GOOD | {"source": 1}, "source is 1, but must be a string"),
        (GOOD | {"version": "1"}, "acme/rms: version is '1', but must be an integer"),
        (GOOD | {"revision": 1}, "acme/rms: revision is 1, no string"),
        (GOOD | {"commit": "main"}, "commit is 'main', but must be 40 hexadecimal digits"),
        (GOOD | {"commit": None}, "a repository has a commit and a folder none"),
        (GOOD | {"source": "./x"}, "a repository has a commit and a folder none"),
        (GOOD | {"variants": {}}, "has no variants"),
        (GOOD | {"variants": {"../x": {}}}, "'../x' names no variant"),
        (GOOD | {"variants": {"torch-cpu": []}}, "must be an object of path → sha256"),
        (GOOD | {"variants": {"torch-cpu": {"/etc/passwd": "b" * 64}}}, "the path '/etc/passwd' is absolute"),
        (GOOD | {"variants": {"torch-cpu": {"a/../../x": "b" * 64}}}, "leaves its folder"),
        (GOOD | {"variants": {"torch-cpu": {"x": "md5"}}}, "x is 'md5', but must be a sha256"),
    ],
)
def test_a_lock_file_that_is_wrong_is_one_clear_error(tmp_path: Path, content: str | dict, message: str) -> None:
    path = tmp_path / "kernels.lock"
    path.write_text(
        content if isinstance(content, str) else json.dumps({"forge_kernels_lock": 1, "kernels": [content]})
    )
    with pytest.raises(hub.MalformedError, match=message) as caught:
        hub.read_lock(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_lock_file_that_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(hub.NotFoundError, match="there is no such lock file; run: forge kernels lock"):
        hub.resolve("acme/rms", lock=tmp_path / "none.lock")


SOURCES = """forge_kernels: 1
library: {name: gates}
build: {cpp: [gate.cpp]}
ops:
- op: torch.nn.functional.silu
  kernels:
  - kernel_name: gates::silu
    device: cpu
    arg_meta: {input: float32}
"""


@pytest.mark.parametrize("named", ["", "forge_kernels.yaml"])
def test_sources_that_are_not_built_are_not_locked(tmp_path: Path, named: str) -> None:
    folder, lock = tmp_path / "gates", tmp_path / "a.lock"
    folder.mkdir()
    (folder / "gate.cpp").write_text("")
    (folder / "forge_kernels.yaml").write_text(SOURCES)
    with pytest.raises(hub.RefusedError, match=rf"has sources \(build:\).* then lock the folder: .* lock {folder}$"):
        hub.lock_kernels([folder / named], lock, policy=LOCAL)
    assert not lock.exists()


def test_sources_with_their_variants_are_locked(tmp_path: Path) -> None:
    folder = write(tmp_path / "gates", kernel({"forge_kernels.yaml": SOURCES}))
    (folder / "gate.cpp").write_text("")
    (folder / "forge_kernels.yaml").write_text(SOURCES)
    (held,) = hub.lock_kernels([folder], tmp_path / "a.lock", policy=LOCAL).kernels
    assert list(held.files) == ["forge_kernels.yaml"]


@pytest.mark.parametrize("name", ["kernels.json", "lock", "a.lock.txt"])
def test_the_command_names_a_lock_file_so_that_it_is_read_as_one(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "rms", kernel())
    assert cli.main(["kernels", "lock", str(folder), "-o", str(tmp_path / name)]) == 1
    assert f"{name}: a lock file's name must end in .lock" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_a_manifest_that_stands_alone_is_locked_where_it_would_be_loaded(tmp_path: Path) -> None:
    manifest, lock = tmp_path / "mine.yaml", tmp_path / "a.lock"
    manifest.write_text("{{{")
    with pytest.raises(hub.HubError, match=r"mine\.yaml:1:\d+: not YAML"):
        hub.lock_kernels([manifest], lock, accept=lambda selection, names: None)
    assert not lock.exists()
