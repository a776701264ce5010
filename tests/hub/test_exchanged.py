"""Files that are exchanged between hashing and loading, and a lock's hashes of manifests."""

import inspect
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge import cli, hub
from forge.executors.hubex import gather
from forge.hub import build, loader, private_copies
from forge.hub.errors import Place
from forge.hub.files import read_small
from forge.testing.hub_server import Hub
from tests.hub.kernels import LOCAL, kernel, metadata, native_module, write
from tests.hub.test_build import Sources, answer, pretended

__all__ = ["answer", "pretended"]
compiles = pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler")
MANIFEST = """\
forge_kernels: 1
library: {name: acme}
ops:
- op: torch.nn.functional.gelu
  kernels:
  - {name: right, kernel_name: KERNEL, args: {x: input}, where: ["approximate == 'none'"]}
"""
CODE = "import torch\n\ndef f(x):\n    return torch.nn.functional.gelu(x)\n"


@pytest.fixture(autouse=True)
def _checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check imports again, although another test had the same files."""
    monkeypatch.setattr(loader, "_import_checks", set())


@pytest.fixture
def exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Path]]:
    """Yield a function that replaces a library, once hashed, by one whose constructor leaves a file."""
    ran = tmp_path / "ran"
    source, evil = tmp_path / "evil.c", tmp_path / "evil.so"
    source.write_text(f'#include <stdio.h>\n__attribute__((constructor)) void f(void) {{ fopen("{ran}", "w"); }}\n')
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(evil)], check=True)

    def of(path: Path) -> Path:
        check = loader.check_imports

        def checked(*args: Any, **options: Any) -> Any:
            found = check(*args, **options)
            path.unlink()
            shutil.copy(evil, path)
            return found

        monkeypatch.setattr(loader, "check_imports", checked)
        return ran

    yield of


OPENED = "import ctypes\nimport os\nlib = ctypes.CDLL(os.path.join(os.path.dirname(__file__), '_native.abi3.so'))\n"


@compiles
@pytest.mark.parametrize("code", ["from . import _native\n", OPENED, f"{OPENED}from . import _native\n"])
@pytest.mark.parametrize("locked", [False, True])
def test_an_exchanged_library_does_not_run(tmp_path: Path, exchange: Callable, code: str, locked: bool) -> None:
    files = {"__init__.py": code, "_native.abi3.so": native_module(tmp_path, "_native", 1)}
    folder = write(tmp_path / "rms", kernel(files))
    lock = hub.lock_kernels([folder], tmp_path / "a.lock", policy=LOCAL) if locked else None
    ran = exchange(folder / "build" / "torch-universal" / "_native.abi3.so")
    module = hub.load(hub.resolve(folder, lock=lock, policy=LOCAL))
    assert not ran.exists()
    assert not hasattr(module, "_native") or module._native.value() == 1


@compiles
def test_copies_are_the_users_alone_and_dropped_where_they_are_not_loaded(tmp_path: Path) -> None:
    files = {"__init__.py": "from . import _native\n", "_native.abi3.so": native_module(tmp_path, "_native", 1)}
    folder = write(tmp_path / "rms", kernel(files))
    module = hub.load(hub.resolve(folder, policy=LOCAL))
    place = Path(module._native.__file__).parent
    assert place.is_relative_to(private_copies._root) and private_copies._root.stat().st_mode & 0o077 == 0
    count = len(list(private_copies._root.iterdir()))
    (folder / "build" / "torch-universal" / "metadata.json").write_text(metadata("rms", "not a name"))
    with pytest.raises(hub.HubError):
        hub.load(hub.resolve(folder, policy=LOCAL))
    assert len(list(private_copies._root.iterdir())) == count


def test_a_built_library_that_was_exchanged_is_refused(answer: Sources, pretended: list[str]) -> None:
    built = answer.build()
    built.path.write_text("another")
    with pytest.raises(hub.IntegrityError, match="changed since it was built"):
        build.load_built(built)


@pytest.mark.parametrize("which", ["folder", "library", "record", "builds"])
def test_a_build_that_others_may_have_written_is_not_used(answer: Sources, pretended: list[str], which: str) -> None:
    built = answer.build()
    folder = built.path.parent
    places = {"folder": folder, "library": built.path, "record": folder / build.RECORD, "builds": folder.parent}
    places[which].chmod(0o777)
    if which == "builds":
        with pytest.raises(hub.BuildError, match="can be written to by other users"):
            answer.build()
    else:
        assert answer.build().seconds is not None and len(pretended) == 2


@pytest.mark.parametrize("inside", [True, False])
def test_a_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    folder = write(tmp_path / "rms", kernel({"__init__.py": CODE}))
    place = folder / "build" / "torch-universal" if inside else folder
    text = MANIFEST.replace("KERNEL", "f")
    (place / "forge_kernels.yaml").write_text(text)
    check = loader.check_imports

    def checked(*args: Any, **options: Any) -> Any:
        found = check(*args, **options)
        (place / "forge_kernels.yaml").write_text(text.replace("approximate == 'none'", "True").replace("right", "new"))
        return found

    monkeypatch.setattr(loader, "check_imports", checked)
    assert [each.name for each in gather([folder], policy=LOCAL)] == ["acme.right"]


def test_the_root_manifest_of_a_folder_is_locked(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write(tmp_path / "rms", kernel({"__init__.py": CODE}))
    manifest = folder / "forge_kernels.yaml"
    manifest.write_text(MANIFEST.replace("KERNEL", "f"))
    lock = tmp_path / "a.lock"
    hub.lock_kernels([folder], lock, policy=LOCAL)
    assert len(gather([lock])) == len(gather([folder], lock=lock)) == 1
    assert cli.main(["kernels", "check", "--lock", str(lock)]) == 0
    manifest.write_text(MANIFEST.replace("KERNEL", "f").replace(", where: [\"approximate == 'none'\"]", ""))
    for ask in (lambda: gather([lock]), lambda: gather([folder], lock=lock)):
        with pytest.raises(hub.IntegrityError, match=r"forge_kernels\.yaml is sha256:"):
            ask()
    assert cli.main(["kernels", "check", "--lock", str(lock)]) == 1


def test_a_root_manifest_that_a_lock_does_not_hold_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "rms", kernel({"__init__.py": CODE}))
    hub.lock_kernels([folder], tmp_path / "a.lock", policy=LOCAL)
    (folder / "forge_kernels.yaml").write_text(MANIFEST.replace("KERNEL", "f"))
    with pytest.raises(hub.IntegrityError, match="lock it again"):
        gather([folder], lock=tmp_path / "a.lock")


def test_a_manifest_for_somebody_elses_repository_is_locked_with_it(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    server.publish("acme/gelu", kernel({"__init__.py": CODE, "metadata.json": metadata("gelu", "_gelu")}))
    manifest, lock = tmp_path / "theirs.yaml", tmp_path / "a.lock"
    manifest.write_text(MANIFEST.replace("KERNEL", "hub:acme/gelu@v1:f"))
    assert cli.main(["kernels", "lock", str(manifest), "-o", str(lock)]) == 0
    assert [each.source for each in hub.read_lock(lock).kernels] == ["./theirs.yaml", "acme/gelu"]
    assert len(gather([lock])) == len(gather([manifest], lock=lock)) == 1
    assert cli.main(["kernels", "check", "--lock", str(lock)]) == 0
    assert cli.main(["kernels", "lock", "-o", str(lock)]) == 0  # everything in it, again
    manifest.write_text(manifest.read_text().replace("where", "layout: {}, where"))
    for ask in (lambda: gather([lock]), lambda: gather([manifest], lock=lock)):
        with pytest.raises(hub.IntegrityError, match=r"theirs\.yaml is sha256:"):
            ask()


READS = """\
import inspect
from pathlib import Path


def double(x):
    return x * 2


TEXT = inspect.getsource(double)
TABLE = (Path(__file__).parent / "table.txt").read_text()
"""


@pytest.mark.parametrize("table", [None, "right"])
@pytest.mark.parametrize("locked", [False, True])
def test_sources_and_tables_that_code_reads_are_those_that_were_hashed(
    tmp_path: Path, table: str | None, locked: bool
) -> None:
    """Triton compiles the text from inspect.getsource."""
    code = READS if table else READS.partition("TABLE")[0]
    folder = write(tmp_path / "rms", kernel({"__init__.py": code, **({"table.txt": table} if table else {})}))
    lock = hub.lock_kernels([folder], tmp_path / "a.lock", policy=LOCAL) if locked else None

    def exchange(verified: loader.VerifiedKernel) -> None:
        variant = folder / "build" / "torch-universal"
        for path in (variant / "__init__.py", variant / "table.txt"):
            path.write_text(path.read_text().replace("2", "3") if path.suffix == ".py" else "wrong")

    module = hub.load(hub.resolve(folder, policy=LOCAL, lock=lock), exchange)
    assert module.TEXT == "def double(x):\n    return x * 2\n" and getattr(module, "TABLE", None) == table
    assert "x * 2" in inspect.getsource(module.double)


def test_metadata_that_is_exchanged_after_it_was_read_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "rms", kernel({"metadata.json": metadata(python_depends=["einops"])}))
    resolved = hub.resolve(folder, policy=LOCAL)
    write(folder, kernel())
    with pytest.raises(hub.IntegrityError, match=r"metadata\.json\): changed while the kernel was checked"):
        hub.load(resolved)


def test_files_through_a_link_to_another_folder_are_no_sources(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "a.cpp").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "linked").symlink_to(tmp_path / "theirs")
    (tmp_path / "mine" / "own").mkdir()
    (tmp_path / "mine" / "own" / "a.cpp").write_text("own")
    (tmp_path / "mine" / "again").symlink_to("own")
    read = lambda path: read_small(tmp_path / "mine" / path, Place("p"), 10, within=tmp_path / "mine")
    assert read("again/a.cpp") == b"own"
    with pytest.raises(hub.MalformedError, match="theirs, which is outside of"):
        read("linked/a.cpp")
