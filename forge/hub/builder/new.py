"""An empty source tree that its author fills in: it builds, conforms and verifies as it stands."""

import keyword
import sys
from collections.abc import Mapping
from pathlib import Path

from forge.hub.builder.config import NAME, NAMED
from forge.hub.errors import HubError

KINDS = ("cpp", "triton")
# What the code of a kernel imports, and what the files below call their own.
_MODULES = frozenset({"torch", "triton", "forge", "kernels", *sys.stdlib_module_names})
_TAKEN = frozenset({"kernel", "ops", "reference", "run"})
_CPP = frozenset(
    """
    alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await co_return
    co_yield compl concept const consteval constexpr constinit const_cast decltype default delete do double
    dynamic_cast enum explicit export extern float friend goto inline int long main mutable namespace new noexcept
    not_eq nullptr operator or_eq private protected public register reinterpret_cast requires short signed sizeof
    static static_assert static_cast std struct switch template this thread_local throw typedef typeid typename union
    unsigned using virtual void volatile wchar_t xor xor_eq
    """.split()
)

_README = """\
# {name}

A kernel for the Hugging Face Kernel Hub, which unmodified models use through forge.

    forge kernels build .          # build/<variant>/, for this machine
    forge kernels check .          # is it as the Hub's requirements say?
    forge kernels verify .         # is it what the reference computes, gradients included?
    python -m pytest tests

What to fill in: the kernel ({source}), the reference and the functions (torch-ext/{module}/), and what they take
(forge_kernels.yaml).
"""

_IGNORE = """\
__pycache__/
build/
"""

_CI = """\
name: kernel
on: [push, pull_request]
jobs:
  test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12"}}
      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: pip install "forge-jit[hub]" pytest
      - run: forge kernels build .
      - run: forge kernels check .
      - run: forge kernels verify .
      - run: python -m pytest tests
"""

_REFERENCE = '''\
"""What the kernel computes, in PyTorch: the pattern that forge finds in models, and what it is verified against."""

import torch


def {module}(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """silu(x) * y, as the gated layers of language models have it."""
    return torch.nn.functional.silu(x) * y
'''

_MANIFEST = """\
# What the kernels take. `forge kernels list .` shows what forge makes of it.
forge_kernels: 1
library: {{name: {name}, priority: 10}}
requires: {{torch: ">=2.11"{requires}}}
ops:
- pattern: python:.reference:{module}
  type_alias: {{T: {dtypes}}}
  kernels:
  - name: {module}
    kernel_name: {module}
    device: {device}
    arg_meta: {{x: T, y: T, __ret_0: T}}
    where: "x.shape == y.shape"
    grad: composite      # derived from the reference; a kernel of your own goes here
    tolerance: {{float32: [1e-5, 1e-5]{tolerances}}}
"""

_TEST = '''\
"""The kernel against its reference. forge kernels verify compares more shapes, dtypes and layouts, and gradients."""

from pathlib import Path

import pytest
import torch

import forge

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("{device}")

if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)


def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * y


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 257)])
def test_a_model_that_computes_it_uses_the_kernel(shape: tuple[int, int]) -> None:
    x, y = (torch.randn(shape, device=DEVICE) for _ in range(2))
    jitted = forge.jit(gated, kernels=[ROOT])
    torch.testing.assert_close(jitted(x, y), gated(x, y))
    assert "{name}" in str(forge.explain(jitted))
'''

_CPP_TOML = """\
[general]
name = "{name}"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu"]

[torch]
src = ["torch-ext/torch_binding.cpp", "torch-ext/torch_binding.h"]

[torch.stable-abi]
cpu = "2.11"

[kernel.{module}_cpu]
backend = "cpu"
depends = ["torch"]
src = ["{module}_cpu/{module}.cpp"]
include = ["torch-ext"]
"""

_CPP_BINDING_H = """\
#pragma once

#include <torch/csrc/stable/tensor.h>

// out, x and y are contiguous, float32 and of one shape
void {module}(torch::stable::Tensor out, torch::stable::Tensor x, torch::stable::Tensor y);
"""

_CPP_BINDING = """\
#include <torch/csrc/stable/library.h>

#include "registration.h"
#include "torch_binding.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {{
  ops.def("{module}(Tensor(a!) out, Tensor x, Tensor y) -> ()");
}}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {{
  ops.impl("{module}", TORCH_BOX(&{module}));
}}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""

_CPP_KERNEL = """\
#include <cmath>
#include <cstdint>

#include "torch_binding.h"

void {module}(torch::stable::Tensor out, torch::stable::Tensor x, torch::stable::Tensor y) {{
  const auto* from_x = static_cast<const float*>(x.data_ptr());
  const auto* from_y = static_cast<const float*>(y.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  const int64_t count = out.numel();
  for (int64_t i = 0; i < count; i++) {{
    to[i] = from_x[i] / (1.0f + std::exp(-from_x[i])) * from_y[i];
  }}
}}
"""

_CPP_INIT = '''\
"""silu(x) * y in C++."""

import torch

from ._ops import ops

__all__ = ["{module}"]


def {module}(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """silu(x) * y.

    Shapes: x and y have one shape. Dtypes: float32. Raises: RuntimeError for others.
    """
    if x.shape != y.shape or x.dtype != torch.float32 or y.dtype != torch.float32:
        raise RuntimeError(
            f"{name}: x and y must be float32 of one shape, "
            f"but are {{x.dtype}} {{list(x.shape)}} and {{y.dtype}} {{list(y.shape)}}"
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops.{module}(out, x.contiguous(), y.contiguous())
    return out
'''

_TRITON_TOML = """\
[general]
name = "{name}"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cuda"]

[torch-noarch]
"""

_TRITON_INIT = '''\
"""silu(x) * y in Triton."""

import torch

from .kernel import run

__all__ = ["{module}"]


def {module}(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """silu(x) * y, computed in float32 and rounded once.

    Shapes: x and y have one shape. Dtypes: float32, bfloat16 or float16, one for both. Raises: RuntimeError for others.
    """
    if x.shape != y.shape or x.dtype != y.dtype or not x.is_floating_point():
        raise RuntimeError(
            f"{name}: x and y must be floating-point tensors of one shape and dtype, "
            f"but are {{x.dtype}} {{list(x.shape)}} and {{y.dtype}} {{list(y.shape)}}"
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        run(out, x.contiguous(), y.contiguous())
    return out
'''

_TRITON_KERNEL = '''\
"""The kernel: a program takes BLOCK elements."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _gated(out, x, y, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    result = value * tl.sigmoid(value) * other
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


def run(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """Launches it; the tensors are contiguous and have elements."""
    with torch.cuda.device(out.device):
        _gated[(triton.cdiv(out.numel(), BLOCK),)](out, x, y, out.numel(), BLOCK=BLOCK)
'''

_COMMON = {
    "README.md": _README,
    ".gitignore": _IGNORE,
    ".github/workflows/kernel.yml": _CI,
    "forge_kernels.yaml": _MANIFEST,
    "tests/test_{module}.py": _TEST,
    "torch-ext/{module}/reference.py": _REFERENCE,
}
_OF_KIND: Mapping[str, Mapping[str, str]] = {
    "cpp": {
        "build.toml": _CPP_TOML,
        "torch-ext/torch_binding.h": _CPP_BINDING_H,
        "torch-ext/torch_binding.cpp": _CPP_BINDING,
        "torch-ext/{module}/__init__.py": _CPP_INIT,
        "{module}_cpu/{module}.cpp": _CPP_KERNEL,
    },
    "triton": {
        "build.toml": _TRITON_TOML,
        "torch-ext/{module}/__init__.py": _TRITON_INIT,
        "torch-ext/{module}/kernel.py": _TRITON_KERNEL,
    },
}
_WORDS: Mapping[str, Mapping[str, str]] = {
    "cpp": {
        "source": "{module}_cpu/",
        "device": "cpu",
        "dtypes": "[float32]",
        "tolerances": "",
        "requires": "",
    },
    "triton": {
        "source": "torch-ext/{module}/kernel.py",
        "device": "cuda",
        "dtypes": "[float32, bfloat16, float16]",
        "tolerances": ", bfloat16: [1.6e-2, 1e-2], float16: [2e-3, 2e-3]",
        "requires": ", python: [triton]",
    },
}


def write_new(name: str, folder: Path, kind: str = "cpp") -> list[Path]:
    """Writes a source tree of a kernel `name`, in C++ for CPUs ("cpp") or in Triton ("triton"), and gives its files.

    Raises: HubError for a name that the Hub does not take, an unknown kind, or a folder that has files.
    """
    if kind not in KINDS:
        raise HubError(f"{kind!r} is no kind of kernel: known are {', '.join(KINDS)}")
    if problem := _problem(name, kind):
        raise HubError(f"{name!r} is no name of a kernel: it {problem}, such as fast-gelu")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HubError(f"{folder}: is there already, and not empty; nothing was written")
    words = {"name": name, "module": name.replace("-", "_")}
    words |= {key: text.format(**words) for key, text in _WORDS[kind].items()}
    written = []
    for path, text in {**_COMMON, **_OF_KIND[kind]}.items():
        file = folder / path.format(**words)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(**words))
        written.append(file)
    return written


def _problem(name: str, kind: str) -> str | None:
    """Why a tree of this name would not build, conform or load, or None."""
    module = name.replace("-", "_")
    if not NAME.fullmatch(name):
        return f"must be {NAMED}"
    if keyword.iskeyword(module):
        return "is a keyword of Python; take another one"
    if kind == "cpp" and module in _CPP:
        return "is a word of C++; take another one"
    if module in _MODULES:
        return "is the name of a module that kernels import; take another one"
    if module in _TAKEN:
        return "is the name of a part of every kernel; take another one"
    return None
