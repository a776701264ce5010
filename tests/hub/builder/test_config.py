"""Reading build.toml like the Hub's kernel-builder; errors name the place and the problem."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.hub.builder import read_config
from forge.hub.builder.targets import targets
from forge.hub.errors import HubError, MalformedError

TOML = """\
[general]
name = "two-gates"
version = 3
edition = 5
license = "MIT"
backends = ["cpu", "cuda"]
python-depends = ["einops"]

[general.hub]
repo-id = "someone/two-gates"

[general.cuda]
minver = "12.4"
python-depends = ["nvidia-cutlass-dsl"]

[torch]
src = ["torch-ext/binding.cpp", "torch-ext/binding.h"]
include = ["common"]
pyext = ["py", "json"]
minver = "2.11"

[torch.stable-abi]
cuda = "2.11"

[kernel.gates]
backend = "cuda"
depends = ["torch"]
src = ["gates.cu"]
cuda-capabilities = ["8.0", "9.0"]
cuda-flags = ["-lineinfo"]

[kernel.gates_cpu]
backend = "cpu"
depends = ["torch"]
src = ["gates.cpp"]
cxx-flags = ["-ffast-math"]
"""


def tree(folder: Path, text: str = TOML) -> Path:
    for path in ("torch-ext/binding.cpp", "torch-ext/binding.h", "gates.cu", "gates.cpp", "common/one.h"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("")
    (folder / "torch-ext/two_gates").mkdir(exist_ok=True)
    (folder / "build.toml").write_text(text)
    return folder


def test_everything_of_a_file_is_read(tmp_path: Path) -> None:
    config = read_config(tree(tmp_path))
    assert (config.name, config.module, config.version, config.license) == ("two-gates", "two_gates", 3, "MIT")
    assert config.backends == ("cpu", "cuda") and config.repository == "someone/two-gates"
    assert config.python_depends == {"": ("einops",), "cuda": ("nvidia-cutlass-dsl",)}
    assert (config.minver, config.stable_abi, config.pyext) == ("2.11", {"cuda": "2.11"}, ("py", "json"))
    cuda, cpu = config.components
    assert (cuda.src, cuda.archs, cuda.flags) == (("gates.cu",), ("8.0", "9.0"), ("-lineinfo",))
    assert (cpu.backend, cpu.cxx_flags, cpu.flags) == ("cpu", ("-ffast-math",), ())


@pytest.mark.parametrize(
    ("before", "after", "framework"),
    [
        ("[torch]\n", "[torch-noarch]\n", "torch-noarch"),
        ("[torch]\n", "[torch]\nuniversal = true\n", "torch-noarch"),
        ("", "", "torch"),
    ],
)
def test_trees_of_python_alone(tmp_path: Path, before: str, after: str, framework: str) -> None:
    text = TOML.split("[torch]")[0] + "[torch]\n"
    assert read_config(tree(tmp_path, text.replace(before, after))).framework == framework


def test_one_version_is_the_stable_abi_of_all_backends(tmp_path: Path) -> None:
    text = TOML.replace('[torch.stable-abi]\ncuda = "2.11"\n', "").replace(
        "[torch]\n", '[torch]\nstable-abi = "2.12"\n'
    )
    config = read_config(tree(tmp_path, text))
    assert config.stable_abi["cpu"] == config.stable_abi["cuda"] == "2.12"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"two-gates"\nv', '"Two Gates"\nv', r":2: \[general\] name: is 'Two Gates', but must be lower-case words"),
        ('"two-gates"\nv', '"two_gates"\nv', r":2: \[general\] name: is 'two_gates', but must be lower-case words"),
        ('license = "MIT"\n', "", r":1: \[general\] license: must be there: a license of the Hub, such as"),
        ('"MIT"', '"NOASSERTION"', r":5: \[general\] license: is 'NOASSERTION', which is not a license identifier"),
        ('name = "two-gates"\n', "", r":1: \[general\] name: must be there: a string"),
        ("version = 3", 'version = "3"', r":3: \[general\] version: is '3', but must be an integer"),
        (
            "edition = 5",
            "edition = 6",
            r":4: \[general\] edition: is 6, but this version of forge reads editions up to 5",
        ),
        ('"cpu", "cuda"]', '"cpu", "gpu"]', r":6: \[general\] backends: has 'gpu', but known are cann, cpu, cuda"),
        ("license =", "licence =", r":5: \[general\] licence: is not a key of \[general\]; those are backends"),
        (
            "[torch]\n",
            "[torch-noarch]\n",
            r"one of \[torch\], \[torch-noarch\] and \[tvm-ffi\] must be there, but there is \[torch\] and",
        ),
        ("[torch]\n", "[tensorflow]\n", r":16: tensorflow: is not a key of the file"),
        ('src = ["gates.cu"]', 'src = ["other.cu"]', r":28: \[kernel.gates\] src: has 'other.cu', which is not there"),
        (
            'src = ["gates.cu"]',
            'src = ["../gates.cu"]',
            r":28: \[kernel.gates\] src: has '\.\./gates.cu', but paths are below",
        ),
        (
            'src = ["gates.cu"]',
            'src = "gates.cu"',
            r":28: \[kernel.gates\] src: is 'gates.cu', but must be a list of strings",
        ),
        ('src = ["gates.cu"]\n', "", r":25: \[kernel.gates\] src: must name at least one file"),
        (
            'cxx-flags = ["-ff',
            'cuda-flags = ["-ff',
            r":36: \[kernel.gates_cpu\] cuda-flags: is not for the backend cpu",
        ),
        (
            'minver = "2.11"',
            'minver = "2"',
            r":20: \[torch\] minver: is '2', but must be a version of torch such as \"2.11\"",
        ),
        ('cuda = "2.11"', "cuda = 2.11", r":23: \[torch.stable-abi\] cuda: is 2.11, but must be a string"),
        ("[general]\n", "[general\n", r"\(build.toml\): "),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in TOML
    with pytest.raises(MalformedError, match=message):
        read_config(tree(tmp_path, TOML.replace(before, after, 1)))


def test_a_folder_without_one_and_a_tree_without_python(tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match=r"there is no build\.toml"):
        read_config(tmp_path)
    (tree(tmp_path) / "torch-ext/two_gates").rmdir()
    with pytest.raises(MalformedError, match=r"its Python files are in torch-ext/two_gates/, which is not there"):
        read_config(tmp_path)


LINES = TOML.splitlines()
KEYS = sorted({line.partition("=")[0].strip() for line in LINES if "=" in line} | {"universal", "stable-abi", "kernel"})
TEXTS = ["", "a", "../x", "/etc", ".", "*", "gates.cpp/x", "2.11", "cpu", "0" * 30 + ".1", "a" * 5000, "é", "\0"]
VALUES = st.recursive(
    st.booleans() | st.integers(-1, 10**20) | st.floats() | st.sampled_from(TEXTS) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["cpu", ""]), inner, max_size=2),
    max_leaves=3,
)
HEADINGS = ("[kernel]", "[[kernel]]", "[kernel.'']", '[kernel."a/b"]', "[torch-noarch]", "[tvm-ffi]", "[")


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_toml(key)} = {as_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, str):
        return '"' + "".join(f"\\u{ord(each):04x}" if ord(each) < 0x10000 else "?" for each in value) + '"'
    return str(value).lower()


ENTRIES = st.builds(lambda key, value: f"{key} = {as_toml(value)}", st.sampled_from(KEYS), VALUES)
NEW = ENTRIES | st.sampled_from([*LINES, *HEADINGS]) | st.text(max_size=8)
EDITS = st.lists(st.tuples(st.integers(0, len(LINES)), st.integers(0, 2), st.lists(NEW, max_size=1)), max_size=3)


def edited(folder: Path, edits: list[tuple[int, int, list[str]]]) -> None:
    """Check that a file with lines removed and inserted is read, or that the error is one of forge's, in one line that
    names the file."""
    lines = [*LINES]
    for start, taken, put in edits:
        lines[start : start + taken] = put
    tree(folder)
    (folder / "build.toml").write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    try:
        targets(read_config(folder))
    except HubError as error:
        assert str(folder) in str(error)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS)
def test_a_file_that_is_edited_at_random_has_no_traceback(edits: list, tmp_path: Path) -> None:
    edited(tmp_path, edits)


@pytest.mark.slow
@settings(max_examples=5000, derandomize=False, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS)
def test_files_that_are_edited_at_random_have_no_traceback(edits: list, tmp_path: Path) -> None:
    edited(tmp_path, edits)


@pytest.mark.parametrize("path", ["a" * 5000, "a\\u0000b", "gates.cpp/x"])
def test_a_path_that_the_system_refuses_is_one_that_is_not_there(tmp_path: Path, path: str) -> None:
    with pytest.raises(MalformedError, match=r":28: \[kernel.gates\] src: has .*, which is not there"):
        read_config(tree(tmp_path, TOML.replace('["gates.cu"]', f'["{path}"]')))


def test_a_folder_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(MalformedError, match=r":35: \[kernel.gates_cpu\] src: has 'folder', which is not a file"):
        read_config(tree(tmp_path, TOML.replace('["gates.cpp"]', '["folder"]')))
