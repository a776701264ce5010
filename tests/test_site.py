"""The documentation as a site: it builds without a warning, and does not show the parts meant for its tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason="needs the extra: pip install forge-jit[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0 and not built.stdout.strip(), built.stdout + built.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    documents = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert documents <= {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    contents = (site / "index.html").read_text()
    assert all(f'href="{name}.html"' in contents for name in documents - {Path("index")})


def test_a_file_in_a_document_is_named_and_marks_for_tests_are_not_shown(site: Path) -> None:
    page = (site / "tutorial/quickstart.html").read_text()
    assert '<span class="filename">my-gelu/build/torch-universal/forge_kernels.yaml</span>' in page
    assert "text printed" not in page and "diff applied" not in page and "```" not in page


def test_the_reference_has_what_the_package_exports(site: Path) -> None:
    page = (site / "reference/api.html").read_text()
    for name in ("jit", "explain", "bisect", "use_kernels", "load_kernel", "make_prim", "FusionExecutor"):
        assert f">{name}" in page, name
