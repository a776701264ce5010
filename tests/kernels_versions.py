"""The tests of forge's use of the `kernels` library against its versions on PyPI: `make test-kernels-versions`.

    python -m tests.kernels_versions [VERSION ...]

Each version is installed alone, without its dependencies, into a folder that is first on the path of its tests; the
environment is not changed. Without arguments, every version that pyproject.toml allows is tested.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
TESTS = ("tests/hub/test_compat.py", "tests/capture/test_layers.py")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def allowed() -> Requirement:
    """Return the requirement of `kernels` in the extra `hub`."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["hub"]
    return next(each for each in map(Requirement, extra) if each.name == "kernels")


def published() -> list[str]:
    """Return the allowed versions that pip finds, the newest first."""
    found = subprocess.run((*PIP, "index", "versions", "kernels"), capture_output=True, text=True, check=True).stdout
    listed = re.search(r"Available versions: (.*)", found)
    return list(allowed().specifier.filter(listed[1].split(", ") if listed else []))


def run(version: str) -> bool:
    """Return whether the tests pass with a version of `kernels`."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = (f"kernels=={version}", "--no-deps", "--target", folder)
        subprocess.run((*PIP, "install", "--quiet", *wanted), check=True)
        path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": path}
        is_it = f"import kernels; assert kernels.__file__.startswith({folder!r}), kernels.__file__"
        tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)  # they are skipped where it cannot be imported
        runs = [subprocess.run((sys.executable, *each), cwd=ROOT, env=environment) for each in (("-c", is_it), tests)]
        return not any(each.returncode for each in runs)


def main(versions: list[str]) -> int:
    """Return the exit status: 1 if a version fails."""
    results = {version: run(version) for version in versions or published()}
    for version, passed in results.items():
        print(f"kernels {version}: {'passed' if passed else 'FAILED'}")
    return 0 if results and all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
