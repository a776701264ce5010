"""The confinement of torch's private names to forge/torch_internals/: a new version of torch breaks only that
package."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import forge
from forge import torch_internals
from forge.torch_internals.patch import PATCHES, Patch
from forge.torch_internals.versions import OLDEST
from tests.torch_privates import names_defined, private_uses

ROOT = Path(forge.__file__).parent
FILES = [file for file in ROOT.rglob("*.py") if not {"torch_internals", "_builtin_kernels"} & set(file.parts)]


def test_private_parts_of_torch_are_named_in_torch_internals_alone() -> None:
    trees = {file.relative_to(ROOT): ast.parse(file.read_text()) for file in FILES}
    own = names_defined(trees.values())
    found = [f"{file}:{line}: {name}" for file, tree in trees.items() for line, name in private_uses(tree, own)]
    assert not found, "\n".join(found)


PLANTED = [
    "import torch._dynamo",
    "from torch._dynamo import eval_frame",
    "from torch.fx import _lazy_graph_module",
    "import torch\ntorch._C._get_tracing_state()",
    "import torch.utils as utils\nutils._pytree",
    "from torch.autograd import forward_ad\nforward_ad._current_level",
    "from torch.nn.parallel import DistributedDataParallel as DDP\nDDP._get_active_ddp_module()",
    "from forge.torch_internals.dynamo import eval_frame\neval_frame._stance",
    "import torch\naten = torch.autograd\naten._functions",
    "import torch\ngetattr(torch, '_C')",
    "from forge.torch_internals.dispatch import C\nkind = 'cudnn'\ngetattr(C, f'_get_{kind}_enabled')",
    "import torch\nhasattr(torch.utils, '_pytree')",
    "import torch\nvars(torch.autograd)['_functions']",
    "import torch\ntorch.__dict__['_C']",
    "import sys\nsys.modules['torch._dynamo']",
    "from sys import modules\nmodules.get('torch._dynamo')",
    "import importlib as loader\nloader.import_module('torch._dynamo')",
    "from importlib import import_module as load\nload('torch._inductor.config')",
    "__import__('torch._dynamo')",
    "__import__('torch').utils._pytree",
    "def backward(ctx):\n    return ctx._raw_saved_tensors",
    "def close(library):\n    library._destroy()",
    "import torch\ntorch.utils.swap_tensors = print",
    "import torch\ntorch.Tensor.t_: object = print",
    "import torch\ndel torch.Tensor.t_",
    "from torch import Tensor\nsetattr(Tensor, 't_', print)",
    "from torch import Tensor\ndelattr(Tensor, 't_')",
    "import torch\nvars(torch.utils)['swap_tensors'] = print",
    "import torch\nkind: object = torch.Tensor\nkind.t_ = print",
    "import torch\nif (kind := torch.Tensor):\n    kind.t_ = print",
    "import torch\nkind, other = torch.Tensor, 1\nkind.t_ = print",
    "import torch\n(kind, [other]) = (torch.Tensor, [torch.utils])\nother.swap_tensors = print",
    "import torch\nfirst = kind = torch.Tensor\nkind.t_ = print",
    "import torch\nx: object = torch\nx._C",
    "def version(x):\n    return x._version",
    "class Mine:\n    def version(self):\n        return self._version",
    "def base(x):\n    return x.grad._base",
    "def view(x):\n    return x._is_view()",
    "def parameters(module):\n    return vars(module)['_parameters']",
    "def buffers(module):\n    return module.__dict__['_buffers']",
    "from operator import attrgetter\nversion = attrgetter('_version')",
    "import operator\nversion = operator.attrgetter('grad._version')",
    "from operator import methodcaller\nview = methodcaller('_is_view')",
    "def version(x):\n    return getattr(x, '_version', 0)",
    "import inspect\ndef version(x):\n    return inspect.getattr_static(x, '_version')",
    "def raw(ctx):\n    return getattr(ctx, '_raw_saved_tensors')",
    "def close(library):\n    library._destroy()\ndef _destroy():\n    pass",
    "class Mine:\n    def __init__(self, callback):\n        self._torchdynamo_orig_backend = callback",
    "def schema(function):\n    return getattr(function, '_schema', None)",
    "import torch\ntorch.Tensor.__dict__.update(t_=print)",
    "import torch\nvars(torch.utils).update(swap_tensors=print)",
    "import torch\nvars(torch.utils).setdefault('swap_tensors', print)",
    "from unittest import mock\nimport torch\nmock.patch.object(torch, 'compile')",
    "from unittest.mock import patch\nimport torch\npatch.object(torch.utils, 'swap_tensors', print)",
    "from unittest import mock\nmock.patch('torch.utils.swap_tensors')",
]


@pytest.mark.parametrize("code", PLANTED)
def test_a_private_part_that_is_planted_is_seen(code: str) -> None:
    assert [*private_uses(ast.parse(code))]


PUBLIC = [
    "import torch\ntorch.ops.aten._softmax.default",
    "import torch\naten = torch.ops.aten\naten._softmax",
    "import torch\ntorch.backends.cudnn.benchmark = True",
    "import torch\ntorch.__version__",
    "class Mine:\n    def _own(self):\n        return self._own",
    "class Mine:\n    def _own(self, other: 'Mine'):\n        return other._own()",
    "class Mine:\n    def __init__(self):\n        self._own = 1\ndef own(mine):\n    return mine._own",
    "from typing import NamedTuple\nclass Mine(NamedTuple):\n    own: int\nMine(1)._replace(own=2)",
    "from operator import attrgetter\nshape = attrgetter('shape')",
    "import torch\nkind: object = torch.Tensor\nkind.t_",
    "import sys\nsys._getframe(1)",
    "from forge.torch_internals.dispatch import schema_of\nschema_of(print)",
]


@pytest.mark.parametrize("code", PUBLIC)
def test_what_is_public_or_of_forge_is_none_of_torch_s_private_parts(code: str) -> None:
    tree = ast.parse(code)
    assert [*private_uses(tree, names_defined([tree]))] == []


BANNED = [
    "import torch._dynamo",
    "import torch._inductor.config as config",
    "from torch import _C",
    "from torch._dynamo.variables.base import VariableTracker",
    "from torch.utils._sympy.functions import FloorDiv",
    "import torch\n\ntorch._C._get_tracing_state()",
    "import torch\n\nwith torch._subclasses.FakeTensorMode():\n    pass",
    "import torch\n\nlibrary = torch._library.custom_ops",
    "import torch.utils as utils\n\nutils._pytree.tree_map(print, [])",
]


def _lint(code: str, file: str) -> str:
    """Return ruff's findings of banned names for a file of forge with this code."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", file, "-"]
    return subprocess.run(command, input=code, cwd=ROOT.parent, capture_output=True, text=True).stdout


@pytest.mark.parametrize("code", BANNED)
def test_ruff_refuses_a_private_module_of_torch_outside_of_torch_internals(code: str) -> None:
    assert "TID251" in _lint(code, "forge/runtime/planted.py")
    assert "TID251" not in _lint(code, "forge/torch_internals/planted.py")


def test_every_private_module_that_torch_internals_names_is_banned_elsewhere() -> None:
    banned = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    prefixes = tuple(f"{each}." for each in banned["flake8-tidy-imports"]["banned-api"])
    trees = [ast.parse(file.read_text()) for file in (ROOT / "torch_internals").rglob("*.py")]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {f"{node.module}.{each.name}" for node in imports if node.module for each in node.names}
    private = {each for each in modules if each.startswith("torch.") and "._" in each.rpartition(".")[0]}
    assert [each for each in sorted(private) if not each.startswith(prefixes)] == []


for _module in pkgutil.walk_packages(torch_internals.__path__, f"{torch_internals.__name__}."):
    importlib.import_module(_module.name)  # otherwise the patches of Inductor are imported with the first region


def test_every_patch_is_written_in_torch_internals() -> None:
    makers = {"patch", "Patch", "Replaced"}
    imports = [(file, each) for file in FILES for each in ast.walk(ast.parse(file.read_text()))]
    found = [
        f"{file.relative_to(ROOT)}:{each.lineno}"
        for file, each in imports
        if isinstance(each, ast.ImportFrom)
        and each.module == "forge.torch_internals.patch"
        and makers & {alias.name for alias in each.names}
    ]
    assert not found, "\n".join(found)


def test_each_patch_says_what_it_is_for() -> None:
    for each in PATCHES:
        assert each.why, str(each)
        assert each.since is None or each.before is None or each.since < each.before, str(each)


ISSUE = r"https://github\.com/pytorch/pytorch/(issues|pull)/\d+|not reported: .+"
UPSTREAM = r"(torch/\S+\.pyi?):(\d+)@(2\.\d+\.\d+), ([\w.]+)"


@pytest.mark.parametrize("patch", PATCHES, ids=str)
def test_each_patch_has_an_issue_of_torch_or_says_why_not(patch: Patch) -> None:
    assert re.fullmatch(ISSUE, patch.issue)


@pytest.mark.parametrize("patch", PATCHES, ids=str)
def test_each_patch_names_the_line_of_torch_that_it_corrects(patch: Patch) -> None:
    file, line, version, name = re.fullmatch(UPSTREAM, patch.upstream).groups()
    if version != torch.__version__.partition("+")[0]:
        pytest.skip(f"the line is that of torch {version}")
    lines = Path(torch.__file__).parent.joinpath(file.removeprefix("torch/")).read_text().split("\n")
    assert name.rpartition(".")[2] in " ".join(lines[int(line) - 1 : int(line) + 4])  # after decorators


@pytest.mark.parametrize("missing", ["issue", "upstream"])
def test_a_patch_without_an_issue_or_a_line_of_torch_is_refused(missing: str) -> None:
    about = {"why": "a test", "issue": "not reported: a test", "upstream": "torch/utils/__init__.py:35@2.13.0, swap"}
    del about[missing]
    with pytest.raises(TypeError, match=missing):
        Patch(torch.utils, "swap_tensors", print, **about)


def test_a_patch_that_nothing_needs_any_more_is_deleted() -> None:
    """Such a patch is for versions that forge does not support."""
    assert [str(each) for each in PATCHES if each.before is not None and each.before <= OLDEST] == []


def test_each_patch_of_a_scope_finds_what_it_replaces() -> None:
    """A name that torch no longer has belongs to a patch for earlier versions, which declares them."""
    lost = [each for each in PATCHES if each.original is None and each.since is None and each.before is None]
    assert [str(each) for each in lost if each.name != "rewire_bwd_graph_outputs"] == []


def test_an_attribute_is_itself_again_after_a_patch() -> None:
    before = {each: vars(each.owner).get(each.name) for each in PATCHES}
    jitted = forge.jit(lambda x: x.relu() + 1)
    jitted(torch.ones(3))
    assert all(vars(each.owner).get(each.name) is was for each, was in before.items())
