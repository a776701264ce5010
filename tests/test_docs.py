"""The documents tell the truth: their code prints what they say it prints, their diff applies, their paths exist.

In a document a block marked `python` is run, all blocks of a document in one namespace; a block marked
`python printed` or `text printed` is what the block before it prints. `pytest tests/test_docs.py --update-golden`
writes what is printed now.
"""

import contextlib
import io
import linecache
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "docs/architecture.md", "docs/adding-an-op.md"]
BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def _run(code: str, scope: dict, document: str, number: int) -> str:
    """What a block prints. Traces quote its lines as example.py's."""
    path = f"{document}/{number}/example.py"
    linecache.cache[path] = (len(code), None, code.splitlines(True), path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, path, "exec"), scope)
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines()) + "\n"


def _with_what_is_printed(document: str) -> str:
    """The document's text with every printed block as the code prints it now."""
    module = sys.modules["example"] = types.ModuleType("example")
    printed = ""

    def replace(match: re.Match) -> str:
        nonlocal printed
        info = match["info"].split()
        if info[-1:] == ["printed"]:
            return f"```{match['info']}\n{printed}```"
        if info == ["python"]:
            printed = _run(match["text"], vars(module), document, match.start())
        return match[0]

    return _renumbered(BLOCK.sub(replace, (ROOT / document).read_text()))


def _renumbered(text: str) -> str:
    """The objects that traces hold, which are numbered over the whole process, numbered over the document."""
    numbers: dict[str, int] = {}
    return re.sub(r"held\((\d+)\)", lambda match: f"held({numbers.setdefault(match[1], len(numbers))})", text)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_code_of_a_document_prints_what_it_says(document: str, request: pytest.FixtureRequest) -> None:
    path = ROOT / document
    actual = _with_what_is_printed(document)
    if request.config.getoption("--update-golden"):
        path.write_text(actual)
    assert path.read_text() == actual, "run pytest tests/test_docs.py --update-golden, and read the difference"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_paths_in_a_document_exist(document: str) -> None:
    text = BLOCK.sub("", (ROOT / document).read_text())
    links = [(ROOT / document).parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    named = [ROOT / name for name in re.findall(r"`((?:forge|tests|docs|bench|examples)/[\w./-]*)`", text)]
    missing = [str(path) for path in [*links, *named] if not path.exists()]
    assert not missing
    assert links or named


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"make ([\w-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= commands <= targets


def test_from_scratch_runs() -> None:
    _python(ROOT, "docs/from_scratch.py")


def test_the_diff_of_adding_an_op_adds_it(tmp_path: Path) -> None:
    """At most four files and four places, and every test of the op passes."""
    assert _diff().count("\n+++ ") <= 4
    assert _diff().count("\n@@ ") <= 5, "four places, and an import"
    copy = _copy_with_the_op(tmp_path)
    summary = _python(copy, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_ops.py", "--op", "inverse").stdout
    assert re.search(r"\d\d passed", summary), summary


def test_a_forgotten_place_is_named_with_its_file(tmp_path: Path) -> None:
    copy = _copy_with_the_op(tmp_path, "--exclude=forge/executors/*", "--exclude=forge/testing/*")
    chosen = ("tests/test_registry.py", "-k", "has_an_opinfo or has_an_implementation")
    missing = _python(copy, "-m", "pytest", "-p", "no:cacheprovider", *chosen, fails=True).stdout
    assert re.search("prims.inverse has no implementation in torch: .* forge/executors/torchex/linalg.py", missing)
    assert re.search("torch.inverse has no OpInfo: .* forge/testing/opinfos/linalg.py", missing)


def _diff() -> str:
    (diff,) = [m["text"] for m in BLOCK.finditer((ROOT / "docs/adding-an-op.md").read_text()) if m["info"] == "diff"]
    return diff


def _copy_with_the_op(where: Path, *exclude: str) -> Path:
    copy = where / "copy"
    for name in ("forge", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(where)}
    command = ["git", "apply", "--whitespace=error-all", *exclude, "-"]
    found = subprocess.run(command, cwd=copy, env=outside, input=_diff(), text=True, capture_output=True, check=False)
    assert found.returncode == 0, f"the diff in docs/adding-an-op.md has to follow the files it changes: {found.stderr}"
    return copy


def _python(where: Path, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess:
    """A Python process that finds the package in `where`, and fails or not as it should."""
    environment = {**os.environ, "PYTHONPATH": str(where)}
    found = subprocess.run(
        [sys.executable, *arguments], cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    assert (found.returncode != 0) == fails, found.stdout + found.stderr
    return found
