"""Helpers of the manifests' tests: a valid manifest, and ways to read one."""

from collections.abc import Callable
from typing import Any

from forge.executors.hubex.operators import Operators
from forge.hub.manifest import Manifest, ManifestError, parse_manifest

OPERATORS = Operators(patterns={"swiglu": lambda x: x})

VALID = """\
forge_kernels: 1
library: {name: acme.norms, priority: 10}
requires: {torch: ">=2.11", python: [einops]}
build: {cpp: [csrc/rms.cpp], cuda: [csrc/rms.cu], cflags: [-O3]}
ops:
- op: torch.nn.functional.rms_norm
  type_alias: {T: [float16, bfloat16]}
  dim_order_alias: {C: contiguous}
  kernels:
  - name: rms_sm80
    kernel_name: acme::rms
    priority: 20
    device: {type: cuda, capability: ">=8.0"}
    arg_meta: {input: [T, C], weight: [T, C], __ret_0: T}
    shape: {input: "[..., H]", weight: "[H]"}
    where: ["H % 8 == 0", "eps is not None", "normalized_shape == [H]"]
    args: {x: input, w: weight, epsilon: eps, mode: 1}
    out: result
    layout: contiguous
    align: {input: 16}
    grad: composite
    tolerance: {float16: [2e-3, 2e-3]}
  - {name: rms_any, arg_meta: null, kernel_name: "python:acme.ref:rms"}
- func: "acme::scale(Tensor x, float factor=1.0) -> Tensor"
  reference: python:acme.ref:scale
  kernels:
  - kernel_name: acme::scale
    grad: {kernel_name: acme::scale_backward, args: [grad_output, factor], returns: [x]}
- pattern: python:acme.patterns:swiglu
  kernels:
  - {kernel_name: acme::swiglu, out: 0}
- op: aten::add.out
  kernels:
  - {kernel_name: acme::add_out, arg_meta: {self: float32, other: float32}}
"""


def read(text: str | bytes, find: Callable[[str], Any] | None = None) -> Manifest:
    """Return the manifest in a text called k.yaml."""
    return parse_manifest(text, OPERATORS, file="k.yaml", find=find)


def problems(text: str | bytes, find: Callable[[str], Any] | None = None) -> list[str]:
    """Return the problems of a manifest, as printed."""
    try:
        read(text, find)
    except ManifestError as error:
        assert str(error) == "\n".join(map(str, error.problems))
        return [str(problem) for problem in error.problems]
    return []


def entry(**fields: Any) -> str:
    """Return a manifest of one kernel of aten::add.out, with these fields as YAML."""
    lines = "".join(f"    {name}: {value}\n" for name, value in fields.items())
    return f"""\
forge_kernels: 1
library: {{name: acme}}
ops:
- op: aten::add.out
  type_alias: {{T1: [Float, Half]}}
  dim_order_alias: {{D: [0, 1]}}
  kernels:
  - kernel_name: acme::add
{lines}"""
