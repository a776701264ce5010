"""The file metadata.json in each published form, and with each kind of error."""

import json
from pathlib import Path
from typing import Any

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
        ('{"id": "_rms"}', "has no 'name', which must be a string"),
        (metadata(name="Bad Name"), "line 1: 'name' is 'Bad Name', but must be lower-case letters, digits and dashes"),
        (metadata(kernel_id=3), "line 1: 'id' is 3, but must be a string"),
        (metadata(backend={"type": "abacus"}), "'type' of 'backend' is 'abacus', but must be one of cann, cpu, cuda"),
        (metadata(digest={"algorithm": "sha256", "files": {"/etc/passwd": "aGk="}}), "'/etc/passwd' is absolute"),
        (metadata(digest={"algorithm": "sha256", "files": {"../x": "aGk="}}), "'../x' leaves its folder"),
        (metadata(digest={"algorithm": "sha256", "files": {"x": "?"}}), "is '\\?', which is not base64"),
    ],
)
def test_metadata_that_is_wrong_is_one_clear_error(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(hub.MalformedError, match=message) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith("acme/rms (commit 000000000000, variant torch-cpu, metadata.json): ")


def dependency(**values: Any) -> dict[str, Any]:
    return {"kernel-depends": [{"repo-id": "acme/rms", "version": 1}, values]}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"version": "1"}, "line 4: 'version' is '1', but must be an integer"),
        ({"version": None}, "line 4: 'version' is None, but must be an integer"),
        ({"version": -1}, "line 4: 'version' is -1, but must be an integer from 0 up"),
        ({"version": 1 << 70}, f"line 4: 'version' is {1 << 70}, but must be an integer from 0 up"),
        ({"version": 1.5}, "line 4: 'version' is 1.5, but must be an integer"),
        ({"license": ...}, "has no 'license', which must be a string"),
        ({"python-depends": ...}, "has no 'python-depends', which must be a list of strings"),
        ({"backend": "cpu"}, "line 7: 'backend' is 'cpu', but must be an object with type and archs"),
        ({"backend": {}}, "line 7: 'backend' has no 'type', which must be the name of a backend"),
        (
            {"backend": {"type": 3}},
            "line 7: 'type' of 'backend' is 3, but must be one of cann, cpu, cuda",
        ),
        (
            {"backend": {"type": "cuda", "archs": "9.0"}},
            "line 7: 'archs' of 'backend' is '9.0', but must be a list",
        ),
        ({"digest": 3}, "line 11: 'digest' is 3, but must be an object with algorithm and files"),
        ({"digest": {}}, "line 11: 'digest' has no 'algorithm', which must be sha256 or sha512"),
        (
            {"digest": {"algorithm": "md5", "files": {}}},
            "line 11: 'algorithm' of 'digest' is 'md5', but must be sha2",
        ),
        ({"digest": {"algorithm": "sha256"}}, "line 11: 'digest' has no 'files', which must be an object of strings"),
        ({"digest": {"algorithm": "sha256", "files": []}}, "line 11: 'files' of 'digest' is [], but must be an object"),
        ({"kernels-minver": 3}, "line 11: 'kernels-minver' is 3, but must be a string"),
        ({"kernels-minver": "1"}, "line 11: 'kernels-minver' is '1', but must be three numbers with dots between them"),
        ({"kernel-depends": {}}, "line 11: 'kernel-depends' is {}, but must be a list of objects"),
        ({"kernel-depends": ["a"]}, "line 11: 'kernel-depends' is ['a'], but must be a list of objects"),
        (dependency(version=1), "line 11: entry 2 of 'kernel-depends' has no 'repo-id', which must be a string"),
        (
            dependency(**{"repo-id": "a/b"}),
            "line 11: entry 2 of 'kernel-depends' must have either 'version'",
        ),
        (
            dependency(**{"repo-id": "a/b", "version": "x"}),
            "line 11: 'version' of entry 2 of 'kernel-depends' is 'x',",
        ),
        (
            dependency(**{"repo-id": "a/b", "version": 1, "who": 2}),
            "line 11: 'who' is no key of entry 2 of 'kernel-depends'",
        ),
        (
            {"source": "here"},
            "is not accepted by the library kernels, which says: invalid git URL `here`",
        ),
    ],
)
def test_what_the_library_refuses_is_told_in_forges_words_with_the_key_and_its_line(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    """The library's own messages are "invalid type: string "1", expected usize" and "missing field"."""
    written = {key: value for key, value in (json.loads(metadata()) | values).items() if value is not ...}
    with pytest.raises(hub.MalformedError) as caught:
        read(tmp_path, json.dumps(written, indent=1))
    assert str(caught.value).partition("metadata.json): ")[2].startswith(said)


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
    """hub-facts 3: metadata says nothing about gradients, so forge must not infer anything from it."""
    assert not any("backward" in name or "grad" in name for name in Metadata.__dataclass_fields__)
    found = hub.resolve(write(tmp_path, kernel()), policy=LOCAL).metadata
    assert found.form == "current"
