"""Modules that Inductor generated, shortened if their kernels are already built."""

import json
from pathlib import Path

import pytest
from torch._inductor.codecache import PyCodeCache

from forge.executors.inductorex import artifacts, inductorex

pytestmark = pytest.mark.skipif(not inductorex.is_available(), reason="Inductor cannot be used here")

MODULE = """\
import torch
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import maybe_profile
async_compile = AsyncCompile()
cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''
kernel
''')
async_compile.wait(globals())
del async_compile

def call(args):
    with maybe_profile(False):
        cpp_fused_0(*args)

def get_args():
    return [extern_kernels]

if __name__ == "__main__":
    call(get_args())
"""

SHORT = """\
import torch
from torch._inductor.utils import maybe_profile
def call(args):
    with maybe_profile(False):
        cpp_fused_0(*args)
"""


def test_it_imports_and_compiles_nothing_that_it_does_not_need() -> None:
    assert artifacts._short(MODULE, {"cpp_fused_0": ("path", "hash")}) == SHORT


def test_one_that_has_other_kernels_is_loaded_by_inductor() -> None:
    assert artifacts._short(MODULE, {}) is None


def test_a_generated_module_that_was_damaged_is_written_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    source = "def call(args):\n    return [args[0] + 17]\n"
    _, path = PyCodeCache.write(source)
    Path(path).write_text(source.replace("17", "16"))
    known = {"source": source, "short": None, "kernels": {}, "aligned": [], "strides": [[], {}]}
    assert artifacts.load(json.dumps(known).encode())([1]) == [18]
