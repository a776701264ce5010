"""Allowed imports of a kernel, found in its syntax trees."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F

import forge
from forge import cli, hub
from forge.executors.hubex import gather
from tests.hub.kernels import LOCAL, kernel, load, metadata, process_restored, write
from tests.hub.repositories import GELU, Repository, gelu


@pytest.mark.parametrize(
    "source",
    [
        "import os, math, torch.nn.functional as F\nfrom torch import nn",
        "import triton\nimport triton.language as tl",
        "from __future__ import annotations",
        "from . import ops\nfrom .ops import double",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers",
        "import typing\nif typing.TYPE_CHECKING:\n    import transformers\nelse:\n    import math",
        "from typing import TYPE_CHECKING as T\nif T:\n    import transformers",
        "import typing as t\nif t.TYPE_CHECKING:\n    import transformers",
        "try:\n    from typing import TYPE_CHECKING\nexcept ImportError:\n    TYPE_CHECKING = False\n"
        "if TYPE_CHECKING:\n    import transformers",
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    import transformers",
        "import importlib\nimportlib.import_module('.ops', __package__)",
        "from importlib import import_module as im\nim('math')\nim('.ops', __package__)",
        "import importlib\nname = 'x'\nlazy = lambda: importlib.import_module(name)",
        "# import requests\n'import requests'",
        "def f():\n    import requests",
        "f = lambda: __import__('requests')",
        "try:\n    import requests\nexcept ImportError:\n    requests = None\nif requests:\n    import requests.api",
        "try:\n    import requests\nexcept (OSError, ImportError):\n    pass\nelse:\n    from requests import x",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import requests",
        "from importlib.util import find_spec\nhas = find_spec('requests') is not None\nif has:\n    import requests",
        "if __name__ == '__main__':\n    import requests",
        "from .ops import double as is_requests_available\nif is_requests_available(1):\n    import requests",
        "import sys\nif sys.version_info < (3, 9):\n    import requests\nelse:\n    import math",
        "import sys\nif sys.platform == 'amiga':\n    import requests",
        "class A:\n    def __init__(self):\n        import requests",
    ],
)
def test_what_loading_does_not_run_into_is_loaded(tmp_path: Path, source: str) -> None:
    hub.verify(hub.resolve(write(tmp_path, kernel({"__init__.py": source})), policy=LOCAL))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import requests", r"__init__.py:1: import requests: is neither"),
        ("\nimport numpy.linalg as la", r"__init__.py:2: import numpy.linalg: is neither"),
        ("from transformers import x", r"__init__.py:1: import transformers: is neither"),
        ("def f():\n    import requests\nf()", r"__init__.py:2: import requests: is neither"),
        ("def f(x):\n    import requests\n@f\ndef g(): ...", r"__init__.py:2: import requests: is neither"),
        ("class A:\n    def __init__(self):\n        import requests\na = A()", r"__init__.py:3: import requests"),
        ("class A:\n    import requests", r"__init__.py:2: import requests: is neither"),
        ("try:\n    import requests\nexcept ValueError:\n    pass", r"__init__.py:2: import requests: is neither"),
        ("try:\n    import os\nexcept ImportError:\n    import requests", r"__init__.py:4: import requests"),
        ("try:\n    import requests\nexcept ImportError:\n    raise RuntimeError", r"__init__.py:2: import requests"),
        ("try:\n    from . import rms, ops\nexcept ImportError:\n    import rms", r"import rms: is the kernel itself"),
        ("import rms", r"import rms: is the kernel itself; write it as a relative import"),
        ("from rms.ops import double", r"import rms.ops: is the kernel itself"),
        ("from _rms_ab12 import ops", r"import _rms_ab12: is the kernel itself"),
        ("from .. import x", r"from ..: leads out of the kernel"),
        ("from ...a import x", r"from ...a: leads out of the kernel"),
        ("__import__('requests')", r"import requests: is neither"),
        ("import importlib\nimportlib.import_module('requests.api')", r"__init__.py:2: import requests.api"),
        ("from importlib import import_module as go, import_module\nimport_module('requests')", ":2: import requests"),
        ("from importlib import import_module as im\nim('requests')", r"__init__.py:2: import requests: is neither"),
        ("import importlib\nim = go = importlib.import_module\ngo('requests')", r"__init__.py:3: import requests"),
        ("im = __import__\nother = im\nother('requests')", r"__init__.py:3: import requests: is neither"),
        ("from builtins import __import__ as im\nim('requests')", r"__init__.py:2: import requests: is neither"),
        ("import importlib\nimportlib.import_module(name='requests')", r"__init__.py:2: import requests"),
        ("TYPE_CHECKING = True\nif TYPE_CHECKING:\n    import requests", r"__init__.py:3: import requests: is neither"),
        (
            "from typing import TYPE_CHECKING\nTYPE_CHECKING = 1\nif TYPE_CHECKING:\n    import requests",
            r"__init__.py:4: import requests: is neither",
        ),
        (
            "import typing\ntyping.TYPE_CHECKING = 1\nif typing.TYPE_CHECKING:\n    import requests",
            r"__init__.py:4: import requests: is neither",
        ),
        ("from .ops import double as T\nif T.TYPE_CHECKING:\n    import requests", r"__init__.py:3: import requests"),
        ("import sys\nif sys.version_info >= (3, 9):\n    import requests", r"__init__.py:3: import requests"),
        ("import torch\nif torch.cuda.is_available():\n    import requests", r"__init__.py:3: import requests"),
        ("import torch as os\nif os.x:\n    import requests", r"__init__.py:3: import requests"),
        ("import kernels", r"import kernels: is neither"),
        ("import forge", r"import forge: is neither"),
    ],
)
def test_undeclared_and_absolute_imports_are_refused(tmp_path: Path, source: str, problem: str) -> None:
    """hub-facts 9: nothing checks them."""
    write(tmp_path, kernel({"__init__.py": source}))
    with pytest.raises(hub.RefusedError, match=f"imports what a kernel may not:\n  .*{problem}"):
        load(tmp_path)


def test_every_file_and_every_problem_is_named(tmp_path: Path) -> None:
    files = {
        "a/b.py": "import requests\nfrom ... import x\n",
        "a/c.py": "from .. import ops\n",
        "d.py": "import yaml\n",
    }
    write(tmp_path, kernel({**files, "__init__.py": "from .a import b, c\nfrom . import d\n"}))
    with pytest.raises(hub.RefusedError) as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip().split(": ")[0] for line in lines[:-1]] == ["a/b.py:1", "a/b.py:2", "d.py:1"]
    assert lines[-1].endswith("allow these: allow_imports=['requests', 'yaml']")


BAD = "import requests\n"


@pytest.mark.parametrize(
    "files",
    [
        {"testing/compare.py": BAD},
        {"__init__.py": "try:\n    from . import extra\nexcept ImportError:\n    pass\n", "extra.py": BAD},
        {"__init__.py": "def lazily():\n    from . import extra\n", "extra.py": BAD},
    ],
)
def test_a_file_that_no_import_needs_may_import_anything(tmp_path: Path, files: dict[str, str]) -> None:
    hub.verify(hub.resolve(write(tmp_path, kernel(files)), policy=LOCAL))


@pytest.mark.parametrize(
    "files",
    [
        {"__init__.py": "from .a.b import c\n", "a/__init__.py": BAD, "a/b.py": ""},
        {"__init__.py": "from .a import b\n", "a/b.py": BAD},
        {"__init__.py": "from . import a\n", "a.py": "from .b import *\n", "b.py": BAD},
        {"__init__.py": "import importlib\nimportlib.import_module('.a', __package__)\n", "a.py": BAD},
        {"__init__.py": "for m in 'ab':\n    __import__(f'{__name__}.{m}')\n", "a.py": BAD},
        {"forge_kernels.yaml": "reference: python:.a:f\n", "a.py": BAD},
        {"__init__.py": "try:\n    from . import a\nexcept ImportError: ...\nfrom .a import f\n", "a.py": BAD},
    ],
)
def test_a_file_that_is_reached_is_held_to_the_rules(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, kernel(files))
    with pytest.raises(hub.RefusedError, match=r"\.py:1: import requests: is neither"):
        hub.verify(hub.resolve(tmp_path, policy=LOCAL))


def test_a_declared_dependency_may_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.hub.compat.python_dependencies", lambda backend: {"einops": (("networkx", "networkx"),)})
    depends = metadata(python_depends=["einops"])
    load(write(tmp_path, kernel({"metadata.json": depends, "__init__.py": "import networkx\n"})))


def test_the_policy_may_allow_more(tmp_path: Path) -> None:
    write(tmp_path, kernel({"__init__.py": "import networkx\n"}))
    with pytest.raises(hub.RefusedError, match="import networkx"):
        load(tmp_path)
    hub.load(hub.resolve(tmp_path, policy=hub.Policy(local=True, imports=("networkx",))))


@pytest.mark.parametrize("source", ["def", "x = '\0'", "(" * 5000, b"\xff\xfe\x00", "# coding: nonsense\n", "\tx\n  y"])
def test_what_is_no_python_is_an_error_with_the_file(tmp_path: Path, source: str | bytes) -> None:
    write(tmp_path, kernel({"bad.py": source}))
    with pytest.raises(hub.MalformedError, match=r"variant torch-universal, bad.py\): is not Python: "):
        load(tmp_path)


def test_in_the_nested_layout_an_import_may_not_leave_the_inner_package(tmp_path: Path) -> None:
    nested = {"__init__.py": None, "ops.py": None, "rms/__init__.py": "from . import a\n", "rms/a/__init__.py": ""}
    load(write(tmp_path / "good", kernel(nested | {"rms/a/b.py": "from .. import a\n"})))
    nested["rms/a/__init__.py"] = "from . import b\n"
    write(tmp_path / "bad", kernel(nested | {"rms/a/b.py": "from ... import a\n"}))
    with pytest.raises(hub.RefusedError, match=r"rms/a/b\.py:1: from \.\.\.: leads out of the kernel"):
        load(tmp_path / "bad")


CODE = "import networkx\n\ndef f(x):\n    return F.gelu(x)\n"


def test_what_kernels_may_import_is_said_where_they_are_named(repository: Callable[..., Repository]) -> None:
    made = repository("needy", CODE, **GELU)
    named: dict[str, Callable] = {
        "jit": lambda **allow: forge.jit(gelu, kernels=[made.folder], **allow),
        "use_kernels": lambda **allow: forge.use_kernels([made.folder], **allow),
        "load_kernel": lambda **allow: forge.load_kernel(F.gelu, kernels=[made.folder], **allow),
    }
    for name, use in named.items():
        with pytest.raises(hub.RefusedError, match=r"import networkx(.|\n)*allow_imports=\['networkx'\]"):
            use()
        with pytest.raises(TypeError, match="allow_imports is 'networkx', but must be a list"):
            use(allow_imports="networkx")
        with process_restored():
            assert use(allow_imports=["networkx"]) is not None or name == "use_kernels"


def test_the_command_line_and_locks_allow_imports_too(
    repository: Callable[..., Repository], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, lock = repository("needy", CODE, **GELU), tmp_path / "k.lock"
    command = ["kernels", "list", str(made.folder)]
    assert cli.main(command) == 1 and "allow_imports=['networkx']" in capsys.readouterr().err
    assert cli.main([*command, "--allow-import", "networkx"]) == 0
    hub.lock_kernels([made.folder], lock, policy=LOCAL)
    with pytest.raises(hub.RefusedError, match="import networkx"):
        gather([str(lock)])
    assert len(gather([str(lock)], allow_imports=["networkx"])) == 1
