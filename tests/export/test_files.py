"""Files that forge.load refuses, each with one error that names the file and the problem."""

import json
import zipfile
from pathlib import Path

import pytest
import torch

import forge
from forge import EntryPoint, ExportError
from tests.export.support import DIGEST, INDEX, Members, Mlp, members_of, with_index, write_members
from tests.markers import slow_except


@pytest.fixture(scope="module")
def exported() -> forge.Exported:
    """Return two entry points in both forms, which share weights."""
    model = Mlp()
    points = {
        "first": EntryPoint(model, (torch.randn(2, 8),)),
        "second": EntryPoint(Drops(model), (torch.randn(2, 8),)),
    }
    return forge.export(points)


@pytest.fixture(scope="module")
def file(exported, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.pt2"
    exported.save(path)
    return path


class Drops(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.model(x).exp() * 2, 0.5, training=True)


def flipped(content: bytes, at: int = -1) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


def named(members: Members, end: str) -> str:
    return next(name for name in members if name.endswith(end))


def changed(end: str):
    return lambda members: {**members, named(members, end): flipped(members[named(members, end)])}


def requires(**changes):
    return lambda members: with_index(members, lambda index: index["requires"].update(changes))


DAMAGES = {
    "a shared object changed": (changed(".so"), "is damaged: data/"),
    "weights changed": (
        changed(".safetensors"),
        "is damaged: data/weights/weights.safetensors is not what was written",
    ),
    "a program changed": (changed("second/blob_0"), "is damaged: data/forge/second/blob_0"),
    "weights missing": (
        lambda members: {name: each for name, each in members.items() if not name.endswith(".safetensors")},
        "is damaged: data/weights/weights.safetensors is missing",
    ),
    "a member added": (lambda members: {**members, "data/forge/evil.py": b"1"}, "data/forge/evil.py was added"),
    "index changed": (
        lambda members: {**members, INDEX: members[INDEX].replace(b'"second"', b'"record"')},
        "is damaged: its index is not what was written",
    ),
    "no index": (
        lambda members: {name: each for name, each in members.items() if name != INDEX},
        "is no file of forge.export: it has no data/forge/index.json",
    ),
    "another format": (
        lambda members: with_index(members, lambda index: index.update(format=0)),
        "has format 0, but this forge reads format 1",
    ),
    "another torch": (requires(torch="1.0.0"), "was exported with torch 1.0.0, but this process has"),
    "another forge": (requires(forge="0.0.0"), "was exported with forge 0.0.0, but this process has"),
    "another system": (requires(system="plan9 mips"), "was exported with system plan9 mips"),
    "another processor": (requires(processor="AVX1024"), "is for processors with AVX1024, but this one has"),
    "another device": (requires(device="xpu"), "is for xpu, but this process has cpu"),
    "a foreign zip": (lambda members: {"data.pkl": b"1"}, "is no file of forge.export"),
}


@pytest.mark.parametrize("damage", slow_except(DAMAGES, *DAMAGES.keys() - {"a shared object changed"}))
def test_damaged_or_foreign_file_is_one_error(file, tmp_path, damage):
    change, message = DAMAGES[damage]
    path = write_members(tmp_path / "damaged.pt2", change(members_of(file)))
    with pytest.raises(ExportError) as error:
        forge.load(path)
    assert str(error.value).startswith(f"forge.load: {path} ") and message in str(error.value)


def test_file_whose_members_were_written_again_is_loaded(file, tmp_path):
    assert forge.load(write_members(tmp_path / "again.pt2", members_of(file))).entry_points.keys() == {
        "first",
        "second",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda content: content[: len(content) // 2], "is no zip file, or only a part of one"),
        (lambda content: b"", "is no zip file"),
        (lambda content: b"not a zip", "is no zip file"),
        (lambda content: content.replace(b'"format": 1', b'"format": 2'), "is damaged: its index"),
    ],
    ids=["truncated", "empty", "text", "changed bytes"],
)
def test_file_of_other_bytes_is_one_error(file, tmp_path, content, message):
    path = tmp_path / "other.pt2"
    path.write_bytes(content(file.read_bytes()))
    with pytest.raises(ExportError, match=message):
        forge.load(path)


def test_compressed_and_repeated_members_are_refused(file, tmp_path):
    members = members_of(file)
    path = tmp_path / "compressed.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in members.items():
            zipped.writestr(f"package/{name}", content)
    with pytest.raises(ExportError, match="is compressed, or there twice"):
        forge.load(path)
    path = write_members(tmp_path / "twice.pt2", members)
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as zipped:
        zipped.writestr(f"package/{INDEX}", members[INDEX])
    with pytest.raises(ExportError, match="is compressed, or there twice"):
        forge.load(path)


def test_missing_file_and_wrong_device_are_one_error(file, tmp_path):
    with pytest.raises(ExportError, match="cannot be read: No such file"):
        forge.load(tmp_path / "missing.pt2")
    with pytest.raises(ExportError, match="is for cpu, but was asked for on cuda"):
        forge.load(file, "cuda")


def test_digest_is_compared_where_it_is_given(exported, tmp_path):
    path = tmp_path / "model.pt2"
    digest = exported.save(path)
    assert forge.load(path, digest=digest).digest == digest
    other = digest[::-1]
    with pytest.raises(ExportError, match=f"has the digest {digest}, but must have {other}"):
        forge.load(path, digest=other)


def test_nothing_of_a_damaged_file_runs(file, tmp_path):
    """A member named by the index of another file is not read before its hash is checked."""
    members = members_of(file)
    (program,) = [name for name in members if name.endswith("second/blob_0")]
    marker = tmp_path / "ran"
    evil = f"__import__('pathlib').Path({str(marker)!r}).write_text('1')".encode()
    path = write_members(tmp_path / "evil.pt2", {**members, program: evil.ljust(len(members[program]))})
    with pytest.raises(ExportError, match="is damaged"):
        forge.load(path)
    assert not marker.exists()


def test_interrupted_save_leaves_the_file_as_it_was(exported, file, tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    path.write_bytes(file.read_bytes())
    monkeypatch.setattr("forge.aot.archive.PackageWriter.write_bytes", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        exported.save(path)
    assert path.read_bytes() == file.read_bytes() and list(tmp_path.iterdir()) == [path]


def test_weights_are_a_safetensors_file(file, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    members = members_of(file)
    held = safetensors.load(members[named(members, ".safetensors")])
    assert any(each.shape == (16, 8) for each in held.values())


def test_index_lists_each_member(file):
    members = members_of(file)
    listed = json.loads(members[INDEX])["members"]
    assert set(members) - set(listed) - {INDEX, DIGEST} <= {
        "archive_format", "archive_version", "byteorder", "version", ".data/version", ".data/serialization_id",
        ".format_version", ".storage_alignment",
    }  # fmt: skip
