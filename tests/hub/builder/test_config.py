"""build.toml is read as the Hub's kernel-builder reads it, or the error says where and what is wrong."""

from pathlib import Path

import pytest

from forge.hub.builder import read_config
from forge.hub.errors import MalformedError

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
