"""Private names of `kernels` and huggingface_hub that forge uses, checked against the installed releases.

A failure here means that a library changed, and that forge/hub/compat.py has to follow.
"""

import ast
import base64
import importlib
import sys
from pathlib import Path

import pytest

from forge import hub
from forge.hub import compat
from forge.hub.errors import Place
from forge.hub.files import UNPINNED, content_hash, is_bytecode, read_files
from tests.hub.kernels import metadata


def test_variants_are_parsed_and_print_as_they_were_written() -> None:
    assert compat.parse_variant("torch-universal").variant_str == "torch-universal"
    with pytest.raises(ValueError, match="Unknown framework"):
        compat.parse_variant("nonsense")


def test_decisions_keep_the_very_variants_they_were_given() -> None:
    given = [compat.parse_variant(name) for name in ("torch-metal", "torch-universal", "torch-cpu")]
    decided = compat.decide_variants(given, "cpu")
    assert [variant for variant, _ in decided] == [given[2], given[1], given[0]]
    assert all(any(variant is each for each in given) for variant, _ in decided)
    assert [reason is None for _, reason in decided] == [True, True, False]
    with pytest.raises(ValueError, match="Invalid backend"):
        compat.decide_variants(given, "abacus")


def test_metadata_has_the_fields_that_forge_reads() -> None:
    depends = [{"repo-id": "a/b", "version": 2}, {"repo-id": "a/c", "revision": "main"}]
    parsed = compat.parse_metadata(metadata(kernel_depends=depends, kernels_minver="0.1.0").encode())
    assert (str(parsed.name), parsed.id, parsed.version, parsed.license) == ("rms", "_rms_ab12", 1, "Apache-2.0")
    assert (str(parsed.backend.backend_type), parsed.backend.archs, parsed.python_depends) == ("cpu", [], [])
    assert [compat.kernel_dependency(each) for each in parsed.kernel_depends] == [
        ("a/b", 2, None),
        ("a/c", None, "main"),
    ]
    assert not compat.newer_than_installed(parsed.kernels_minver)


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_the_librarys_digest_covers_the_files_that_forge_pins(tmp_path: Path, algorithm: str) -> None:
    for path in ("__init__.py", "metadata.json", "metadata.json.sigstore", "inner/metadata.json", "__pycache__/a.pyc"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    parsed = compat.parse_metadata(metadata(digest={"algorithm": algorithm, "files": {}}).encode())
    theirs = type(parsed.digest).hash_variant(parsed.digest.algorithm, tmp_path)
    assert str(parsed.digest.algorithm).lower() == algorithm
    ours = read_files(tmp_path, Place("x"), max_file_bytes=1 << 20)
    assert set(theirs.files) == {path for path in ours if path not in UNPINNED and not is_bytecode(path)}
    if algorithm == "sha256":
        assert {base64.b64decode(each).hex() for each in theirs.files.values()} == {
            ours[path].sha256 for path in theirs.files
        }
    assert content_hash(ours)


def test_python_dependencies_give_modules() -> None:
    assert compat.python_dependencies("cpu")["einops"] == (("einops", "einops"),)
    assert compat.python_dependencies("cuda")["nvidia-cutlass-dsl"] == (("nvidia-cutlass-dsl", "cutlass"),)
    assert compat.python_dependencies("xpu")["onednn"] == (("onednn-devel", None),)
    assert "nvidia-cutlass-dsl" not in compat.python_dependencies("cpu")


def test_a_missing_signature_needs_no_network(tmp_path: Path) -> None:
    assert compat.signature_problem(tmp_path) == "SignatureBundleMissing"
    (tmp_path / "metadata.json.sigstore").write_text("{}")
    assert compat.signature_problem(tmp_path).startswith("SignatureBundleInvalid: ")


def test_the_results_of_a_signature_are_those_that_forge_names() -> None:
    results = compat.library("kernels.verify").VerificationResult
    assert results.SignatureVerificationFailure(reason="why").reason == "why"
    assert results.DigestVerificationFailure(violations=[]).violations == []
    assert results.Success()


def test_dependencies_are_given_while_the_context_is_entered() -> None:
    kernels = compat.library("kernels")
    with compat.kernel_dependencies({"a/b": sys}):
        assert kernels.get_kernel_dep("a/b") is sys
    with pytest.raises(RuntimeError):
        kernels.get_kernel_dep("a/b")


def test_transport_errors_are_what_the_client_raises() -> None:
    errors = compat.library("huggingface_hub.errors")
    base, *_ = compat.transport_errors()
    assert issubclass(errors.HfHubHTTPError, base)
    client = importlib.import_module(base.__module__.split(".")[0])
    assert all(issubclass(getattr(client, name), base) for name in ("ConnectError", "ConnectTimeout", "ReadTimeout"))


def test_layers_are_where_a_mapping_says(tmp_path: Path) -> None:
    kernels = compat.library("kernels")
    at = {"layer_name": "Norm"}
    places = [
        (kernels.LayerRepository("acme/rms", version=1, **at), compat.LayerPlace("acme/rms@v1", "Norm")),
        (kernels.LayerRepository("acme/rms", revision="main", **at), compat.LayerPlace("acme/rms@main", "Norm")),
        (
            kernels.LayerRepository("acme/rms", version=1, trust_remote_code=True, **at),
            compat.LayerPlace("acme/rms@v1", "Norm", True),
        ),
        (
            kernels.LayerRepository("acme/rms", version=1, trust_remote_code=["acme/rms"], **at),
            compat.LayerPlace("acme/rms@v1", "Norm", ("acme/rms",)),
        ),
        (kernels.LocalLayerRepository(tmp_path, **at), compat.LayerPlace(str(tmp_path), "Norm")),
    ]
    for repository, place in places:
        assert compat.is_layer_place(repository)
        assert compat.layer_place(repository) == place
    assert not compat.is_layer_place(tmp_path)


def test_what_is_registered_is_known_by_device_capability_and_mode(tmp_path: Path) -> None:
    kernels = compat.library("kernels")
    place = kernels.LocalLayerRepository(tmp_path, layer_name="Norm")
    mode, properties = kernels.Mode, kernels.CUDAProperties(min_capability=75, max_capability=90)
    narrow = kernels.Device("cuda", properties=properties)
    devices = {"cpu": place, narrow: {mode.INFERENCE | mode.TORCH_COMPILE: place}, "cuda": place}
    assert [compat.layer_device(each) for each in devices] == [("cpu", None), ("cuda", (75, 90)), ("cuda", None)]
    with kernels.use_kernel_mapping({"Norm": devices}, inherit_mapping=False):
        found = compat.registered_layers()
    modes = {key: set(map(compat.layer_mode, each)) for key, each in found["Norm"].items()}
    assert modes == {
        ("cpu", None): {frozenset({"FALLBACK"})},
        ("cuda", (75, 90)): {frozenset({"INFERENCE", "TORCH_COMPILE"})},
        ("cuda", (0, sys.maxsize)): {frozenset({"FALLBACK"})},
    }


def test_without_the_extra_a_call_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(hub.MissingExtraError, match=r"need the package kernels .*: pip install forge-jit\[hub\]"):
        hub.resolve("acme/rms", version=1)


def test_nothing_optional_is_imported_before_a_call() -> None:
    """`import forge.hub` works without the extra."""
    optional = {"kernels", "huggingface_hub", "yaml", "pydantic", "packaging", "platformdirs", "filelock"}
    for path in Path(compat.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        assert not {name.split(".")[0] for name in names} & optional, path
        ours = {name.split(".")[1] for name in names if name.startswith("forge.")}
        assert ours <= {"ir", "hub", "support", "torch_internals"}, path
