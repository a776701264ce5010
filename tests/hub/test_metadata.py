"""metadata.json in each published form, and each way in which it can be wrong."""

import json
from pathlib import Path

import pytest

from forge import hub
from forge.hub.errors import Place
from forge.hub.metadata import Metadata, dependency_modules, read_metadata
from tests.hub.kernels import LOCAL, kernel, load, metadata, write

PLACE = Place("acme/rms", "0" * 40, "torch-cpu")


def read(folder: Path, content: str | bytes, backend: str = "cpu") -> Metadata:
    (folder / "metadata.json").write_bytes(content.encode() if isinstance(content, str) else content)
    return read_metadata(folder, PLACE, name="rms-norm", backend=backend)


def test_the_form_of_today_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, metadata(backend={"type": "cuda", "archs": ["8.0"]}, version=3, python_depends=["einops"]))
    assert (found.form, found.name, found.id, found.version) == ("current", "rms", "_rms_ab12", 3)
    assert (found.backend, found.archs, found.python_depends) == ("cuda", ("8.0",), ("einops",))


def test_the_earlier_form_is_read_and_its_kernel_is_loaded(tmp_path: Path) -> None:
    """hub-facts: 0.17.2 raises for it."""
    earlier = {"python-depends": ["einops"], "python-depends-backends": {"cuda": ["nvidia-cutlass-dsl"]}, "version": 1}
    found = read(tmp_path, json.dumps(earlier))
    assert (found.form, found.name, found.id, found.version) == ("earlier", "rms-norm", None, 1)
    assert found.python_depends == ("einops",)
    assert read(tmp_path, json.dumps(earlier), "cuda").python_depends == ("einops", "nvidia-cutlass-dsl")
    files = kernel({"metadata.json": '{"python-depends": [], "version": 1}'})
    assert load(write(tmp_path / "rms", files)).double(1) == 2


def test_no_metadata_is_read_and_its_kernel_is_loaded(tmp_path: Path) -> None:
    """hub-facts: 0.17.2 raises for it."""
    assert read_metadata(tmp_path, PLACE, name="rms-norm", backend="cpu") == Metadata("none", "rms-norm")
    assert load(write(tmp_path, kernel({"metadata.json": None}))).double(1) == 2


def test_backend_dependencies_count_in_the_form_of_today_too(tmp_path: Path) -> None:
    """hub-facts: 0.17.2 ignores the key."""
    text = metadata(python_depends_backends={"cuda": ["nvidia-cutlass-dsl"], "cpu": ["einops"]})
    assert read(tmp_path, text).python_depends == ("einops",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"version": 1, "version": 2}', "'version' stands twice"),
        ("[]", "is a JSON list, but must be an object"),
        ("null", "is a JSON NoneType, but must be an object"),
        ('{"python-depends": "einops"}', "'python-depends' is 'einops', but must be a list of strings"),
        ('{"python-depends": [1]}', "must be a list of strings"),
        ('{"python-depends-backends": []}', r"'python-depends-backends' is \[\], but must be an object of lists"),
        ('{"python-depends-backends": {"cuda": "x"}}', "'cuda' is 'x', but must be a list of strings"),
        ('{"version": true}', "'version' is True, but must be an integer"),
        ('{"version": null}', "'version' is None, but must be an integer"),
        ('{"license": 1}', "'license' is 1, but must be a string"),
        ('{"id": "_rms"}', "missing field `name`"),
        (metadata(name="Bad Name"), "Invalid kernel name"),
        (metadata(kernel_id=3), "invalid type: integer `3`"),
        (metadata(backend={"type": "abacus"}), "unknown variant `abacus`"),
        (metadata(digest={"algorithm": "sha256", "files": {"/etc/passwd": "aGk="}}), "'/etc/passwd' is absolute"),
        (metadata(digest={"algorithm": "sha256", "files": {"../x": "aGk="}}), "'../x' leaves its folder"),
        (metadata(digest={"algorithm": "sha256", "files": {"x": "?"}}), "is '\\?', which is not base64"),
    ],
)
def test_metadata_that_is_wrong_is_one_clear_error(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(hub.MalformedError, match=message) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith("acme/rms (commit 000000000000, variant torch-cpu, metadata.json): ")


def test_huge_metadata_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "metadata.json").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(hub.MalformedError, match="has 1099511627776 bytes, but at most 1048576 are allowed"):
        read_metadata(tmp_path, PLACE, name="x", backend="cpu")


def test_a_kernel_for_a_newer_library_says_so(tmp_path: Path) -> None:
    with pytest.raises(hub.NotFoundError, match=r"needs kernels>=99\.0\.0: pip install --upgrade kernels"):
        read(tmp_path, metadata(kernels_minver="99.0.0"))


def test_a_dependency_that_the_hub_does_not_allow_is_named(tmp_path: Path) -> None:
    write(tmp_path, kernel({"metadata.json": metadata(python_depends=["requests"])}))
    with pytest.raises(
        hub.MalformedError, match=r"depends on 'requests', which the Hub does not allow on cpu; allowed"
    ):
        load(tmp_path, backend="cpu")


def test_a_dependency_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(hub.NotFoundError, match="needs the package einops: pip install einops"):
        dependency_modules(Metadata("none", "rms", python_depends=("einops",)), "cpu", PLACE)


def test_a_missing_has_backward_is_no_promise(tmp_path: Path) -> None:
    """hub-facts 3: metadata says nothing of gradients, so nothing that forge reads of it may."""
    assert not any("backward" in name or "grad" in name for name in Metadata.__dataclass_fields__)
    found = hub.resolve(write(tmp_path, kernel()), policy=LOCAL).metadata
    assert found.form == "current"
