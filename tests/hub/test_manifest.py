"""Manifests that are read, and their contents."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from forge.hub.manifest import (
    Argument,
    Constant,
    DimOrder,
    Grad,
    KernelArgument,
    KernelEntry,
    Layout,
    ManifestError,
    candidates,
    kernel,
    parse_manifest,
    read_manifest,
    unmet,
)
from tests.hub.manifests import OPERATORS, VALID, entry, problems, read


def kernels(text: str) -> dict[str, KernelEntry]:
    return {entry.name: entry for entry in read(text).kernels}


def test_every_field_of_the_valid_manifest_is_read() -> None:
    manifest = read(VALID)
    assert (manifest.dialect, manifest.library.name, manifest.library.priority) == ("forge", "acme.norms", 10)
    assert (manifest.requires.torch, manifest.requires.python) == (">=2.11", ("einops",))
    assert (manifest.build.cpp, manifest.build.cuda) == (("csrc/rms.cpp",), ("csrc/rms.cu",))
    assert manifest.build.cflags == ("-O3",)
    assert [op.kind for op in manifest.ops] == ["op", "func", "pattern", "op"]
    found = manifest.kernels[0]
    assert (found.op, found.name, found.kernel_name) == ("torch.nn.functional.rms_norm", "rms_sm80", "acme::rms")
    assert (found.priority, found.device.types, found.device.capability) == (20, ("cuda",), ((">=", (8, 0)),))
    assert found.dtypes["input"].dtypes == (torch.float16, torch.bfloat16) == found.returns[0].dtypes
    assert str(found.shape["input"]) == "[..., H]"
    assert [condition.text for condition in found.where][:2] == ["H % 8 == 0", "eps is not None"]
    assert found.args[0] == KernelArgument("x", Argument("input")) and found.args[3] == KernelArgument(
        "mode", Constant(1)
    )
    assert found.out == ("result",) and found.grad.kind == "composite"
    assert found.layout["input"] == Layout(DimOrder(), 16) and found.layout["weight"] == Layout(DimOrder(), None)
    assert found.tolerance == {torch.float16: (2e-3, 2e-3)}


def test_a_kernel_without_priority_has_its_librarys() -> None:
    assert kernels(VALID)["rms_any"].priority == 10


def test_a_kernel_without_grad_has_none() -> None:
    """A missing declaration never silently means no gradient."""
    assert kernels(VALID)["rms_any"].grad.kind == "none"


def test_torchs_autograd_may_be_the_gradient() -> None:
    (found,) = read(entry(grad="autograd", arg_meta="{self: T1}").replace("aten::add.out", "aten::add.Tensor")).kernels
    assert found.grad == Grad("autograd")


def test_a_backward_kernel_says_what_it_takes_and_gives() -> None:
    grad = kernels(VALID)["acme::scale"].grad
    assert (grad.kind, grad.kernel_name, grad.returns) == ("kernel", "acme::scale_backward", ("x",))
    assert grad.args == (KernelArgument(None, Argument("grad_output")), KernelArgument(None, Argument("factor")))


def test_an_out_variant_names_its_out_parameter() -> None:
    assert kernels(VALID)["acme::add_out"].out == ("out",)


def test_an_out_argument_given_by_name_is_the_out_parameter() -> None:
    found = read(entry(args="{a: self, b: other, result: out}")).kernels[0]
    assert found.out == ("result",) and [given.parameter for given in found.args] == ["a", "b"]


def test_a_scalar_stands_for_a_list_of_one() -> None:
    found = read(entry(where='"self.ndim == 2"', device="cpu")).kernels[0]
    assert len(found.where) == 1 and found.device.types == ("cpu",)


def test_words_of_old_yaml_are_text_and_exponents_are_numbers() -> None:
    found = read(entry(args="{a: self, b: other, flag: {constant: no}, x: 1e-3}", out="out")).kernels[0]
    assert [given.value for given in found.args[2:]] == [Constant("no"), Constant(1e-3)]


def test_a_func_can_have_kernels_in_a_later_entry() -> None:
    text = VALID + "- op: acme::scale\n  kernels:\n  - {kernel_name: acme::scale2, priority: 1}\n"
    assert [entry.op for entry in read(text).kernels].count("acme::scale") == 2


def test_a_known_pattern_is_named() -> None:
    assert problems(VALID.replace("pattern: python:acme.patterns:swiglu", "pattern: swiglu")) == []


def test_an_unquoted_shape_is_read() -> None:
    assert str(read(entry(shape="{self: [..., 2*D, _, 4]}")).kernels[0].shape["self"]) == "[..., 2*D, _, 4]"


def test_quoted_text_with_signs_of_yaml_is_read() -> None:
    assert problems(entry(name="'a: *b'")) == []


# files


def test_a_manifest_is_read_from_a_file_and_its_sources_are_found(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    for name in ("rms.cpp", "rms.cu"):
        (tmp_path / "csrc" / name).touch()
    (tmp_path / "kernels.yaml").write_text(VALID)
    assert read_manifest(tmp_path / "kernels.yaml", OPERATORS).build.cpp == ("csrc/rms.cpp",)


def test_a_file_that_changed_within_one_tick_of_the_clock_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "kernels.yaml"
    names = []
    for name in ("one", "two"):
        path.write_text(f"forge_kernels: 1\nlibrary: {{name: {name}}}\nops: []\n")
        os.utime(path, (0, 0))
        names += [read_manifest(path, OPERATORS).library.name] * 2
    assert names == ["one", "one", "two", "two"]


def test_a_file_with_a_byte_order_mark_and_windows_lines_is_read() -> None:
    assert problems(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode()) == []


def test_a_missing_source_is_named_with_the_near_one(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    for name in ("rmss.cpp", "rms.cu"):
        (tmp_path / "csrc" / name).touch()
    path = tmp_path / "kernels.yaml"
    path.write_text(VALID)
    with pytest.raises(ManifestError) as caught:
        read_manifest(path, OPERATORS)
    assert str(caught.value) == (
        f"{path}:4:15: build cpp 'csrc/rms.cpp' does not exist in {tmp_path}; did you mean 'csrc/rmss.cpp'?"
    )


def test_a_source_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "repository"
    (inside / "csrc").mkdir(parents=True)
    (tmp_path / "secret.cpp").touch()
    (inside / "csrc" / "rms.cpp").symlink_to(tmp_path / "secret.cpp")
    (inside / "csrc" / "rms.cu").touch()
    (inside / "kernels.yaml").write_text(VALID)
    with pytest.raises(ManifestError, match=r"4:15: .*is a link out of the manifest's folder"):
        read_manifest(inside / "kernels.yaml", OPERATORS)


def test_a_file_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"none.yaml:1:1: cannot be read: No such file"):
        read_manifest(tmp_path / "none.yaml", OPERATORS)


def test_a_folder_in_place_of_a_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r":1:1: cannot be read: Is a directory"):
        read_manifest(tmp_path, OPERATORS)


def test_what_is_required_and_not_installed_is_named() -> None:
    text = VALID.replace(">=2.11", ">=99").replace("[einops]", "['packaging>=1', 'packaging>=999', no_such_package]")
    missing = unmet(read(text).requires)
    assert missing[0] == f"needs torch>=99, but {torch.__version__} is installed"
    assert (
        missing[1].startswith("needs packaging>=999, but")
        and missing[2] == "needs no_such_package, which is not installed"
    )
    assert len(missing) == 3


# ExecuTorch


EXECUTORCH = """\
# operators of ATen
- op: add.out
  kernels:
    - arg_meta: null
      kernel_name: torch::executor::add_out

- op: clamp.out
  cpp_no_default_args: ['min']
  dispatch: {}
  kernels:
    - arg_meta: null
      kernel_name: torch::executor::clamp_out

- op: mul.out
  type_alias:
    T0: [Double, Half, BFloat16]
    T1: Long
  dim_order_alias:
    D0: [[0, 1, 2, 3]]
    D1: [0]
  kernels:
    - arg_meta: null
      kernel_name: default_impl
    - arg_meta:
        self: [T0, D0]
        other: [T0 , D0]
        out: [T0, D0]
      kernel_name: torch::executor::mul_out
    - arg_meta:
        self: [T1, D1]
        other: [T1, D1]
        out: [T1, D1]
      kernel_name: torch::executor::mul_1d_out

- op: gather.out

- op: gather.out

- op: aten::native_dropout.out

- op: an_operator_of_another_torch.out

- func: custom::allclose.out(Tensor self, Tensor other, float rtol=1e-05, *, Tensor(a!) out) -> Tensor(a!)
  variants: function
  kernels:
    - arg_meta: null
      kernel_name: torch::executor::allclose_out

- func: linear.scratch(Tensor input, Tensor weight, *, Tensor(a!) out, Tensor(b!) scratch) -> Tensor(a!)
  dispatch:
    CPU: torch::executor::linear_scratch_example
"""


def test_functions_yaml_of_executorch_is_read_unchanged() -> None:
    manifest = parse_manifest(EXECUTORCH, OPERATORS, file="functions.yaml")
    assert manifest.dialect == "executorch" and len(manifest.ops) == 8
    names = [entry.kernel_name for entry in manifest.kernels]
    assert names == [
        "torch::executor::add_out",
        "torch::executor::clamp_out",
        "default_impl",
        "torch::executor::mul_out",
        "torch::executor::mul_1d_out",
        "torch::executor::allclose_out",
        "torch::executor::linear_scratch_example",
    ]
    assert [entry.device.types for entry in manifest.kernels if entry.device is not None] == [("cpu",)]
    assert manifest.kernels[3].orders["self"].orders == (DimOrder((0, 1, 2, 3)),)
    assert manifest.kernels[4].orders["self"].orders == (DimOrder((0,)),)
    assert manifest.kernels[3].dtypes["self"].dtypes == (torch.float64, torch.float16, torch.bfloat16)


def test_in_executorch_a_default_and_a_specialised_kernel_stand_side_by_side() -> None:
    order = candidates(entry for entry in parse_manifest(EXECUTORCH, OPERATORS).kernels if entry.op == "aten::mul.out")
    assert [entry.kernel_name for entry in order] == [
        "torch::executor::mul_out",
        "torch::executor::mul_1d_out",
        "default_impl",
    ]


def test_every_out_operator_of_aten_is_known() -> None:
    names = sorted(name.removeprefix("aten::") for name in OPERATORS.names() if name.startswith("aten::"))
    outs = [name for name in names if name.endswith((".out", "_out"))]
    text = "".join(f"- op: {name}\n  kernels:\n  - {{arg_meta: null, kernel_name: k}}\n" for name in outs)
    assert len(outs) > 300 and len(parse_manifest(text, OPERATORS).kernels) == len(outs)


def test_forges_keys_in_an_executorch_file_say_how_to_use_them() -> None:
    text = "- op: add.out\n  kernels:\n  - {arg_meta: null, kernel_name: k, where: 'alpha == 1'}\n"
    assert problems(text) == [
        "k.yaml:3:38: unknown key 'where' in kernels[0]; begin the file with forge_kernels: 1 to use it"
    ]


# merging


def library(name: str, *kernels: str, head: str = "") -> str:
    lines = "".join(f"  - {text}\n" for text in kernels)
    return f"forge_kernels: 1\nlibrary: {{name: {name}}}\nops:\n- op: aten::add.Tensor\n{head}  kernels:\n{lines}"


DEFAULT = "{kernel_name: default}"
PARTIAL = "{kernel_name: partial, arg_meta: {self: float32}}"


def test_replace_drops_the_kernels_before_it_in_one_file() -> None:
    text = library("a", DEFAULT) + "- op: aten::add.Tensor\n  replace: true\n  kernels:\n  - " + PARTIAL
    assert [entry.name for entry in read(text).kernels] == ["partial"]


def test_candidates_are_ordered_by_priority_then_specificity_then_declaration() -> None:
    kernels = read(
        library(
            "a",
            "{kernel_name: plain}",
            "{kernel_name: first, arg_meta: {self: float32}}",
            "{kernel_name: second, arg_meta: {other: float32}}",
            "{kernel_name: both, arg_meta: {self: float32, other: float32}}",
            "{kernel_name: urgent, priority: 1}",
        )
    ).kernels
    assert [entry.name for entry in candidates(kernels)] == ["urgent", "both", "first", "second", "plain"]


# in Python


def rms(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return input


def test_a_kernel_declared_in_python_is_the_same_entry() -> None:
    declared = kernel(
        "torch.nn.functional.rms_norm",
        rms,
        resolver=OPERATORS,
        name="rms",
        library="acme",
        arg_meta={"input": ["T", "contiguous"], "weight": "T"},
        type_alias={"T": [torch.float16, "bfloat16"]},
        shape={"input": "[..., H]", "weight": "[H]"},
        where=["H % 8 == 0", "normalized_shape == [H]"],
        device={"type": "cuda", "capability": ">=8.0"},
        args={"input": "input", "weight": "weight", "eps": "eps"},
        layout="contiguous",
        align=16,
        priority=5,
        grad="composite",
        tolerance={torch.float16: (1e-3, 1e-3)},
    )
    written = read("""\
forge_kernels: 1
library: {name: acme}
ops:
- op: torch.nn.functional.rms_norm
  type_alias: {T: [float16, bfloat16]}
  kernels:
  - name: rms
    kernel_name: rms
    arg_meta: {input: [T, contiguous], weight: T}
    shape: {input: "[..., H]", weight: "[H]"}
    where: ["H % 8 == 0", "normalized_shape == [H]"]
    device: {type: cuda, capability: ">=8.0"}
    args: {input: input, weight: weight, eps: eps}
    layout: contiguous
    align: 16
    priority: 5
    grad: composite
    tolerance: {float16: [1e-3, 1e-3]}
""").kernels[0]
    assert declared == dataclasses.replace(written, kernel_name=None) and declared.fn is rms


def test_a_torch_function_names_its_operator() -> None:
    assert kernel(torch.nn.functional.silu, lambda input: input, resolver=OPERATORS).op == "torch.nn.functional.silu"


def test_dtypes_alone_are_one_for_all_tensor_arguments() -> None:
    declared = kernel("aten::add.Tensor", torch.add, resolver=OPERATORS, dtypes=[torch.float32, torch.float16])
    assert declared.dtypes["self"] == declared.dtypes["other"] and declared.dtypes["self"].name == "T"


def test_dtypes_by_argument_are_each_its_own() -> None:
    made = kernel("aten::add.Tensor", torch.add, resolver=OPERATORS, dtypes={"self": ["float32"], "other": ["half"]})
    assert made.dtypes["self"].dtypes == (torch.float32,) and made.dtypes["other"].dtypes == (torch.float16,)


def test_mistakes_in_python_are_reported_at_the_callers_line() -> None:
    with pytest.raises(ManifestError) as caught:
        kernel("aten::add.Tensor", rms, resolver=OPERATORS, arg_meta={"nosuch": "T"}, where="len(x)")
    texts = [problem.text for problem in caught.value.problems]
    assert {problem.mark.file for problem in caught.value.problems} == {__file__}
    assert [text.partition(";")[0] for text in texts] == [
        "arg_meta names 'nosuch', not an argument of aten::add.Tensor",
        "kernel 'rms': its signature does not accept 'alpha'",
        "kernel 'rms': its signature needs 'eps', which it is not given",
        "undefined type alias 'T'",
        "where: 'len(x)' is not an allowed expression",
    ]


def test_an_unknown_operator_in_python_is_an_error_with_the_near_one() -> None:
    with pytest.raises(ManifestError, match=r"unknown operator 'torch.rellu'; did you mean 'torch.relu'\?"):
        kernel("torch.rellu", rms, resolver=OPERATORS)


def test_numpys_names_of_arguments_mean_torchs_and_warn() -> None:
    """0.1.0 had `axis` and `keepdims` besides `dim` and `keepdim`."""
    kernel = '{kernel_name: acme::sum, where: "axis == 1 and not keepdims", args: [input, axis]}'
    with pytest.warns(DeprecationWarning, match="torch.sum: the argument 'axis' is now 'dim'"):
        (found,) = read(
            f"forge_kernels: 1\nlibrary: {{name: acme}}\nops: [{{op: torch.sum, kernels: [{kernel}]}}]"
        ).kernels
    assert found.args == (KernelArgument(None, Argument("input")), KernelArgument(None, Argument("dim")))
    assert found.where[0].names == {"dim", "keepdim"} and found.where[0].text == "axis == 1 and not keepdims"
