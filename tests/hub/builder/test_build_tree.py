"""Variants of a source tree are built for this machine atomically, and not rebuilt."""

import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forge import cli, hub
from forge.hub import toolchain
from forge.hub.builder import BuiltTree, build_tree, read_config, targets, variant, write_new
from forge.hub.errors import BuildError, HubError

# writes its arguments, one per line, and its inputs as the object
COMPILER = """#!{python}
import pathlib, sys
if "--version" in sys.argv:
    print("a compiler")
    sys.exit()
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
{extra}
pathlib.Path(sys.argv[-1]).write_bytes(" ".join(sys.argv).encode())
"""

Build = Callable[..., BuiltTree]


class Compiler:
    """A compiler of the tests' own that records its calls."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log = folder / "c++", folder / "calls"
        self.does("")

    def does(self, extra: str) -> None:
        self.path.write_text(COMPILER.format(python=sys.executable, log=str(self.log), extra=extra))
        self.path.chmod(stat.S_IRWXU)

    @property
    def compiled(self) -> list[str]:
        """The sources, in order."""
        calls = self.log.read_text().splitlines() if self.log.exists() else []
        return sorted(call.split()[call.split().index("-c") + 1] for call in calls if " -c " in f" {call} ")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    (tmp_path / "bin").mkdir()
    made = Compiler(tmp_path / "bin")
    monkeypatch.setenv("CXX", str(made.path))
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(variant, "_check_loads", lambda module, id: None)
    toolchain.version.cache_clear()
    return made


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_new("my-gate", tmp_path / "tree")
    return tmp_path / "tree"


BOTH = ["my_gate_cpu/my_gate.cpp", "torch-ext/torch_binding.cpp"]


def test_a_new_tree_is_built_loaded_and_right(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "cache"))
    (built,) = build_tree(tree).variants
    assert built.fresh and built.path.name.startswith("torch-stable-abi211-cpu-")
    assert [each for each in hub.check_repository(tree) if not each.advice] == []
    resolved = hub.resolve(str(tree), policy=hub.Policy(local=True))
    module = hub.load(resolved)
    x, y = torch.randn(2, 3, 7)
    torch.testing.assert_close(module.my_gate(x, y), torch.nn.functional.silu(x) * y)
    assert resolved.metadata.id == module._ops.ops.name and resolved.metadata.digest is not None


def test_what_is_there_is_not_built_again(tree: Path, compiler: Compiler) -> None:
    assert [each.fresh for each in (*build_tree(tree).variants, *build_tree(tree).variants)] == [True, False]
    assert compiler.compiled == BOTH
    assert build_tree(tree, force=True).variants[0].fresh


@pytest.mark.parametrize(
    ("path", "compiled"),
    [
        ("torch-ext/my_gate/__init__.py", []),  # the library's name, which the binding contains, keeps its inputs
        ("my_gate_cpu/my_gate.cpp", [BOTH[0]]),
        ("torch-ext/torch_binding.h", BOTH),
    ],
)
def test_what_did_not_change_is_not_compiled_again(
    tree: Path, compiler: Compiler, path: str, compiled: list[str]
) -> None:
    before = build_tree(tree).variants[0]
    first = json.loads((before.path / "metadata.json").read_text())["id"]
    compiler.log.unlink()
    with (tree / path).open("a") as file:
        file.write("\n")
    assert build_tree(tree).variants[0].fresh
    assert json.loads((before.path / "metadata.json").read_text())["id"] != first
    assert set(compiler.compiled) - {BOTH[1]} == set(compiled) - {BOTH[1]}


@pytest.mark.parametrize(
    ("what", "change"),
    [
        (
            "flags",
            lambda tree: (tree / "build.toml").write_text((tree / "build.toml").read_text() + 'cxx-flags = ["-g"]\n'),
        ),
        ("a damaged file", lambda tree: next(tree.glob("build/*/__init__.py")).write_text("broken")),
        ("a file too many", lambda tree: next(tree.glob("build/torch*")).joinpath("more.py").write_text("")),
        ("a file too few", lambda tree: next(tree.glob("build/*/reference.py")).unlink()),
    ],
)
def test_what_is_not_as_it_was_built_is_built_again(
    tree: Path, compiler: Compiler, what: str, change: Callable[[Path], None]
) -> None:
    build_tree(tree)
    change(tree)
    assert build_tree(tree).variants[0].fresh
    assert not build_tree(tree).variants[0].fresh


def test_a_compilers_error_is_told_with_its_command_and_nothing_is_left(tree: Path, compiler: Compiler) -> None:
    compiler.does("if 'binding' in sys.argv[-3]: print('binding.cpp:3: error: no such thing'); sys.exit(1)")
    with pytest.raises(BuildError) as raised:
        build_tree(tree)
    text = str(raised.value)
    assert "torch-ext/torch_binding.cpp: the compiler failed" in text and "error: no such thing" in text
    assert f"$ {compiler.path} -std=c++20" in text
    log = Path(text.partition("all of its output: ")[2].splitlines()[0])
    assert "no such thing" in log.read_text()
    assert os.listdir(tree / "build") == [".lock"]


def test_a_compiler_that_is_killed_is_told(tree: Path, compiler: Compiler) -> None:
    compiler.does("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(BuildError, match="the compiler was ended by signal 9"):
        build_tree(tree)


def test_without_a_compiler_the_error_says_what_to_do(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="there is no C\\+\\+ compiler 'no-such-compiler': install one, or name"):
        build_tree(tree)


def test_a_library_that_does_not_load_is_told(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="cannot be loaded"):
        (tmp_path / "no.so").write_text("no library")
        variant._check_loads(tmp_path / "no.so", "no")


def test_what_a_killed_builder_left_is_removed(tree: Path, compiler: Compiler) -> None:
    left = tree / "build/.unfinished-1"
    left.mkdir(parents=True)
    build_tree(tree)
    assert not left.exists()


def test_two_builders_build_once(tree: Path, compiler: Compiler, capsys: pytest.CaptureFixture) -> None:
    compiler.does("import time; time.sleep(0.3)")
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(build_tree(tree).variants[0].fresh)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False, True] and compiler.compiled == BOTH


def test_a_folder_that_cannot_be_written_is_an_error_of_the_build(tree: Path, compiler: Compiler) -> None:
    (tree / "build").write_text("no folder")
    with pytest.raises(BuildError, match="build"):
        build_tree(tree)


def test_python_alone_is_built_for_every_backend(tmp_path: Path) -> None:
    write_new("my-gate", tmp_path / "tree", "triton")
    toml = tmp_path / "tree/build.toml"
    toml.write_text(toml.read_text().replace('"cuda"]', '"cuda", "rocm"]'))
    built = build_tree(tmp_path / "tree").variants
    assert [each.path.name for each in built] == ["torch-cuda", "torch-rocm"]
    assert not (built[0].path / "_ops.py").read_text().count("from .")
    metadata = json.loads((built[1].path / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "rocm"} and metadata["id"].startswith("_my_gate_")


# which variants


def of(tree: Path, **replaced: str) -> tuple[list[str], dict[str, str]]:
    text = (tree / "build.toml").read_text()
    for before, after in replaced.values():
        text = text.replace(before, after)
    (tree / "build.toml").write_text(text)
    found, reasons = targets.targets(read_config(tree))
    return [each.variant for each in found], reasons


def test_the_stable_abi_is_used_where_the_sources_allow_it(tree: Path) -> None:
    (variant,), _ = of(tree, drop=('[torch.stable-abi]\ncpu = "2.11"\n', ""))
    assert variant.startswith("torch-stable-abi211-cpu-")
    with (tree / "torch-ext/torch_binding.cpp").open("a") as file:
        file.write("#include <torch/library.h>\n")
    (variant,), _ = of(tree)
    assert variant.startswith(f"torch{''.join(torch.__version__.split('.')[:2])}-")


@pytest.mark.parametrize(
    ("before", "after", "backend", "reason"),
    [
        ('["cpu"]', '["cpu", "xpu"]', "xpu", "forge has no compiler for xpu"),
        ('["cpu"]', '["cpu", "cuda"]', "cuda", 'no [kernel.NAME] has backend = "cuda"'),
        ('["torch"]', '["torch", "cutlass_3_9"]', "cpu", "it depends on cutlass_3_9, which forge does not fetch"),
        ('cpu = "2.11"', 'cpu = "9.0"', "cpu", "it is made for torch's stable ABI of 9.0, and"),
        ("[torch]\n", '[torch]\nminver = "9.0"\n', "cpu", "it needs torch 9.0, and"),
        ("[torch]\n", '[torch]\nmaxver = "1.13"\n', "cpu", "it takes torch up to 1.13, and"),
        ("[torch]\n", "[tvm-ffi]\n", "cpu", "it is compiled against tvm-ffi"),
    ],
)
def test_why_a_backend_is_not_built(tree: Path, before: str, after: str, backend: str, reason: str) -> None:
    drop = ('[torch.stable-abi]\ncpu = "2.11"\n', "") if "tvm" in after else ("", "")
    _, reasons = of(tree, drop=drop, replaced=(before, after))
    assert reason in reasons[backend]


def test_where_nothing_can_be_built_the_error_has_all_reasons(tree: Path) -> None:
    of(tree, replaced=('["cpu"]', '["rocm", "xpu"]'))
    with pytest.raises(BuildError, match=r"(?s)nothing of it can be built here:\n  rocm: .*\n  xpu: "):
        build_tree(tree)


def test_cuda_sources_are_compiled_by_nvcc(tree: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "gate.cu").write_text("")
    with (tree / "build.toml").open("a") as file:
        file.write(
            '[kernel.gate]\nbackend = "cuda"\ndepends = ["torch"]\nsrc = ["gate.cu"]\ncuda-capabilities = ["9.0"]\n'
        )
    of(
        tree,
        replaced=('["cpu"]', '["cuda"]'),
        drop=('[torch.stable-abi]\ncpu = "2.11"\n', '[torch.stable-abi]\ncuda = "2.11"\n'),
    )
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(toolchain, "nvcc", lambda: str(compiler.path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0")
    (built,) = build_tree(tree).variants
    assert built.path.name.startswith("torch-stable-abi211-cu126-")
    assert json.loads((built.path / "metadata.json").read_text())["backend"] == {"type": "cuda", "archs": ["9.0"]}
    (call,) = [line for line in compiler.log.read_text().splitlines() if "-c gate.cu" in line]
    assert "-gencode=arch=compute_90,code=sm_90" in call and "-DCUDA_KERNEL" in call


# new


@pytest.mark.parametrize("name", ["My-Gate", "my gate", "-gate", "", "gate/more", "my_gate2", "a", "gate-"])
def test_a_name_that_the_hub_does_not_take_writes_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(HubError, match="is no name of a kernel: it must be lower-case words"):
        write_new(name, tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("class", "cpp", "a keyword of Python"),
        ("double", "cpp", r"a word of C\+\+"),
        ("torch", "triton", "a module that kernels import"),
        ("forge", "cpp", "a module that kernels import"),
        ("json", "cpp", "a module that kernels import"),
        ("reference", "cpp", "a part of every kernel"),
        ("run", "triton", "a part of every kernel"),
    ],
)
def test_a_name_that_means_something_else_writes_nothing(tmp_path: Path, name: str, kind: str, problem: str) -> None:
    with pytest.raises(HubError, match=f"^'{name}' is no name of a kernel: it is .*{problem}; take another one"):
        write_new(name, tmp_path / "tree", kind)
    assert not (tmp_path / "tree").exists()


def test_a_folder_with_files_is_left_alone(tree: Path) -> None:
    before = (tree / "README.md").read_text()
    with pytest.raises(HubError, match="is there already, and not empty"):
        write_new("other", tree)
    assert (tree / "README.md").read_text() == before


def test_the_commands(tmp_path: Path, compiler: Compiler, capsys: pytest.CaptureFixture) -> None:
    tree = tmp_path / "my-gate"
    assert cli.main(["kernels", "new", "my-gate", "--folder", str(tree)]) == 0
    assert str(tree / "build.toml") in capsys.readouterr().out
    assert cli.main(["kernels", "build", str(tree), "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert Path(said.out.strip()).parent == tmp_path / "out" and "[2/2]" in said.err
    assert cli.main(["kernels", "build", str(tree), "--output", str(tmp_path / "out")]) == 0
    assert "is up to date" in capsys.readouterr().err
    compiler.does("sys.exit(1)")
    (tree / "my_gate_cpu/my_gate.cpp").write_text("\n")
    assert cli.main(["kernels", "build", str(tree), "--force"]) == 1
    assert "my_gate_cpu/my_gate.cpp: the compiler failed" in capsys.readouterr().err
