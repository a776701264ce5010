"""What a kernel may import, found in its syntax trees."""

from pathlib import Path

import pytest

from forge import hub
from tests.hub.kernels import LOCAL, kernel, load, metadata, write


@pytest.mark.parametrize(
    "source",
    [
        "import os, math, torch.nn.functional as F\nfrom torch import nn",
        "import triton\nimport triton.language as tl",
        "from __future__ import annotations",
        "from . import ops\nfrom .ops import double",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers",
        "import typing\nif typing.TYPE_CHECKING:\n    import transformers\nelse:\n    import math",
        "import importlib\nimportlib.import_module('.ops', __package__)",
        "import importlib\nname = 'x'\nlazy = lambda: importlib.import_module(name)",
        "# import requests\n'import requests'",
    ],
)
def test_what_the_requirements_allow_is_allowed(tmp_path: Path, source: str) -> None:
    hub.verify(hub.resolve(write(tmp_path, kernel({"__init__.py": source})), policy=LOCAL))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import requests", r"__init__.py:1: import requests: is neither"),
        ("\nimport numpy.linalg as la", r"__init__.py:2: import numpy.linalg: is neither"),
        ("from transformers import x", r"__init__.py:1: import transformers: is neither"),
        ("def f():\n    import requests", r"__init__.py:2: import requests: is neither"),
        ("try:\n    import requests\nexcept ImportError:\n    pass", r"__init__.py:2: import requests: is neither"),
        ("import rms", r"import rms: is the kernel itself; write it as a relative import"),
        ("from rms.ops import double", r"import rms.ops: is the kernel itself"),
        ("from _rms_ab12 import ops", r"import _rms_ab12: is the kernel itself"),
        ("from .. import x", r"from ..: leads out of the kernel"),
        ("from ...a import x", r"from ...a: leads out of the kernel"),
        ("__import__('requests')", r"import requests: is neither"),
        ("import importlib\nimportlib.import_module('requests.api')", r"__init__.py:2: import requests.api"),
        ("from importlib import import_module as go, import_module\nimport_module('requests')", ":2: import requests"),
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
    write(tmp_path, kernel(files))
    with pytest.raises(hub.RefusedError) as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip().split(": ")[0] for line in lines] == ["a/b.py:1", "a/b.py:2", "d.py:1"]


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
    write(tmp_path / "bad", kernel(nested | {"rms/a/b.py": "from ... import a\n"}))
    with pytest.raises(hub.RefusedError, match=r"rms/a/b\.py:1: from \.\.\.: leads out of the kernel"):
        load(tmp_path / "bad")
