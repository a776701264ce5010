"""The command forge kernels check: each violated requirement of the Hub is found, and nothing else."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge import cli, hub
from forge.hub.conformance import REQUIREMENTS, check_repository
from forge.testing.hub_server import Hub
from tests.hub.conforming import CPU, ID, INIT, LAYERS, NAME, OPS, SCALE, described, elf, write_conforming
from tests.hub.kernels import kernel, metadata, write

SO = f"{ID}.abi3.so"
ROOT = Path(cli.__file__).parents[2]
Change = Callable[[Path], Any]


def says(**values: Any) -> Change:
    return lambda variant: (variant / "metadata.json").write_text(json.dumps(described(**values), indent=2))


def holds(path: str, content: str | bytes) -> Change:
    def change(variant: Path) -> None:
        (variant / path).parent.mkdir(parents=True, exist_ok=True)
        (variant / path).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def lacks(path: str) -> Change:
    return lambda variant: (variant / path).unlink()


def renamed(name: str) -> Change:
    return lambda variant: variant.rename(variant.parent / name)


def layer(old: str, new: str) -> Change:
    assert old in LAYERS
    return holds("layers.py", LAYERS.replace(old, new))


MANIFEST = """forge_kernels: 1
library: {name: scale-rows}
ops:
- op: torch.mul
  kernels:
  - kernel_name: scale
    device: cpu
    arg_meta: {input: float32, other: float32}
    where: "input.ndim == 2"
    grad: composite
"""
WRONG_DIGEST = {"algorithm": "sha256", "files": {"__init__.py": "AAAA"}}
FORWARD = "    def forward(self, x):\n        return scale(x) * self.weight\n"

VIOLATIONS: dict[str, tuple[Change, str, str, int]] = {
    "a variant of no known name": (renamed("torch-quantum"), "variant-name", "build/torch-quantum", 0),
    "a variant of no known processor": (
        renamed("torch211-cxx11-cpu-mips-linux"),
        "variant-name",
        "build/torch211-cxx11-cpu-mips-linux",
        0,
    ),
    "no __init__": (lacks("__init__.py"), "init", "", 0),
    "a link out of it": (lambda variant: os.symlink("/etc/hostname", variant / "x.txt"), "files", "", 0),
    "no metadata": (lacks("metadata.json"), "metadata", "", 0),
    "no JSON": (holds("metadata.json", '{"name": "a"\n "b"}'), "metadata", "metadata.json", 2),
    "a key twice": (holds("metadata.json", '{"name": "a", "name": "b"}'), "metadata", "metadata.json", 1),
    "a JSON list": (holds("metadata.json", "[1]"), "metadata", "metadata.json", 1),
    "no id": (says(id=None), "metadata", "metadata.json", 1),
    "an unknown key": (says(author="me"), "metadata", "metadata.json", 12),
    "a version that is text": (says(version="1"), "metadata", "metadata.json", 4),
    "a name in capitals": (says(name="Scale"), "name", "metadata.json", 2),
    "another name": (says(name="other"), "name", "metadata.json", 2),
    "another version": (says(version=2), "version", "metadata.json", 4),
    "an unknown license": (says(license="my own"), "license", "metadata.json", 5),
    "an unknown backend": (says(backend={"type": "abacus"}), "backend", "metadata.json", 10),
    "another backend": (says(backend={"type": "metal"}), "backend", "metadata.json", 10),
    "a dependency that is not allowed": (
        says(python_depends=["einops", "requests"]),
        "python-depends",
        "metadata.json",
        8,
    ),
    "a dependency of another backend": (
        says(python_depends_backends={"cpu": ["nvidia-cutlass-dsl"]}),
        "python-depends",
        "metadata.json",
        14,
    ),
    "a wrong digest": (says(digest=WRONG_DIGEST), "digest", "metadata.json", 12),
    "a manifest that is no YAML": (holds("forge_kernels.yaml", "{{{"), "manifest", "forge_kernels.yaml", 1),
    "a manifest of an unknown operator": (
        holds("forge_kernels.yaml", MANIFEST.replace("torch.mul", "torch.multiplied")),
        "manifest",
        "forge_kernels.yaml",
        4,
    ),
    "a manifest with an unknown key": (
        holds("forge_kernels.yaml", MANIFEST.replace("where:", "wheer:")),
        "manifest",
        "forge_kernels.yaml",
        9,
    ),
    "an import in a function": (
        holds("ops.py", f"{SCALE}\n\ndef f():\n    import requests\n"),
        "imports",
        "ops.py",
        11,
    ),
    "a guarded import": (
        holds("more.py", "try:\n    import requests\nexcept ImportError:\n    pass\n"),
        "imports",
        "more.py",
        2,
    ),
    "an import by another name of import_module": (
        holds("more.py", "from importlib import import_module as im\n\n\ndef f():\n    im('requests')\n"),
        "imports",
        "more.py",
        5,
    ),
    "an import under what is not typing's TYPE_CHECKING": (
        holds("more.py", "TYPE_CHECKING = True\nif TYPE_CHECKING:\n    import requests\n"),
        "imports",
        "more.py",
        3,
    ),
    "an import of itself": (holds("more.py", "\nfrom scale_rows.ops import scale\n"), "imports", "more.py", 2),
    "an import from outside": (holds("more.py", "from .. import x\n"), "imports", "more.py", 1),
    "Python of later": (holds("more.py", "match 1:\n    case 1: pass\n"), "python-floor", "more.py", 2),
    "a later standard library": (holds("more.py", "import tomllib\n"), "python-floor", "more.py", 1),
    "no Python": (holds("more.py", "x = 1\ndef\n"), "python-floor", "more.py", 2),
    "a byte that is no UTF-8 in a comment": (holds("more.py", b"x = 1\n# caf\xe9\n"), "python-floor", "more.py", 2),
    "a byte that is no UTF-8 in a string": (holds("more.py", b"\n\nx = 'caf\xe9'\n"), "python-floor", "more.py", 3),
    "an encoding that there is not": (holds("more.py", "# coding: abacus\nx = 1\n"), "python-floor", "more.py", 1),
    "a later symbol of Python": (holds(SO, elf(undefined=["PyObject_Vectorcall"])), "abi3", SO, 0),
    "a symbol that is not in the limited API": (holds(SO, elf(undefined=["PyUnicode_New"])), "abi3", SO, 0),
    "a module of one Python": (holds("_x.cpython-311-x86_64-linux-gnu.so", elf()), "abi3", "_x.cpython-", 0),
    "a later system": (holds(SO, elf(versions=[("libc.so.6", "GLIBC_2.34")])), "manylinux", SO, 0),
    "a later C++ library": (holds(SO, elf(versions=[("libstdc++.so.6", "GLIBCXX_3.4.30")])), "manylinux", SO, 0),
    "a library of its own": (holds(SO, elf(needed=["libopenblas.so.0"])), "dynamic-libraries", SO, 0),
    "a library of another backend": (holds(SO, elf(needed=["libcudart.so.13"])), "dynamic-libraries", SO, 0),
    "another processor": (holds(SO, elf(machine=183)), "native", SO, 0),
    "no library": (holds(SO, b"MZ"), "native", SO, 0),
    "a cut library": (holds(SO, elf()[:-40]), "native", SO, 0),
    "another namespace": (holds("_ops.py", OPS.replace(f"ops.{ID}", "ops.scale")), "op-namespace", "_ops.py", 5),
    "a second namespace": (
        holds("more.py", "import torch\n\n@torch.library.custom_op('mine::f', mutates_args=())\ndef f(): ...\n"),
        "op-namespace",
        "more.py",
        3,
    ),
    "layers that are not exported": (
        holds("__init__.py", "from .ops import scale\n"),
        "layers-exported",
        "__init__",
        1,
    ),
    "a layer of no Module": (layer("Scale(nn.Module)", "Scale(object)"), "layer-class", "layers.py", 7),
    "a constructor": (
        layer(FORWARD, f"{FORWARD}\n    def __init__(self):\n        super().__init__()\n"),
        "layer-constructor",
        "layers.py",
        15,
    ),
    "a class variable": (layer("weight: torch.Tensor", "weight: int = 1"), "layer-variables", "layers.py", 10),
    "another method": (layer(FORWARD, f"{FORWARD}\n    def helper(self): ...\n"), "layer-methods", "layers.py", 15),
    "no forward": (layer(FORWARD, ""), "layer-forward", "layers.py", 7),
    "a forward without self": (layer("(self, x)", "()"), "layer-signature", "layers.py", 12),
    "a forward unlike torch's": (
        holds("layers.py", LAYERS.replace("class Scale", "class SiLU").replace("(self, x)", "(self, x, y)")),
        "layer-signature",
        "layers.py",
        12,
    ),
    "a backward that is not there": (layer("has_backward = False", "has_backward = True"), "has-backward", "layers", 8),
    "a backward that is not denied": (layer("    has_backward = False\n", ""), "has-backward", "layers.py", 7),
    "has_backward that is computed": (layer("= False", "= 1 > 2"), "layer-variables", "layers.py", 8),
}


@pytest.fixture
def variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the last variant of a conforming repository; the symbol table is used even if kernel-abi-check is
    installed."""
    monkeypatch.setattr("forge.hub.conformance.native._checker", lambda: None)
    return write_conforming(tmp_path)


def test_a_repository_that_meets_every_requirement_has_no_finding(variant: Path, tmp_path: Path) -> None:
    assert check_repository(tmp_path) == check_repository(tmp_path / "build") == check_repository(variant) == []


@pytest.mark.parametrize("name", VIOLATIONS)
def test_one_violation_is_one_finding_with_its_file_and_line(name: str, variant: Path, tmp_path: Path) -> None:
    change, requirement, file, line = VIOLATIONS[name]
    change(variant)
    found = [each for each in check_repository(tmp_path) if not each.advice]
    assert [each.requirement for each in found] == [requirement], [str(each) for each in found]
    assert file in found[0].file and found[0].line == line and found[0].file.startswith("build"), str(found[0])


@pytest.mark.parametrize(
    ("kernel_id", "text"),
    [("not-a-name", "is not the name"), ("json", "shadows the module"), ("scale_rows", "is not unique to the build")],
)
def test_an_id_is_a_name_that_is_unique_to_the_build(variant: Path, tmp_path: Path, kernel_id: str, text: str) -> None:
    says(id=kernel_id)(variant)
    if kernel_id.isidentifier():
        holds("_ops.py", OPS.replace(ID, kernel_id))(variant)
    else:
        holds("_ops.py", "ops = None\n")(variant)
    assert [text in each.text for each in check_repository(tmp_path)] == [True]


def test_of_a_system_the_recommended_variants_that_are_missing_are_advice(variant: Path, tmp_path: Path) -> None:
    variant.rename(variant.parent / "torch213-cxx11-cpu-x86_64-linux")
    (found,) = check_repository(tmp_path)
    assert found.advice and found.requirement == "recommended-variants" and CPU[1] in found.text


def test_the_repositories_of_forge_itself_have_no_finding() -> None:
    folders = [*(ROOT / "forge" / "_builtin_kernels").iterdir(), *(ROOT / "examples" / "kernels").glob("norms-*")]
    folders = [each for each in folders if each.is_dir() and not each.name.startswith("_")]
    for folder in folders:
        built = check_repository(folder)
        assert [each for each in built if each.requirement != "manylinux"] == []  # the compiler's own, where it is new
    assert len(folders) >= 3


def test_a_folder_without_variants_says_where_they_belong(tmp_path: Path) -> None:
    (found,) = check_repository(tmp_path)
    assert found.requirement == "layout" and "build/<variant>/" in found.text


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbfx = 1\n", b"# coding: latin-1\nx = 'caf\xe9'\n", "x = 'café'\n".encode()]
)
def test_the_encodings_that_python_reads_are_no_finding(variant: Path, tmp_path: Path, content: bytes) -> None:
    holds("more.py", content)(variant)
    assert check_repository(tmp_path) == []


def test_control_characters_of_names_are_escaped(
    variant: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holds("\x1b[2Kmo\nre.py", "import requests\n")(variant)
    (variant.parent / "torch-\x1b[31m").mkdir()
    (found,) = [each for each in check_repository(tmp_path) if each.requirement == "imports"]
    assert "/\\x1b[2Kmo\\nre.py:1: imports: " in str(found) and "\x1b[2Kmo\nre.py" in found.as_json()["file"]
    _, out, err = run(capsys, "check", tmp_path, "--backend", "cpu")
    assert "\x1b" not in out + err and "\\x1b[31m" in out


def test_what_never_runs_imports_nothing(variant: Path, tmp_path: Path) -> None:
    holds("more.py", "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import transformers\n")(variant)
    holds("tool.py", "if __name__ == '__main__':\n    import requests\n")(variant)
    assert check_repository(tmp_path) == []


def test_checking_executes_nothing(variant: Path, tmp_path: Path) -> None:
    holds("__init__.py", INIT + "raise SystemExit(3)\n")(variant)
    holds("sub/__init__.py", "open('/tmp/ran', 'w')\n")(variant)
    assert check_repository(tmp_path) == []


TEXTS = ["", "\0", "[", "{}", "nul", "\ud800", "import", "(" * 300, "class A(", "layers", '"', "\n", "torch.ops.", "é"]


@st.composite
def damage(draw: st.DrawFn) -> tuple[str, int, int, bytes]:
    """Draw a file, the place of the cut, the number of removed bytes, and the inserted ones."""
    file = draw(st.sampled_from(["__init__.py", "_ops.py", "layers.py", "ops.py", "metadata.json", SO]))
    text = draw(st.sampled_from(TEXTS) | st.text(max_size=6)).encode(errors="surrogatepass")
    return file, draw(st.integers(0, 900)), draw(st.integers(0, 60)), draw(st.just(text) | st.binary(max_size=6))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=st.lists(damage(), min_size=1, max_size=3))
def test_a_damaged_repository_has_findings_and_no_traceback(
    damages: list[tuple[str, int, int, bytes]], tmp_path: Path
) -> None:
    variant = write_conforming(tmp_path)
    for file, start, length, text in damages:
        held = (variant / file).read_bytes()
        (variant / file).write_bytes(held[:start] + text + held[start + length :])
    for found in check_repository(tmp_path):
        assert found.file.startswith("build") and found.line >= 0 and "\n" not in str(found)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from([*described(), "digest", "kernel-depends", "python-depends-backends", "provenance", "x"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "cpu", NAME, "type"]),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["type", "archs", "files", "algorithm", "cpu"]), inner, max_size=3)
        ),
        max_leaves=4,
    ),
)
def test_metadata_of_any_shape_has_no_traceback(key: str, value: Any, tmp_path: Path) -> None:
    variant = write_conforming(tmp_path)
    (variant / "metadata.json").write_text(json.dumps(described() | {key: value}))
    check_repository(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main(["kernels", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_the_command_prints_a_line_for_each_finding(
    variant: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "check", tmp_path, "--backend", "cpu")[0] == 0
    holds("more.py", "import requests\nimport yaml\n")(variant)
    status, out, _ = run(capsys, "check", tmp_path)
    lines = [line for line in out.splitlines() if ": imports: " in line]
    assert status == 1 and [line.split(": ")[0] for line in lines] == [
        f"build/{CPU[1]}/more.py:1",
        f"build/{CPU[1]}/more.py:2",
    ]
    assert run(capsys, "check", tmp_path, "--allow-import", "requests", "--allow-import", "yaml")[0] == 0
    status, out, _ = run(capsys, "check", tmp_path, "--json")
    (source,) = json.loads(out)["sources"]
    assert status == 1 and source["ok"] is False
    assert [(each["requirement"], each["line"]) for each in source["findings"]] == [("imports", 1), ("imports", 2)]


def test_without_arguments_the_command_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "check")
    assert status == 2 and not out and "give a folder or org/name@v1, or a lock file" in err
    write(tmp_path / "rms", kernel())
    assert run(capsys, "lock", "./rms")[0] == 0
    status, out, err = run(capsys, "check")
    assert status == 0 and "3 files are as locked" in out and "checks the files of forge-kernels.lock" in err


def test_a_manifest_is_held_against_what_loading_reads(variant: Path, tmp_path: Path) -> None:
    for each in variant.parent.iterdir():
        (each / "forge_kernels.yaml").write_text(MANIFEST)
    (tmp_path / "forge_kernels.yaml").write_text(MANIFEST)
    assert check_repository(tmp_path) == []
    (tmp_path / "forge_kernels.yaml").write_text(MANIFEST + "more: 1\n")
    found = [(each.file, each.line) for each in check_repository(tmp_path) if each.requirement == "manifest"]
    copies = [(f"build/{name}/forge_kernels.yaml", 0) for name in CPU]
    assert found == [*copies, ("forge_kernels.yaml", 11)]
    assert [each.line for each in check_repository(tmp_path, blobs=tmp_path / "blobs")] == []


def test_what_loading_refuses_of_a_manifest_is_not_locked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "k.lock"
    folder = write(tmp_path / "bad", kernel({"forge_kernels.yaml": "{{{"}))
    status, out, _ = run(capsys, "check", folder)
    assert status == 1 and "build/torch-universal/forge_kernels.yaml:1: manifest: " in out
    status, _, err = run(capsys, "lock", folder, "-o", lock)
    assert status == 1 and "forge_kernels.yaml:1: manifest: " in err and not lock.exists()


def test_sources_to_compile_are_told_from_a_folder_without_a_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "f.cpp").write_text("")
    (sources / "forge_kernels.yaml").write_text(
        "forge_kernels: 1\nlibrary: {name: acme}\nbuild: {cpp: [f.cpp]}\nops:\n- op: torch.relu\n"
        "  kernels:\n  - {name: f, kernel_name: acme::f}\n"
    )
    for command in ("check", "lock"):
        status, out, err = run(capsys, command, sources)
        assert status == 1 and "sources (build:)" in out + err
    _, out, _ = run(capsys, "check", sources)
    assert "layout: has sources (build:), which a first use compiles, and no variant" in out


def test_lock_takes_what_check_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "k.lock"
    good = write(tmp_path / "good", kernel())
    bad = write(tmp_path / "bad", kernel({"metadata.json": metadata(license="mine")}))
    assert [run(capsys, "check", each)[0] for each in (good, bad)] == [0, 1]
    status, _, err = run(capsys, "lock", bad, "-o", lock)
    assert status == 1 and "metadata.json:1: license" in err and not lock.exists()
    assert run(capsys, "lock", bad, "-o", lock, "--force")[0] == run(capsys, "lock", good, "-o", lock)[0] == 0


@pytest.mark.parametrize("command", ["check", "lock", "verify", "build"])
def test_paths_that_the_system_refuses_are_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for path in ("loop", "a" * 5000, "a/" * 3000):
        status, out, err = run(capsys, command, f"./{path}")
        assert status == 1 and "Traceback" not in out + err and path[:200] in out + err


def test_lock_reads_the_folders_that_check_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "good", kernel())
    variant = folder / "build" / "torch-universal"
    (folder / "build" / ".unfinished").mkdir()
    os.mkfifo(folder / "build" / ".unfinished" / "pipe")
    wanted = ["check", folder], ["lock", folder, "--all-variants", "-o", tmp_path / "k.lock"]
    assert [run(capsys, *each)[0] for each in wanted] == [0, 0]
    for path, to in ((variant / "more.py", "more.py"), (folder / "forge_kernels.yaml", "/etc/hostname")):
        path.symlink_to(to)
        assert [run(capsys, *each)[0] for each in wanted] == [1, 1]
        path.unlink()


def test_a_repository_of_the_hub_is_checked_as_far_as_it_is_here(
    server: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    server.publish("acme/rms", kernel({"more.py": "def f():\n    import requests\n"}))
    status, out, err = run(capsys, "check", "acme/rms@v1")
    assert status == 0 and "not in the cache: torch-universal; --fetch" in err
    status, out, _ = run(capsys, "check", "acme/rms@v1", "--fetch")
    assert status == 1 and "build/torch-universal/more.py:2: imports: import requests" in out
    assert run(capsys, "check", "acme/rms@v1")[0] == 1


def test_each_requirement_has_a_line_that_says_it() -> None:
    assert all(each.__doc__ for each in REQUIREMENTS) and hub.check_repository is check_repository
