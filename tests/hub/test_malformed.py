"""Malformed repositories of all kinds: one clear error each; nothing is imported, and nothing written elsewhere."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge import hub
from forge.hub import client
from forge.testing.hub_server import Hub
from tests.hub.kernels import INIT, LOCAL, OPS, forget, kernel, load, metadata, write

GOOD = json.loads(metadata(digest={"algorithm": "sha256", "files": {}}, kernel_depends=[], kernels_minver="0.1.0"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("/etc/passwd"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PATHS = st.sampled_from(("__init__.py", "ops.py", "metadata.json", "sub/__init__.py", "_native.abi3.so"))


def links(folder: Path, path: str) -> None:
    (folder / path).symlink_to("/etc/hostname")


def huge(folder: Path, path: str) -> None:
    with (folder / path).open("wb") as stream:
        stream.truncate(1 << 42)


def pipe(folder: Path, path: str) -> None:
    os.mkfifo(folder / path)


def directory(folder: Path, path: str) -> None:
    (folder / path).mkdir()


def broken_link(folder: Path, path: str) -> None:
    (folder / path).symlink_to("nowhere")


def folder_link(folder: Path, path: str) -> None:
    (folder / path).symlink_to(folder.parent)


def garbage(folder: Path, path: str) -> None:
    (folder / path).write_bytes(b"\xff\x00(")


FAULTS = (links, huge, pipe, directory, broken_link, folder_link, garbage)


def attempt(repository: Path, mark: Path) -> hub.HubError | None:
    """Load a repository and return its error, if any, which must be forge's and name the repository; then nothing
    ran."""
    before, tree = set(sys.modules), snapshot(repository)
    try:
        load(repository)
    except hub.HubError as error:
        assert str(repository) in str(error), error
        assert set(sys.modules) == before
        assert isinstance(error, hub.KernelImportError) or not mark.exists()
        return error
    finally:
        assert snapshot(repository) == tree
        mark.unlink(missing_ok=True)
        forget()
    return None


def snapshot(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*"))


def marked(mark: Path) -> str:
    return f"open({str(mark)!r}, 'w').close()\n{INIT}"


@given(data=st.data())
@settings(max_examples=60)
def test_any_fault_of_any_file_is_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = tmp_path_factory.mktemp("fault")
    mark = base / "ran"
    repository = write(base / "rms", kernel({"__init__.py": marked(mark), "sub/__init__.py": ""}))
    folder = repository / "build" / "torch-universal"
    path, fault = data.draw(PATHS), data.draw(st.sampled_from(FAULTS))
    (folder / path).unlink(missing_ok=True)
    fault(folder, path)
    error = attempt(repository, mark)
    harmless = path == "_native.abi3.so" and fault in (garbage, directory)
    assert (error is None) == (harmless or (path, fault) == ("sub/__init__.py", directory)), (path, fault, error)


@given(key=st.sampled_from(sorted(GOOD)), value=VALUES)
@settings(max_examples=150)
def test_metadata_of_any_type_is_read_or_is_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    base = tmp_path_factory.mktemp("metadata")
    content = json.dumps({**GOOD, "digest": None, key: value})
    attempt(write(base / "rms", kernel({"metadata.json": content})), base / "ran")


@given(
    content=st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | VALUES.map(lambda v: json.dumps(v).encode())
)
@settings(max_examples=100)
def test_metadata_of_any_content_is_read_or_is_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    base = tmp_path_factory.mktemp("content")
    attempt(write(base / "rms", kernel({"metadata.json": content})), base / "ran")


@given(missing=st.sets(st.sampled_from(("__init__.py", "ops.py", "metadata.json"))))
def test_any_missing_files_are_one_clear_error(tmp_path_factory: pytest.TempPathFactory, missing: set[str]) -> None:
    base = tmp_path_factory.mktemp("missing")
    mark = base / "ran"
    files = {"__init__.py": marked(mark), "ops.py": OPS}
    repository = write(base / "rms", kernel(files | dict.fromkeys(missing)) or {"torch-universal/x": ""})
    error = attempt(repository, mark)
    assert (error is None) == (missing <= {"metadata.json"})


@given(
    names=st.lists(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12))
)
def test_variants_of_any_name_are_rejected_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    base = tmp_path_factory.mktemp("names")
    for name in {name for name in names if name not in (".", "..")}:
        (base / "rms" / "build" / name).mkdir(parents=True, exist_ok=True)
    (base / "rms" / "build").mkdir(parents=True, exist_ok=True)
    with pytest.raises(hub.NotFoundError, match="no variant fits this system"):
        load(base / "rms")


def test_a_variant_that_is_a_link_out_of_the_repository_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", kernel())
    (tmp_path / "rms" / "build").mkdir(parents=True)
    (tmp_path / "rms/build/torch-universal").symlink_to(tmp_path / "elsewhere/build/torch-universal")
    with pytest.raises(hub.MalformedError, match=r"is a link to .*elsewhere.*outside of the repository"):
        hub.resolve(tmp_path / "rms", policy=LOCAL)


def test_a_link_inside_of_the_folder_is_followed(tmp_path: Path) -> None:
    folder = write(tmp_path, kernel({"ops.py": None, "real.py": OPS})) / "build" / "torch-universal"
    (folder / "ops.py").symlink_to("real.py")
    assert load(tmp_path).double(1) == 2


def test_a_link_that_is_put_into_the_cache_may_lead_to_its_blobs_only(server: Hub, tmp_path: Path) -> None:
    server.publish("acme/rms", kernel())
    resolved = hub.resolve("acme/rms", version=1)
    assert (resolved.folder / "ops.py").is_symlink(), "huggingface_hub links to its blobs"
    (tmp_path / "evil.py").write_bytes((resolved.folder / "ops.py").read_bytes())
    (resolved.folder / "ops.py").unlink()
    (resolved.folder / "ops.py").symlink_to(tmp_path / "evil.py")
    with pytest.raises(hub.MalformedError, match=r"ops.py\): is a link to .*evil.py, which is outside"):
        hub.load(resolved)


@given(
    path=st.sampled_from(("/etc/x", "../x", "build/../../x", "build/a\\b", "C:/x", "build//x", "")),
    data=st.binary(max_size=4),
)
@settings(max_examples=20)
def test_a_listing_with_any_unsafe_path_writes_nothing_outside(
    tmp_path_factory: pytest.TempPathFactory, path: str, data: bytes
) -> None:
    base = tmp_path_factory.mktemp("listing")
    server = Hub(trusted={"acme"}).start()
    with pytest.MonkeyPatch.context() as patch:
        constants = pytest.importorskip("huggingface_hub").constants
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("KERNELS_CACHE", str(base / "cache"))
        client.forget()
        commit = server.publish("acme/rms", kernel())
        server.repositories["acme/rms"].commits[commit][path] = data
        with pytest.raises(hub.MalformedError, match="in its listing"):
            hub.resolve("acme/rms", version=1)
    server.stop()
    written = {path.relative_to(base).parts[0] for path in base.rglob("*")}
    assert written <= {"cache"}
