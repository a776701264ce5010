"""The correctness of the documents: their code prints the printed text, their diff applies, their paths exist.

In a document a block marked `python` is run, all blocks of a document in one namespace and in one folder, which is
empty except for examples/; a block marked `python printed` or `text printed` is the output of the block before it. A
block marked with a language and a path is a file of that folder, `diff applied` changes files, and `console` has
commands with their output. `pytest tests/test_docs.py --update-golden` writes the current output.
"""

import contextlib
import dataclasses
import inspect
import io
import linecache
import operator
import os
import platform
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import forge
from forge.hub.manifest.kernels import KernelKeys
from forge.hub.manifest.schema import keys_of
from forge.hub.manifest.validate import ManifestKeys, OpKeys

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "docs/tutorial/quickstart.md",
    "docs/how-to/recipes.md",
    "docs/how-to/debugging.md",
    "docs/how-to/gradients.md",
    "docs/how-to/custom-operators.md",
    "docs/how-to/declaring-a-kernel.md",
    "docs/how-to/extending.md",
    "docs/explanation/architecture.md",
    "docs/how-to/adding-an-op.md",
    "docs/tutorial/writing-a-kernel.md",
    "docs/how-to/layers.md",
    "docs/how-to/distributed.md",
    "docs/how-to/export.md",
    "docs/how-to/serving.md",
]
BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def _run(code: str, scope: dict, document: str, number: int) -> str:
    """Return the output of a block. Traces quote its lines as example.py's."""
    path = f"{document}/{number}/example.py"
    linecache.cache[path] = (len(code), None, code.splitlines(True), path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, path, "exec"), scope)
    told = re.sub(r"(compiled in|compile time:) [\d.]+ s", r"\1 0.1 s", printed.getvalue())
    return "\n".join(line.rstrip() for line in told.rstrip().splitlines()) + "\n"


def _with_what_is_printed(document: str) -> str:
    """Return the document's text with the current output in every printed block."""
    name = re.sub(r"\W", "_", document)  # a unique name: Dynamo keeps the first module that it finds by a name
    module = sys.modules[name] = types.ModuleType(name)
    printed = ""

    def replace(match: re.Match) -> str:
        nonlocal printed
        match match["info"].split(), match["text"]:
            case [_, "printed"], _:
                return f"```{match['info']}\n{printed}```"
            case ["python"], code:
                printed = _run(code, vars(module), document, match.start())
            case ["console"], commands:
                return f"```console\n{_with_answers(commands)}```"
            case ["diff", "applied"], diff:
                _apply(diff, Path.cwd())
            case [_, path], text:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(text)
        return match[0]

    return _renumbered(BLOCK.sub(replace, (ROOT / document).read_text()))


def _with_answers(commands: str) -> str:
    """Return lines that begin with a $, each with its standard output and error, independent of the machine."""
    answered = ""
    for command in re.findall(r"^\$ (.*)$", commands, re.MULTILINE):
        ran = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed = ran.stdout.replace(str(Path.cwd()), "~").replace(str(ROOT), "~").replace(platform.machine(), "x86_64")
        answered += f"$ {command}\n" + "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    return answered


def _apply(diff: str, folder: Path, *options: str) -> None:
    """Apply a diff. Raises AssertionError if it does not match the files that it changes."""
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "--whitespace=error-all", *options, "-"]
    found = subprocess.run(command, cwd=folder, env=outside, input=diff, text=True, capture_output=True, check=False)
    assert found.returncode == 0, f"the diff has to follow the files that it changes: {found.stderr}"


def _renumbered(text: str) -> str:
    """Return a text with the objects of traces, numbered over the process, renumbered over the document."""
    numbers: dict[str, int] = {}
    return re.sub(
        r"printed_object\((\d+)\)", lambda match: f"printed_object({numbers.setdefault(match[1], len(numbers))})", text
    )


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a separate folder, in which `forge` and `python` are commands and forge keeps its caches."""
    folder, commands = tmp_path / "folder", tmp_path / "commands"
    folder.mkdir()
    commands.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, runs in {"python": sys.executable, "forge": f"{sys.executable} -m forge"}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {runs} "$@"\n')
        (commands / name).chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


NEEDS_KERNELS = {
    "docs/tutorial/quickstart.md",
    "docs/tutorial/writing-a-kernel.md",
    "docs/how-to/declaring-a-kernel.md",
    "docs/how-to/layers.md",
}


def _needs(document: str) -> None:
    """Skip a document about kernels if their tools are missing."""
    if document in NEEDS_KERNELS:
        pytest.importorskip("kernels", reason="needs the extra: pip install forge-jit[hub]")
    if document == "docs/how-to/recipes.md":
        pytest.importorskip("accelerate", reason="needs the extra: pip install forge-jit[test]")
    compiled = ("README.md", "docs/tutorial/quickstart.md", "docs/tutorial/writing-a-kernel.md")
    if document in compiled and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler")


# they verify kernels, start processes, compile files or serve: minutes
_LONG = ("custom-operators", "debugging", "distributed", "export", "layers", "recipes", "serving")
LONG = {f"docs/how-to/{each}.md" for each in _LONG} | {"docs/tutorial/writing-a-kernel.md"}
UNFUSED = {"docs/explanation/architecture.md"}  # which prints traces of torch's calls, and says so
CODE = [pytest.param(each, marks=[pytest.mark.slow] if each in LONG else []) for each in DOCUMENTS]


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("document", CODE)
def test_the_code_of_a_document_prints_what_it_says(
    document: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    _needs(document)
    if document in UNFUSED:
        monkeypatch.setenv("FORGE_EXECUTORS", "hub,torch")
    path = ROOT / document
    actual = _with_what_is_printed(document)
    if request.config.getoption("--update-golden"):
        path.write_text(actual)
    assert path.read_text() == actual, "run pytest tests/test_docs.py --update-golden, and read the difference"


WHOLE = {  # models that are jitted whole have a forward, and jit nothing themselves
    "self.model(x)": "self(x)",
    "self.model, self.is_jitted = forge.jit(self.model), True": "pass",
    "= Classifier()": "= forge.jit(Classifier())",
    "    def training_step": "    def forward(self, x):\n        return self.model(x)\n\n    def training_step",
    "forge.explain(classifier.model)": "forge.explain(classifier)",
}


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("whole", [False, True])
def test_the_recipe_for_lightning_prints_what_it_says(whole: bool) -> None:
    """The recipe has its own test because Lightning may not be installed. whole: the LightningModule itself is jitted,
    as the text below the code says."""
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    blocks = [(match["info"], match["text"]) for match in BLOCK.finditer((ROOT / "docs/how-to/recipes.md").read_text())]
    place = [info for info, _ in blocks].index("python train_lightning.py")
    (_, code), (_, printed) = blocks[place : place + 2]
    if whole:
        for old, new in WHOLE.items():
            assert old in code
            code = code.replace(old, new)
    module = sys.modules["train_lightning"] = types.ModuleType("train_lightning")
    assert _run(code, vars(module), "docs/how-to/recipes.md", int(whole)) == printed


PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
WITHOUT_PATHS = {"docs/reference/api.md", "docs/reference/coverage.md"}


def test_the_documentation_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    assert sum(len((ROOT / page).read_text().split()) for page in PAGES) <= 20_000


def _documented_objects() -> dict[str, object]:
    """Return the objects of the API page, and the functions of the package, by name."""
    paths = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/api.md").read_text(), flags=re.MULTILINE)
    names = {f"forge.{name}" for name in forge.__all__ if inspect.isroutine(getattr(forge, name))}
    return {path: operator.attrgetter(path.removeprefix("forge."))(forge) for path in sorted({*paths, *names})}


@pytest.mark.parametrize("name", _documented_objects())
def test_a_public_docstring_describes_every_parameter(name: str) -> None:
    target = _documented_objects()[name]
    text = inspect.getdoc(target) or ""
    described = set()
    for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", text, flags=re.MULTILINE):
        described.update(re.findall(r"^    (\w+):", section, flags=re.MULTILINE))
    is_plain_class = isinstance(target, type) and "Args:" not in text and not dataclasses.is_dataclass(target)
    parameters = [] if is_plain_class else list(inspect.signature(target).parameters)
    assert [each for each in parameters if each not in described] == []


def test_every_page_is_in_one_of_the_four_parts() -> None:
    assert {Path(page).parent.name for page in PAGES if page != "docs/index.md"} == {
        "tutorial",
        "how-to",
        "reference",
        "explanation",
    }


PLACED = [
    *sorted({*PAGES} - WITHOUT_PATHS),
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/manifests/README.md",
]


@pytest.mark.parametrize("document", PLACED)
def test_the_paths_in_a_document_exist(document: str) -> None:
    text = BLOCK.sub("", (ROOT / document).read_text())
    links = [(ROOT / document).parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    named = [ROOT / name for name in re.findall(r"`((?:forge|tests|docs|bench|examples)/[\w./-]*)`", text)]
    missing = [str(path) for path in [*links, *named] if not path.exists()]
    assert not missing
    assert links or named


def test_the_tests_that_a_document_names_exist() -> None:
    text = (ROOT / "docs/explanation/security.md").read_text()
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"\btest_\w+\.py", text)) <= {path.name for path in files}
    functions = set(re.findall(r"\btest_\w+\b(?!\.py)", text))
    assert functions
    assert not [name for name in functions if not any(f"def {name}(" in code for code in files.values())]


def test_every_key_of_a_manifest_is_in_its_document() -> None:
    keys = {*keys_of(ManifestKeys), *keys_of(OpKeys), *keys_of(KernelKeys)}
    text = (ROOT / "docs/reference/manifest.md").read_text()
    assert keys <= set(re.findall(r"`(\w+)`", text))


def test_every_option_and_variable_is_in_its_document() -> None:
    text = (ROOT / "docs/reference/options.md").read_text()
    options, variables = text.split("## Environment variables")
    parameters = inspect.signature(forge.jit).parameters.values()
    assert {each.name for each in parameters if each.kind is each.KEYWORD_ONLY} <= set(re.findall(r"`(\w+)`", options))
    read = {name for path in (ROOT / "forge").rglob("*.py") for name in re.findall(r"FORGE_[A-Z_]+", path.read_text())}
    assert read - {"FORGE_MODULE"} == set(re.findall(r"^\| `(FORGE_\w+)` \|", variables, re.MULTILINE))


def test_every_command_is_in_its_document() -> None:
    text = (ROOT / "docs/reference/commands.md").read_text()
    commands = re.findall(r"^\| `forge (?:kernels )?(\w+)", text, re.MULTILINE)
    listed = subprocess.run([sys.executable, "-m", "forge", "--help"], capture_output=True, text=True)
    kernels_listed = subprocess.run(
        [sys.executable, "-m", "forge", "kernels", "--help"], capture_output=True, text=True
    )
    found = re.findall(r"^  ([a-z]+) {2,}[A-Z]", listed.stdout + kernels_listed.stdout, re.MULTILINE)
    assert sorted(set(found) - {"kernels"}) == sorted(set(commands))


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"make ([\w-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= commands <= targets


def test_from_scratch_runs() -> None:
    _python(ROOT, "docs/from_scratch.py")


@pytest.mark.slow
def test_the_diff_of_adding_an_op_adds_it(tmp_path: Path) -> None:
    """The diff has at most four files and four places, and every test of the op passes."""
    assert _diff().count("\n+++ ") <= 4
    assert _diff().count("\n@@ ") <= 5, "four places, and an import"
    copy = _copy_with(_diff(), tmp_path)
    tests = ("tests/test_ops.py", "--op", "fake_quantize_per_tensor_affine")
    summary = _python(copy, "-m", "pytest", "-p", "no:cacheprovider", *tests).stdout
    assert re.search(r"\d\d passed", summary), summary


@pytest.mark.slow
def test_a_forgotten_place_is_named_with_its_file(tmp_path: Path) -> None:
    copy = _copy_with(_diff(), tmp_path, "--exclude=forge/executors/*", "--exclude=forge/testing/*")
    chosen = ("tests/test_registry.py", "-k", "has_an_opinfo or has_an_implementation")
    missing = _python(copy, "-m", "pytest", "-p", "no:cacheprovider", *chosen, fails=True).stdout
    assert re.search(
        "prims.fake_quantize has no implementation in torch: .* forge/executors/torchex/elementwise", missing
    )
    assert re.search(
        "torch.fake_quantize_per_tensor_affine has no OpInfo: .* forge/testing/opinfos/elementwise", missing
    )


@pytest.mark.parametrize("name", ["an-op", "a-pass"])
def test_a_diff_follows_the_files_that_it_changes(name: str, tmp_path: Path) -> None:
    diff = _diff(name)
    for path in re.findall(r"^--- a/(\S+)$", diff, re.MULTILINE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    _apply(diff, tmp_path)
    ruff = Path(sys.executable).with_name("ruff")
    if ruff.exists():  # a development environment: contributors lint what the guide has them write
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        for command in (["check", "--ignore", "I001"], ["format", "--check"]):  # forge's files are not all here
            found = subprocess.run([ruff, *command, "--no-cache", "."], cwd=tmp_path, capture_output=True, text=True)
            assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_the_diff_of_adding_a_pass_adds_it(tmp_path: Path) -> None:
    copy = _copy_with(_diff("a-pass"), tmp_path)
    chosen = ("tests/transforms/test_double_negation.py", "tests/compiler/test_pipeline.py")
    summary = _python(copy, "-m", "pytest", "-p", "no:cacheprovider", *chosen).stdout
    assert re.search(r"\d passed", summary), summary


def _diff(name: str = "an-op") -> str:
    return (ROOT / f"docs/how-to/adding-{name}.diff").read_text()


def _copy_with(diff: str, where: Path, *exclude: str) -> Path:
    copy = where / "copy"
    for name in ("forge", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    _apply(diff, copy, *exclude)
    return copy


def _python(where: Path, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess:
    """Run a Python process that finds the package in `where`, and check that it fails if it should."""
    environment = {**os.environ, "PYTHONPATH": str(where)}
    found = subprocess.run(
        [sys.executable, *arguments], cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    assert (found.returncode != 0) == fails, found.stdout + found.stderr
    return found
