"""Loading of kernels: every check first, then an import that touches nothing else."""

import ast
import gc
import hashlib
import importlib
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge import hub
from forge.hub import loader
from forge.hub.errors import Place
from forge.hub.files import Pins, check_pins, read_files
from forge.testing.hub_server import Hub
from tests.hub.kernels import INIT, LOCAL, OPS, digest, kernel, load, metadata, native_module, write


def ops(factor: int) -> str:
    return f"def double(x):\n    return x * {factor}\n"


def test_two_versions_of_one_kernel_live_side_by_side(server: Hub) -> None:
    server.publish("acme/rms", kernel(), branch="v1")
    server.publish("acme/rms", kernel({"ops.py": ops(3)}), branch="v2")
    first, second = (hub.load(hub.resolve("acme/rms", version=version)) for version in (1, 2))
    assert (first.double(1), second.double(1)) == (2, 3)
    assert first.__name__ != second.__name__
    assert sys.modules[first.__name__] is first and sys.modules[f"{second.__name__}.ops"] is second.ops


def test_a_kernel_is_verified_every_time_and_imported_once(tmp_path: Path) -> None:
    write(tmp_path, kernel())
    assert load(tmp_path) is load(tmp_path)
    (tmp_path / "build" / "torch-universal" / "ops.py").write_text("import requests\n")
    with pytest.raises(hub.RefusedError, match="import requests"):
        load(tmp_path)


def test_nothing_in_sys_modules_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, kernel())
    before = dict(sys.modules)
    module = load(tmp_path)
    assert all(sys.modules[name] is held for name, held in before.items())
    new = [name for name in sys.modules if name not in before]
    assert sorted(new) == [module.__name__, f"{module.__name__}.ops"]


def test_a_copy_of_what_is_loaded_is_no_other_kernel(tmp_path: Path) -> None:
    """This holds even if an earlier version of it was loaded from the place of the copy."""
    first = load(write(tmp_path / "mine", kernel()))
    changed = {"ops.py": ops(3)}
    second = load(write(tmp_path / "mine", kernel(changed)))
    assert load(write(tmp_path / "copy", kernel(changed))) is second is not first
    with pytest.raises(hub.RefusedError, match="the id '_rms_ab12' was loaded from"):
        load(write(tmp_path / "copy", kernel({"ops.py": ops(4)})))


def test_a_kernel_that_replaces_a_module_is_refused_and_undone(tmp_path: Path) -> None:
    write(tmp_path, kernel({"__init__.py": "import sys, types\nsys.modules['json'] = types.ModuleType('json')\n"}))
    with pytest.raises(hub.RefusedError, match="replaced modules while it was imported: json"):
        load(tmp_path)
    assert sys.modules["json"] is json
    assert not any(name.startswith(loader.PREFIX) for name in loader._packages)


def test_a_kernel_named_as_a_standard_module_is_refused(server: Hub) -> None:
    """hub-facts 2: `id: "json"` replaces the standard json."""
    server.publish("acme/json", kernel({"metadata.json": metadata(kernel_id="json")}))
    with pytest.raises(hub.RefusedError, match="the id 'json' shadows a module of the standard library"):
        hub.load(hub.resolve("acme/json", version=1))
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("kernel_id", "message"),
    [
        ("networkx", "the id 'networkx' (was loaded from|shadows the installed module) .*networkx"),
        ("torch", "the id 'torch' was loaded from .*torch"),
        ("", r"the id is '', but must match \^_\?\[A-Za-z0-9_\]\+\$"),
        ("a.b", "the id is 'a.b'"),
        ("../x", "the id is '../x'"),
        ("a\n", r"the id is 'a\\n'"),
        ("ä", "the id is 'ä'"),
    ],
)
def test_an_id_that_is_no_name_or_another_module_is_refused(tmp_path: Path, kernel_id: str, message: str) -> None:
    write(tmp_path, kernel({"metadata.json": metadata(kernel_id=kernel_id)}))
    with pytest.raises(hub.RefusedError, match=message):
        load(tmp_path)


def test_one_id_in_two_repositories_is_refused(server: Hub) -> None:
    """hub-facts 2: they contaminate each other through sys.modules."""
    server.publish("acme/rms", kernel())
    server.publish("acme/other", kernel({"ops.py": ops(3)}))
    first = hub.load(hub.resolve("acme/rms", version=1))
    with pytest.raises(hub.RefusedError, match=r"acme/other .*the id '_rms_ab12' was loaded from acme/rms \(commit"):
        hub.load(hub.resolve("acme/other", version=1))
    assert first.double(1) == 2


def test_an_id_that_another_library_loaded_from_elsewhere_is_refused(tmp_path: Path) -> None:
    import kernels

    write(tmp_path / "theirs", kernel())
    write(tmp_path / "ours", kernel({"ops.py": ops(3)}))
    kernels.get_local_kernel(tmp_path / "theirs")
    try:
        with pytest.raises(hub.RefusedError, match=r"the id '_rms_ab12' was loaded from .*theirs"):
            load(tmp_path / "ours")
        assert load(tmp_path / "theirs").double(1) == 2
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "_rms_ab12"]:
            del sys.modules[name]


def test_the_same_files_elsewhere_are_the_same_kernel(tmp_path: Path) -> None:
    assert load(write(tmp_path / "a" / "rms", kernel())) is load(write(tmp_path / "b" / "rms", kernel()))


def test_the_older_nested_layout_is_imported(tmp_path: Path) -> None:
    nested = {"__init__.py": None, "ops.py": None, "rms/__init__.py": INIT, "rms/ops.py": OPS}
    assert load(write(tmp_path, kernel(nested))).double(2) == 4


def test_the_nested_layout_is_found_by_the_repositorys_name(server: Hub) -> None:
    nested = {"__init__.py": None, "ops.py": None, "metadata.json": None, "helpers/__init__.py": ""}
    inner = {"rms_norm/__init__.py": INIT, "rms_norm/ops.py": OPS}
    server.publish("acme/rms-norm", kernel(nested | inner))
    assert hub.load(hub.resolve("acme/rms-norm", version=1)).double(2) == 4


def test_a_folder_without_a_module_says_what_was_wanted(tmp_path: Path) -> None:
    write(tmp_path, kernel({"__init__.py": None}))
    with pytest.raises(hub.MalformedError, match=r"has neither __init__.py nor rms/__init__.py"):
        load(tmp_path)


def test_relative_imports_and_namespace_folders_work(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from . import a\nfrom .a import b\nfrom .names.c import value\nimport importlib\n"
        "later = lambda: importlib.import_module('.late', __package__)\n",
        "a/__init__.py": "from ..ops import double\n",
        "a/b.py": "from . import double\nfrom .. import ops\n",
        "names/c.py": "value = 7\n",
        "late.py": "value = 8\n",
    }
    module = load(write(tmp_path, kernel(files)))
    assert module.a.b.double is module.a.b.ops.double
    assert (module.value, module.later().value) == (7, 8)
    assert "x * 2" in inspect.getsource(module.a.double)


def test_a_file_that_came_after_the_checks_is_not_imported(tmp_path: Path) -> None:
    write(tmp_path, kernel({"__init__.py": "def get():\n    from . import late\n    return late\n"}))
    module = load(tmp_path)
    (tmp_path / "build" / "torch-universal" / "late.py").write_text("raise SystemExit\n")
    with pytest.raises(ImportError, match="late"):
        module.get()


def test_bytecode_is_neither_read_nor_written(tmp_path: Path) -> None:
    folder = write(tmp_path, kernel()) / "build" / "torch-universal"
    source = folder / "ops.py"
    evil = tmp_path / "evil.py"
    evil.write_text(ops(9))
    program = (
        "import importlib.util, py_compile, os, sys\n"
        f"py_compile.compile({str(evil)!r}, importlib.util.cache_from_source({str(source)!r}), {str(source)!r},\n"
        "    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", program], check=True)
    assert load(tmp_path).double(1) == 2
    assert len(list(folder.rglob("*.pyc"))) == 1


def test_a_kernel_that_raises_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, kernel({"__init__.py": "from . import ops\nraise SystemExit('no')\n"}))
    before = set(sys.modules)
    with pytest.raises(hub.KernelImportError, match=r"variant torch-universal\): raised .*imported: SystemExit: no"):
        load(tmp_path)
    assert set(sys.modules) == before and hub.loaded_kernels() == ()


def test_a_missing_native_module_is_an_error_with_its_name(tmp_path: Path) -> None:
    write(tmp_path, kernel({"__init__.py": "from . import _native\n"}))
    with pytest.raises(hub.KernelImportError, match="_native"):
        load(tmp_path)


def test_a_broken_native_module_is_an_error_and_no_crash(tmp_path: Path) -> None:
    write(tmp_path, kernel({"__init__.py": "from . import _native\n", "_native.abi3.so": b"not a library"}))
    with pytest.raises(hub.KernelImportError, match=r"_native\.abi3\.so"):
        load(tmp_path)


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler")
def test_native_modules_are_the_kernels_own_and_one_name_means_one_module(server: Hub, tmp_path: Path) -> None:
    def files(returns: int, extra: str = "") -> dict[str, str | bytes]:
        init = f"from . import _native\nvalue = _native.value\n{extra}"
        return kernel({"__init__.py": init, "_native.abi3.so": native_module(tmp_path, "_native", returns)})

    server.publish("acme/rms", files(1), branch="v1")
    server.publish("acme/rms", files(1, "new = True\n"), branch="v2")
    server.publish("acme/rms", files(2), branch="v3")
    first, second = (hub.load(hub.resolve("acme/rms", version=version)) for version in (1, 2))
    assert (first.value(), second.value(), second.new) == (1, 1, True)
    with pytest.raises(hub.RefusedError, match=r"_native.abi3.so\): a native module of this name was loaded from"):
        hub.load(hub.resolve("acme/rms", version=3))


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler")
def test_a_native_module_of_the_same_content_is_loaded_once(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from . import _native\n",
        "_native.abi3.so": native_module(tmp_path, "_native", 1),
        "metadata.json": None,
    }
    newer = files | {"__init__.py": "from . import _native\nnew = True\n"}
    first = load(write(tmp_path / "first", kernel(files)))
    second = load(write(tmp_path / "second", kernel(newer)))
    assert second.new and second is not first
    assert second._native.__file__ == first._native.__file__


def test_a_wrong_digest_is_refused(tmp_path: Path) -> None:
    """hub-facts 1: a wrong digest loads."""
    wrong = digest({"__init__.py": INIT, "ops.py": ops(3)})
    write(tmp_path, kernel({"metadata.json": metadata(digest=wrong)}))
    with pytest.raises(hub.IntegrityError, match=r"are not those of the digest in metadata.json:\n  ops.py is sha256:"):
        load(tmp_path)


def test_a_right_digest_is_accepted_and_names_missing_and_extra_files(tmp_path: Path) -> None:
    right = {"__init__.py": INIT, "ops.py": OPS}
    write(tmp_path, kernel({"metadata.json": metadata(digest=digest(right))}))
    assert load(tmp_path).double(1) == 2
    write(tmp_path, {"torch-universal/extra.py": "", "torch-universal/__pycache__/ops.pyc": b""})
    with pytest.raises(hub.IntegrityError, match=r"\n  extra.py is not among them$"):
        load(tmp_path)
    (tmp_path / "build/torch-universal/extra.py").rename(tmp_path / "build/torch-universal/ops.py")
    (tmp_path / "build/torch-universal/ops.py").unlink()
    with pytest.raises(hub.IntegrityError, match=r"\n  ops.py is missing$"):
        load(tmp_path)


def test_a_tampered_cache_is_refused_without_a_lock_too(server: Hub) -> None:
    """hub-facts 1: a tampered cache loads. The Hub's listing of the commit has the id of every blob."""
    server.publish("acme/rms", kernel({"_data.so": b"12345678"}))
    resolved = hub.resolve("acme/rms", version=1)
    hub.load(resolved)
    for name, data in {"ops.py": ops(3).encode(), "_data.so": b"87654321"}.items():
        (resolved.folder / name).resolve().write_bytes(data)
    with pytest.raises(hub.IntegrityError) as caught:
        hub.load(hub.resolve("acme/rms", version=1))
    text = str(caught.value)
    assert f"the Hub's listing of commit {resolved.commit[:12]}" in text
    assert "\n  ops.py is git:" in text and "\n  _data.so is sha256:" in text


def test_signatures_are_off_or_warned_of_or_enforced(tmp_path: Path) -> None:
    write(tmp_path, kernel())

    def policy(signatures: str) -> hub.Policy:
        return hub.Policy(local=True, signatures=signatures)

    hub.load(hub.resolve(tmp_path, policy=policy("off")))
    with pytest.warns(hub.HubNotice, match="is not signed by a trusted publisher: SignatureBundleMissing"):
        hub.load(hub.resolve(tmp_path, policy=policy("warn")))
    with pytest.raises(hub.IntegrityError, match="is not signed by a trusted publisher: SignatureBundleMissing"):
        hub.load(hub.resolve(tmp_path, policy=policy("enforce")))


def test_a_good_signature_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, kernel())
    verify = pytest.importorskip("kernels.verify")
    monkeypatch.setattr(verify, "verify_variant", lambda folder: verify.VerificationResult.Success())
    hub.load(hub.resolve(tmp_path, policy=hub.Policy(local=True, signatures="enforce")))
    failure = verify.VerificationResult.SignatureVerificationFailure(reason="wrong signer")
    monkeypatch.setattr(verify, "verify_variant", lambda folder: failure)
    with pytest.raises(hub.IntegrityError, match="SignatureVerificationFailure: wrong signer"):
        hub.load(hub.resolve(tmp_path, policy=hub.Policy(local=True, signatures="enforce")))


def test_a_dependency_is_checked_before_anything_is_imported(server: Hub, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    depends = [{"repo-id": "acme/base", "version": 1}]
    touch = {"__init__.py": f"open({str(mark)!r}, 'w')\n", "metadata.json": metadata(kernel_depends=depends)}
    server.publish("acme/rms", kernel(touch))
    server.publish("acme/base", kernel({"metadata.json": metadata("base", "_base"), "ops.py": "import requests\n"}))
    with pytest.raises(hub.RefusedError, match="acme/base"):
        hub.load(hub.resolve("acme/rms", version=1))
    assert not mark.exists()


def test_loaded_kernels_are_listed(tmp_path: Path) -> None:
    module = load(write(tmp_path, kernel()))
    (held,) = hub.loaded_kernels()
    assert held.module is module and held.verified.resolved.policy == LOCAL
    assert held.verified.module_name == module.__name__ == f"forge_kernel_rms_{held.verified.content[:16]}"


def test_what_is_imported_is_what_was_parsed_for_the_checks(tmp_path: Path) -> None:
    source = (
        "# -*- coding: latin-1 -*-\n"
        "from __future__ import annotations\n\n"
        "NAME = 'm\xe9tal'\n\n"
        "def double(x: NotDefined):\n"
        "    return x / 0\n"
    )
    write(tmp_path, kernel({"ops.py": source.encode("latin-1"), "later.py": "value = 1\n"}))
    verified = hub.verify(hub.resolve(tmp_path, policy=LOCAL))
    assert sorted(verified.trees) == ["__init__.py", "later.py", "ops.py"]
    verified.trees["__init__.py"].body += ast.parse("from_the_tree = True").body
    module = loader._load(verified)
    assert module.from_the_tree and not verified.trees
    assert module.ops.NAME == "métal" and module.double.__annotations__ == {"x": "NotDefined"}
    with pytest.raises(ZeroDivisionError) as raised:
        module.double(1)
    last = raised.traceback[-1]
    assert (Path(str(last.path)).name, last.lineno + 1, str(last.statement).strip()) == ("ops.py", 7, "return x / 0")
    assert importlib.import_module(".later", module.__name__).value == 1


def test_pins_are_held_against_the_bytes_that_are_imported(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(OPS)
    place = Place("kernel", None, None)
    files = read_files(tmp_path, place, max_file_bytes=1000)
    (tmp_path / "ops.py").write_text(ops(3))
    pins = {name: Pins({"ops.py": git_blob(text)}, "the listing") for name, text in (("old", OPS), ("new", ops(3)))}
    check_pins(files, pins["old"], place)
    with pytest.raises(hub.IntegrityError, match=r"ops\.py is git:"):
        check_pins(files, pins["new"], place)


def git_blob(text: str) -> str:
    return "git:" + hashlib.sha1(b"blob %d\0" % len(text) + text.encode()).hexdigest()


def test_loading_leaves_garbage_collection_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, kernel({"ops.py": "import gc\nenabled = gc.isenabled()\n", "__init__.py": "from . import ops\n"}))
    assert not load(tmp_path).ops.enabled
    assert gc.isenabled()
    gc.disable()
    try:
        load(tmp_path)
        assert not gc.isenabled()
    finally:
        gc.enable()
