"""Kernels compiled here: once per set of inputs, atomically, with the reason for each way that was tried.

The cache is tested with a library of plain C, which compiles fastest; operators with torch's stable ABI.
"""

import ctypes
import multiprocessing
import os
import platform
import shutil
import signal
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import cli, hub
from forge.executors.hubex import gather, operators, worker
from forge.executors.hubex.verification import process
from forge.executors.hubex.verification.messages import Question
from forge.hub import HubNotice, Policy, build, toolchain
from forge.hub.manifest import Manifest, read_manifest
from tests.hub.kernels import kernel, write

LOCAL = Policy(local=True)
ANSWER = '#include "beside.h"\n#include "given.h"\nextern "C" int answer() { return BESIDE + GIVEN; }\n'
UNARY = r"""
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

template <class Function>
Tensor map(const Tensor& x, Function function) {
  Tensor from = torch::stable::contiguous(x), out = torch::stable::empty_like(from);
  const float* source = static_cast<const float*>(from.data_ptr());
  float* target = static_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i < from.numel(); ++i) target[i] = function(source[i]);
  return out;
}

Tensor relu(const Tensor& x) { return map(x, [](float v) { return v < 0 ? 0 : v; }); }
Tensor square(const Tensor& x) { return map(x, [](float v) { return v * v * 1.01f; }); }

STABLE_TORCH_LIBRARY(forge_built, m) {
  m.def("relu(Tensor x) -> Tensor");
  m.def("square(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(forge_built, CPU, m) {
  m.impl("relu", TORCH_BOX(&relu));
  m.impl("square", TORCH_BOX(&square));
}
"""
KERNELS = """\
- op: torch.nn.functional.relu
  kernels:
  - {name: relu, kernel_name: "forge_built::relu", arg_meta: {input: float32}, args: [input]}
- op: torch.square
  kernels:
  - {name: square, kernel_name: "forge_built::square", arg_meta: {input: float32}}
"""


def tool_is_missing() -> str | None:
    """Return the reason why nothing can be compiled here, or None."""
    compiler = os.environ.get("CXX", "c++")
    tools = os.pathsep.join([os.environ["PATH"], sysconfig.get_path("scripts")])
    missing = [name for name in (compiler, "ninja") if shutil.which(name, path=tools) is None]
    return f"there is no {missing[0]} to build with" if missing else None


compiles = pytest.mark.skipif(tool_is_missing() is not None, reason=str(tool_is_missing()))


class Sources:
    """A folder with the manifest and the sources of a library."""

    def __init__(self, folder: Path, files: dict[str, str], ops: str = KERNELS, **keys: str) -> None:
        self.folder = folder
        for path, text in files.items():
            self.write(path, text)
        listed = ", ".join(f"{key}: {value}" for key, value in {"cpp": "csrc/answer.cpp", **keys}.items())
        self.write("forge_kernels.yaml", f"forge_kernels: 1\nlibrary: {{name: acme}}\nbuild: {{{listed}}}\nops:\n{ops}")

    def write(self, path: str, text: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def read(self) -> Manifest:
        return read_manifest(self.folder / "forge_kernels.yaml", operators())

    def build(self, **options: Any) -> hub.BuiltLibrary:
        return hub.build_kernels(self.read(), policy=LOCAL, **options)

    def key(self) -> str:
        return build._plan(self.read(), {}).key


@pytest.fixture
def answer(tmp_path: Path) -> Sources:
    """Return a library with a function `answer`, whose headers lie beside it and in an include folder."""
    files = {
        "csrc/answer.cpp": ANSWER,
        "csrc/beside.h": "#define BESIDE 1\n",
        "include/inner/given.h": "#define GIVEN 1\n",
    }
    return Sources(tmp_path / "answer", files, include="[include/inner]", cflags="[-O1]")


@pytest.fixture
def unary(tmp_path: Path) -> Sources:
    """Return a library with two operators, one of which, `square`, is wrong."""
    files = {"csrc/unary.cpp": UNARY}
    return Sources(
        tmp_path / "unary", files, cpp="csrc/unary.cpp", cflags="[-DTORCH_TARGET_VERSION=0x020b000000000000]"
    )


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a compiler that lists what it compiles in `compiled`, and waits while the file `hold` exists."""
    script = tmp_path / "tools" / "slow-c++"
    script.parent.mkdir()
    script.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            cd_to="{script.parent}"
            case " $* " in *" -c "*)
              echo "$*" >> "$cd_to/compiled"
              while [ -e "$cd_to/hold" ]; do sleep 0.05; done
            esac
            exec {os.environ.get("CXX", "c++")} "$@"
            """)
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    yield script
    script.with_name("hold").unlink(missing_ok=True)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace compilation by writing a small file; return the keys of the requested builds."""
    asked: list[str] = []

    def compile_(plan: Any, work: Path) -> dict[str, Any]:
        asked.append(plan.key)
        (work / "out").mkdir()
        (work / "out" / "acme.so").write_text("library")
        return {"file": "acme.so", "operators": [], "namespaces": []}

    monkeypatch.setattr(build, "_compile", compile_)
    return asked


def answer_of(built: hub.BuiltLibrary) -> int:
    return ctypes.CDLL(str(built.path)).answer()


def left_in_cache() -> list[str]:
    """Return the names in the folder of builds, without locks."""
    return sorted(path.name for path in build.builds().iterdir() if path.suffix != ".lock")


def wait_for(there: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not there():
        assert time.monotonic() < until, "nothing happened within a minute"
        time.sleep(0.02)


# builds, and when they run


@compiles
def test_sources_are_built_once_and_found_again(answer: Sources, capsys: pytest.CaptureFixture) -> None:
    first = answer.build(prebuilt="none fits")
    assert answer_of(first) == 2 and first.seconds is not None
    assert list(first.skipped) == ["prebuilt", "cached"] and first.skipped["prebuilt"] == "none fits"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "forge: building acme from csrc/answer.cpp"
    assert lines[1].startswith("forge: built acme in ") and lines[1].endswith(f" s: {first.path.parent}")
    again = answer.build()
    assert (again.path, again.key, again.seconds) == (first.path, first.key, None)
    assert list(again.skipped) == ["prebuilt"] and capsys.readouterr().err == ""
    assert left_in_cache() == [f"acme-{first.key[:16]}"]


@compiles
def test_what_was_hashed_is_what_is_compiled(answer: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    key, say = answer.key(), build._say

    def change(text: str) -> None:
        answer.write("csrc/answer.cpp", 'extern "C" int answer() { return 666; }')
        answer.write("include/inner/given.h", "#define GIVEN 666")
        say(text)

    monkeypatch.setattr(build, "_say", change)
    built = answer.build()
    assert built.key == key and answer_of(built) == 2


@compiles
@pytest.mark.parametrize(
    "change",
    [
        lambda made, patch: made.write("csrc/answer.cpp", ANSWER + "\n"),
        lambda made, patch: made.write("csrc/beside.h", "#define BESIDE 2\n"),
        lambda made, patch: made.write("include/inner/given.h", "#define GIVEN 2\n"),
        lambda made, patch: made.write("include/inner/deep/new.h", ""),
        lambda made, patch: made.write("forge_kernels.yaml", manifest_of(made).replace("-O1", "-O2")),
        lambda made, patch: made.write("forge_kernels.yaml", manifest_of(made).replace("cflags", "ldflags")),
        lambda made, patch: patch.setattr(torch, "__version__", "2.99"),
        lambda made, patch: patch.setattr(torch, "compiled_with_cxx11_abi", lambda: None),
        lambda made, patch: patch.setattr(sysconfig, "get_config_var", lambda name: ".other.so"),
        lambda made, patch: patch.setattr(platform, "machine", lambda: "other"),
        lambda made, patch: patch.setattr(toolchain, "version", lambda program: f"{program} 99"),
        lambda made, patch: patch.setattr(toolchain, "cpu_features", lambda: "flags: none"),
        lambda made, patch: patch.setenv("CPLUS_INCLUDE_PATH", "/elsewhere"),
    ],
    ids="source beside header new-header flag kind-of-flag torch abi python machine compiler cpu environment".split(),
)
def test_a_change_of_what_decides_is_another_build(
    answer: Sources, monkeypatch: pytest.MonkeyPatch, change: Callable
) -> None:
    before = answer.key()
    change(answer, monkeypatch)
    assert answer.key() != before


def manifest_of(made: Sources) -> str:
    return (made.folder / "forge_kernels.yaml").read_text()


@compiles
def test_other_files_and_the_place_of_the_folder_are_not_part_of_the_key(answer: Sources, tmp_path: Path) -> None:
    before = answer.key()
    answer.write("README.md", "text")
    answer.write("csrc/notes.txt", "text")
    answer.write("include/inner/.hidden/x.h", "text")
    answer.folder = answer.folder.rename(tmp_path / "elsewhere")
    assert answer.key() == before


@compiles
def test_a_build_that_was_damaged_is_built_again(answer: Sources, pretended: list[str]) -> None:
    first = answer.build()
    for damage in (first.path.unlink, lambda: first.path.write_text(""), lambda: record(first).write_text("[]")):
        damage()
        again = answer.build()
        assert again.seconds is not None and again.path.read_text() == "library"
    assert len(pretended) == 4 and len(left_in_cache()) == 1


def record(built: hub.BuiltLibrary) -> Path:
    return built.path.parent / build.RECORD


# several builders, and those that end early


@compiles
def test_two_processes_build_once(answer: Sources, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, messages = compiler.with_name("hold"), compiler.with_name("messages")
    hold.touch()
    monkeypatch.setattr(build, "_say", lambda text: messages.open("a").write(f"{text}\n"))
    first = started(answer)
    wait_for(compiler.with_name("compiled").exists)
    second = started(answer)
    wait_for(lambda: "waiting for another process that builds acme" in messages.read_text())
    hold.unlink()
    for builder in (first, second):
        builder.join(60)
        assert builder.exitcode == 0
    assert len(compiler.with_name("compiled").read_text().splitlines()) == 1
    assert answer.build().seconds is None


def started(made: Sources) -> multiprocessing.Process:
    builder = multiprocessing.get_context("fork").Process(target=made.build)
    builder.start()
    return builder


@compiles
@pytest.mark.slow
def test_a_builder_that_is_killed_leaves_nothing_in_the_way(answer: Sources, compiler: Path) -> None:
    hold = compiler.with_name("hold")
    hold.touch()
    builder = started(answer)
    wait_for(compiler.with_name("compiled").exists)
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(60)
    (left,) = left_in_cache()
    out = build.builds() / left / "out"
    assert left.startswith(".acme-") and (out / "lock").exists()  # torch would wait for it
    hold.unlink()
    wait_for((out / "output.json").exists)  # its compiler lived on, and ended
    assert build._cached_library(build._plan(answer.read(), {}))[0] is None
    built = answer.build()
    assert answer_of(built) == 2 and left_in_cache() == [built.path.parent.name]


# failures


@compiles
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int one;\nint two = one +;\n", "it failed:\n    csrc/answer.cpp:2:16: error: expected "),
        pytest.param("int gone();\nint two = gone();\n", "undefined symbol: _Z4gonev", marks=pytest.mark.slow),
        ("#include <cstdlib>\nint two = (abort(), 1);\n", "loading it ended its process (signal 6)"),
    ],
    ids=["compiler", "linker", "crash"],
)
def test_what_cannot_be_built_or_loaded_says_why(answer: Sources, source: str, reason: str) -> None:
    answer.write("csrc/answer.cpp", source)
    with pytest.raises(hub.BuildError) as caught:
        answer.build(prebuilt="torch-metal: is not for this system")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{answer.folder / 'forge_kernels.yaml'}: there is no library with its kernels:"
    assert lines[1] == "  prebuilt: torch-metal: is not for this system"
    assert lines[2] == f"  cached: {build.builds()} has none of these sources, flags, compilers and torch"
    assert lines[3].startswith("  build: ") and reason in str(caught.value)
    assert left_in_cache() == []


def test_a_missing_compiler_is_a_reason(answer: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-c++")
    with pytest.raises(
        hub.BuildError, match=r"build: there is no C\+\+ compiler 'no-such-c\+\+': install one, or name"
    ):
        answer.build()


@compiles
def test_cuda_sources_are_left_out_where_they_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"csrc/answer.cpp": "", "csrc/answer.cu": ""}
    both = Sources(tmp_path / "both", files, cuda="csrc/answer.cu")
    alone = Sources(tmp_path / "alone", files, cpp="[]", cuda="csrc/answer.cu")
    monkeypatch.setattr(torch.version, "cuda", None)
    skipped: dict[str, str] = {}
    plan = build._plan(both.read(), skipped)
    assert plan.build.sources == ("csrc/answer.cpp",) and [*plan.files] == ["csrc/answer.cpp"]
    assert skipped["cuda sources"] == f"torch {torch.__version__} is built without CUDA"
    with pytest.raises(hub.BuildError, match=r"build: torch .* is built without CUDA"):
        alone.build()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    with pytest.warns(HubNotice, match="its CUDA sources are left out: there is no nvcc: install the CUDA toolkit"):
        assert build._plan(both.read(), {}).build.cuda == ()
    monkeypatch.setattr(toolchain, "nvcc", lambda: "/usr/bin/true")
    monkeypatch.setattr(toolchain, "architectures", list)
    with pytest.raises(hub.BuildError, match=r"build: there is no GPU to compile for: name .* TORCH_CUDA_ARCH_LIST"):
        alone.build()


@compiles
def test_only_what_the_policy_allows_is_built(answer: Sources, pretended: list[str]) -> None:
    for policy in (Policy(), Policy(local=True, trust="locked")):
        with pytest.raises(hub.RefusedError, match=r"forge_kernels\.yaml: (its sources are in a folder|trust=)"):
            hub.build_kernels(answer.read(), policy=policy)
    with pytest.raises(hub.BuildError, match=r"build: the policy does not allow it \(build=False\)"):
        hub.build_kernels(answer.read(), policy=Policy(local=True, build=False))
    assert pretended == []
    built = answer.build()
    assert hub.build_kernels(answer.read(), policy=Policy(local=True, build=False)).path == built.path


@compiles
def test_a_header_that_is_a_link_out_of_the_folder_is_refused(answer: Sources, tmp_path: Path) -> None:
    (tmp_path / "secret.h").write_text("")
    (answer.folder / "include" / "inner" / "link.h").symlink_to(tmp_path / "secret.h")
    with pytest.raises(
        hub.MalformedError, match=r"include/inner/link\.h\): is a link to .*secret\.h, which is outside"
    ):
        answer.build()


def test_operators_that_are_registered_are_not_registered_again(tmp_path: Path) -> None:
    """A second registration would abort the process."""
    built = hub.BuiltLibrary("acme.yaml", "key", tmp_path / "acme.so", ("acme::new", "aten::relu"), (), None, {})
    with pytest.raises(hub.RefusedError, match=r"acme\.yaml: aten::relu is registered in this process already"):
        hub.load_built(built)
    with pytest.raises(hub.RefusedError, match=r"acme\.yaml: aten is registered in this process already"):
        hub.load_built(replace(built, operators=("aten::new",), namespaces=("aten",)))


# prebuilt variants come first


def test_a_prebuilt_variant_that_fits_is_taken(answer: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_kernels", None)
    write(answer.folder, kernel())
    one = "- op: torch.nn.functional.relu\n  kernels:\n  - {kernel_name: double, args: [input]}\n"
    made = Sources(answer.folder, {"other.yaml": ""}, one)
    for source in (made.folder, made.folder / "forge_kernels.yaml"):
        (found,) = gather([source])
        assert found.function(3) == 6


def test_why_no_prebuilt_variant_is_taken_is_kept(answer: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-c++")
    with pytest.raises(hub.BuildError, match=r"prebuilt: there is no variant in .*/build\n"):
        gather([answer.folder])
    write(answer.folder, kernel(variant="torch-metal"))
    with pytest.raises(hub.BuildError, match=r"prebuilt: torch-metal: backend \(metal\) does not match .*\n"):
        gather([answer.folder])
    write(answer.folder, kernel({"__init__.py": "raise ImportError('undefined symbol')"}))
    with (
        pytest.warns(
            HubNotice, match="raised while it was imported: .*undefined symbol; its sources are built instead"
        ),
        pytest.raises(hub.BuildError, match=r"prebuilt: .*undefined symbol; torch-metal: backend"),
    ):
        gather([answer.folder])


def test_a_lock_holds_variants_and_no_sources(answer: Sources, tmp_path: Path) -> None:
    write(answer.folder, kernel())
    lock = hub.lock_kernels([answer.folder], tmp_path / "kernels.lock", policy=LOCAL)
    shutil.rmtree(answer.folder / "build")
    with pytest.raises(hub.NotFoundError, match="no variant fits this system"):
        gather([answer.folder], lock=lock)


# in models, and from the command line


@compiles
def test_a_model_uses_what_was_built_where_it_is_right(unary: Sources, capfd: pytest.CaptureFixture) -> None:
    jitted = forge.jit(lambda x: F.relu(x) + torch.square(x), kernels=[unary.folder])
    x = torch.randn(5)
    with pytest.warns(HubNotice, match=r"kernel acme\.square of torch\.square is not used: failed verification"):
        torch.testing.assert_close(jitted(x), F.relu(x) + torch.square(x))
    rows = {row.executor: row for row in forge.explain(jitted).rows}
    assert "acme.relu" in rows and "acme.square" not in rows
    assert "values differ" in str(forge.explain(jitted))
    assert capfd.readouterr().err.count("forge: building") == 1 and len(left_in_cache()) == 1
    relu, square = gather([unary.folder / "forge_kernels.yaml"])
    assert relu.origin.content == square.origin.content == unary.key()
    shutil.rmtree(build.builds())
    with pytest.raises(hub.BuildError, match="build: the policy does not allow it"):  # verification never compiles
        worker.find(process._request(relu, Question(x.device, x.dtype), 1, ""))


def test_the_command_builds_and_prints_the_place(
    answer: Sources, pretended: list[str], capsys: pytest.CaptureFixture
) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        return cli.main(["kernels", "build", *map(str, arguments)]), capsys.readouterr().out

    place = build.builds() / f"acme-{answer.key()[:16]}"
    assert run(answer.folder) == run(answer.folder / "forge_kernels.yaml") == (0, f"{place}\n")
    assert len(pretended) == 1
    assert run(answer.folder, "--force") == (0, f"{place}\n")
    assert len(pretended) == 2 and (place / "acme.so").read_text() == "library"
    write(answer.folder, kernel())
    assert cli.main(["kernels", "build", str(answer.folder)]) == 0
    assert capsys.readouterr() == (f"{place}\n", "forge: the prebuilt variant torch-universal is taken before it\n")
    assert cli.main(["kernels", "build", "acme/rms@v1"]) == 1
    assert "acme/rms@v1: only a folder of this machine or a manifest's file has sources" in capsys.readouterr().err
